"""A training as DeepSpeed wants it: every parameter in a group, all with the same states and count of steps."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shardwise.checkpoint.convert.contents import MODEL, OPTIMIZER
from shardwise.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from shardwise.checkpoint.convert.contents import Contents

VERSION = "0.19.8"
"""The DeepSpeed whose form is written."""

_HOW = frozenset({"params", "param_names", "fused", "foreach", "capturable", "differentiable"})
"""Settings of a group that say how it is computed: the loading script's own stay."""


@dataclass(frozen=True)
class Optimized:
    """Parameters by group, with the states and settings that each group has."""

    contents: Contents
    states: dict[str, dict[str, str]]
    """Parameter -> key -> full name of a state."""
    names: tuple[tuple[str, ...], ...]
    """Parameters of each group."""
    settings: tuple[dict[str, Any], ...]
    keys: tuple[str, ...]
    """States that are shaped as their parameter."""
    step: float

    @classmethod
    def of(cls, contents: Contents) -> Optimized:
        """Take the optimizer of a checkpoint apart; one that DeepSpeed could not load is refused."""
        states, groups = contents.states(), contents.groups
        if not states:
            raise InputError(
                "the checkpoint holds no optimizer, and DeepSpeed loads weights together with one",
                code="checkpoint.no-optimizer",
                fix="convert --to torch, and load that into the model before deepspeed.initialize",
            )
        names = tuple(tuple(group.get("params", ())) for group in groups)
        unknown = {*states, *(name for group in names for name in group)} - _weights(contents)
        missing = states.keys() - {name for group in names for name in group}
        if missing or unknown:
            raise InputError(
                f"the checkpoint does not say in which group {min(missing or unknown)!r} is",
                code="checkpoint.optimizer-groups-unknown",
                fix="convert a checkpoint that names the parameters of its optimizer's groups",
            )
        keys = _shaped(contents, states)
        return cls(contents, states, names, tuple(map(_settings, groups)), keys, _step(contents, states))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a parameter."""
        return self.contents.forms[MODEL + name][1]

    def weights(self, name: str) -> Tensor:
        """Return a parameter in fp32."""
        return self.contents.read([MODEL + name])[MODEL + name].float()

    def read(self, name: str) -> dict[str, Tensor]:
        """Return a parameter in fp32 as "fp32" and its states; one that never had a gradient has zeros, as in ZeRO."""
        state = self.states.get(name, {})
        found = self.contents.read([MODEL + name, *(state[key] for key in self.keys if key in state)])
        weights = found[MODEL + name].float()
        others = {key: found[state[key]].float() if key in state else torch.zeros_like(weights) for key in self.keys}
        return {"fp32": weights, **others}

    def others(self) -> dict[str, Tensor]:
        """Return what of the model no group has: buffers and frozen weights."""
        mine = {MODEL + name for group in self.names for name in group}
        found = self.contents.read(
            [name for name in self.contents.forms if name.startswith(MODEL) and name not in mine]
        )
        return {name.removeprefix(MODEL): tensor for name, tensor in found.items()}

    def model_states(self, module: dict[str, Tensor], num_ranks: int) -> dict[str, Any]:
        """Return what a file of model states holds."""
        shapes = [{name: torch.Size(self.shape(name)) for name in group} for group in self.names]
        return {
            "module": module,
            "buffer_names": list(self.others()),
            "optimizer": None,
            "param_shapes": shapes,
            "frozen_param_shapes": {},
            "shared_params": self.contents.tied,
            "frozen_param_fragments": {},
            # What DeepSpeed's own schedules count; a script with another one loads without it.
            "lr_scheduler": {"last_batch_iteration": self.contents.step - 1},
            "skipped_steps": 0,
            "global_steps": self.contents.step,
            "dp_world_size": num_ranks,
            "mp_world_size": 1,
            "ds_config": {},
            "ds_version": VERSION,
        }

    def left_out(self) -> list[str]:
        """Return what of the checkpoint a DeepSpeed folder has no place for, one sentence each."""
        forms = self.contents.forms
        cast = [name for name in forms if name.startswith(MODEL) and forms[name][0] == "F64"]
        words = [f"fp64: {len(cast)} weights are written in fp32"] if cast else []
        rest = [name for name in forms if not name.startswith((MODEL, OPTIMIZER))]
        rest += [state[key] for state in self.states.values() for key in state if key not in {*self.keys, "step"}]
        facts = [name for name in self.contents.facts if name not in {"tied", "optimizer", "step"}]
        words += [f"{name}: DeepSpeed has no place for it" for name in rest]
        return words + ([f"facts ({', '.join(facts)}): DeepSpeed has no place for them"] if facts else [])


def save(value: Any, path: Path, **options: Any) -> None:
    """Write one torch file, down to the disk."""
    with path.open("xb") as file:
        torch.save(value, file, **options)
        file.flush()
        os.fsync(file.fileno())


def _weights(contents: Contents) -> set[str]:
    return {name.removeprefix(MODEL) for name in contents.forms if name.startswith(MODEL)}


def _shaped(contents: Contents, states: dict[str, dict[str, str]]) -> tuple[str, ...]:
    """Return the states that have their parameter's shape; another shape cannot lie flat beside it."""
    keys = set()
    for name, state in states.items():
        shape = contents.forms[MODEL + name][1]
        for key, full in state.items():
            found = contents.forms[full][1]
            if found not in {shape, ()}:
                raise InputError(
                    f"state {full!r} has shape {found}, its parameter {shape}, and DeepSpeed cuts both alike",
                    code="checkpoint.optimizer-shape-mismatch",
                    fix="convert --to torch",
                )
            if found == shape and key != "step":
                keys.add(key)
    return tuple(sorted(keys))


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    found = {key: value for key, value in group.items() if key not in _HOW}
    return {key: tuple(value) if isinstance(value, list) else value for key, value in found.items()}


def _step(contents: Contents, states: dict[str, dict[str, str]]) -> float:
    """Return how many steps all parameters have made: DeepSpeed counts once for all."""
    counted = contents.read([state["step"] for state in states.values() if "step" in state])
    steps = {float(tensor) for tensor in counted.values()}
    if len(steps) > 1:
        raise InputError(
            f"parameters have made {min(steps):g} to {max(steps):g} steps, and DeepSpeed counts once for all",
            code="checkpoint.optimizer-steps-differ",
            fix="convert --to torch",
        )
    return steps.pop() if steps else float(contents.step)
