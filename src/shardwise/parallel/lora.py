"""LoRA adapters: two small linear modules beside a frozen one, added before the model is sharded."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from shardwise.errors import JobError, some_of
from shardwise.job import Lora
from shardwise.job.lora import DOWN, PREFIX, UP, WEIGHTS, is_adapter, read_config
from shardwise.parallel.meta_model import MetaModel, find_units
from shardwise.parallel.skeleton import Write
from shardwise.parallel.tensor_rules import is_plain_linear, is_transposed
from shardwise.parallel.weights import InitializedWeights, open_weights

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardwise.parallel.skeleton import Recipe
    from shardwise.parallel.weights import Weights


def adapt_meta_model(meta_model: MetaModel, lora: Lora, *, seed: int) -> MetaModel:
    """Return the meta_model with adapters in its module, on meta, and the place where their values come from."""
    if meta_model.weights is None:
        raise JobError(
            "adapters go beside weights that are not there yet",
            code="job.lora-without-weights",
            fix="give the job a model function",
        )
    add_adapters(meta_model.module, lora)
    weights = AdapterWeights(meta_model.weights, _adapter_values(meta_model.module, lora, seed))
    return dataclasses.replace(meta_model, weights=weights, units=find_units(meta_model.module))


class AdapterWeights:
    """Values of adapters from one place, of all other weights from another."""

    def __init__(self, base: Weights, adapters: Weights) -> None:
        self.description = f"{base.description}; adapters {adapters.description}"
        self.from_model = base.from_model
        self._base = base
        self._adapters = adapters

    def value(self, name: str, like: Tensor, device: torch.device, *, wanted: bool) -> Tensor | None:
        """Return the value from where it is; communicates as that place does."""
        return (self._adapters if is_adapter(name) else self._base).value(name, like, device, wanted=wanted)


class LoadedAdapters:
    """Values of adapters out of a folder in peft's format; every rank reads what it wants."""

    from_model = False

    def __init__(self, folder: Path) -> None:
        self.description = f"read from {folder}"
        self._values = open_weights(folder / WEIGHTS)

    def names(self) -> set[str]:
        """Return the names of all weights in the file, as the model has them."""
        return {name.removeprefix(PREFIX) for name in self._values}

    def value(self, name: str, like: Tensor, device: torch.device, *, wanted: bool) -> Tensor | None:
        """Read the value; no communication."""
        if not wanted:
            return None
        value = self._values[PREFIX + name]
        if value.shape != like.shape:
            raise JobError(
                f"{name} is {list(value.shape)} in the file, {list(like.shape)} in the model",
                code="job.adapter-shape-mismatch",
                fix="name adapters of this model",
            )
        return value.to(device, like.dtype)


def _adapter_values(module: nn.Module, lora: Lora, seed: int) -> Weights:
    """Return where adapters start: drawn by name, so equal on every layout, or loaded."""
    names = [name for name, _ in module.named_parameters() if is_adapter(name)]
    if lora.weights is None:
        return InitializedWeights({name: _recipe(name, module.get_parameter(name)) for name in names}, seed)
    folder = Path(lora.weights)
    saved = read_config(folder)
    for key in ("rank", "alpha"):
        if saved[key] != getattr(lora, key):
            raise JobError(
                f"adapters in {folder} have {key} {saved[key]:g}, the job's Lora has {getattr(lora, key):g}",
                code="job.adapter-option-mismatch",
                fix=f"--set lora.{key}={saved[key]:g}",
            )
    loaded = LoadedAdapters(folder)
    missing, extra = sorted(set(names) - loaded.names()), sorted(loaded.names() - set(names))
    if missing or extra:
        raise JobError(
            f"adapters in {folder} lack {some_of(missing)} and have extra {some_of(extra)}",
            code="job.adapter-keys-mismatch",
            fix="give Lora the targets they were trained with",
        )
    return loaded


def _recipe(name: str, parameter: nn.Parameter) -> Recipe:
    """Return how torch draws a Linear's weight (kaiming_uniform_ with a = sqrt(5)) for A, and zeros for B."""
    if name.endswith(f".{UP}.weight"):
        return (Write("zero_", ()),)
    bound = parameter.shape[1] ** -0.5
    return (Write("uniform_", (-bound, bound)),)


# Adapters: two small linear modules inside the one they adapt, and how a model gets them.
#
# An adapter is `NAME.lora_A` and `NAME.lora_B`. The names of all other weights stay as they are, so that files and
# tensor rules fit, and every transform sees plain modules.


def add_adapters(module: nn.Module, lora: Lora) -> None:
    """Freeze `module` and put an adapter of no values, on meta, beside every linear module that `lora` names.

    Adapters are in fp32, of a model in fp64 in that. A target that names nothing is refused, and so is a module whose
    forward is not just a product.
    """
    linears = {
        name: child for name, child in module.named_modules() if isinstance(child, nn.Linear) or is_transposed(child)
    }
    chosen = lora.choose(linears)
    for name in chosen:
        _check_target(module, name)
    dtype = _trained_dtype(module)
    module.requires_grad_(requires_grad=False)
    for name in chosen:
        _add_adapter(linears[name], lora, dtype)


def has_adapter(module: nn.Module) -> bool:
    """Whether this module has an adapter."""
    return isinstance(module.__dict__.get("lora"), Lora)


def adapted(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (name, module) of every module with an adapter."""
    return ((name, child) for name, child in module.named_modules() if has_adapter(child))


def adapter_output(module: Any, x: Tensor) -> Tensor:
    """Return what the adapter beside `module` adds to its output for input `x`."""
    output: Tensor = module.lora_B(module.lora_A(module.lora_dropout(x))) * module.lora.scale
    return output


def _check_target(module: nn.Module, name: str) -> None:
    """Refuse a linear module that others use without calling it, or that does more than a product."""
    child = module.get_submodule(name)
    above = module.get_submodule(name.rpartition(".")[0])
    if isinstance(child, NonDynamicallyQuantizableLinear) or isinstance(above, nn.TransformerEncoderLayer):
        raise JobError(
            f"Lora targets name {name}, whose weight {type(above).__name__} uses without calling the module",
            code="job.lora-target-not-called",
            fix="leave it out of the targets",
        )
    if not is_plain_linear(child):
        raise JobError(
            f"Lora targets name {name}, a {type(child).__name__} with a forward of its own",
            code="job.lora-target-not-linear",
            fix="name plain Linear modules only",
        )
    twin = next(
        (name for name, other in module.named_modules() if other is not child and _shares_weight(other, child)), None
    )
    if twin is not None:
        raise JobError(
            f"Lora target {name} shares its weight with {twin}, and an adapter would apply to one of them only",
            code="job.lora-target-tied",
            fix="untie them (tie_head=False, tie_word_embeddings=False), or leave it out of the targets",
        )
    if has_adapter(child):
        raise JobError(
            f"{name} has an adapter already",
            code="job.lora-target-adapted",
            fix="let Job.model return the model without adapters",
        )
    if not child.weight.is_floating_point():  # type: ignore[operator]
        raise JobError(
            f"Lora targets name {name}, whose weight is {child.weight.dtype}",
            code="job.lora-target-quantized",
            fix="use an unquantised model",
        )


def _shares_weight(module: nn.Module, child: nn.Module) -> bool:
    return any(parameter is child.weight for parameter in module.parameters(recurse=False))


def _trained_dtype(module: nn.Module) -> torch.dtype:
    """Return fp64 for a model in fp64, else fp32: what is trained never has fewer bits."""
    dtypes = {parameter.dtype for parameter in module.parameters()}
    return torch.float64 if dtypes == {torch.float64} else torch.float32


def _add_adapter(module: Any, lora: Lora, dtype: torch.dtype) -> None:
    inputs, outputs = module.weight.shape if is_transposed(module) else reversed(module.weight.shape)
    module.add_module(DOWN, nn.Linear(inputs, lora.rank, bias=False, device="meta", dtype=dtype))
    module.add_module(UP, nn.Linear(lora.rank, outputs, bias=False, device="meta", dtype=dtype))
    module.add_module("lora_dropout", nn.Dropout(lora.dropout) if lora.dropout else nn.Identity())
    module.lora = lora
    module.train(module.training)
    # A method of the module itself, and so also of copies of it: a pipeline copies models for its stages.
    module.forward = MethodType(_adapted_forward, module)


def _adapted_forward(self: Any, x: Tensor) -> Tensor:
    output: Tensor = type(self).forward(self, x)
    return output + adapter_output(self, x)
