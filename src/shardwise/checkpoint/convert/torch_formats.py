"""Converts torch.save files and torch.distributed.checkpoint (DCP) directories without unpickling arbitrary objects."""

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
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from shardwise.checkpoint.convert.contents import form_from, form_of
from shardwise.checkpoint.convert.nested import contents_of, dotted, nest, parse_state
from shardwise.checkpoint.disk import CheckpointError, DamagedError, sync_directory
from shardwise.checkpoint.manifest import MAX_BYTES, read_regular
from shardwise.errors import InputError
from shardwise.torch_private.distributed import SHARDED_TENSOR_METADATA

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import IO

    from shardwise.checkpoint.convert.contents import Contents
    from shardwise.checkpoint.convert.nested import Key


_GLOBAL = re.compile(r"(?:GLOBAL|class|function|global)\s+`?([\w.]+\.[\w.]+)")
FAILURES = (RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError, EOFError, pickle.UnpicklingError)
"""Exceptions of torch.load for an invalid file or one that contains disallowed classes."""


def read_file(path: Path) -> Contents:
    """Return the contents of a torch.save file; its tensors are memory-mapped."""
    # Only the zip format of torch 1.6 and later can be memory-mapped.
    state = load_plain(path, str(path), mmap=zipfile.is_zipfile(path))
    if not isinstance(state, Mapping):
        raise InputError(
            f"{path} contains a {type(state).__name__}, expected a dict",
            code="checkpoint.not-state-dict",
            fix="save a state dict, or a dict of state dicts",
        )
    return contents_of_state("torch", state)


def contents_of_state(kind: str, state: Mapping[str, Any]) -> Contents:
    """Return the contents of a nested state dict in memory."""
    tensors: dict[Key, Tensor] = {}
    values: dict[Key, Any] = {}
    for key, value in _walk(state, ()):
        if isinstance(value, Tensor):
            tensors[key] = value
        else:
            values[key] = value
    forms = {key: form_of(dotted(key), tensor) for key, tensor in tensors.items()}
    found = parse_state(forms, values, values.__getitem__, same=_shared(tensors))
    return contents_of(kind, found, forms, lambda key: tensors[key].detach())


def write_file(contents: Contents, path: Path) -> list[str]:
    """Write a new torch.save file and return the contents that it cannot represent.

    If there are only weights, the file is a plain state dict, otherwise a nested one.
    """
    tensors = contents.read(list(contents.forms))
    nested, left_out = nest(contents, tensors, numbered=True)
    with path.open("xb") as file:
        torch.save(nested["model"] if nested.keys() == {"model"} else nested, file)
        file.flush()
        os.fsync(file.fileno())
    return left_out


def load_plain(source: Path | IO[bytes], name: str, *, mmap: bool = False) -> Any:
    """Load a torch.save file of tensors and plain values; raise an InputError that names any other class in it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about pickles that it did not write; they raise below
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
    except FAILURES as error:
        message = " ".join(str(error).split())
        required = _GLOBAL.search(message)
        if required:
            raise InputError(
                f"{name} requires {required[1]}, which is code rather than data; the code was not executed",
                code="checkpoint.contains-code",
                fix="save only tensors and plain values",
            ) from None
        reason = message.partition("WeightsUnpickler error: ")[2].partition(" Check the documentation")[0] or message
        raise InputError(
            f"{name} is not a valid torch.save file ({reason[:200]})", code="checkpoint.read-failed"
        ) from None


def _walk(value: Any, key: Key) -> Iterator[tuple[Key, Any]]:
    """Yield the keys and values of the leaves of nested mappings and lists of mappings."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _walk(inner, (*key, name if isinstance(name, int) else str(name)))
    elif isinstance(value, list | tuple) and value and all(isinstance(each, Mapping) for each in value):
        for index, inner in enumerate(value):
            yield from _walk(inner, (*key, index))
    else:
        yield key, value


def _shared(tensors: Mapping[Key, Tensor]) -> dict[Key, Key]:
    """Map each tensor that shares memory with an earlier tensor to that tensor; torch.save preserves sharing."""
    first: dict[tuple[Any, ...], Key] = {}
    shared = {}
    for key, tensor in tensors.items():
        if not tensor.numel():
            continue
        memory = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        original = first.setdefault(memory, key)
        if original != key:
            shared[key] = original
    return shared


def read_directory(path: Path) -> Contents:
    """Return the contents of a torch.distributed.checkpoint (DCP) directory; tensors are read lazily."""
    listing = read_listing(path)
    forms = {key: form_from(dotted(key), tensor.dtype, tensor.shape) for key, tensor in listing.tensors.items()}
    found = parse_state(forms, listing.values, lambda key: _load(path, listing.values[key]))
    return contents_of("dcp", found, forms, lambda key: _read_tensor(path, listing.tensors[key]))


def write_directory(contents: Contents, path: Path) -> list[str]:
    """Write a new DCP directory with torch's FileSystemWriter and return the contents that it cannot represent."""
    nested, left_out = nest(contents, contents.read(list(contents.forms)), numbered=False)
    writer = FileSystemWriter(path, sync_files=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about saving in a single process
            save(nested, storage_writer=writer, no_dist=True)
    except CheckpointException as error:  # derives from BaseException
        cause = next(iter(error.failures.values()), (error,))[0]
        raise CheckpointError(f"{path} cannot be written ({cause})", code="checkpoint.write-failed") from error
    sync_directory(path)
    return left_out


def _read_tensor(directory: Path, tensor: StoredTensor) -> Tensor:
    result = torch.empty(tensor.shape, dtype=tensor.dtype)
    for offsets, shape, stored in tensor.chunks:
        if not math.prod(shape):
            continue
        chunk = _load(directory, stored)
        if not isinstance(chunk, torch.Tensor) or tuple(chunk.shape) != shape or chunk.dtype != tensor.dtype:
            raise DamagedError(
                f"the chunk at byte {stored.offset} of {directory / stored.file} does not match the metadata",
                code="checkpoint.chunk-mismatch",
            )
        target = result
        for dim, (offset, length) in enumerate(zip(offsets, shape, strict=True)):
            target = target.narrow(dim, offset, length)
        target.copy_(chunk.detach())
    return result


def _load(directory: Path, stored: StoredRange) -> Any:
    path = directory / stored.file
    try:
        with path.open("rb") as file:
            file.seek(stored.offset)
            data = file.read(stored.length)
    except (OSError, ValueError, OverflowError) as error:
        raise DamagedError(f"{path} cannot be read ({error})", code="checkpoint.read-failed") from None
    if len(data) != stored.length:
        raise DamagedError(f"{path} ends before byte {stored.offset + stored.length}", code="checkpoint.file-truncated")
    return load_plain(io.BytesIO(data), str(path))


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
"""The classes that DCP pickles. Each is unpickled as a record without methods, so that no code of torch is called."""
_FUNCTIONS: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): str,
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): int,
    (SHARDED_TENSOR_METADATA, "MEM_FORMAT_ENCODING"): int,
    ("collections", "OrderedDict"): dict,
}
_PATHS = {("pathlib", "PosixPath"), ("pathlib", "Path"), ("pathlib._local", "PosixPath")}


@dataclass(frozen=True)
class StoredRange:
    """The byte range of a value in one file of the directory, in the format of torch.save."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a DCP directory and the chunks that it consists of."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[tuple[tuple[int, ...], tuple[int, ...], StoredRange], ...]
    """Offsets and shape of each chunk in the full tensor, and the byte range of its values."""


@dataclass(frozen=True)
class Listing:
    """The tensors and values of a DCP directory, by their key in the saved state dict."""

    tensors: dict[Key, StoredTensor]
    values: dict[Key, StoredRange]


class _Record:
    """Represents an unpickled object, with its attributes but without methods."""


class _Properties(_Record):
    """The properties of a tensor, which are pickled as a tuple that starts with the dtype."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.dtype = state[0]


class _MetadataUnpickler(pickle.Unpickler):
    def __init__(self, file: Any, origin: Path) -> None:
        super().__init__(file)
        self._origin = origin
        self._made: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        if name in _RECORDS.get(module, ()):
            # A new class per file, so that a pickle that modifies it does not affect other files.
            return self._made.setdefault((module, name), type(name, (_base(name),), {}))
        if (module, name) in _FUNCTIONS:
            return _FUNCTIONS[module, name]
        if (module, name) in _PATHS:
            return self._made.setdefault((module, name), type("Path", (str,), {"__new__": _join}))
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise InputError(
            f"{self._origin} requires {module}.{name}, which is not allowed in a checkpoint; no code was executed",
            code="checkpoint.contains-code",
            fix="do not use this directory",
        )

    def persistent_load(self, pid: Any) -> NoReturn:
        raise InputError(
            f"{self._origin} refers to the external object {pid!r}",
            code="checkpoint.path-escapes",
            fix="do not use this directory",
        )


def _base(name: str) -> type[_Record]:
    return _Properties if name == "TensorProperties" else _Record


def _join(cls: type[str], *parts: object) -> str:
    return str.__new__(cls, PurePosixPath(*map(str, parts)))


def read_listing(directory: Path) -> Listing:
    """Read and validate the pickled `.metadata` of a DCP directory without executing code from it.

    An invalid file raises a DamagedError, a disallowed class or path an InputError.
    """
    path = directory / METADATA
    try:
        data = read_regular(path, MAX_BYTES)
    except OSError as error:
        raise DamagedError(f"{path} cannot be read ({error.strerror})", code="checkpoint.read-failed") from None
    try:
        return _listing(directory, _MetadataUnpickler(io.BytesIO(data), path).load())
    except (pickle.UnpicklingError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise DamagedError(
            f"{path} is not valid DCP metadata ({type(error).__name__}: {error})",
            code="checkpoint.metadata-invalid",
        ) from None
    except (EOFError, RecursionError, MemoryError, ImportError, AssertionError) as error:
        raise DamagedError(
            f"{path} is not valid DCP metadata ({type(error).__name__})", code="checkpoint.metadata-invalid"
        ) from None


def _listing(directory: Path, metadata: Any) -> Listing:
    keys = metadata.planner_data or {}
    stored: dict[tuple[str, tuple[int, ...]], StoredRange] = {}
    for index, info in metadata.storage_data.items():
        offset = tuple(map(int, getattr(index, "offset", None) or ()))  # attributes that are None are not pickled
        stored[str(index.fqn), offset] = _stored(directory, info)
    listing = Listing({}, {})
    for name, entry in metadata.state_dict_metadata.items():
        key = tuple(part if isinstance(part, int) else str(part) for part in keys.get(name, (name,)))
        if hasattr(entry, "chunks"):
            listing.tensors[key] = _tensor(str(name), entry, stored)
        else:
            listing.values[key] = stored[name, ()]
    return listing


def _stored(directory: Path, info: Any) -> StoredRange:
    file = str(info.relative_path)
    if Path(file).name != file or file in {"", ".", ".."}:
        raise InputError(
            f"{directory / METADATA} refers to {file!r} outside the directory",
            code="checkpoint.path-escapes",
            fix="do not use this directory",
        )
    if getattr(info, "transform_descriptors", None):
        raise InputError(
            f"{directory / file} is compressed or encrypted by a DCP extension",
            code="checkpoint.dcp-extension",
            fix="save the checkpoint without DCP extensions",
        )
    return StoredRange(file, int(info.offset), int(info.length))


def _tensor(name: str, entry: Any, stored: dict[tuple[str, tuple[int, ...]], StoredRange]) -> StoredTensor:
    dtype, shape = entry.properties.dtype, tuple(map(int, entry.size))
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"the dtype of {name} must be a torch.dtype, got {dtype!r}")
    chunks = []
    for chunk in entry.chunks:
        offsets, sizes = tuple(map(int, chunk.offsets)), tuple(map(int, chunk.sizes))
        for offset, size, length in zip(offsets, sizes, shape, strict=True):  # raises a ValueError for other dimensions
            if offset < 0 or size < 0 or offset + size > length:
                raise ValueError(f"{name} of shape {shape} has a chunk of {sizes} at {offsets}, outside its shape")
        data = stored[name, offsets]
        if data.length < math.prod(sizes) * dtype.itemsize:
            raise ValueError(f"{name} has a chunk of {data.length} bytes, too few for its shape {sizes}")
        chunks.append((offsets, sizes, data))
    if sum(math.prod(sizes) for _, sizes, _ in chunks) != math.prod(shape):
        raise ValueError(f"{name} has chunks that do not cover its shape {shape}")
    return StoredTensor(dtype, shape, tuple(chunks))
