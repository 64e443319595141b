"""Writing a DeepSpeed checkpoint: optimizer groups, and the ZeRO files of each rank for one stage."""

from __future__ import annotations

import math
import os
import pickle
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from shardwise.checkpoint.convert.contents import MODEL, OPTIMIZER, bytes_of
from shardwise.checkpoint.convert.deepspeed import LATEST, MODEL_STATES, OPTIMIZER_STATES, WEIGHTS
from shardwise.checkpoint.disk import sync_folder, write_synced
from shardwise.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

    from shardwise.checkpoint.convert.contents import Contents


VERSION = "0.19.8"
"""The DeepSpeed whose form is written."""

_HOW = frozenset({"params", "param_names", "fused", "foreach", "capturable", "differentiable"})
"""Settings of how a group is computed: the loading script's own stay."""


@dataclass(frozen=True)
class DeepSpeedOptimizer:
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
    def of(cls, contents: Contents) -> DeepSpeedOptimizer:
        """Take the optimizer of a checkpoint apart; one that DeepSpeed could not load is refused."""
        states, groups = contents.states(), contents.groups
        if not states:
            raise InputError(
                "the checkpoint has no optimizer state, which DeepSpeed requires",
                code="checkpoint.no-optimizer",
                fix="convert --to torch, and load that into the model before deepspeed.initialize",
            )
        names = tuple(tuple(group.get("params", ())) for group in groups)
        unknown = {*states, *(name for group in names for name in group)} - _weights(contents)
        missing = states.keys() - {name for group in names for name in group}
        if missing or unknown:
            raise InputError(
                f"the checkpoint does not hold in which group {min(missing or unknown)!r} is",
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
        """Return the contents of a DeepSpeed file of model states."""
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
        left_out = [f"fp64: {len(cast)} weights are written in fp32"] if cast else []
        rest = [name for name in forms if not name.startswith((MODEL, OPTIMIZER))]
        for state in self.states.values():
            rest += [state[key] for key in state if key not in {*self.keys, "step"}]
        facts = [name for name in self.contents.facts if name not in {"tied", "optimizer", "step"}]
        left_out += [f"{name}: DeepSpeed has no place for it" for name in rest]
        return left_out + ([f"facts ({', '.join(facts)}): DeepSpeed has no place for them"] if facts else [])


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
                    f"state {full!r} has shape {found}, its parameter {shape}, and DeepSpeed partitions both alike",
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


# DeepSpeed's ZeRO files for one stage and number of ranks, as `engine.load_checkpoint` takes them with no option.


ALIGNMENT = 2
"""Stages 1 and 2 make each group a multiple of this times the ranks."""
SUB_GROUP = 1_000_000_000
"""Stage 3 closes a flat tensor when a rank's part of it has so many elements: `sub_group_size` where it is not set."""


def write_ranks(contents: Contents, path: Path, *, stage: int, num_ranks: int) -> list[str]:
    """Write the files of every rank, one at a time, and return what they cannot hold."""
    optimized = DeepSpeedOptimizer.of(contents)
    tag = f"global_step{contents.step}"
    folder = path / tag
    folder.mkdir(parents=True)
    (_write_model_3 if stage == 3 else _write_model)(optimized, folder, num_ranks)
    for rank in range(num_ranks):  # each in a call of its own, so that one is gone before the next is made
        _write_rank(optimized, folder, stage, rank, num_ranks)
    write_synced(path / LATEST, tag.encode())
    for each in (folder, path):
        sync_folder(each)
    # Stage 3 refuses a file without a scaler, and takes the one that is there.
    scale = ["loss scale of fp16: it would stay at 1 from here, so for fp16 load a universal checkpoint"]
    return [*optimized.left_out(), *(scale if stage == 3 else ())]


def host_peak_bytes(contents: Contents, stage: int, num_ranks: int) -> int:
    """Return about how many bytes of tensors are on the host at once: a rank's file, or all weights below stage 3."""
    weights = {name: bytes_of(form) for name, form in contents.forms.items() if name.startswith(MODEL)}
    every = sum(map(bytes_of, contents.forms.values()))
    # A rank's file, and beside it one parameter with its states.
    rank = math.ceil(every / num_ranks + max(weights.values(), default=0) * every / max(1, sum(weights.values())))
    return rank if stage == 3 else max(rank, sum(weights.values()))


def _write_rank(optimized: DeepSpeedOptimizer, folder: Path, stage: int, rank: int, num_ranks: int) -> None:
    state = _stage_3(optimized, rank, num_ranks) if stage == 3 else _stage_1_2(optimized, rank, num_ranks)
    state |= {"zero_stage": stage, "ds_version": VERSION}
    whole = {"optimizer_state_dict": state, "ds_config": {}, "ds_version": VERSION}
    save(whole, folder / f"zero_pp_rank_{rank}_{OPTIMIZER_STATES}", pickle_module=_PICKLING)


def _write_model(optimized: DeepSpeedOptimizer, folder: Path, num_ranks: int) -> None:
    """Write all weights in one file, tied ones under all their names."""
    names = [name for group in optimized.names for name in group]
    module = {name: optimized.weights(name) for name in names} | optimized.others()
    module |= {alias: module[name] for alias, name in optimized.contents.tied.items()}
    save(optimized.model_states(_ordered(optimized, module), num_ranks), folder / MODEL_STATES)


def _write_model_3(optimized: DeepSpeedOptimizer, folder: Path, num_ranks: int) -> None:
    """Write for each rank what is not partitioned; in place of parameters stage 3 has empty tensors."""
    names = [*(name for group in optimized.names for name in group), *optimized.contents.tied]
    module = {name: torch.empty(0) for name in names} | optimized.others()
    shapes = [dict(part) for group in optimized.names for part in _flats(optimized, group, num_ranks)]
    states = optimized.model_states(_ordered(optimized, module), num_ranks)
    states["param_shapes"] = [{name: torch.Size(shape) for name, shape in part.items()} for part in shapes]
    for rank in range(num_ranks):
        save(states, folder / f"zero_pp_rank_{rank}_{MODEL_STATES}")


def _ordered(optimized: DeepSpeedOptimizer, module: dict[str, Tensor]) -> dict[str, Tensor]:
    order = {name.removeprefix(MODEL): place for place, name in enumerate(optimized.contents.forms)}
    return dict(sorted(module.items(), key=lambda item: order.get(item[0], len(order))))


def _stage_1_2(optimized: DeepSpeedOptimizer, rank: int, num_ranks: int) -> dict[str, Any]:
    """Return a rank's part of groups that lie flat over all ranks, with padding at the end of the last."""
    states, weights, paddings, slices = {}, [], [], []
    for number, group in enumerate(optimized.names):
        numel = sum(math.prod(optimized.shape(name)) for name in group)
        part = math.ceil(numel / (ALIGNMENT * num_ranks)) * ALIGNMENT
        pieces = _pieces(optimized, group, rank * part, part)
        flat = _fill(optimized, part, {name: (start, offset, count) for name, start, offset, count in pieces})
        mine = min(part, max(0, numel - rank * part))
        whole = flat.pop(WEIGHTS)
        weights.append(whole if mine == part else whole[:mine].clone())
        paddings.append(part - mine)
        states[number] = flat | {"step": torch.tensor(optimized.step)}
        slices.append({name: _fragment(count, start) for name, start, _, count in pieces})
    return {
        "base_optimizer_state": {"state": states, "param_groups": _groups(optimized, [[n] for n in states])},
        "single_partition_of_fp32_groups": weights,
        "group_paddings": paddings,
        "partition_count": [num_ranks] * len(states),
        "param_slice_mappings": slices,
    }


def _pieces(
    optimized: DeepSpeedOptimizer, group: Sequence[str], begin: int, length: int
) -> list[tuple[str, int, int, int]]:
    """Return which parameters of a group lie in a stretch of it: name, where in the stretch, where in it, how much."""
    found, place = [], 0
    for name in group:
        numel = math.prod(optimized.shape(name))
        first, last = max(place, begin), min(place + numel, begin + length)
        if first < last:
            found.append((name, first - begin, first - place, last - first))
        place += numel
    return found


def _stage_3(optimized: DeepSpeedOptimizer, rank: int, num_ranks: int) -> dict[str, Any]:
    """Return a rank's even share of every parameter, with padding at the end of each."""
    states: dict[int, dict[str, Tensor]] = {}
    weights, numbers = [], []
    for group in optimized.names:
        numbers.append(list[int]())
        for part in _flats(optimized, group, num_ranks):
            places, length = {}, 0
            for name, shape in part:
                share = math.ceil(math.prod(shape) / num_ranks)
                places[name] = (length, rank * share, max(0, min(share, math.prod(shape) - rank * share)))
                length += share
            flat = _fill(optimized, length, places)
            weights.append(flat.pop(WEIGHTS))
            numbers[-1].append(len(states))
            states[len(states)] = flat | {"step": torch.tensor(optimized.step)}
    return {
        "loss_scaler": _scaler(),
        "dynamic_loss_scale": False,
        "overflow": False,
        "partition_count": num_ranks,
        "optimizer_state_dict": {"state": states, "param_groups": _groups(optimized, numbers)},
        "fp32_flat_groups": weights,
    }


def _flats(
    optimized: DeepSpeedOptimizer, group: Sequence[str], num_ranks: int
) -> list[list[tuple[str, tuple[int, ...]]]]:
    """Partition a group into the flat tensors of stage 3."""
    parts: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    length = 0
    for name in group:
        if length >= SUB_GROUP:
            parts.append([])
            length = 0
        parts[-1].append((name, optimized.shape(name)))
        length += math.ceil(math.prod(optimized.shape(name)) / num_ranks)
    return parts


def _fill(optimized: DeepSpeedOptimizer, length: int, places: dict[str, tuple[int, int, int]]) -> dict[str, Tensor]:
    """Return flat tensors with parts of parameters in place: name -> where to, where from, how much."""
    flat = {key: torch.zeros(length) for key in (WEIGHTS, *optimized.keys)}
    for name, (start, offset, count) in places.items():
        for key, tensor in optimized.read(name).items():
            flat[key][start : start + count] = tensor.reshape(-1)[offset : offset + count]
    return flat


def _groups(optimized: DeepSpeedOptimizer, numbers: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    return [settings | {"params": list(mine)} for settings, mine in zip(optimized.settings, numbers, strict=True)]


class _Scaler:
    """DeepSpeed's scaler that scales by 1, in fp32 and bf16."""


class _Fragment:
    """DeepSpeed's address of a piece in a flat tensor."""


def _scaler() -> _Scaler:
    scaler = _Scaler()
    vars(scaler).update(cur_scale=1.0, dynamic=False)
    return scaler


def _fragment(numel: int, start: int) -> _Fragment:
    fragment = _Fragment()
    vars(fragment).update(numel=numel, start=start)
    return fragment


_NAMES: dict[object, bytes] = {
    _Scaler: b"deepspeed.runtime.fp16.loss_scaler\nLossScaler\n",
    _Fragment: b"deepspeed.utils.tensor_fragment\nfragment_address\n",
}


_PLAIN: Any = pickle._Pickler  # noqa: SLF001 - the one in C imports a class to write its name


class _Pickler(_PLAIN):  # type: ignore[misc]  # its stubs leave most of it out
    """Writes the two classes above under DeepSpeed's names, which need not be installed here."""

    def save_global(self, obj: Any, name: str | None = None) -> None:
        if isinstance(obj, type) and obj in _NAMES:
            self.write(pickle.GLOBAL + _NAMES[obj])
            self.memoize(obj)
        else:
            super().save_global(obj, name)


_PICKLING = SimpleNamespace(__name__="pickle", Pickler=_Pickler)
