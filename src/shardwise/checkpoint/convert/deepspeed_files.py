"""The files of a DeepSpeed checkpoint: where they are, and what is in them, without DeepSpeed and with no code run."""

from __future__ import annotations

import re
import zipfile
from typing import TYPE_CHECKING, Any

import torch

from shardwise.checkpoint.convert.torch_file import load_plain
from shardwise.checkpoint.errors import DamagedError
from shardwise.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

LATEST, LATEST_UNIVERSAL = "latest", "latest_universal"
MODEL_STATES, OPTIMIZER_STATES = "mp_rank_00_model_states.pt", "mp_rank_00_optim_states.pt"
"""What file names end in; before it zero_pp_rank_N_ where each rank has its own."""
ZERO = "zero"
"""The folder of a universal checkpoint that has one folder for each parameter."""

_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_FOREIGN = re.compile(r"layer_\d+.*\.pt|.*expert_\d+.*\.pt|offloaded_tensors")


class Plain:
    """Stands in for DeepSpeed's own classes in its files: keeps their values and does nothing."""

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
                f"{path} is a part of a model cut by tensor or pipeline",
                code="checkpoint.deepspeed-model-parallel",
                fix="convert it with DeepSpeed",
            )
        if _FOREIGN.fullmatch(path.name):
            raise InputError(
                f"{path} is of a pipeline, of experts or on nvme",
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
        raise DamagedError(f"{path} is not there", code="checkpoint.file-missing")
    with torch.serialization.safe_globals(allowed):
        return load_plain(path, str(path), mmap=zipfile.is_zipfile(path))
