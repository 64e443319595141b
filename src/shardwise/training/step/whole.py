"""Whole weights of a torch module, as the user's own model has them, from any strategy; and what its adapters are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from shardwise.checkpoint.adapters import merge_state
from shardwise.parallel.adapters import adapted as adapted_parts
from shardwise.parallel.apply import stages_of
from shardwise.parallel.gather import full_state_dict
from shardwise.parallel.stages import Stage
from shardwise.parallel.tensor_rules import is_transposed

if TYPE_CHECKING:
    from torch import Tensor, nn

T = TypeVar("T")


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """Communicate over the world to return the state dict of the user's own model on rank 0, {} elsewhere.

    Adapters are merged into the weights they stand beside.
    """
    weights = full_state_dict(model)
    for alias, name in _tied(model).items():
        if alias in weights:
            weights[alias] = weights[name]  # one memory, so one copy in the file
    lora = adapter_facts(model)
    return weights if lora is None else merge_state(weights, lora)


def adapter_facts(model: nn.Module) -> dict[str, Any] | None:
    """Communicate over the world to say what the adapters of a model are (Lora.facts), None without; on every rank."""
    found = [item for stage in stages_of(model) for item in adapted_parts(stage)]
    mine = (found[0][1].lora if found else None, [name for name, part in found if is_transposed(part)])
    everyone = from_all(mine)
    lora = next((own for own, _ in everyone if own is not None), None)
    return None if lora is None else lora.facts({name for _, names in everyone for name in names})


def from_all(mine: T) -> list[T]:
    """Return what every rank hands in; communicates over the world."""
    if not dist.is_initialized() or dist.get_backend() == "fake":
        return [mine]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def _tied(model: nn.Module) -> dict[str, str]:
    """Return the names under which the model has a weight that an earlier name has too."""
    tied = {}
    for stage in stages_of(model):
        if isinstance(stage, Stage):
            return dict(stage.model_ties.first_names)  # of all stages
        first: dict[int, str] = {}
        for name, value in stage.state_dict(keep_vars=True).items():
            original = first.setdefault(id(value), name)
            if original != name:
                tied[name] = original
    return tied
