"""Writes DeepSpeed checkpoints: parameter groups, and the ZeRO files of each rank for a given stage."""

from __future__ import annotations

import itertools
import math
import os
import pickle
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from shardwise.checkpoint.convert.contents import MODEL, OPTIMIZER, bytes_of, short_names
from shardwise.checkpoint.convert.deepspeed import LATEST, MODEL_STATES, OPTIMIZER_STATES, WEIGHTS
from shardwise.checkpoint.disk import sync_directory, write_synced
from shardwise.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

    from shardwise.checkpoint.convert.contents import Contents


VERSION = "0.19.8"
"""The DeepSpeed version whose format is written."""

_IMPLEMENTATION = frozenset({"params", "param_names", "fused", "foreach", "capturable", "differentiable"})
"""Options of a parameter group that select an implementation; they are not written, so the loading script sets them."""


@dataclass(frozen=True)
class DeepSpeedOptimizer:
    """The optimizer of a checkpoint: the parameters, states and options of each parameter group."""

    contents: Contents
    states: dict[str, dict[str, str]]
    """Optimizer states: parameter -> key -> full tensor name."""
    names: tuple[tuple[str, ...], ...]
    """Parameter names of each group."""
    settings: tuple[dict[str, Any], ...]
    keys: tuple[str, ...]
    """Keys of the states that have the shape of their parameter."""
    step: float

    @classmethod
    def of(cls, contents: Contents) -> DeepSpeedOptimizer:
        """Read the optimizer of a checkpoint; raise an InputError if DeepSpeed could not load it."""
        states, groups = contents.states(), contents.groups
        if not states:
            raise InputError(
                "the checkpoint has no optimizer state, which DeepSpeed requires",
                code="checkpoint.no-optimizer",
                fix="pass --to torch, and load the weights into the model before deepspeed.initialize",
            )
        names = tuple(tuple(group.get("params", ())) for group in groups)
        grouped = set().union(*names)
        missing = states.keys() - grouped
        unknown = (states.keys() | grouped) - set(short_names(dict.fromkeys(contents.weights)))
        if missing or unknown:
            raise InputError(
                f"the checkpoint does not contain the parameter or the parameter group of {min(missing or unknown)!r}",
                code="checkpoint.optimizer-groups-unknown",
                fix="convert a checkpoint that lists the parameter names of each group",
            )
        keys = _shaped_keys(contents, states)
        return cls(contents, states, names, tuple(map(_settings, groups)), keys, _step(contents, states))

    def all_names(self) -> list[str]:
        """Return the names of the parameters of all groups."""
        return list(itertools.chain.from_iterable(self.names))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a parameter."""
        return self.contents.forms[MODEL + name][1]

    def weights(self, name: str) -> Tensor:
        """Return a parameter in fp32."""
        return self.contents.read([MODEL + name])[MODEL + name].float()

    def read(self, name: str) -> dict[str, Tensor]:
        """Return a parameter ("fp32") and its states in fp32; states that do not exist yet are zero, as in ZeRO."""
        found = {WEIGHTS: self.weights(name)}
        state = self.states.get(name, {})
        for key in self.keys:
            if key in state:
                found[key] = self.contents.read([state[key]])[state[key]].float()
            else:
                found[key] = torch.zeros_like(found[WEIGHTS])
        return found

    def others(self) -> dict[str, Tensor]:
        """Return the buffers and frozen weights, which are in no parameter group."""
        optimized = set(self.all_names())
        names = [name for name in self.contents.weights if name.removeprefix(MODEL) not in optimized]
        return short_names(self.contents.read(names))

    def shapes(self, names: Sequence[str]) -> dict[str, torch.Size]:
        """Return the shapes of parameters by name."""
        return {name: torch.Size(self.shape(name)) for name in names}

    def model_states(self, module: dict[str, Tensor], num_ranks: int) -> dict[str, Any]:
        """Return the contents of a DeepSpeed file of model states."""
        return {
            "module": module,
            "buffer_names": list(self.others()),
            "optimizer": None,
            "param_shapes": list(map(self.shapes, self.names)),
            "frozen_param_shapes": {},
            "shared_params": self.contents.tied,
            "frozen_param_fragments": {},
            # The counter of DeepSpeed's schedules; a script with a different schedule must not load it.
            "lr_scheduler": {"last_batch_iteration": self.contents.step - 1},
            "skipped_steps": 0,
            "global_steps": self.contents.step,
            "dp_world_size": num_ranks,
            "mp_world_size": 1,
            "ds_config": {},
            "ds_version": VERSION,
        }

    def left_out(self) -> list[str]:
        """Return the contents that a DeepSpeed checkpoint cannot represent, one sentence each."""
        left_out = []
        forms = self.contents.forms
        num_cast = sum(forms[name][0] == "F64" for name in self.contents.weights)
        if num_cast:
            left_out.append(f"fp64: {num_cast} weights are written in fp32")
        unsupported = [name for name in forms if not name.startswith((MODEL, OPTIMIZER))]
        for state in self.states.values():
            unsupported += [state[key] for key in state if key not in {*self.keys, "step"}]
        left_out += [f"{name}: not supported by DeepSpeed" for name in unsupported]
        facts = [name for name in self.contents.facts if name not in {"tied", "optimizer", "step"}]
        if facts:
            left_out.append(f"facts ({', '.join(facts)}): not supported by DeepSpeed")
        return left_out


def save(value: Any, path: Path, **options: Any) -> None:
    """Write a new file with torch.save and flush it to disk."""
    with path.open("xb") as file:
        torch.save(value, file, **options)
        file.flush()
        os.fsync(file.fileno())


def _shaped_keys(contents: Contents, states: dict[str, dict[str, str]]) -> tuple[str, ...]:
    """Return the keys of states with the shape of their parameter; raise an InputError for a different shape."""
    keys = set()
    for name, state in states.items():
        shape = contents.forms[MODEL + name][1]
        for key, full in state.items():
            found = contents.forms[full][1]
            if found not in {shape, ()}:
                raise InputError(
                    f"state {full!r} has shape {found}, but DeepSpeed requires the shape {shape} of its parameter",
                    code="checkpoint.optimizer-shape-mismatch",
                    fix="pass --to torch",
                )
            if found == shape and key != "step":
                keys.add(key)
    return tuple(sorted(keys))


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for key, value in group.items():
        if key not in _IMPLEMENTATION:
            found[key] = tuple(value) if isinstance(value, list) else value
    return found


def _step(contents: Contents, states: dict[str, dict[str, str]]) -> float:
    """Return the number of optimizer steps; raise an InputError if it differs between parameters."""
    counts = contents.read([state["step"] for state in states.values() if "step" in state])
    steps = set(map(float, counts.values()))
    if len(steps) > 1:
        raise InputError(
            f"parameters have {min(steps):g} to {max(steps):g} optimizer steps, but DeepSpeed requires one step count",
            code="checkpoint.optimizer-steps-differ",
            fix="pass --to torch",
        )
    return steps.pop() if steps else float(contents.step)


ALIGNMENT = 2
"""Stages 1 and 2 pad each group to a multiple of this number times the number of ranks."""
SUB_GROUP = 1_000_000_000
"""Number of elements per rank after which stage 3 starts a new flat tensor: the default of `sub_group_size`."""


def write_ranks(contents: Contents, path: Path, *, stage: int, num_ranks: int) -> list[str]:
    """Write the ZeRO files of every rank, which engine.load_checkpoint loads without options.

    One file is in memory at a time. Returns the contents that the files cannot represent.
    """
    optimized = DeepSpeedOptimizer.of(contents)
    tag = f"global_step{contents.step}"
    directory = path / tag
    directory.mkdir(parents=True)
    left_out = optimized.left_out()
    if stage == 3:
        _write_model_3(optimized, directory, num_ranks)
        # Stage 3 requires a loss scaler in the file and loads it.
        left_out.append("loss scale of fp16: the files set it to 1; convert to a universal checkpoint for fp16")
    else:
        _write_model(optimized, directory, num_ranks)
    for rank in range(num_ranks):  # a call per rank, so that the tensors of one rank are freed before the next
        _write_rank(optimized, directory, stage, rank, num_ranks)
    write_synced(path / LATEST, tag.encode())
    for each in (directory, path):
        sync_directory(each)
    return left_out


def host_peak_bytes(contents: Contents, stage: int, num_ranks: int) -> int:
    """Estimate the peak host memory for tensors in bytes: the file of one rank, or all weights below stage 3."""
    sizes = [bytes_of(contents.forms[name]) for name in contents.weights]
    total = sum(map(bytes_of, contents.forms.values()))
    # The file of a rank and one parameter with its states.
    rank = math.ceil(total / num_ranks + max(sizes, default=0) * total / max(1, sum(sizes)))
    return rank if stage == 3 else max(rank, sum(sizes))


def _write_rank(optimized: DeepSpeedOptimizer, directory: Path, stage: int, rank: int, num_ranks: int) -> None:
    rank_state = _stage_3 if stage == 3 else _stage_1_2
    state = rank_state(optimized, rank, num_ranks)
    state |= {"zero_stage": stage, "ds_version": VERSION}
    whole = {"optimizer_state_dict": state, "ds_config": {}, "ds_version": VERSION}
    save(whole, directory / f"zero_pp_rank_{rank}_{OPTIMIZER_STATES}", pickle_module=_PICKLING)


def _write_model(optimized: DeepSpeedOptimizer, directory: Path, num_ranks: int) -> None:
    """Write all weights to one file, tied weights under each of their names."""
    module = optimized.others()
    for name in optimized.all_names():
        module[name] = optimized.weights(name)
    for alias, name in optimized.contents.tied.items():
        module[alias] = module[name]
    save(optimized.model_states(_ordered(optimized, module), num_ranks), directory / MODEL_STATES)


def _write_model_3(optimized: DeepSpeedOptimizer, directory: Path, num_ranks: int) -> None:
    """Write the buffers and frozen weights once per rank; stage 3 has empty tensors for the parameters."""
    module = optimized.others()
    for name in [*optimized.all_names(), *optimized.contents.tied]:
        module[name] = torch.empty(0)
    states = optimized.model_states(_ordered(optimized, module), num_ranks)
    states["param_shapes"] = []
    for group in optimized.names:
        states["param_shapes"] += map(optimized.shapes, _flat_groups(optimized, group, num_ranks))
    for rank in range(num_ranks):
        save(states, directory / f"zero_pp_rank_{rank}_{MODEL_STATES}")


def _ordered(optimized: DeepSpeedOptimizer, module: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors in the order of the checkpoint, followed by tied weights."""
    order = [name.removeprefix(MODEL) for name in optimized.contents.forms]
    names = dict.fromkeys([*order, *module])
    return {name: module[name] for name in names if name in module}


def _stage_1_2(optimized: DeepSpeedOptimizer, rank: int, num_ranks: int) -> dict[str, Any]:
    """Return the state of a rank: its slice of every group, which is flattened over all ranks and padded at the end."""
    states, weights, paddings, slices = {}, [], [], []
    for number, group in enumerate(optimized.names):
        numel = sum(math.prod(optimized.shape(name)) for name in group)
        slice_numel = math.ceil(numel / (ALIGNMENT * num_ranks)) * ALIGNMENT
        ranges = _ranges(optimized, group, rank * slice_numel, slice_numel)
        flat = _fill(optimized, slice_numel, ranges)
        used = min(slice_numel, max(0, numel - rank * slice_numel))
        values = flat.pop(WEIGHTS)
        weights.append(values if used == slice_numel else values[:used].clone())
        paddings.append(slice_numel - used)
        states[number] = flat | {"step": torch.tensor(optimized.step)}
        slices.append({name: _fragment(count, start) for name, (start, _, count) in ranges.items()})
    return {
        "base_optimizer_state": {"state": states, "param_groups": _groups(optimized, [[n] for n in states])},
        "single_partition_of_fp32_groups": weights,
        "group_paddings": paddings,
        "partition_count": [num_ranks] * len(states),
        "param_slice_mappings": slices,
    }


def _ranges(
    optimized: DeepSpeedOptimizer, group: Sequence[str], begin: int, length: int
) -> dict[str, tuple[int, int, int]]:
    """Return the parameters in a slice of a group: name -> offset in the slice, offset in the parameter, length."""
    found, start = {}, 0
    for name in group:
        end = start + math.prod(optimized.shape(name))
        first, last = max(start, begin), min(end, begin + length)
        if first < last:
            found[name] = (first - begin, first - start, last - first)
        start = end
    return found


def _stage_3(optimized: DeepSpeedOptimizer, rank: int, num_ranks: int) -> dict[str, Any]:
    """Return the state of a rank: its shard of every parameter, each sharded evenly and padded at the end."""
    states: dict[int, dict[str, Tensor]] = {}
    weights, numbers = [], []
    for group in optimized.names:
        numbers.append(list[int]())
        for names in _flat_groups(optimized, group, num_ranks):
            ranges, length = {}, 0
            for name in names:
                numel = math.prod(optimized.shape(name))
                shard_numel = math.ceil(numel / num_ranks)
                offset = rank * shard_numel
                ranges[name] = (length, offset, max(0, min(shard_numel, numel - offset)))
                length += shard_numel
            flat = _fill(optimized, length, ranges)
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


def _flat_groups(optimized: DeepSpeedOptimizer, group: Sequence[str], num_ranks: int) -> list[list[str]]:
    """Split the parameters of a group into the flat tensors of stage 3."""
    parts: list[list[str]] = [[]]
    length = 0
    for name in group:
        if length >= SUB_GROUP:
            parts.append([])
            length = 0
        parts[-1].append(name)
        length += math.ceil(math.prod(optimized.shape(name)) / num_ranks)
    return parts


def _fill(optimized: DeepSpeedOptimizer, length: int, ranges: dict[str, tuple[int, int, int]]) -> dict[str, Tensor]:
    """Return flat tensors of values and states, filled with the given ranges of the parameters (see `_ranges`)."""
    flat = {key: torch.zeros(length) for key in (WEIGHTS, *optimized.keys)}
    for name, (start, offset, count) in ranges.items():
        for key, tensor in optimized.read(name).items():
            flat[key][start : start + count] = tensor.reshape(-1)[offset : offset + count]
    return flat


def _groups(optimized: DeepSpeedOptimizer, numbers: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    return [settings | {"params": list(params)} for settings, params in zip(optimized.settings, numbers, strict=True)]


class _Scaler:
    """Represents deepspeed's LossScaler with scale 1, for fp32 and bf16."""


class _Fragment:
    """Represents deepspeed's fragment_address: the range of a parameter in a flat tensor."""


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


_PLAIN: Any = pickle._Pickler  # noqa: SLF001 - the C implementation imports a class to write its name


class _Pickler(_PLAIN):  # type: ignore[misc]  # the stubs lack most methods
    """Pickles the two classes above under the names of DeepSpeed's classes, without importing deepspeed."""

    def save_global(self, obj: Any, name: str | None = None) -> None:
        if isinstance(obj, type) and obj in _NAMES:
            self.write(pickle.GLOBAL + _NAMES[obj])
            self.memoize(obj)
        else:
            super().save_global(obj, name)


_PICKLING = SimpleNamespace(__name__="pickle", Pickler=_Pickler)
