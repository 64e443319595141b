"""The manifest of a checkpoint (tensors, shard files, checksums) and the assignment of shards to ranks.

Deduplication and resharding use the planners of torch.distributed.checkpoint. The offsets of a shard are computed here:
torch applies the placements from left to right, which is wrong if a dimension is sharded unevenly, first by axis tp and
then by axis shard, such as the 50,257 rows of the GPT-2 embedding on shard4 x tp2.
"""

from __future__ import annotations

import math
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from shardwise.checkpoint.disk import CheckpointError, DamagedError, crc32_text
from shardwise.checkpoint.names import MANIFEST, parse_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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
"""Supported dtypes by their name in the safetensors format."""
CODES = dict(zip(DTYPES.values(), DTYPES, strict=True))
"""The safetensors name of each dtype."""
FORMAT = "shardwise-checkpoint"
VERSION = 1
MAX_BYTES = 1 << 30
"""Maximum size of a manifest in bytes; 3,000 tensors on 2,000 ranks need about half of it."""

_SHARD = re.compile(r"rank-\d{5,}\.safetensors")
_CHECKSUM = re.compile(r"[0-9a-f]{8}")


class Piece(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rectangular piece of a tensor, stored under the name of the tensor in one shard file."""

    file: str
    offsets: tuple[int, ...]
    """Index of the first element of the piece in the full tensor."""
    shape: tuple[int, ...]
    checksum: str
    """CRC-32 of the bytes of the piece, as eight hexadecimal digits."""


class TensorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor of a checkpoint: its global shape, dtype and pieces, which cover every element exactly once."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of a checkpoint."""

    step: int
    saved_at: float
    """Seconds since 1970."""
    facts: dict[str, Any]
    """State other than tensors: plan, cursor, random states, hyper-parameters, metrics and user values."""
    files: dict[str, int]
    """Size of each shard file in bytes."""
    tensors: dict[str, TensorEntry]

    @property
    def num_bytes(self) -> int:
        """Total size of the shard files in bytes."""
        return sum(self.files.values())


class _Envelope(msgspec.Struct, forbid_unknown_fields=True):
    format: str
    version: int
    checksum: str
    content: msgspec.Raw


def encode(manifest: Manifest) -> bytes:
    """Serialize the manifest to JSON with a checksum."""
    content = msgspec.json.encode(manifest)
    return msgspec.json.encode(_Envelope(FORMAT, VERSION, crc32_text(content), msgspec.Raw(content)))


def decode(data: bytes, origin: str) -> Manifest:
    """Parse and validate a serialized manifest; raise a DamagedError that names `origin` if it is invalid."""
    try:
        envelope = msgspec.json.decode(data, type=_Envelope)
        if envelope.format != FORMAT:
            raise DamagedError(
                f"{origin} has format {envelope.format!r}, expected {FORMAT!r}", code="checkpoint.manifest-format"
            )
        if envelope.version != VERSION:
            raise DamagedError(
                f"{origin} has format version {envelope.version}, expected {VERSION}",
                code="checkpoint.manifest-version",
                fix="upgrade shardwise",
            )
        if crc32_text(envelope.content) != envelope.checksum:
            raise DamagedError(f"{origin} does not match its checksum", code="checkpoint.manifest-checksum-mismatch")
        manifest = msgspec.json.decode(envelope.content, type=Manifest)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise DamagedError(f"{origin} is not a valid manifest ({error})", code="checkpoint.manifest-invalid") from None
    problem = find_problem(manifest)
    if problem:
        raise DamagedError(f"{origin} is inconsistent: {problem}", code="checkpoint.manifest-inconsistent")
    return manifest


def read_manifest(directory: Path | str) -> Manifest:
    """Read and validate the manifest of the checkpoint in `directory`, without reading the shard files.

    A directory named step-NNNNNNNN must not be a symbolic link and must contain the checkpoint of that step.
    """
    directory = Path(directory)
    path, named = directory / MANIFEST, parse_name(directory.name)
    if named is not None and directory.is_symlink():
        raise DamagedError(f"{directory} is a symbolic link", code="checkpoint.is-link")
    try:
        data = read_regular(path, MAX_BYTES)
    except OSError as error:
        raise DamagedError(f"{path} cannot be read ({error.strerror})", code="checkpoint.read-failed") from None
    manifest = decode(data, str(path))
    if named is not None and named[0] != manifest.step:
        raise DamagedError(
            f"{path} contains step {manifest.step}, expected step {named[0]}", code="checkpoint.step-mismatch"
        )
    return manifest


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Read a regular file of at most `max_bytes`; raise a DamagedError for a larger file or a symbolic link."""
    fd = open_regular(path)
    with os.fdopen(fd, "rb") as file:
        size = os.fstat(fd).st_size
        if size > max_bytes:
            raise DamagedError(
                f"{path} has {size} bytes, but the maximum is {max_bytes}", code="checkpoint.file-too-large"
            )
        return file.read(max_bytes)


def open_regular(path: Path) -> int:
    """Open a regular file for reading and return its descriptor; raise a DamagedError for a link, pipe or device."""
    if not stat.S_ISREG(path.lstat().st_mode):  # checked before opening, because opening a pipe would block
        raise DamagedError(f"{path} is not a regular file", code="checkpoint.not-plain-file")
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)


def find_problem(manifest: Manifest) -> str | None:
    """Return a description of the first inconsistency of a manifest, or None if it is consistent."""
    for file in manifest.files:
        if not _SHARD.fullmatch(file):
            return f"file {file!r} is not a valid shard name"
    seen: set[tuple[str, str]] = set()
    for name, entry in manifest.tensors.items():
        problem = _tensor_problem(entry) or _files_problem(name, entry, manifest.files, seen)
        if problem:
            return f"tensor {name!r} {problem}"
    unused = manifest.files.keys() - {file for file, _ in seen}
    return f"file {min(unused)!r} contains no tensor" if unused else None


def _files_problem(name: str, entry: TensorEntry, files: dict[str, int], seen: set[tuple[str, str]]) -> str | None:
    for piece in entry.pieces:
        if piece.file not in files:
            return f"is stored in {piece.file!r}, which the manifest does not list"
        if (piece.file, name) in seen:
            return f"has two pieces in {piece.file!r}"
        if not _CHECKSUM.fullmatch(piece.checksum):
            return f"has the invalid checksum {piece.checksum!r}"
        seen.add((piece.file, name))
    return None


def _tensor_problem(entry: TensorEntry) -> str | None:
    if entry.dtype not in DTYPES:
        return f"has the unknown dtype {entry.dtype!r}"
    if min(entry.shape, default=0) < 0:
        return f"has the invalid shape {entry.shape}"
    for piece in entry.pieces:
        if not len(piece.offsets) == len(piece.shape) == len(entry.shape):
            return f"has a piece of {len(piece.shape)} dimensions, expected {len(entry.shape)}"
        for offset, length, whole in zip(piece.offsets, piece.shape, entry.shape, strict=True):
            if offset < 0 or length < 1 or offset + length > whole:
                return f"has a piece of shape {piece.shape} at {piece.offsets}, outside its shape {entry.shape}"
    if sum(math.prod(piece.shape) for piece in entry.pieces) != math.prod(entry.shape):
        return "has pieces that do not cover it"
    return "has pieces that overlap" if _overlap(entry.pieces) else None


def _overlap(pieces: tuple[Piece, ...]) -> bool:
    """Return whether any two pieces share an element.

    This is a sweep-line search along the dimension that has the most distinct offsets.
    """
    if len(pieces) < 2:
        return False
    ndim = len(pieces[0].shape)
    if ndim == 0:
        return True
    dim = max(range(ndim), key=lambda d: len({piece.offsets[d] for piece in pieces}))
    active: list[Piece] = []
    for piece in sorted(pieces, key=lambda piece: piece.offsets[dim]):
        active = [other for other in active if other.offsets[dim] + other.shape[dim] > piece.offsets[dim]]
        for other in active:
            if _intersect(piece, other):
                return True
        active.append(piece)
    return False


def _intersect(one: Piece, other: Piece) -> bool:
    for a, n, b, m in zip(one.offsets, one.shape, other.offsets, other.shape, strict=True):
        if a >= b + m or b >= a + n:
            return False
    return True


Form = tuple[str, tuple[int, ...]]
"""Safetensors dtype name and global shape of a tensor."""


def local_data(tensor: Tensor) -> Tensor:
    """Return the local shard of a DTensor, detached, or the tensor itself if it is not distributed."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    return tensor.detach()


def box_of(name: str, tensor: Tensor) -> ChunkStorageMetadata:
    """Return the offsets and sizes of the local shard in the global tensor `name`."""
    offsets, lengths = [0] * tensor.ndim, list(tensor.shape)
    if isinstance(tensor, DTensor):
        _narrow(name, tensor, offsets, lengths)
    local_shape = tuple(local_data(tensor).shape)
    if local_shape != tuple(lengths):
        raise CheckpointError(
            f"the local shard of tensor {name!r} has shape {local_shape}, but its placements imply {tuple(lengths)}",
            code="checkpoint.placement-mismatch",
        )
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(lengths))


def _narrow(name: str, tensor: DTensor, offsets: list[int], lengths: list[int]) -> None:
    """Narrow offsets and lengths in place to the local shard, one mesh axis at a time in the order of sharding."""
    # Looked up by rank, because DeviceMesh.get_coordinate may be wrong: DTensor may return an equal mesh from its
    # cache that was created in the parent process before a fork.
    rank = dist.get_rank() if dist.is_initialized() else 0
    coordinates = (tensor.device_mesh.mesh == rank).nonzero().tolist()
    if not coordinates:
        raise CheckpointError(
            f"the device mesh of tensor {name!r} does not contain rank {rank}", code="checkpoint.foreign-mesh"
        )
    num_shards = [1] * tensor.ndim
    # The split factor of _StridedShard is the number of shards before its axis; Shard applies in mesh order.
    for axis, placement in sorted(enumerate(tensor.placements), key=lambda each: getattr(each[1], "split_factor", 1)):
        if placement.is_replicate():
            continue
        dim = getattr(placement, "dim", None)
        if dim is None or getattr(placement, "split_factor", num_shards[dim]) != num_shards[dim]:
            raise CheckpointError(
                f"tensor {name!r} has placements {tensor.placements}, which are not a rectangular shard",
                code="checkpoint.placement-unsupported",
            )
        axis_size = tensor.device_mesh.size(axis)
        step = -(-lengths[dim] // axis_size)
        first = min(lengths[dim], coordinates[0][axis] * step)
        lengths[dim] = min(lengths[dim], first + step) - first
        offsets[dim] += first
        num_shards[dim] *= axis_size


@dataclass(frozen=True)
class WriteProposal:
    """The tensors of one rank and the shards that it can write."""

    forms: dict[str, Form]
    """Dtype and shape of every tensor, including tensors with an empty local shard."""
    plan: SavePlan


def propose(tensors: Mapping[str, Tensor]) -> WriteProposal:
    """Return the shards that this rank can write, without communication."""
    forms, items = {}, []
    for name, tensor in tensors.items():
        if tensor.dtype not in CODES:
            raise CheckpointError(
                f"tensor {name!r} has the unsupported dtype {tensor.dtype}",
                code="checkpoint.dtype-unsupported",
                fix=f"use one of {', '.join(DTYPES)}",
            )
        if name == "__metadata__":
            raise CheckpointError(
                f"the tensor name {name!r} is reserved by safetensors",
                code="checkpoint.tensor-name-reserved",
                fix="rename the tensor",
            )
        forms[name] = (CODES[tensor.dtype], tuple(tensor.shape))
        box = box_of(name, tensor)
        if 0 not in box.sizes:
            data = TensorWriteData(chunk=box, properties=TensorProperties(dtype=tensor.dtype), size=tensor.shape)
            items.append(WriteItem(index=MetadataIndex(name, box.offsets), type=WriteItemType.SHARD, tensor_data=data))
    return WriteProposal(forms, SavePlan(items))


def assign(proposals: Sequence[WriteProposal]) -> tuple[list[list[str]], dict[str, Form]]:
    """Return the tensor names that each rank writes (each shard is written once), and each tensor's dtype and shape."""
    forms: dict[str, Form] = {}
    for proposal in proposals:
        for name, form in proposal.forms.items():
            if forms.setdefault(name, form) != form:
                raise CheckpointError(
                    f"tensor {name!r} has dtype and shape {forms[name]} on one rank and {form} on another",
                    code="checkpoint.ranks-disagree",
                )
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    plans, _ = planner.create_global_plan([proposal.plan for proposal in proposals])
    return [[item.index.fqn for item in plan.items] for plan in plans], forms


@dataclass(frozen=True)
class PieceOverlap:
    """The overlap of a saved piece with the local shard of the same tensor."""

    piece: Piece
    piece_offsets: tuple[int, ...]
    box_offsets: tuple[int, ...]
    shape: tuple[int, ...]


def overlaps(name: str, tensor: Tensor, entry: TensorEntry) -> list[PieceOverlap]:
    """Return the overlap of each saved piece with the local shard of `tensor`."""
    box = box_of(name, tensor)
    if 0 in box.sizes:
        return []
    chunks = [ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.shape)) for p in entry.pieces]
    saved = TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), torch.Size(entry.shape), chunks)
    found = []
    for item in create_read_items_for_chunk_list(name, saved, [box]):
        piece = entry.pieces[cast("int", item.storage_index.index)]
        offsets, box_offsets = tuple(item.storage_offsets), tuple(item.dest_offsets)
        found.append(PieceOverlap(piece, offsets, box_offsets, tuple(item.lengths)))
    return found
