"""One torch file: a plain state dict, or model, optimizer and step together, read with torch's restricted unpickler."""

from __future__ import annotations

import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardwise.checkpoint.convert.contents import form_of
from shardwise.checkpoint.convert.nested import gather, nest, sort_out
from shardwise.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import IO

    from shardwise.checkpoint.convert.contents import Contents
    from shardwise.checkpoint.convert.nested import Key

_GLOBAL = re.compile(r"(?:GLOBAL|class|function|global)\s+`?([\w.]+\.[\w.]+)")
FAILURES = (RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError, EOFError, pickle.UnpicklingError)
"""What torch.load raises at a file that is none, or holds what is not allowed."""


def read(path: Path) -> Contents:
    """Return what a torch file holds; its tensors stay in the file until they are used."""
    # Only files of today's form can be mapped into memory; older ones are read whole.
    state = load_plain(path, str(path), mmap=zipfile.is_zipfile(path))
    if not isinstance(state, Mapping):
        raise InputError(
            f"{path} holds a {type(state).__name__}",
            code="checkpoint.not-state-dict",
            fix="save a state dict, or a dict of them",
        )
    return sort_state("torch", state)


def sort_state(kind: str, state: Mapping[str, Any]) -> Contents:
    """Return the contents of a nested state whose tensors are at hand."""
    tensors: dict[Key, Tensor] = {}
    values: dict[Key, Any] = {}
    for key, value in _walk(state, ()):
        (tensors if isinstance(value, Tensor) else values)[key] = value
    forms = {key: form_of(".".join(map(str, key)), tensor) for key, tensor in tensors.items()}
    found = sort_out(forms, values, values.__getitem__, same=_shared(tensors))
    return gather(kind, found, forms, lambda key: tensors[key].detach())


def write(contents: Contents, path: Path) -> list[str]:
    """Write a new torch file and return what it does not hold: weights alone as a plain state dict, else nested."""
    tensors = contents.read(list(contents.forms))
    nested, left_out = nest(contents, tensors, numbered=True)
    with path.open("xb") as file:
        torch.save(nested["model"] if nested.keys() == {"model"} else nested, file)
        file.flush()
        os.fsync(file.fileno())
    return left_out


def load_plain(source: Path | IO[bytes], name: str, *, mmap: bool = False) -> Any:
    """Return what torch.load gives for tensors and plain values only; anything else in it is refused by name."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickles that torch did not write: they are refused below
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
    except FAILURES as error:
        message = " ".join(str(error).split())
        asked = _GLOBAL.search(message)
        if asked:
            raise InputError(
                f"{name} asks for {asked[1]}, which is code and not data; nothing of it was run",
                code="checkpoint.contains-code",
                fix="save tensors and plain values only",
            ) from None
        reason = message.partition("WeightsUnpickler error: ")[2].partition(" Check the documentation")[0] or message
        raise InputError(
            f"{name} cannot be read as a torch file ({reason[:200]})", code="checkpoint.read-failed"
        ) from None


def _walk(value: Any, key: Key) -> Iterator[tuple[Key, Any]]:
    """Yield what lies at the ends of nested mappings, and of lists of mappings."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _walk(inner, (*key, name if isinstance(name, int) else str(name)))
    elif isinstance(value, list | tuple) and value and all(isinstance(each, Mapping) for each in value):
        for index, inner in enumerate(value):
            yield from _walk(inner, (*key, index))
    else:
        yield key, value


def _shared(tensors: Mapping[Key, Tensor]) -> dict[Key, Key]:
    """Return the tensors that are the same memory as an earlier one: torch's files keep what is shared together."""
    first: dict[tuple[Any, ...], Key] = {}
    shared = {}
    for key, tensor in tensors.items():
        where = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        original = first.setdefault(where, key) if tensor.numel() else key
        if original != key:
            shared[key] = original
    return shared
