"""Reads DeepSpeed checkpoints: the ZeRO shards of all ranks (stages 0 to 3) and universal checkpoints."""

from __future__ import annotations

import dataclasses
import math
import re
import zipfile
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor

from shardwise.checkpoint.convert.contents import MODEL, OPTIMIZER, Contents, form_from
from shardwise.checkpoint.convert.torch_formats import contents_of_state, load_plain
from shardwise.checkpoint.disk import DamagedError
from shardwise.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    from shardwise.checkpoint.manifest import Form


WEIGHTS = "fp32"
"""DeepSpeed's key for the values of a parameter, in addition to the keys of its optimizer states."""

_UNDERSTOOD = frozenset(
    {
        *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params"),
        *("frozen_param_fragments", "global_steps", "global_samples", "skipped_steps", "dp_world_size"),
        *("mp_world_size", "checkpoint_parallel_dimensions", "ds_config", "ds_version", "universal_checkpoint_info"),
    }
)


@dataclass
class FlatTensor:
    """A tensor of the model, stored as flat shards together with the optimizer states of each shard."""

    shape: tuple[int, ...]
    group: int | None
    """Index of its parameter group; None for buffers and frozen weights."""
    parts: list[tuple[Mapping[str, Any], int, int]] = field(default_factory=list)
    """Shards in order: flat tensors by key ("fp32" for the values), offset of the shard in them, number of elements."""

    @property
    def examples(self) -> Mapping[str, Any]:
        """Flat tensors of the first shard by key."""
        return self.parts[0][0]

    def unsharded(self, name: str, key: str) -> Tensor:
        """Return the values or an optimizer state of tensor `name`, concatenated from its shards."""
        example = self.examples[key]
        if not is_flat(example):
            return torch.as_tensor(example, dtype=_dtype(example)).detach()
        found = [values[key].detach().reshape(-1)[start : start + numel] for values, start, numel in self.parts]
        flat = found[0] if len(found) == 1 else torch.cat(found)
        if flat.numel() != math.prod(self.shape):
            raise DamagedError(
                f"the shards of {name} have {flat.numel()} elements of {key}, expected {math.prod(self.shape)}",
                code="checkpoint.element-count-mismatch",
            )
        return flat.view(self.shape)


@dataclass(frozen=True)
class ZeroFiles:
    """The parsed files of a DeepSpeed checkpoint."""

    model: Mapping[str, Any]
    """Contents of the first file of model states."""
    flats: dict[str, FlatTensor]
    groups: list[Mapping[str, Any]]
    """Parameter groups of the optimizer without parameter names; `FlatTensor.group` refers to them."""


def read(path: Path) -> Contents:
    """Return the contents of a checkpoint of ZeRO stage 0 to 3; tensors are read lazily from memory-mapped files."""
    directory = tag_directory(path)
    models = [load_file(file) for file in model_files(directory)]
    ranks = [load_file(file)["optimizer_state_dict"] for file in optimizer_files(directory)]
    if not ranks:
        return _stage_0(models[0])
    if len(ranks) != models[0].get("dp_world_size", len(ranks)):
        raise DamagedError(
            f"{directory} contains the optimizer states of {len(ranks)} ranks, expected {models[0]['dp_world_size']}",
            code="checkpoint.rank-file-missing",
        )
    if "fp32_flat_groups" in ranks[0]:
        return contents_of_files(_stage_3(models, ranks))
    return contents_of_files(_stage_1_2(models[0], ranks))


def contents_of_files(source: ZeroFiles) -> Contents:
    """Return the contents of parsed DeepSpeed files, in the order of the model's state dict."""
    model, flats = source.model, source.flats
    tied = {alias: name for alias, name in (model.get("shared_params") or {}).items() if alias not in flats}
    groups = [_json_settings(group) | {"params": []} for group in source.groups]
    weights, states = {}, {}
    for name in dict.fromkeys([*model["module"], *flats]):
        if name not in flats:
            continue
        weights[MODEL + name] = (name, WEIGHTS)
        for key in flats[name].examples:
            if key != WEIGHTS:
                states[f"{OPTIMIZER}{name}/{key}"] = (name, key)
        group = flats[name].group
        if groups and group is not None:
            groups[group]["params"].append(name)
    stored = weights | states

    def read_stored(names: Collection[str]) -> dict[str, Tensor]:
        return {full: flats[stored[full][0]].unsharded(*stored[full]) for full in names}

    facts: dict[str, Any] = {}
    if tied:
        facts["tied"] = tied
    if groups:
        facts["optimizer"] = {"groups": groups}
    return Contents(
        kind="deepspeed",
        step=model.get("global_steps", 0),
        forms={full: _form(flats[name], full, key) for full, (name, key) in stored.items()},
        facts=facts,
        read=read_stored,
        left_out=_left_out(model),
    )


def is_flat(value: Any) -> bool:
    """Return whether an optimizer state is partitioned like its parameter, unlike a step count."""
    return isinstance(value, Tensor) and value.ndim > 0


def shapes_of(model: Mapping[str, Any], key: str) -> list[dict[str, tuple[int, ...]]]:
    """Return the parameter shapes in a file of model states, by group."""
    saved = model.get(key) or []
    groups = [saved] if isinstance(saved, dict) else saved
    return [dict(zip(shapes, map(tuple, shapes.values()), strict=True)) for shapes in groups]


def groups_by_number(settings: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """Return the index of the parameter group of each flat tensor of the optimizer, by its number."""
    found: dict[int, int] = {}
    for index, group in enumerate(settings):
        found |= dict.fromkeys(group.get("params", ()), index)
    return found


def states_of(states: Mapping[int, Any], number: int, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the optimizer states of a flat tensor; DeepSpeed's Adam stores its step in the group."""
    found = dict(states.get(number, {}))
    if found and "step" not in found and "step" in group:
        found["step"] = group["step"]
    return found


def unpartitioned(tensor: Tensor) -> FlatTensor:
    """Return a FlatTensor for a buffer or frozen weight that one file contains completely."""
    return FlatTensor(tuple(tensor.shape), None, [({WEIGHTS: tensor}, 0, tensor.numel())])


def _form(flat: FlatTensor, full: str, key: str) -> Form:
    example = flat.examples[key]
    return form_from(full, _dtype(example), flat.shape if is_flat(example) else ())


def _dtype(value: Any) -> torch.dtype:
    return value.dtype if isinstance(value, Tensor) else torch.float32


def _json_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group that can be stored as JSON."""
    found = {}
    for key, value in group.items():
        if key not in {"params", "step"}:
            try:
                found[key] = msgspec.json.decode(msgspec.json.encode(value))
            except (TypeError, msgspec.MsgspecError):
                continue
    return found


def _stage_0(model: Mapping[str, Any]) -> Contents:
    """Return the contents of a stage 0 checkpoint; in half precision, its optimizer format is not supported."""
    optimizer = model.get("optimizer")
    state = {"model": model["module"], "step": model.get("global_steps", 0)}
    lost: tuple[str, ...] = ()
    if isinstance(optimizer, dict) and "param_groups" in optimizer:
        state["optimizer"] = optimizer
    elif optimizer:
        lost = ("optimizer: DeepSpeed's format for stage 0 in half precision is not supported",)
    contents = contents_of_state("deepspeed", state)
    return dataclasses.replace(contents, left_out=(*contents.left_out, *lost, *_left_out(model)))


def _stage_1_2(model: Mapping[str, Any], ranks: list[dict[str, Any]]) -> ZeroFiles:
    """Parse stages 1 and 2: each group is a flat tensor over all ranks, and each rank maps its slice to parameters."""
    if "param_slice_mappings" not in ranks[0]:
        raise InputError(
            "the checkpoint was saved by a DeepSpeed version before 0.8, which does not store the parameter slices",
            code="checkpoint.deepspeed-too-old",
            fix="load and save it with a newer DeepSpeed",
        )
    flats: dict[str, FlatTensor] = {}
    for group, shapes in enumerate(shapes_of(model, "param_shapes")):
        for name, shape in shapes.items():
            flats[name] = FlatTensor(shape, group)
    settings: list[Mapping[str, Any]] = []
    for rank in ranks:
        states, settings = _base_states(rank)
        for group, pieces in enumerate(rank["param_slice_mappings"]):
            values = {WEIGHTS: rank["single_partition_of_fp32_groups"][group], **states[group]}
            for name, piece in pieces.items():
                flats[name].parts.append((values, piece.start, piece.numel))
    aliases = model.get("shared_params") or {}
    for name, tensor in model["module"].items():
        if name not in flats and name not in aliases:
            flats[name] = unpartitioned(tensor)
    return ZeroFiles(model, flats, settings)


def _base_states(rank: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[Mapping[str, Any]]]:
    """Return the optimizer states and options of each parameter group, from a rank of stage 1 or 2."""
    base = rank["base_optimizer_state"]
    if isinstance(base, list):  # an elastic checkpoint: states without padding, no options
        step = rank.get("base_optimizer_state_step")
        common = {} if step is None else {"step": step}
        return [{**state, **common} for state in base], []
    settings = base["param_groups"]
    return [states_of(base["state"], group["params"][0], group) for group in settings], settings


def _stage_3(models: list[Mapping[str, Any]], ranks: list[dict[str, Any]]) -> ZeroFiles:
    """Parse stage 3: every parameter is sharded evenly over the ranks, and a group is one or more flat tensors."""
    model, num_ranks = models[0], len(ranks)
    settings = ranks[0]["optimizer_state_dict"]["param_groups"]
    group_of = groups_by_number(settings)
    flats: dict[str, FlatTensor] = {}
    shapes_by_number = shapes_of(model, "param_shapes")
    for index, rank in enumerate(ranks):
        for number, shapes in enumerate(shapes_by_number):
            group = group_of[number]
            states = states_of(rank["optimizer_state_dict"]["state"], number, settings[group])
            values, start = {WEIGHTS: rank["fp32_flat_groups"][number], **states}, 0
            for name, shape in shapes.items():
                shard_numel = math.ceil(math.prod(shape) / num_ranks)
                numel = max(0, min(shard_numel, math.prod(shape) - index * shard_numel))
                flats.setdefault(name, FlatTensor(shape, group)).parts.append((values, start, numel))
                start += shard_numel
    for name in model.get("buffer_names") or ():
        if name in model["module"]:
            flats[name] = unpartitioned(model["module"][name])
    for shapes in shapes_of(model, "frozen_param_shapes"):
        for name, shape in shapes.items():
            flats[name] = _frozen(models, name, shape)
    return ZeroFiles(model, flats, settings)


def _frozen(models: list[Mapping[str, Any]], name: str, shape: tuple[int, ...]) -> FlatTensor:
    flat, rest = FlatTensor(shape, None), math.prod(shape)
    for model in models:
        fragment = model["frozen_param_fragments"][name]
        flat.parts.append(({WEIGHTS: fragment}, 0, min(rest, fragment.numel())))
        rest -= min(rest, fragment.numel())
    return flat


def _left_out(model: Mapping[str, Any]) -> tuple[str, ...]:
    unknown = [name for name, value in model.items() if name not in _UNDERSTOOD and value is not None]
    return tuple(f"{name}: not supported by shardwise checkpoints" for name in unknown)


LATEST, LATEST_UNIVERSAL = "latest", "latest_universal"
MODEL_STATES, OPTIMIZER_STATES = "mp_rank_00_model_states.pt", "mp_rank_00_optim_states.pt"
"""File names; files of one rank start with zero_pp_rank_N_."""
ZERO = "zero"
"""Name of the subdirectory of a universal checkpoint that contains one directory per parameter."""

_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_FOREIGN = re.compile(r"layer_\d+.*\.pt|.*expert_\d+.*\.pt|offloaded_tensors")


class PickledObject:
    """Replaces instances of DeepSpeed classes when a file is loaded, and stores their attributes."""

    def __init__(self, *values: object) -> None:
        self.values = values


_CLASSES = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
)


def is_deepspeed(path: Path) -> bool:
    """Return whether a directory is a DeepSpeed checkpoint or contains tagged DeepSpeed checkpoints."""
    return path.is_dir() and (_tag(path) is not None or _has_model_states(path))


def is_universal(path: Path) -> bool:
    """Return whether a directory is a DeepSpeed universal checkpoint or contains one as the latest tag."""
    return is_deepspeed(path) and (tag_directory(path) / ZERO).is_dir()


def tag_directory(path: Path) -> Path:
    """Return the directory of the latest tag, or `path` itself if it contains no tags."""
    return path / (_tag(path) or "")


def _tag(path: Path) -> str | None:
    for name in (LATEST, LATEST_UNIVERSAL):
        file = path / name
        if file.is_file() and file.stat().st_size < 1024:
            tag = file.read_text(errors="replace").strip()
            if tag and "/" not in tag and (path / tag).is_dir() and _has_model_states(path / tag):
                return tag
    return None


def _has_model_states(directory: Path) -> bool:
    return any(_MODEL.fullmatch(each.name) for each in directory.iterdir())


def model_files(directory: Path) -> list[Path]:
    """Return the files of model states by rank; stages 0 to 2 have one file."""
    return _by_rank(directory, _MODEL)


def optimizer_files(directory: Path) -> list[Path]:
    """Return the files of optimizer states by rank; stage 0 has none."""
    return _by_rank(directory, _OPTIMIZER)


def _by_rank(directory: Path, pattern: re.Pattern[str]) -> list[Path]:
    found: dict[int, Path] = {}
    for path in directory.iterdir():
        match = pattern.fullmatch(path.name)
        if match and int(match[2]):
            raise InputError(
                f"{path} is a shard of tensor or pipeline parallelism, which is not supported",
                code="checkpoint.deepspeed-model-parallel",
                fix="convert the checkpoint with DeepSpeed",
            )
        if _FOREIGN.fullmatch(path.name):
            raise InputError(
                f"{path} is a file of a pipeline, of experts or of NVMe offload, which is not supported",
                code="checkpoint.deepspeed-unsupported",
                fix="convert the checkpoint with DeepSpeed",
            )
        if match:
            found[int(match[1] or 0)] = path
    missing = set(range(max(found, default=-1) + 1)) - found.keys()
    if missing:
        raise DamagedError(
            f"{directory} contains {found[max(found)].name}, but no file of rank {min(missing)}",
            code="checkpoint.rank-file-missing",
        )
    return [found[rank] for rank in sorted(found)]


def load_file(path: Path) -> Any:
    """Load a DeepSpeed file with memory-mapped tensors; instances of DeepSpeed classes become PickledObjects."""
    allowed: Any = [(PickledObject, name) for name in _CLASSES]
    if not path.is_file():
        raise DamagedError(f"{path} does not exist", code="checkpoint.file-missing")
    with torch.serialization.safe_globals(allowed):
        return load_plain(path, str(path), mmap=zipfile.is_zipfile(path))
