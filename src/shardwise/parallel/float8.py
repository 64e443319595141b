"""Float8 linear layers with torchao: the matrix products of blocks in 8 bits, everything else in bf16.

Each operand is scaled to the range of its 8-bit format before a product: e4m3 for inputs and weights, e5m2 for output
gradients. Scales come from the current maximum, of a tensor (the "tensorwise" recipe) or of a row. A product is up to
twice as fast as in bf16, but casts read and write every operand once more, so small layers get slower: these stay in
bf16. Without torch.compile, casts are separate kernels and cost more than the products save.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.errors import JobError, MissingExtraError, some_of
from shardwise.parallel.recompute import block_of, find_blocks
from shardwise.parallel.support import no_float8_layer
from shardwise.parallel.tensor_rules import split_dim, styles_by_name
from shardwise.plans.rules import (
    FLOAT8_LEAST_WIDTH,
    FLOAT8_MULTIPLE,
    gains_from_float8,
    gathers_float8,
    is_float8_size,
)
from shardwise.torch_private.dispatch import maxima_of
from shardwise.torch_private.distributed import extend_all_gather, modules_of, padded_shard, parameter_groups

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from torch import Tensor

    from shardwise.plans import Plan

_RECIPES = {"tensorwise": "tensorwise", "rowwise": "rowwise_with_gw_hp"}
"""Recipe of a plan -> torchao's; its rowwise recipe with the weight gradient in bf16 is the one that trains as well."""


def float8_linears(module: nn.Module, names: Collection[str], plan: Plan, device: torch.device) -> nn.Module:
    """Make the linear layers in `names` compute in float8; they keep their parameters, adapters and hooks."""
    try:
        from torchao.float8 import Float8LinearConfig, float8_linear
    except ImportError as error:
        raise MissingExtraError.of('precision.compute = "float8"', "float8") from error
    recipe: Any = Float8LinearConfig.from_recipe_name(_RECIPES[plan.float8.recipe])
    if device.type != "cuda":
        object.__setattr__(recipe, "emulate", True)  # the same rounding, with products in the original dtype
    for name, linear in module.named_modules():
        if name in names and type(linear) is nn.Linear:
            # torchao would replace the layer by a new one, without its adapters and hooks.
            linear.__class__ = Float8Linear
            linear.config = recipe
            linear.linear_mm_config = float8_linear.Float8Linear.from_float(linear, recipe).linear_mm_config
    return module


class Float8Linear(nn.Linear):
    """A linear layer that computes its product in float8, as torchao's Float8Linear."""

    config: Any
    linear_mm_config: Any
    is_rounded: bool = True
    """Whether the product is computed in float8; else in the dtype of the inputs."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name is torch's
        """Return the output for an input [..., columns of the weight]."""
        return linear_output(self, input, self.weight, self.bias)


def linear_output(linear: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the output of a linear layer for parameters that may be shards; in float8 if the layer computes in it.

    The scale of a weight's shard comes from the maximum of that shard.
    """
    if not isinstance(linear, Float8Linear):
        return nn.functional.linear(x, weight, bias)
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args
    from torchao.float8.float8_training_tensor import Float8TrainingTensor

    device = x.device.type
    if torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    if not linear.is_rounded:
        if isinstance(weight, Float8TrainingTensor):  # gathered in 8 bits
            weight = weight.to_original_precision()
        return nn.functional.linear(x, weight.to(x.dtype), bias)
    if linear.config.emulate:
        weight = weight.to(x.dtype)  # emulated products require operands of one dtype
    output: Tensor = matmul_with_hp_or_float8_args.apply(x, weight.t(), linear.linear_mm_config, linear.config)
    return output if bias is None else output + bias.to(output.dtype)


@contextmanager
def without_float8(module: nn.Module) -> Iterator[None]:
    """Compute the products of float8 layers in the dtype of their inputs in this context.

    A token then changes no other one; in float8 it does, by the scale of a tensor.
    """
    linears = [each for each in module.modules() if isinstance(each, Float8Linear)]
    for linear in linears:
        linear.is_rounded = False
    try:
        yield
    finally:
        for linear in linears:
            linear.is_rounded = True


class Float8Layers(NamedTuple):
    """The linear layers that a plan computes in float8, by their names in the full model."""

    names: frozenset[str]
    unaligned: tuple[str, ...] = ()
    """Layers that stay in the compute dtype because float8 kernels do not support their tensor-parallel shards."""


def float8_note(layers: Float8Layers, plan: Plan, device: torch.device) -> str:
    """Return a note on the layers in float8, on those left out, and on settings with which they are not faster."""
    note = f"float8: {len(layers.names)} linear layers, {plan.float8.recipe} scales"
    if gathers_float8(plan):
        note += ", weights gathered in 8 bits"
    if layers.unaligned:
        note += (
            f"; {some_of(layers.unaligned)} stay in {plan.precision.activations}, since tp={plan.layout.tp} splits them"
            f" into shards that are not multiples of {FLOAT8_MULTIPLE}"
        )
    if device.type != "cuda":
        return f"{note}; emulated, since the device has no float8 products"
    if plan.compile == "none":
        return f"{note}; without compilation, casts take longer than the products save: pass --set compile=model"
    return note


def select_linears(
    module: nn.Module, plan: Plan, rules: Mapping[str, str] | None = None, *, least_width: int | None = None
) -> Float8Layers:
    """Return the linear layers that the plan computes in float8; raises JobError if there are none.

    `module` is the full model, and `rules` are its tensor rules. Layers that the plan does not name are chosen by the
    dimensions of their shards, at least `least_width` (default: FLOAT8_LEAST_WIDTH).
    """
    linears = {name: each for name, each in module.named_modules() if type(each) is nn.Linear}
    styles = styles_by_name(module, rules or {})
    sizes = {name: _shard_size(each, styles.get(name), plan.layout.tp) for name, each in linears.items()}
    least = 0
    if plan.float8.modules:
        wanted = _named_linears(linears, plan.float8.modules)
    else:
        least = FLOAT8_LEAST_WIDTH[plan.float8.recipe] if least_width is None else least_width
        blocks = find_blocks(module)
        wanted = frozenset(name for name in linears if plan.float8.head or block_of(name, blocks))
    aligned = {name for name in wanted if is_aligned(linears[name])}
    chosen = {name for name in aligned if gains_from_float8(*sizes[name], least)}
    if not chosen:
        raise no_float8_layer([sizes[name] for name in wanted], max(least, FLOAT8_MULTIPLE))
    return Float8Layers(frozenset(chosen), tuple(sorted(name for name in aligned if not is_float8_size(*sizes[name]))))


def _shard_size(linear: nn.Linear, style: str | None, tp: int) -> tuple[int, int]:
    """Return rows and columns of a weight's largest tensor-parallel shard; the others of an aligned weight fit, too."""
    size = [*linear.weight.shape]
    dim = split_dim(linear, style, "weight")
    if dim is not None:
        size[dim] = -(-size[dim] // tp)
    return size[0], size[1]


def _named_linears(linears: Mapping[str, nn.Linear], names: Collection[str]) -> frozenset[str]:
    """Return the layers that float8.modules names; raises JobError for names and dimensions that are not supported."""
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
            f"float8 requires weights whose dimensions are multiples of {FLOAT8_MULTIPLE}, got {some_of(odd)}",
            code="support.float8-dimensions",
            fix="remove these layers from float8.modules",
        )
    return frozenset(names)


def is_aligned(linear: nn.Linear) -> bool:
    """Return whether float8 kernels support the dimensions of a layer."""
    return is_float8_size(*linear.weight.shape)


# All-gather of float8 weights under FSDP2, in one byte per element.
#
# Ranks cast their shards before the all-gather instead of casting the gathered weight after it: this halves the bytes
# of bf16, and each rank casts only its shard. The scale of a weight is the maximum over all shards, as in one process.
# One all-reduce at the start of a forward pass reduces the maxima of all weights; parameters do not change before the
# backward pass, which gathers them with the same scales. FSDP2 gathers bytes (uint8), since gloo has no float8.
# Reference: torchao's WeightWithDynamicFloat8CastTensor, which is a tensor subclass of parameters.


def gather_in_float8(root: nn.Module) -> None:
    """Make the FSDP2 units of `root` gather the weights of float8 layers in 8 bits; its forward communicates."""
    weights = []
    for unit in parameter_groups(root):
        for record in unit.fsdp_params:
            modules = modules_of(record)
            # A weight that is tied to an embedding is also used in bf16.
            if record.sharded_param.ndim == 2 and all(isinstance(module, Float8Linear) for module in modules):
                weights.append(_GatheredWeight(record, modules[0]))
    if weights:
        scales = _GatherScales(weights)
        root.register_forward_pre_hook(scales.update, prepend=True)  # before FSDP2's hook, which gathers the root


class _GatheredWeight:
    """The weight of a float8 layer, cast to float8 by its shards."""

    def __init__(self, record: Any, linear: Any) -> None:
        """Extend FSDP2's all-gather of `record`, an `FSDPParam` of the layer `linear`."""
        self._record = record
        self._mm_config = linear.linear_mm_config
        self.dtype: torch.dtype = linear.config.cast_config_weight.target_dtype
        self.group: dist.ProcessGroup = record.shard_mesh_from_root.get_group()
        self.scale: Tensor | None = None
        extend_all_gather(record, self._cast, self._create)

    @property
    def shard(self) -> Tensor:
        """This rank's shard in its original precision, with padding rows of zeros."""
        return padded_shard(self._record)

    def _cast(self, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> tuple[Any, Any]:  # noqa: ARG002 - FSDP2's signature
        """Return the bytes to gather, and the scale for `_create`."""
        from torchao.float8.float8_training_tensor import GemmInputRole, hp_tensor_and_scale_to_float8

        assert self.scale is not None  # noqa: S101 - the root's hook has run before any unit is gathered
        cast: Any = hp_tensor_and_scale_to_float8(
            self.shard, self.scale, self.dtype, self._mm_config, GemmInputRole.WEIGHT
        )
        return (cast._data.view(torch.uint8),), self.scale  # noqa: SLF001 - torchao has no public name for the bytes

    def _create(self, gathered: tuple[Tensor, ...], scale: Tensor, dtype: torch.dtype, *, out: Any = None) -> Any:
        """Return the unsharded weight and its storage; with `out`, the weight whose storage FSDP2 has filled again."""
        from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole

        if out is not None:
            out._scale = scale  # noqa: SLF001
            return None
        data = gathered[0].view(self.dtype)
        whole = Float8TrainingTensor(data, scale, dtype, self._mm_config, gemm_input_role=GemmInputRole.WEIGHT)
        return whole, (data,)


def zero_gradient(parameter: Tensor) -> Tensor:
    """Return a gradient of zeros; that of a weight gathered in float8 has the weight's original dtype."""
    if isinstance(parameter, DTensor):
        return torch.zeros_like(parameter)
    return torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)


class _GatherScales:
    """The scales of all weights that are gathered in float8."""

    def __init__(self, weights: Sequence[_GatheredWeight]) -> None:
        self._weights = weights

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def update(self, _module: nn.Module, _args: Any) -> None:
        """Compute the scales from the current weights. Communicates over the group that shards the weights."""
        from torchao.float8.float8_utils import amax_to_scale

        maxima = maxima_of([weight.shard for weight in self._weights])
        dist.all_reduce(maxima, dist.ReduceOp.MAX, group=self._weights[0].group)
        scales = amax_to_scale(maxima, self._weights[0].dtype)
        for weight, scale in zip(self._weights, scales.unbind(), strict=True):
            weight.scale = scale
