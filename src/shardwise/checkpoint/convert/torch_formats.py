"""Formats of torch: a file of torch.save and a torch.distributed.checkpoint folder, read with restricted unpicklers."""

from __future__ import annotations

import io
import math
import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from shardwise.checkpoint.convert.contents import form_from, form_of
from shardwise.checkpoint.convert.nested import gather, nest, sort_out
from shardwise.checkpoint.disk import sync_folder
from shardwise.checkpoint.errors import CheckpointError, DamagedError
from shardwise.checkpoint.manifest import MAX_BYTES, read_regular
from shardwise.errors import InputError
from shardwise.torch_private.runtime import SHARDED_TENSOR_METADATA

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import IO

    from shardwise.checkpoint.convert.contents import Contents
    from shardwise.checkpoint.convert.nested import Key


_GLOBAL = re.compile(r"(?:GLOBAL|class|function|global)\s+`?([\w.]+\.[\w.]+)")
FAILURES = (RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError, EOFError, pickle.UnpicklingError)
"""What torch.load raises at a file that is none, or holds what is not allowed."""


def read_file(path: Path) -> Contents:
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


def write_file(contents: Contents, path: Path) -> list[str]:
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


# A torch.distributed.checkpoint folder, as plain FSDP2 code writes it, and its pickled metadata read safely.


def read_folder(path: Path) -> Contents:
    """Return what a folder holds; tensors are put together from their pieces when they are asked for."""
    listing = read_listing(path)
    forms = {
        key: form_from(".".join(map(str, key)), tensor.dtype, tensor.shape) for key, tensor in listing.tensors.items()
    }
    found = sort_out(forms, listing.values, lambda key: _load(path, listing.values[key]))
    return gather("dcp", found, forms, lambda key: _whole(path, listing.tensors[key]))


def write_folder(contents: Contents, path: Path) -> list[str]:
    """Write a new folder with torch's own writer and return what it does not hold."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    nested, left_out = nest(contents, contents.read(list(contents.forms)), numbered=False)
    writer = FileSystemWriter(path, sync_files=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a single process is intended here
            save(nested, storage_writer=writer, no_dist=True)
    except CheckpointException as error:  # derives from BaseException
        cause = next(iter(error.failures.values()), (error,))[0]
        raise CheckpointError(f"{path} cannot be written ({cause})", code="checkpoint.write-failed") from error
    sync_folder(path)
    return left_out


def _whole(folder: Path, tensor: StoredTensor) -> Tensor:
    result = torch.empty(tensor.shape, dtype=tensor.dtype)
    for offsets, shape, where in tensor.chunks:
        if not math.prod(shape):
            continue
        chunk = _load(folder, where)
        if not isinstance(chunk, torch.Tensor) or tuple(chunk.shape) != shape or chunk.dtype != tensor.dtype:
            raise DamagedError(
                f"{folder / where.file} holds something else at byte {where.offset}", code="checkpoint.chunk-mismatch"
            )
        target = result
        for dim, (offset, length) in enumerate(zip(offsets, shape, strict=True)):
            target = target.narrow(dim, offset, length)
        target.copy_(chunk.detach())
    return result


def _load(folder: Path, where: Stored) -> Any:
    path = folder / where.file
    try:
        with path.open("rb") as file:
            file.seek(where.offset)
            data = file.read(where.length)
    except (OSError, ValueError, OverflowError) as error:
        raise DamagedError(f"{path} cannot be read ({error})", code="checkpoint.read-failed") from None
    if len(data) != where.length:
        raise DamagedError(f"{path} ends before byte {where.offset + where.length}", code="checkpoint.file-truncated")
    return load_plain(io.BytesIO(data), str(path))


# The `.metadata` of a torch.distributed.checkpoint folder, a pickle, read so that it can do nothing but be data.


METADATA = ".metadata"
_RECORDS = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "MetadataIndex",
        "StorageMeta",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    SHARDED_TENSOR_METADATA: {"TensorProperties"},  # up to torch 2.3
}
"""The classes that DCP writes. Each is read as a bare record: nothing of torch's is made or called."""
_FUNCTIONS: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): str,
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): int,
    (SHARDED_TENSOR_METADATA, "MEM_FORMAT_ENCODING"): int,
    ("collections", "OrderedDict"): dict,
}
_PATHS = {("pathlib", "PosixPath"), ("pathlib", "Path"), ("pathlib._local", "PosixPath")}


@dataclass(frozen=True)
class Stored:
    """Where a piece lies: `length` bytes from `offset` on in one file of the folder, as torch.save wrote them."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """One tensor, and the boxes that fill it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[tuple[tuple[int, ...], tuple[int, ...], Stored], ...]
    """Offsets and shape in the whole tensor, and where the values are."""


@dataclass(frozen=True)
class Listing:
    """What a folder holds, by its place in the nested state that was saved."""

    tensors: dict[Key, StoredTensor]
    values: dict[Key, Stored]


class _Record:
    """Replaces an object of the pickle: its fields, and nothing that could be called."""


class _Properties(_Record):
    """The properties of a tensor, which pickle as a tuple that begins with the dtype."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.dtype = state[0]


class _MetadataUnpickler(pickle.Unpickler):
    def __init__(self, file: Any, origin: Path) -> None:
        super().__init__(file)
        self._origin = origin
        self._made: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        if name in _RECORDS.get(module, ()):
            # A class of its own for every reading: whatever the pickle does to it ends with it.
            return self._made.setdefault((module, name), type(name, (_base(name),), {}))
        if (module, name) in _FUNCTIONS:
            return _FUNCTIONS[module, name]
        if (module, name) in _PATHS:
            return self._made.setdefault((module, name), type("Path", (str,), {"__new__": _join}))
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise InputError(
            f"{self._origin} has a pickle of {module}.{name}, which a checkpoint may not have; no code was run",
            code="checkpoint.contains-code",
            fix="do not use this folder",
        )

    def persistent_load(self, pid: Any) -> NoReturn:
        raise InputError(
            f"{self._origin} refers to {pid!r} outside of it",
            code="checkpoint.path-escapes",
            fix="do not use this folder",
        )


def _base(name: str) -> type[_Record]:
    return _Properties if name == "TensorProperties" else _Record


def _join(cls: type[str], *parts: object) -> str:
    return str.__new__(cls, PurePosixPath(*map(str, parts)))


def read_listing(folder: Path) -> Listing:
    """Read and check the `.metadata` of a folder; whatever is wrong with it is a DamagedError or an InputError."""
    path = folder / METADATA
    try:
        data = read_regular(path, MAX_BYTES)
    except OSError as error:
        raise DamagedError(f"{path} cannot be read ({error.strerror})", code="checkpoint.read-failed") from None
    try:
        return _listing(folder, _MetadataUnpickler(io.BytesIO(data), path).load())
    except (pickle.UnpicklingError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise DamagedError(
            f"{path} is not the metadata of a checkpoint ({type(error).__name__}: {error})",
            code="checkpoint.metadata-invalid",
        ) from None
    except (EOFError, RecursionError, MemoryError, ImportError, AssertionError) as error:
        raise DamagedError(
            f"{path} is not the metadata of a checkpoint ({type(error).__name__})", code="checkpoint.metadata-invalid"
        ) from None


def _listing(folder: Path, metadata: Any) -> Listing:
    places = metadata.planner_data or {}
    stored: dict[tuple[str, tuple[int, ...]], Stored] = {}
    for index, info in metadata.storage_data.items():
        offset = tuple(map(int, getattr(index, "offset", None) or ()))  # fields that are None are not written
        stored[str(index.fqn), offset] = _stored(folder, info)
    listing = Listing({}, {})
    for name, entry in metadata.state_dict_metadata.items():
        key = tuple(each if isinstance(each, int) else str(each) for each in places.get(name, (name,)))
        if hasattr(entry, "chunks"):
            listing.tensors[key] = _tensor(str(name), entry, stored)
        else:
            listing.values[key] = stored[name, ()]
    return listing


def _stored(folder: Path, info: Any) -> Stored:
    file = str(info.relative_path)
    if Path(file).name != file or file in {"", ".", ".."}:
        raise InputError(
            f"{folder / METADATA} refers to {file!r} outside of it",
            code="checkpoint.path-escapes",
            fix="do not use this folder",
        )
    if getattr(info, "transform_descriptors", None):
        raise InputError(
            f"{folder / file} is compressed or encrypted by an extension",
            code="checkpoint.dcp-extension",
            fix="save it without",
        )
    return Stored(file, int(info.offset), int(info.length))


def _tensor(name: str, entry: Any, stored: dict[tuple[str, tuple[int, ...]], Stored]) -> StoredTensor:
    dtype, shape = entry.properties.dtype, tuple(map(int, entry.size))
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} has dtype {dtype!r}")
    chunks = []
    for chunk in entry.chunks:
        offsets, sizes = tuple(map(int, chunk.offsets)), tuple(map(int, chunk.sizes))
        if not len(offsets) == len(sizes) == len(shape) or any(
            offset < 0 or size < 0 or offset + size > whole
            for offset, size, whole in zip(offsets, sizes, shape, strict=True)
        ):
            raise ValueError(f"{name} has a chunk outside of it")
        where = stored[name, offsets]
        if where.length < math.prod(sizes) * dtype.itemsize:
            raise ValueError(f"{name} has a chunk of {where.length} bytes, too few")
        chunks.append((offsets, sizes, where))
    if sum(math.prod(sizes) for _, sizes, _ in chunks) != math.prod(shape):
        raise ValueError(f"{name} has chunks that do not add up to it")
    return StoredTensor(dtype, shape, tuple(chunks))
