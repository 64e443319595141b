"""Reading a DeepSpeed folder, ZeRO stages 0 to 3 and universal: parameters joined from the flat shards of all ranks."""

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
from shardwise.checkpoint.convert.torch_formats import load_plain, sort_state
from shardwise.checkpoint.errors import DamagedError
from shardwise.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from shardwise.checkpoint.pieces import Form


WEIGHTS = "fp32"
"""What DeepSpeed calls a parameter's own values beside its optimizer states."""

_UNDERSTOOD = frozenset(
    {
        *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params"),
        *("frozen_param_fragments", "global_steps", "global_samples", "skipped_steps", "dp_world_size"),
        *("mp_world_size", "checkpoint_parallel_dimensions", "ds_config", "ds_version", "universal_checkpoint_info"),
    }
)


@dataclass
class Flat:
    """One tensor of the model in flat parts, each with the optimizer states that belong to it."""

    shape: tuple[int, ...]
    group: int | None
    """Its group of the optimizer; None for buffers and frozen weights."""
    parts: list[tuple[Mapping[str, Any], int, int]] = field(default_factory=list)
    """In order: values by name ("fp32" for its own), where the part begins in them, how many elements it has."""

    @property
    def examples(self) -> Mapping[str, Any]:
        """Values of the first part by name."""
        return self.parts[0][0]

    def whole(self, name: str, key: str) -> Tensor:
        """Return one of its values, whole."""
        example = self.examples[key]
        if not is_flat(example):
            return example.detach() if isinstance(example, Tensor) else torch.tensor(float(example))
        found = [values[key].detach().reshape(-1)[start : start + numel] for values, start, numel in self.parts]
        flat = found[0] if len(found) == 1 else torch.cat(found)
        if flat.numel() != math.prod(self.shape):
            raise DamagedError(
                f"{name} has {flat.numel()} elements of {key} in all files, its shape is {self.shape}",
                code="checkpoint.element-count-mismatch",
            )
        return flat.view(self.shape)


@dataclass(frozen=True)
class Source:
    """The contents of the files of a checkpoint, before it gets our names."""

    model: Mapping[str, Any]
    """The first file of model states."""
    flats: dict[str, Flat]
    groups: list[Mapping[str, Any]]
    """Settings of the optimizer's groups; `flats` knows their parameters."""


def read(path: Path) -> Contents:
    """Return what a folder holds; a tensor is put together when it is asked for, from files that are mapped."""
    folder = tag_folder(path)
    if (folder / ZERO).is_dir():
        from shardwise.checkpoint.convert.deepspeed_universal import read_universal

        return gather(read_universal(folder))
    models = [load_file(file) for file in model_files(folder)]
    ranks = [load_file(file)["optimizer_state_dict"] for file in optimizer_files(folder)]
    if not ranks:
        return _stage_0(models[0])
    if len(ranks) != models[0].get("dp_world_size", len(ranks)):
        raise DamagedError(
            f"{folder} has optimizer states of {len(ranks)} ranks of {models[0]['dp_world_size']}",
            code="checkpoint.rank-file-missing",
        )
    return gather(_stage_3(models, ranks) if "fp32_flat_groups" in ranks[0] else _stage_1_2(models[0], ranks))


def gather(source: Source) -> Contents:
    """Return contents under our names, in the order of the model's own state dict."""
    model, flats = source.model, source.flats
    tied = {alias: name for alias, name in (model.get("shared_params") or {}).items() if alias not in flats}
    names = [name for name in model["module"] if name in flats]
    names += [name for name in flats if name not in model["module"]]
    places = {MODEL + name: (name, WEIGHTS) for name in names}
    places |= {f"{OPTIMIZER}{name}/{key}": (name, key) for name in names for key in flats[name].examples}
    places = {full: place for full, place in places.items() if not full.endswith(f"/{WEIGHTS}")}
    groups = [_plain(group) | {"params": []} for group in source.groups]
    for name in names:
        group = flats[name].group
        if groups and group is not None:
            groups[group]["params"].append(name)

    def read_all(names: Collection[str]) -> dict[str, Tensor]:
        return {full: flats[places[full][0]].whole(*places[full]) for full in names}

    return Contents(
        kind="deepspeed",
        step=model.get("global_steps", 0),
        forms={full: _form(flats[name], full, key) for full, (name, key) in places.items()},
        facts=({"tied": tied} if tied else {}) | ({"optimizer": {"groups": groups}} if groups else {}),
        read=read_all,
        left_out=_left_out(model),
    )


def is_flat(value: Any) -> bool:
    """Whether a value is partitioned as its parameter is; a count of steps is not."""
    return isinstance(value, Tensor) and value.ndim > 0


def shapes_of(model: Mapping[str, Any], key: str) -> list[dict[str, tuple[int, ...]]]:
    """Return the shapes of parameters that a file of model states holds, group by group."""
    saved = model.get(key) or []
    groups = [saved] if isinstance(saved, dict) else saved
    return [{name: tuple(shape) for name, shape in each.items()} for each in groups]


def states_of(states: Mapping[int, Any], number: int, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return one flat tensor's states; DeepSpeed's own Adam counts its steps in the group."""
    found = dict(states.get(number, {}))
    if found and "step" not in found and "step" in group:
        found["step"] = group["step"]
    return found


def alone(tensor: Tensor) -> Flat:
    """Return a tensor that is whole in its file and that no optimizer has."""
    return Flat(tuple(tensor.shape), None, [({WEIGHTS: tensor}, 0, tensor.numel())])


def _form(flat: Flat, full: str, key: str) -> Form:
    example = flat.examples[key]
    dtype = example.dtype if isinstance(example, Tensor) else torch.float32
    return form_from(full, dtype, flat.shape if is_flat(example) else ())


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a group that are plain values."""
    found = {}
    for key, value in group.items():
        if key not in {"params", "step"}:
            try:
                found[key] = msgspec.json.decode(msgspec.json.encode(value))
            except (TypeError, msgspec.MsgspecError):
                continue
    return found


def _stage_0(model: Mapping[str, Any]) -> Contents:
    """Weights whole, and the optimizer as torch writes it, unless half precision wrapped it."""
    optimizer = model.get("optimizer")
    state = {"model": model["module"], "step": model.get("global_steps", 0)}
    lost: tuple[str, ...] = ()
    if isinstance(optimizer, dict) and "param_groups" in optimizer:
        state["optimizer"] = optimizer
    elif optimizer:
        lost = ("optimizer: at stage 0 in half precision it is in a form of DeepSpeed's own",)
    contents = sort_state("deepspeed", state)
    return dataclasses.replace(contents, left_out=(*contents.left_out, *lost, *_left_out(model)))


def _stage_1_2(model: Mapping[str, Any], ranks: list[dict[str, Any]]) -> Source:
    """Groups lie flat over all ranks; each rank lists which piece of which parameter it has."""
    if "param_slice_mappings" not in ranks[0]:
        raise InputError(
            "it was saved by a DeepSpeed before 0.8, which does not save where its parameters are",
            code="checkpoint.deepspeed-too-old",
            fix="load and save it with a newer one",
        )
    groups = enumerate(shapes_of(model, "param_shapes"))
    flats = {name: Flat(shape, group) for group, shapes in groups for name, shape in shapes.items()}
    settings: list[Mapping[str, Any]] = []
    for rank in ranks:
        states, settings = _base_states(rank)
        for group, pieces in enumerate(rank["param_slice_mappings"]):
            values = {WEIGHTS: rank["single_partition_of_fp32_groups"][group], **states[group]}
            for name, piece in pieces.items():
                flats[name].parts.append((values, piece.start, piece.numel))
    aliases = model.get("shared_params") or {}
    flats |= {name: alone(tensor) for name, tensor in model["module"].items() if name not in {*flats, *aliases}}
    return Source(model, flats, settings)


def _base_states(rank: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[Mapping[str, Any]]]:
    """Return states and settings of the optimizer by group, from a rank of stage 1 or 2."""
    base = rank["base_optimizer_state"]
    if isinstance(base, list):  # an elastic checkpoint: states without padding, and no settings
        step = rank.get("base_optimizer_state_step")
        return [{**state, **({} if step is None else {"step": step})} for state in base], []
    settings = base["param_groups"]
    return [states_of(base["state"], group["params"][0], group) for group in settings], settings


def _stage_3(models: list[Mapping[str, Any]], ranks: list[dict[str, Any]]) -> Source:
    """Every parameter is partitioned evenly over the ranks; a group of the optimizer is one flat tensor, or several."""
    model, size = models[0], len(ranks)
    settings = ranks[0]["optimizer_state_dict"]["param_groups"]
    group_of = {number: index for index, group in enumerate(settings) for number in group["params"]}
    flats: dict[str, Flat] = {}
    every = shapes_of(model, "param_shapes")
    for index, rank in enumerate(ranks):
        for number, shapes in enumerate(every):
            group = group_of[number]
            states = states_of(rank["optimizer_state_dict"]["state"], number, settings[group])
            values, start = {WEIGHTS: rank["fp32_flat_groups"][number], **states}, 0
            for name, shape in shapes.items():
                share = math.ceil(math.prod(shape) / size)
                mine = max(0, min(share, math.prod(shape) - index * share))
                flats.setdefault(name, Flat(shape, group)).parts.append((values, start, mine))
                start += share
    flats |= {name: alone(model["module"][name]) for name in model.get("buffer_names") or () if name in model["module"]}
    for shapes in shapes_of(model, "frozen_param_shapes"):
        flats |= {name: _frozen(models, name, shape) for name, shape in shapes.items()}
    return Source(model, flats, settings)


def _frozen(models: list[Mapping[str, Any]], name: str, shape: tuple[int, ...]) -> Flat:
    flat, rest = Flat(shape, None), math.prod(shape)
    for model in models:
        fragment = model["frozen_param_fragments"][name]
        flat.parts.append(({WEIGHTS: fragment}, 0, min(rest, fragment.numel())))
        rest -= min(rest, fragment.numel())
    return flat


def _left_out(model: Mapping[str, Any]) -> tuple[str, ...]:
    others = [name for name, value in model.items() if name not in _UNDERSTOOD and value is not None]
    return tuple(f"{name}: a checkpoint of ours has no place for it" for name in others)


# The files of a DeepSpeed checkpoint: where they are, and what is in them, without DeepSpeed and with no code run.


LATEST, LATEST_UNIVERSAL = "latest", "latest_universal"
MODEL_STATES, OPTIMIZER_STATES = "mp_rank_00_model_states.pt", "mp_rank_00_optim_states.pt"
"""What file names end in; before it zero_pp_rank_N_ where each rank has its own."""
ZERO = "zero"
"""The folder of a universal checkpoint that has one folder for each parameter."""

_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_FOREIGN = re.compile(r"layer_\d+.*\.pt|.*expert_\d+.*\.pt|offloaded_tensors")


class Plain:
    """Replaces DeepSpeed's own classes in its files: keeps their values and does nothing."""

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
    """Whether a folder is what DeepSpeed saves: a folder of tags, or one of them."""
    return path.is_dir() and (_tag(path) is not None or any(_MODEL.fullmatch(each.name) for each in path.iterdir()))


def tag_folder(path: Path) -> Path:
    """Return the folder that holds the files: of several the one that was saved last."""
    tag = _tag(path)
    return path if tag is None else path / tag


def _tag(path: Path) -> str | None:
    for name in (LATEST, LATEST_UNIVERSAL):
        file = path / name
        if file.is_file() and file.stat().st_size < 1024:
            tag = file.read_text(errors="replace").strip()
            if tag and "/" not in tag and (path / tag).is_dir() and _has_model_states(path / tag):
                return tag
    return None


def _has_model_states(folder: Path) -> bool:
    return any(_MODEL.fullmatch(each.name) for each in folder.iterdir())


def model_files(folder: Path) -> list[Path]:
    """Return the files of model states by rank; at stages 0 to 2 there is one."""
    return _by_rank(folder, _MODEL)


def optimizer_files(folder: Path) -> list[Path]:
    """Return the files of optimizer states by rank; none at stage 0."""
    return _by_rank(folder, _OPTIMIZER)


def _by_rank(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    found: dict[int, Path] = {}
    for path in folder.iterdir():
        match = pattern.fullmatch(path.name)
        if match and int(match[2]):
            raise InputError(
                f"{path} is a part of a model split by tensor or pipeline parallelism",
                code="checkpoint.deepspeed-model-parallel",
                fix="convert it with DeepSpeed",
            )
        if _FOREIGN.fullmatch(path.name):
            raise InputError(
                f"{path} is of a pipeline, of experts or of NVMe offload, which is not supported",
                code="checkpoint.deepspeed-unsupported",
                fix="convert it with DeepSpeed",
            )
        if match:
            found[int(match[1] or 0)] = path
    missing = set(range(max(found, default=-1) + 1)) - found.keys()
    if missing:
        raise DamagedError(
            f"{folder} lacks the file of rank {min(missing)} beside {found[max(found)].name}",
            code="checkpoint.rank-file-missing",
        )
    return [found[rank] for rank in sorted(found)]


def load_file(path: Path) -> Any:
    """Return what a file holds, its tensors mapped and not read; of classes only DeepSpeed's few pass, as Plain."""
    allowed: Any = [(Plain, name) for name in _CLASSES]
    if not path.is_file():
        raise DamagedError(f"{path} does not exist", code="checkpoint.file-missing")
    with torch.serialization.safe_globals(allowed):
        return load_plain(path, str(path), mmap=zipfile.is_zipfile(path))
