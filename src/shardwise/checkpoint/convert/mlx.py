"""MLX weight files, which mlx.nn.Module.load_weights reads: convolution weights have their input channels last."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import torch
from safetensors.torch import save_file

from shardwise.checkpoint.convert import hugging_face as convert_hf
from shardwise.checkpoint.convert.contents import MODEL, Contents, short_names
from shardwise.checkpoint.disk import DamagedError, sync_file
from shardwise.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from torch import Tensor

    from shardwise.checkpoint.manifest import Form

SUFFIX = ".safetensors"
_MEAN, _VAR, _COUNT = "running_mean", "running_var", "num_batches_tracked"
_NOTE = "shardwise"
"""Header key of a JSON value with the state that MLX does not store: batch counts and tied weights."""
_MAX_HEADER_BYTES = 100_000_000


class _Note(msgspec.Struct, frozen=True):
    counts: dict[str, Annotated[int, msgspec.Meta(ge=0, le=2**62)]] = {}
    tied: dict[str, str] = {}


def is_mlx(path: Path) -> bool:
    """Return whether MLX wrote a file or directory; only MLX writes the header format `null` or `mlx`."""
    file = path if path.is_file() else min(path.glob(f"*{SUFFIX}"), default=None)
    if file is None or file.suffix != SUFFIX:
        return False
    metadata = _header(file).get("__metadata__", {})
    return metadata is None or (isinstance(metadata, dict) and metadata.get("format") == "mlx")


def read(path: Path) -> Contents:
    """Return the weights in the layout of torch; tensors are read lazily.

    torch counts the batches of a batch norm, MLX does not. If the file does not contain the count, it is set to 0.
    """
    contents = convert_hf.read(path)
    note = _note(path)
    counts = {}
    for name in _missing_counts(contents.forms):
        counts[name] = torch.tensor(note.counts.get(name.removeprefix(MODEL), 0))
    forms = {name: _torch_form(name, form) for name, form in contents.forms.items()}
    forms |= dict.fromkeys(counts, ("I64", ()))

    def read_stored(names: Collection[str]) -> dict[str, Tensor]:
        values = contents.read([name for name in names if name not in counts])
        found = {}
        for name in names:
            found[name] = counts[name] if name in counts else _to_torch(name, values[name])
        return found

    facts = {"tied": note.tied} if note.tied else {}
    return dataclasses.replace(contents, kind="mlx", forms=forms, facts=facts, read=read_stored)


def read_as_saved(path: Path) -> dict[str, Tensor]:
    """Return the weights in the layout of MLX, and the batch counts in the header."""
    contents = convert_hf.read(path)
    values = short_names(contents.read(list(contents.forms)))
    for name, count in _note(path).counts.items():
        values[name] = torch.tensor(count)
    return values


def supported(contents: Contents) -> Contents:
    """Return the contents that an MLX weight file can represent: the weights without batch counts."""
    weights = contents.only_weights()
    return weights.select([name for name in weights.forms if _leaf(name) != _COUNT])


def write(contents: Contents, path: Path) -> list[str]:
    """Write a new weight file and return the contents that it cannot represent."""
    if path.suffix != SUFFIX:
        raise InputError(
            f"the name of an MLX weight file must end in {SUFFIX}, got {path.name}",
            code="checkpoint.mlx-file-name",
            fix=f"use {path.stem}{SUFFIX}",
        )
    weights = supported(contents)
    for name, (code, _) in weights.forms.items():
        if code.startswith("F8"):
            raise InputError(
                f"tensor {name.removeprefix(MODEL)!r} is fp8, which MLX does not support",
                code="checkpoint.dtype-unsupported",
                fix="convert the tensor to bf16 first",
            )
    counts = contents.read([name for name in contents.weights if _leaf(name) == _COUNT])
    note = _Note({name: int(value) for name, value in short_names(counts).items()}, contents.tied)
    tensors = {}
    for name, value in short_names(contents.read(list(weights.forms))).items():
        tensors[name] = _to_mlx(name, value).contiguous().clone()
    save_file(tensors, path, metadata={"format": "mlx", _NOTE: msgspec.json.encode(note).decode()})
    sync_file(path)
    return convert_hf.left_out(contents, "file")


def permuted_weights(forms: Mapping[str, Form]) -> tuple[str, ...]:
    """Return the names of the convolution weights, whose axes differ between torch and MLX, without "model/"."""
    return tuple(name for name, (_, shape) in short_names(forms).items() if _is_convolution(name, len(shape)))


def _leaf(name: str) -> str:
    return re.split(r"[./]", name)[-1]


def _is_convolution(name: str, num_dims: int) -> bool:
    """Return whether a tensor is assumed to be the weight of Conv1d, Conv2d or Conv3d, by its name and dimensions."""
    return num_dims in {3, 4, 5} and _leaf(name) == "weight"


def _to_mlx(name: str, value: Tensor) -> Tensor:
    return value.movedim(1, -1) if _is_convolution(name, value.dim()) else value


def _to_torch(name: str, value: Tensor) -> Tensor:
    return value.movedim(-1, 1).contiguous() if _is_convolution(name, value.dim()) else value


def _torch_form(name: str, form: Form) -> Form:
    code, shape = form
    return (code, (shape[0], shape[-1], *shape[1:-1])) if _is_convolution(name, len(shape)) else form


def _missing_counts(names: Collection[str]) -> list[str]:
    """Return the names of the batch counts that torch stores with batch statistics and that `names` lacks."""
    found = []
    for name in names:
        norm = name.removesuffix(_MEAN)
        if _leaf(name) == _MEAN and norm + _VAR in names and norm + _COUNT not in names:
            found.append(norm + _COUNT)
    return found


def _note(path: Path) -> _Note:
    metadata = _header(path).get("__metadata__")
    if not isinstance(metadata, dict) or not metadata.get(_NOTE):
        return _Note()
    try:
        return msgspec.json.decode(metadata[_NOTE], type=_Note)
    except msgspec.MsgspecError as error:
        raise DamagedError(
            f"the batch counts and tied weights in the header of {path} are invalid ({error})",
            code="checkpoint.mlx-metadata-invalid",
        ) from None


def _header(file: Path) -> dict[str, Any]:
    """Return the header of a safetensors file, or {} if it cannot be read."""
    try:
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = msgspec.json.decode(opened.read(size)) if size <= _MAX_HEADER_BYTES else {}
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return {}
    return header if isinstance(header, dict) else {}
