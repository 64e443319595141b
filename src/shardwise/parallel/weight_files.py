"""Weights in files: a torch state dict, a safetensors file, or a Hugging Face folder, read without loading it whole."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardwise.errors import JobError

if TYPE_CHECKING:
    from pathlib import Path


def open_weights(path: Path) -> Mapping[str, Tensor]:
    """Return the tensors of a file or folder by name; each is read when it is asked for."""
    if path.is_dir():
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise JobError(
                f"Job.weights {path} holds no .safetensors file",
                code="model.weights-no-safetensors",
                fix="name a folder saved by save_pretrained",
            )
        return _Safetensors(files)
    if not path.is_file():
        raise JobError(
            f"Job.weights {path} is not a file",
            code="model.weights-not-found",
            fix="name a state dict saved by torch.save, or a folder",
        )
    if path.suffix == ".safetensors":
        return _Safetensors([path])
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, ValueError, TypeError, OSError, pickle.UnpicklingError) as error:
        raise _unreadable(path, error) from error
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise JobError(
            f"Job.weights {path} does not load (it is no state dict)",
            code="model.weights-not-state-dict",
            fix="save model.state_dict()",
        )
    return state


class _Safetensors(Mapping[str, Tensor]):
    """Tensors of several files under one roof, of which one at a time is open: mapped pages count as host memory."""

    def __init__(self, files: list[Path]) -> None:
        self._paths: dict[str, Path] = {}
        for path in files:
            self._paths.update(dict.fromkeys(_open(path).keys(), path))
        self._open: tuple[Path, Any] | None = None

    def __getitem__(self, name: str) -> Tensor:
        path = self._paths[name]
        if self._open is None or self._open[0] != path:
            self._open = None  # before the next one is mapped
            self._open = (path, _open(path))
        value: Tensor = self._open[1].get_tensor(name)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)


def _open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> JobError:
    reason = (str(error).splitlines() or [""])[-1].strip()
    return JobError(
        f"Job.weights {path} does not load ({reason})",
        code="model.weights-unreadable",
        fix="name a matching state dict",
    )
