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
                f"Job.weights {path} holds no .safetensors file", fix="name a folder saved by save_pretrained"
            )
        return _Safetensors(files)
    if not path.is_file():
        raise JobError(f"Job.weights {path} is not a file", fix="name a state dict saved by torch.save, or a folder")
    if path.suffix == ".safetensors":
        return _Safetensors([path])
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, ValueError, TypeError, OSError, pickle.UnpicklingError) as error:
        raise _unreadable(path, error) from error
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise JobError(f"Job.weights {path} does not load (it is no state dict)", fix="save model.state_dict()")
    return state


class _Safetensors(Mapping[str, Tensor]):
    """Tensors of several files under one roof."""

    def __init__(self, files: list[Path]) -> None:
        from safetensors import SafetensorError, safe_open

        self._files: dict[str, Any] = {}
        for path in files:
            try:
                file = safe_open(path, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise _unreadable(path, error) from error
            self._files.update(dict.fromkeys(file.keys(), file))  # type: ignore[no-untyped-call]

    def __getitem__(self, name: str) -> Tensor:
        value: Tensor = self._files[name].get_tensor(name)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def _unreadable(path: Path, error: Exception) -> JobError:
    reason = (str(error).splitlines() or [""])[-1].strip()
    return JobError(f"Job.weights {path} does not load ({reason})", fix="name a matching state dict")
