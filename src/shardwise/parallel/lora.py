"""LoRA: a blueprint with adapters, put there before the model is cut in any way, and where their values come from."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.errors import JobError, some_of
from shardwise.job.lora import UP, is_adapter
from shardwise.job.peft_config import PREFIX, WEIGHTS, read_config
from shardwise.parallel.adapters import add_adapters
from shardwise.parallel.blueprint import Blueprint, find_units
from shardwise.parallel.skeleton import Write
from shardwise.parallel.weight_files import open_weights
from shardwise.parallel.weights import DrawnWeights

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from shardwise.job import Lora
    from shardwise.parallel.skeleton import Recipe
    from shardwise.parallel.weights import Weights


def adapt_blueprint(blueprint: Blueprint, lora: Lora, *, seed: int) -> Blueprint:
    """Return the blueprint with adapters in its module, on meta, and the place where their values come from."""
    if blueprint.weights is None:
        raise JobError(
            "adapters go beside weights that are not there yet",
            code="job.lora-without-weights",
            fix="give the job a model function",
        )
    add_adapters(blueprint.module, lora)
    weights = AdapterWeights(blueprint.weights, _adapter_values(blueprint.module, lora, seed))
    return dataclasses.replace(blueprint, weights=weights, units=find_units(blueprint.module))


class AdapterWeights:
    """Values of adapters from one place, of all other weights from another."""

    def __init__(self, base: Weights, adapters: Weights) -> None:
        self.words = f"{base.words}; adapters {adapters.words}"
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
        self.words = f"read from {folder}"
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
        return DrawnWeights({name: _recipe(name, module.get_parameter(name)) for name in names}, seed)
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
