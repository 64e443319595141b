"""A Hugging Face folder of safetensors: weights in one file, or in several with an index."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from shardwise.checkpoint.convert.contents import MODEL, Contents, bytes_of, form_from
from shardwise.checkpoint.disk import sync_file, sync_folder, write_synced
from shardwise.checkpoint.errors import DamagedError
from shardwise.checkpoint.manifest import DTYPES
from shardwise.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import Tensor

    from shardwise.checkpoint.pieces import Form

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_FILE_BYTES = 5_000_000_000
"""Weights beyond this go into several files, so that loading has a host peak of one of them."""


def read(path: Path) -> Contents:
    """Return the weights of a folder, or of one safetensors file; they are read when they are asked for."""
    files = _files(path)
    places: dict[str, Any] = {}
    forms: dict[str, Form] = {}
    for file, expected in files.items():
        opened = _open(file)
        names = set(opened.keys())
        if expected is not None and not expected <= names:
            raise DamagedError(
                f"{file} lacks {min(expected - names)!r}, which the index promises", code="checkpoint.tensor-missing"
            )
        # In the order of their bytes: that is the order in which they were saved.
        for name in (each for each in opened.offset_keys() if expected is None or each in expected):
            if MODEL + name in places:
                raise InputError(
                    f"{path} holds {name!r} twice",
                    code="checkpoint.tensor-repeated",
                    fix="remove files that do not belong to it",
                )
            part = opened.get_slice(name)
            code = part.get_dtype()
            if code not in DTYPES:
                raise InputError(
                    f"tensor {name!r} is {code}",
                    code="checkpoint.dtype-unsupported",
                    fix=f"use one of {', '.join(DTYPES)}",
                )
            places[MODEL + name] = opened
            forms[MODEL + name] = form_from(name, DTYPES[code], tuple(part.get_shape()))

    def get(names: Collection[str]) -> dict[str, Tensor]:
        return {name: places[name].get_tensor(name.removeprefix(MODEL)) for name in names}

    return Contents(kind="hf", step=0, forms=forms, facts={}, read=get)


def write(contents: Contents, path: Path, *, max_file_bytes: int = MAX_FILE_BYTES) -> list[str]:
    """Write a new folder and return what it cannot hold; host peak is one file."""
    weights = [name for name in contents.forms if name.startswith(MODEL)]
    parts = contents.split(weights, max_file_bytes)
    names = [SINGLE] if len(parts) <= 1 else [_name(i, len(parts)) for i in range(len(parts))]
    path.mkdir()
    for file, part in zip(names, parts or [[]], strict=True):
        values = {name.removeprefix(MODEL): tensor.contiguous() for name, tensor in contents.read(part).items()}
        save_file({name: tensor.clone() for name, tensor in values.items()}, path / file, metadata={"format": "pt"})
        sync_file(path / file)
    if len(parts) > 1:
        where = {name.removeprefix(MODEL): file for file, part in zip(names, parts, strict=True) for name in part}
        total = sum(bytes_of(contents.forms[name]) for name in weights)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        write_synced(path / INDEX, msgspec.json.format(msgspec.json.encode(index), indent=2))
    sync_folder(path)
    return left_out(contents, "folder")


def left_out(contents: Contents, target: str) -> list[str]:
    """Return what weights alone do not hold, one sentence each; `target` is what they are in."""
    left_out = [f"{alias}: written once, as {name}, to which it is tied" for alias, name in contents.tied.items()]
    others: dict[str, int] = {}
    for name in contents.forms:
        if not name.startswith(MODEL):
            part = name.partition("/")[0]
            others[part] = others.get(part, 0) + 1
    left_out += [f"{part}: {count} tensors, the {target} holds weights only" for part, count in others.items()]
    facts = [name for name in contents.facts if name != "tied"]
    return left_out + ([f"facts ({', '.join(facts)}): the {target} holds weights only"] if facts else [])


def _files(path: Path) -> dict[Path, set[str] | None]:
    """Return the files of a folder, and which weights the index takes from each; None for all."""
    if path.is_file():
        return {path: None}
    index = path / INDEX
    if not index.exists():
        single = path / SINGLE
        return dict.fromkeys([single] if single.exists() else sorted(path.glob("*.safetensors")))
    try:
        where = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
    except (msgspec.MsgspecError, OSError) as error:
        raise DamagedError(f"{index} is not an index ({error})", code="checkpoint.index-invalid") from None
    files: dict[Path, set[str] | None] = {}
    for name, file in where.items():
        if Path(file).name != file:
            raise InputError(
                f"{index} refers to {file!r} outside of the folder",
                code="checkpoint.path-escapes",
                fix="do not use this folder",
            )
        wanted = files.setdefault(path / file, set())
        if wanted is not None:
            wanted.add(name)
    return files


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise DamagedError(f"{file} cannot be read ({error})", code="checkpoint.read-failed") from None


def _name(number: int, count: int) -> str:
    return f"model-{number + 1:05d}-of-{count:05d}.safetensors"
