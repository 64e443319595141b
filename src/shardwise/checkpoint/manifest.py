"""The manifest: what a checkpoint holds and where, with a checksum over itself, read without trusting a byte of it."""

from __future__ import annotations

import math
import os
import re
import stat
from pathlib import Path
from typing import Any

import msgspec
import torch

from shardwise.checkpoint.disk import crc32_text
from shardwise.checkpoint.errors import DamagedError, parse_name

# Names of dtypes as the safetensors format writes them.


DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""What a checkpoint can hold."""

CODES = {dtype: code for code, dtype in DTYPES.items()}
"""The same table, read from the other side."""


MANIFEST = "manifest.json"
FORMAT = "shardwise-checkpoint"
VERSION = 1
MAX_BYTES = 1 << 30
"""A manifest larger than this is refused unread: 3,000 tensors on 2,000 ranks take about half of it."""

_SHARD = re.compile(r"rank-\d{5,}\.safetensors")
_CHECKSUM = re.compile(r"[0-9a-f]{8}")


class Piece(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One box of a tensor: the bytes under the tensor's name in one shard file."""

    file: str
    offsets: tuple[int, ...]
    """Where the box begins in the whole tensor."""
    shape: tuple[int, ...]
    checksum: str
    """CRC-32 of its bytes, eight hexadecimal digits."""


class TensorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor: its whole shape, and the pieces that fill it exactly once."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of a checkpoint."""

    step: int
    saved_at: float
    """Seconds since 1970."""
    facts: dict[str, Any]
    """Everything but tensors: plan, cursor, random states, hyper-parameters, metrics, the user's own."""
    files: dict[str, int]
    """Size of each shard file in bytes."""
    tensors: dict[str, TensorEntry]

    @property
    def num_bytes(self) -> int:
        """Bytes of all shard files."""
        return sum(self.files.values())


class _Envelope(msgspec.Struct, forbid_unknown_fields=True):
    format: str
    version: int
    checksum: str
    content: msgspec.Raw


def encode(manifest: Manifest) -> bytes:
    """Return the bytes of the manifest file."""
    content = msgspec.json.encode(manifest)
    return msgspec.json.encode(_Envelope(FORMAT, VERSION, crc32_text(content), msgspec.Raw(content)))


def decode(data: bytes, origin: str) -> Manifest:
    """Read the bytes of a manifest file; whatever is wrong with them is a DamagedError that names `origin`."""
    try:
        envelope = msgspec.json.decode(data, type=_Envelope)
        if envelope.format != FORMAT:
            raise DamagedError(
                f"{origin} has format {envelope.format!r}, not {FORMAT!r}", code="checkpoint.manifest-format"
            )
        if envelope.version != VERSION:
            raise DamagedError(
                f"{origin} has version {envelope.version}, this program reads {VERSION}",
                code="checkpoint.manifest-version",
                fix="use the newer shardwise",
            )
        if crc32_text(envelope.content) != envelope.checksum:
            raise DamagedError(
                f"{origin} does not match its own checksum", code="checkpoint.manifest-checksum-mismatch"
            )
        manifest = msgspec.json.decode(envelope.content, type=Manifest)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise DamagedError(f"{origin} is not a manifest ({error})", code="checkpoint.manifest-invalid") from None
    problem = find_problem(manifest)
    if problem:
        raise DamagedError(f"{origin} contradicts itself: {problem}", code="checkpoint.manifest-inconsistent")
    return manifest


def read_manifest(folder: Path | str) -> Manifest:
    """Read and check the manifest of the checkpoint in `folder`; the shard files are not touched.

    A folder named as a step must be a real folder and hold that step; under any other name it may hold any.
    """
    folder = Path(folder)
    path, named = folder / MANIFEST, parse_name(folder.name)
    if named is not None and folder.is_symlink():
        raise DamagedError(f"{folder} is a link", code="checkpoint.is-link")
    try:
        data = read_regular(path, MAX_BYTES)
    except OSError as error:
        raise DamagedError(f"{path} cannot be read ({error.strerror})", code="checkpoint.read-failed") from None
    manifest = decode(data, str(path))
    if named is not None and named[0] != manifest.step:
        raise DamagedError(f"{path} is of step {manifest.step}", code="checkpoint.step-mismatch")
    return manifest


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Return the bytes of a plain file that is not a link and not larger than `max_bytes`."""
    fd = open_regular(path)
    with os.fdopen(fd, "rb") as file:
        size = os.fstat(fd).st_size
        if size > max_bytes:
            raise DamagedError(
                f"{path} has {size} bytes, more than the {max_bytes} allowed", code="checkpoint.file-too-large"
            )
        return file.read(max_bytes)


def open_regular(path: Path) -> int:
    """Return a descriptor of a plain file; a link, pipe or device is a DamagedError."""
    if not stat.S_ISREG(path.lstat().st_mode):  # before opening: to open a pipe is to wait for its writer
        raise DamagedError(f"{path} is not a plain file", code="checkpoint.not-plain-file")
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)


def find_problem(manifest: Manifest) -> str | None:
    """Return the first thing in a manifest that cannot be true, or None; pure."""
    for file in manifest.files:
        if not _SHARD.fullmatch(file):
            return f"file {file!r} is not a shard of this folder"
    seen: set[tuple[str, str]] = set()
    for name, entry in manifest.tensors.items():
        problem = _tensor_problem(entry) or _files_problem(name, entry, manifest.files, seen)
        if problem:
            return f"tensor {name!r} {problem}"
    unused = manifest.files.keys() - {file for file, _ in seen}
    return f"file {min(unused)!r} holds no tensor" if unused else None


def _files_problem(name: str, entry: TensorEntry, files: dict[str, int], seen: set[tuple[str, str]]) -> str | None:
    for piece in entry.pieces:
        if piece.file not in files:
            return f"lies in {piece.file!r}, which is not listed"
        if (piece.file, name) in seen:
            return f"lies twice in {piece.file!r}"
        if not _CHECKSUM.fullmatch(piece.checksum):
            return f"has a checksum {piece.checksum!r}"
        seen.add((piece.file, name))
    return None


def _tensor_problem(entry: TensorEntry) -> str | None:
    if entry.dtype not in DTYPES:
        return f"has an unknown dtype {entry.dtype!r}"
    if any(length < 0 for length in entry.shape):
        return f"has shape {entry.shape}"
    for piece in entry.pieces:
        if not len(piece.offsets) == len(piece.shape) == len(entry.shape):
            return f"has a piece of {len(piece.shape)} dimensions"
        for offset, length, whole in zip(piece.offsets, piece.shape, entry.shape, strict=True):
            if offset < 0 or length < 1 or offset + length > whole:
                return f"has a piece at {piece.offsets} of {piece.shape} outside its shape {entry.shape}"
    if sum(math.prod(piece.shape) for piece in entry.pieces) != math.prod(entry.shape):
        return "has pieces that do not add up to it"
    return "has pieces that overlap" if _overlap(entry.pieces) else None


def _overlap(pieces: tuple[Piece, ...]) -> bool:
    """Whether any two boxes share an element: a sweep along the dimension in which most of them differ."""
    if len(pieces) < 2:
        return False
    ndim = len(pieces[0].shape)
    if ndim == 0:
        return True
    dim = max(range(ndim), key=lambda d: len({piece.offsets[d] for piece in pieces}))
    open_pieces: list[Piece] = []
    for piece in sorted(pieces, key=lambda piece: piece.offsets[dim]):
        open_pieces = [other for other in open_pieces if other.offsets[dim] + other.shape[dim] > piece.offsets[dim]]
        if any(_intersect(piece, other) for other in open_pieces):
            return True
        open_pieces.append(piece)
    return False


def _intersect(one: Piece, other: Piece) -> bool:
    return all(
        a < b + m and b < a + n for a, n, b, m in zip(one.offsets, one.shape, other.offsets, other.shape, strict=True)
    )
