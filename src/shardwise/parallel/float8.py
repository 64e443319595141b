"""Float8 linear layers with torchao: the matrix products of blocks in 8 bits, everything else in bf16.

Each operand is scaled to the range of its 8-bit format before a product: e4m3 for inputs and weights, e5m2 for output
gradients. Scales come from the current maximum, of a tensor (the "tensorwise" recipe) or of a row. A product is up to
twice as fast as in bf16, but casts read and write every operand once more, so small layers get slower: these stay in
bf16. Without torch.compile, casts are separate kernels and cost more than the products save.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise.errors import JobError, MissingExtraError, some_of
from shardwise.parallel.recompute import block_of, find_blocks

if TYPE_CHECKING:
    from collections.abc import Collection

    from shardwise.plans import Plan

MULTIPLE = 16
"""Both dimensions of a weight must be multiples of this number, the alignment of float8 kernels."""
LEAST_WIDTH = {"tensorwise": 1024, "rowwise": 2048}
"""Smallest dimension of a weight in float8, by recipe: on an H200, whole steps were slower at width 768 and faster at
2048 (rowwise: 5 % faster), and the limits between them are a judgement. benchmarks/float8.py measures single layers."""
LEAST_CAPABILITY = (8, 9)
"""CUDA compute capability of the first GPUs with float8 products (Ada, Hopper)."""
_RECIPES = {"tensorwise": "tensorwise", "rowwise": "rowwise_with_gw_hp"}
"""Recipe of a plan -> torchao's; its rowwise recipe with the weight gradient in bf16 is the one that trains as well."""


def float8_linears(module: nn.Module, names: Collection[str], plan: Plan, device: torch.device) -> nn.Module:
    """Replace the linear layers in `names` by float8 ones, which keep their names and parameters."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        major, minor = torch.cuda.get_device_capability(device)
        raise JobError(
            f"float8 requires CUDA compute capability 8.9 or higher, but {torch.cuda.get_device_name(device)} has"
            f" {major}.{minor}",
            code="support.float8-device",
            fix="pass --set precision=bf16",
        )
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise MissingExtraError.of('precision.compute = "float8"', "float8") from error
    recipe: Any = Float8LinearConfig.from_recipe_name(_RECIPES[plan.float8.recipe])
    if device.type != "cuda":
        object.__setattr__(recipe, "emulate", True)  # the same rounding, with products in the original dtype
    converted: nn.Module = convert_to_float8_training(
        module, config=recipe, module_filter_fn=lambda _, name: name in names
    )
    return converted


def float8_note(names: Collection[str], plan: Plan, device: torch.device) -> str:
    """Return a note on the layers in float8, and on settings with which they are not faster."""
    note = f"float8: {len(names)} linear layers, {plan.float8.recipe} scales"
    if device.type != "cuda":
        return f"{note}; emulated, since the device has no float8 products"
    if plan.compile == "none":
        return f"{note}; without compilation, casts take longer than the products save: pass --set compile=model"
    return note


def select_linears(module: nn.Module, plan: Plan) -> frozenset[str]:
    """Return the names of the linear layers that the plan computes in float8; raises JobError if there are none."""
    linears = {name: each for name, each in module.named_modules() if type(each) is nn.Linear}
    if plan.float8.modules:
        return _named_linears(linears, plan.float8.modules)
    blocks = find_blocks(module)
    wanted = {name: each for name, each in linears.items() if block_of(name, blocks)}
    if plan.float8.head:
        wanted |= {name: each for name, each in linears.items() if not block_of(name, blocks)}
    least = LEAST_WIDTH[plan.float8.recipe]
    chosen = {name for name, each in wanted.items() if is_aligned(each) and min(each.weight.shape) >= least}
    if not chosen:
        smallest = min((min(each.weight.shape) for each in wanted.values()), default=0)
        raise JobError(
            f"float8 needs linear layers in blocks of at least {least} rows and columns, multiples of {MULTIPLE},"
            f" but the narrowest of {len(wanted)} has {smallest}",
            code="support.float8-no-layer",
            fix="pass --set precision=bf16, or name layers in float8.modules",
        )
    return frozenset(chosen)


def _named_linears(linears: dict[str, nn.Linear], names: Collection[str]) -> frozenset[str]:
    missing = sorted(set(names) - set(linears))
    if missing:
        raise JobError(
            f"float8.modules contains {some_of(missing)}, which the model does not have as nn.Linear",
            code="support.float8-module-unknown",
            fix="use names of model.named_modules() that are nn.Linear",
        )
    odd = [f"{name} {list(linears[name].weight.shape)}" for name in names if not is_aligned(linears[name])]
    if odd:
        raise JobError(
            f"float8 requires weights whose dimensions are multiples of {MULTIPLE}, got {some_of(odd)}",
            code="support.float8-dimensions",
            fix="remove these layers from float8.modules",
        )
    return frozenset(names)


def is_aligned(linear: nn.Linear) -> bool:
    """Return whether float8 kernels support the dimensions of a layer."""
    return all(size % MULTIPLE == 0 for size in linear.weight.shape)
