"""One file of MLX weights, which Module.load_weights reads: convolutions have their input channels last."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import torch
from safetensors.torch import save_file

from shardwise.checkpoint.convert import hugging_face as convert_hf
from shardwise.checkpoint.convert.contents import MODEL, Contents
from shardwise.checkpoint.disk import sync_file
from shardwise.checkpoint.errors import DamagedError
from shardwise.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from torch import Tensor

    from shardwise.checkpoint.pieces import Form

SUFFIX = ".safetensors"
_MEAN, _VAR, _COUNT = "running_mean", "running_var", "num_batches_tracked"
_NOTE = "shardwise"
"""What MLX has no place for is JSON under this key of the header: batch counts, and what is tied to what."""
_MAX_HEADER_BYTES = 100_000_000


class _Note(msgspec.Struct, frozen=True):
    counts: dict[str, Annotated[int, msgspec.Meta(ge=0, le=2**62)]] = {}
    tied: dict[str, str] = {}


def is_mlx(path: Path) -> bool:
    """Whether MLX wrote a file or a folder: MLX alone writes `null` or `mlx` where others name a format."""
    files = [path] if path.is_file() else sorted(path.glob(f"*{SUFFIX}"))[:1]
    return any(file.suffix == SUFFIX and _is_head_of_mlx(_header(file)) for file in files)


def read(path: Path) -> Contents:
    """Return the weights in torch's layout; tensors are loaded lazily.

    Torch counts the batches of a batch norm, MLX does not: where a file has none, the count is 0.
    """
    contents = convert_hf.read(path)
    note = _note(path)
    forms = {name: _torch_form(name, form) for name, form in contents.forms.items()}
    counts = {MODEL + name: note.counts.get(name, 0) for name in _counted(contents.forms)}
    forms |= dict.fromkeys(counts, ("I64", ()))

    def get(names: Collection[str]) -> dict[str, Tensor]:
        values = contents.read([name for name in names if name not in counts])
        found = {name: _to_torch(name, value) for name, value in values.items()}
        return {name: torch.tensor(counts[name]) if name in counts else found[name] for name in names}

    facts = {"tied": note.tied} if note.tied else {}
    return dataclasses.replace(contents, kind="mlx", forms=forms, facts=facts, read=get)


def read_as_saved(path: Path) -> dict[str, Tensor]:
    """Return the weights in MLX's own layouts, and the batch counts of the header."""
    contents = convert_hf.read(path)
    values = {name.removeprefix(MODEL): value for name, value in contents.read(list(contents.forms)).items()}
    return values | {name: torch.tensor(count) for name, count in _note(path).counts.items()}


def holds(contents: Contents) -> Contents:
    """Return what a file of MLX weights can hold: no optimizer, no batch counts."""
    weights = contents.only_weights()
    forms = {name: form for name, form in weights.forms.items() if _leaf(name) != _COUNT}
    return dataclasses.replace(weights, forms=forms)


def write(contents: Contents, path: Path) -> list[str]:
    """Write a new file and return what it cannot hold."""
    if path.suffix != SUFFIX:
        raise InputError(
            f"{path.name} is not a name that MLX loads weights from",
            code="checkpoint.mlx-file-name",
            fix=f"use {path.stem}{SUFFIX}",
        )
    kept = holds(contents)
    small = [name for name, (code, _) in kept.forms.items() if code.startswith("F8")]
    if small:
        raise InputError(
            f"tensor {small[0].removeprefix(MODEL)!r} is fp8, which MLX does not load",
            code="checkpoint.dtype-unsupported",
            fix="use bf16",
        )
    counts = contents.read([name for name in contents.forms if name.startswith(MODEL) and _leaf(name) == _COUNT])
    note = _Note({name.removeprefix(MODEL): int(value) for name, value in counts.items()}, contents.tied)
    values = {name: _to_mlx(name, value) for name, value in contents.read(list(kept.forms)).items()}
    save_file(
        {name.removeprefix(MODEL): value.contiguous().clone() for name, value in values.items()},
        path,
        metadata={"format": "mlx", _NOTE: msgspec.json.encode(note).decode()},
    )
    sync_file(path)
    return convert_hf.left_out(contents, "file")


def moved(forms: Mapping[str, Form]) -> tuple[str, ...]:
    """Return which tensors have their axes moved on the way between torch and MLX, without "model/"."""
    return tuple(name.removeprefix(MODEL) for name, (_, shape) in forms.items() if _is_convolution(name, len(shape)))


def _leaf(name: str) -> str:
    return re.split(r"[./]", name)[-1]


def _is_convolution(name: str, num_dims: int) -> bool:
    """Whether a weight is taken for one of Conv1d to Conv3d: it is called so, and has as many dimensions."""
    return num_dims in {3, 4, 5} and _leaf(name) == "weight"


def _to_mlx(name: str, value: Tensor) -> Tensor:
    return value.movedim(1, -1) if _is_convolution(name, value.dim()) else value


def _to_torch(name: str, value: Tensor) -> Tensor:
    return value.movedim(-1, 1).contiguous() if _is_convolution(name, value.dim()) else value


def _torch_form(name: str, form: Form) -> Form:
    code, shape = form
    return (code, (shape[0], shape[-1], *shape[1:-1])) if _is_convolution(name, len(shape)) else form


def _counted(names: Collection[str]) -> list[str]:
    """Return the batch counts that torch has beside the statistics among these names, without "model/"."""
    norms = [name.removesuffix(_MEAN) for name in names if _leaf(name) == _MEAN]
    return [
        (norm + _COUNT).removeprefix(MODEL) for norm in norms if norm + _VAR in names and norm + _COUNT not in names
    ]


def _is_head_of_mlx(header: dict[str, Any]) -> bool:
    metadata = header.get("__metadata__", {})
    return metadata is None or (isinstance(metadata, dict) and metadata.get("format") == "mlx")


def _note(path: Path) -> _Note:
    metadata = _header(path).get("__metadata__") if path.is_file() else None
    text = metadata.get(_NOTE) if isinstance(metadata, dict) else None
    try:
        return msgspec.json.decode(text, type=_Note) if text else _Note()
    except msgspec.MsgspecError as error:
        raise DamagedError(
            f"{path} holds something else than batch counts and ties ({error})", code="checkpoint.mlx-metadata-invalid"
        ) from None


def _header(file: Path) -> dict[str, Any]:
    """Return the header of a safetensors file, {} where it has none that can be read."""
    try:
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = msgspec.json.decode(opened.read(size)) if size <= _MAX_HEADER_BYTES else {}
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return {}
    return header if isinstance(header, dict) else {}
