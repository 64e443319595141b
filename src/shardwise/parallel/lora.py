"""LoRA adapters, which add two low-rank linear modules to frozen linear modules before the model is sharded."""

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
    """Return the meta model with LoRA adapters on the meta device and a source of their values."""
    if meta_model.weights is None:
        raise JobError(
            "LoRA requires a model that is built on the meta device, got a model that was already built",
            code="job.lora-without-weights",
            fix="set Job.model to a function that returns the model",
        )
    add_adapters(meta_model.module, lora)
    weights = AdapterWeights(meta_model.weights, _adapter_values(meta_model.module, lora, seed))
    return dataclasses.replace(meta_model, weights=weights, units=find_units(meta_model.module))


class AdapterWeights:
    """Weights that read adapters from `adapters` and all other parameters from `base`."""

    def __init__(self, base: Weights, adapters: Weights) -> None:
        self.description = f"{base.description}; adapters {adapters.description}"
        self.from_model = base.from_model
        self._base = base
        self._adapters = adapters

    def value(self, name: str, like: Tensor, device: torch.device, *, wanted: bool) -> Tensor | None:
        """Return the tensor `name` from its source; communicates if the source communicates."""
        source = self._adapters if is_adapter(name) else self._base
        return source.value(name, like, device, wanted=wanted)


class LoadedAdapters:
    """Adapter weights from a directory in peft's format; every rank reads the tensors that it needs."""

    from_model = False

    def __init__(self, folder: Path) -> None:
        self.description = f"read from {folder}"
        self._values = open_weights(folder / WEIGHTS)

    def names(self) -> set[str]:
        """Return the names of all tensors in the file, without peft's prefix."""
        return {name.removeprefix(PREFIX) for name in self._values}

    def value(self, name: str, like: Tensor, device: torch.device, *, wanted: bool) -> Tensor | None:
        """Read the tensor if it is `wanted`; does not communicate."""
        if not wanted:
            return None
        value = self._values[PREFIX + name]
        if value.shape != like.shape:
            raise JobError(
                f"adapter {name} must have the shape {list(like.shape)}, got {list(value.shape)} in the file",
                code="job.adapter-shape-mismatch",
                fix="use adapters that were trained for this model",
            )
        return value.to(device, like.dtype)


def _adapter_values(module: nn.Module, lora: Lora, seed: int) -> Weights:
    """Return the initial adapter weights: loaded, or sampled by parameter name so that they are equal on any layout."""
    names = [name for name, _ in module.named_parameters() if is_adapter(name)]
    if lora.weights is None:
        return InitializedWeights({name: _recipe(name, module.get_parameter(name)) for name in names}, seed)
    folder = Path(lora.weights)
    saved = read_config(folder)
    for key in ("rank", "alpha"):
        if saved[key] != getattr(lora, key):
            raise JobError(
                f"adapters in {folder} have {key} {saved[key]:g}, but the job's Lora has {getattr(lora, key):g}",
                code="job.adapter-option-mismatch",
                fix=f"pass --set lora.{key}={saved[key]:g}",
            )
    loaded = LoadedAdapters(folder)
    missing, extra = sorted(set(names) - loaded.names()), sorted(loaded.names() - set(names))
    if missing or extra:
        raise JobError(
            f"adapters in {folder} do not match the model: missing {some_of(missing)}, unexpected {some_of(extra)}",
            code="job.adapter-keys-mismatch",
            fix="set Lora.targets to the modules for which these adapters were trained",
        )
    return loaded


def _recipe(name: str, parameter: nn.Parameter) -> Recipe:
    """Return the initialization recipe: that of nn.Linear (kaiming_uniform_ with a = sqrt(5)) for A, zeros for B."""
    if name.endswith(f".{UP}.weight"):
        return (Write("zero_", ()),)
    bound = parameter.shape[1] ** -0.5
    return (Write("uniform_", (-bound, bound)),)


# An adapter consists of two low-rank linear modules, `NAME.lora_A` and `NAME.lora_B`, in the module that they adapt.
#
# The names of all other parameters stay the same, so that weight files and tensor rules apply, and every transform sees
# plain modules.


def add_adapters(module: nn.Module, lora: Lora) -> None:
    """Freeze `module` and add a meta adapter to every linear module that `lora` selects.

    Adapters are fp32, or fp64 if the model is fp64. Raises JobError for a target pattern that matches no module, and
    for a module whose forward is not a plain matrix product.
    """
    submodules = dict(module.named_modules())
    linears = {
        name: child for name, child in submodules.items() if isinstance(child, nn.Linear) or is_transposed(child)
    }
    chosen = lora.choose(linears)
    for name in chosen:
        _check_target(module, name)
    dtype = _trained_dtype(module)
    module.requires_grad_(requires_grad=False)
    for name in chosen:
        _add_adapter(linears[name], lora, dtype)


def has_adapter(module: nn.Module) -> bool:
    """Return whether `module` has a LoRA adapter."""
    return isinstance(module.__dict__.get("lora"), Lora)


def adapted(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (name, module) for every submodule with a LoRA adapter."""
    return ((name, child) for name, child in module.named_modules() if has_adapter(child))


def adapter_output(module: Any, x: Tensor) -> Tensor:
    """Return the contribution of the adapter of `module` to its output for input `x`."""
    output: Tensor = module.lora_B(module.lora_A(module.lora_dropout(x))) * module.lora.scale
    return output


def _check_target(module: nn.Module, name: str) -> None:
    """Raise JobError if a LoRA target is not called, or is not a plain, untied, unquantized Linear without adapter."""
    child = module.get_submodule(name)
    above = module.get_submodule(name.rpartition(".")[0])
    if isinstance(child, NonDynamicallyQuantizableLinear) or isinstance(above, nn.TransformerEncoderLayer):
        raise JobError(
            f"Lora target {name} is never called, because {type(above).__name__} reads its weight directly",
            code="job.lora-target-not-called",
            fix=f"remove {name} from Lora.targets",
        )
    if not is_plain_linear(child):
        raise JobError(
            f"Lora target {name} must be a plain Linear, got a {type(child).__name__} with its own forward",
            code="job.lora-target-not-linear",
            fix="set Lora.targets to plain Linear modules only",
        )
    twin = None
    for other_name, other in module.named_modules():
        if other is not child and _shares_weight(other, child):
            twin = other_name
            break
    if twin is not None:
        raise JobError(
            f"Lora target {name} shares its weight with {twin}, but an adapter would apply to only one of the two",
            code="job.lora-target-tied",
            fix=f"untie them (tie_head=False, tie_word_embeddings=False), or remove {name} from Lora.targets",
        )
    if has_adapter(child):
        raise JobError(
            f"Lora target {name} already has an adapter",
            code="job.lora-target-adapted",
            fix="return a model without adapters from Job.model",
        )
    if not child.weight.is_floating_point():  # type: ignore[operator]
        raise JobError(
            f"Lora target {name} must have floating-point weights, got {child.weight.dtype}",
            code="job.lora-target-quantized",
            fix="use an unquantized model",
        )


def _shares_weight(module: nn.Module, child: nn.Module) -> bool:
    return any(parameter is child.weight for parameter in module.parameters(recurse=False))


def _trained_dtype(module: nn.Module) -> torch.dtype:
    """Return fp64 if all parameters are fp64, else fp32, the minimum precision of trained parameters."""
    dtypes = {parameter.dtype for parameter in module.parameters()}
    return torch.float64 if dtypes == {torch.float64} else torch.float32


def _add_adapter(module: Any, lora: Lora, dtype: torch.dtype) -> None:
    inputs, outputs = module.weight.shape if is_transposed(module) else reversed(module.weight.shape)
    module.add_module(DOWN, nn.Linear(inputs, lora.rank, bias=False, device="meta", dtype=dtype))
    module.add_module(UP, nn.Linear(lora.rank, outputs, bias=False, device="meta", dtype=dtype))
    module.add_module("lora_dropout", nn.Dropout(lora.dropout) if lora.dropout else nn.Identity())
    module.lora = lora
    module.train(module.training)
    # A bound method is rebound when the module is copied, as for pipeline stages.
    module.forward = MethodType(_adapted_forward, module)


def _adapted_forward(self: Any, x: Tensor) -> Tensor:
    output: Tensor = type(self).forward(self, x)
    return output + adapter_output(self, x)
