"""Atomic checkpoint saving: every rank writes its shards to a temporary directory, then rank 0 publishes it.

Invariant: a directory named step-NNNNNNNN is always a complete checkpoint. Rank 0 renames the temporary directory only
after all ranks have flushed their shards and the manifest is consistent with them.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from shardwise.checkpoint.disk import (
    CheckpointError,
    lock,
    rank_in,
    remove_atomically,
    remove_temporary_files,
    replace_synced,
    run_collectively,
    sync_directory,
    temporary_name,
    unlock,
    wait_until_visible,
    write_synced,
)
from shardwise.checkpoint.manifest import (
    CODES,
    Manifest,
    Piece,
    TensorEntry,
    assign,
    box_of,
    encode,
    find_problem,
    local_data,
    propose,
)
from shardwise.checkpoint.names import LATEST, MANIFEST, name_of, parse_name, shard_name
from shardwise.checkpoint.shard import ShardLayout, write_shard

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch.distributed as dist
    from torch import Tensor

    from shardwise.checkpoint.manifest import Form, WriteProposal


@dataclass(frozen=True)
class SaveReport:
    """The result of saving a checkpoint."""

    path: Path
    step: int
    num_bytes: int
    """Total size over all ranks in bytes."""
    bytes_here: int
    """Number of bytes that this rank wrote."""
    seconds: float
    """Time from the call until the checkpoint was published."""


def save(
    directory: Path | str,
    step: int,
    tensors: Mapping[str, Tensor],
    facts: Mapping[str, Any],
    *,
    group: dist.ProcessGroup | None,
) -> SaveReport:
    """Save `tensors` and `facts` to `directory`/step-NNNNNNNN. Communicates over `group`; call on every rank.

    A tensor replicated on several ranks is written once. `facts` must be JSON values; the facts of rank 0 are saved.
    Either every rank returns and `latest` names the checkpoint, or every rank raises the same CheckpointError and
    existing checkpoints are unchanged. `group` is None in a world of one rank.
    """
    planned = PlannedSave(Path(directory), step, tensors, facts, group)
    return planned.write(lambda: planned.pieces)


class PlannedSave:
    """A save that all ranks have planned but not yet written."""

    def __init__(
        self,
        directory: Path,
        step: int,
        tensors: Mapping[str, Tensor],
        facts: Mapping[str, Any],
        group: dist.ProcessGroup | None,
    ) -> None:
        """Plan the save and create its temporary directory. Communicates over `group`; call on every rank."""
        self._start = time.perf_counter()
        self._step = step
        self._group = group
        self._operation = f"saving {directory / name_of(step)}"
        self._facts: dict[str, Any] = {}
        self._publication = Publication(directory, step)
        try:
            self._assignment = run_collectively(
                group, self._operation, lambda: self._propose(tensors, facts), self._publication.open
            )
        except BaseException:
            self._publication.close()
            raise
        self._offsets = {name: tuple(box_of(name, tensors[name]).offsets) for name in self._assignment.names}
        self.pieces = {name: local_data(tensors[name]) for name in self._assignment.names}
        """The local shards that this rank writes, by tensor name. They share memory with the tensors."""
        self.bytes_here = sum(piece.nbytes for piece in self.pieces.values())

    def write(self, get_pieces: Callable[[], Mapping[str, Tensor]]) -> SaveReport:
        """Write and publish the checkpoint. Communicates over the group; call once on every rank.

        `get_pieces` returns the values of `pieces`: the shards, copies of them, or a mapping that reads them lazily.
        """
        try:
            published = run_collectively(
                self._group,
                self._operation,
                lambda: self._write(get_pieces()),
                lambda results: self._publication.publish(self._assignment.temporary, results, self._facts),
            )
        finally:
            self._publication.close()
        seconds = time.perf_counter() - self._start
        return SaveReport(published.path, self._step, published.num_bytes, self.bytes_here, seconds)

    def _propose(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> WriteProposal:
        if rank_in(self._group) == 0:
            # A round trip through JSON copies the values and raises here if a value is not serializable.
            self._facts = msgspec.json.decode(msgspec.json.encode(dict(facts)))
        return propose(tensors)

    def _write(self, pieces: Mapping[str, Tensor]) -> WrittenShard:
        assignment = self._assignment
        if not wait_until_visible(assignment.temporary):
            raise CheckpointError(
                f"{assignment.temporary}, created by rank 0 on {assignment.host}, is not visible to this rank",
                code="checkpoint.storage-not-shared",
                fix="save to a file system shared by all nodes",
            )
        file = shard_name(rank_in(self._group))
        if not assignment.names:
            return WrittenShard(file, 0, {})
        layout = ShardLayout.of({name: (CODES[piece.dtype], tuple(piece.shape)) for name, piece in self.pieces.items()})
        written = {}
        for name, checksum in write_shard(assignment.temporary / file, layout, pieces).items():
            written[name] = Piece(file, self._offsets[name], layout.ranges[name].shape, checksum)
        return WrittenShard(file, layout.size, written)


@dataclass(frozen=True)
class WriteAssignment:
    """The tensors that one rank writes, and the temporary directory to write them to."""

    temporary: Path
    host: str
    """Host on which rank 0 created the directory."""
    names: list[str]


@dataclass(frozen=True)
class WrittenShard:
    """The shard file that one rank wrote; the file does not exist if the rank had no tensor to write."""

    file: str
    size: int
    pieces: dict[str, Piece]


@dataclass(frozen=True)
class Published:
    """The published checkpoint, sent to all ranks."""

    path: Path
    num_bytes: int


class Publication:
    """The part of a save that only rank 0 executes: locking, the manifest and publication."""

    def __init__(self, directory: Path, step: int) -> None:
        self._directory = directory
        self._step = step
        self._temporary: Path | None = None
        self._lock: int | None = None
        self._forms: dict[str, Form] = {}

    def open(self, proposals: list[WriteProposal]) -> list[WriteAssignment]:
        """Lock the directory, remove the temporary files of failed saves and assign tensors to the ranks that write."""
        names_by_rank, self._forms = assign(proposals)
        self._directory.mkdir(exist_ok=True)  # without parents: a missing parent directory is an error
        self._lock = lock(self._directory)
        remove_temporary_files(self._directory)
        self._temporary = self._directory / temporary_name(name_of(self._step))
        self._temporary.mkdir()
        return [WriteAssignment(self._temporary, socket.gethostname(), names) for names in names_by_rank]

    def publish(self, temporary: Path, results: list[WrittenShard], facts: dict[str, Any]) -> list[Published]:
        """Check the shards of all ranks, write the manifest, rename the directory and update `latest`."""
        manifest = self._manifest(results, facts)
        for file, size in manifest.files.items():
            found = (temporary / file).stat().st_size
            if found != size:
                raise CheckpointError(
                    f"{temporary / file} has {found} bytes, expected {size}",
                    code="checkpoint.write-incomplete",
                )
        write_synced(temporary / MANIFEST, encode(manifest))
        sync_directory(temporary)
        path = publish_directory(temporary, self._directory, self._step)
        self._temporary = None
        return [Published(path, manifest.num_bytes)] * len(results)

    def close(self) -> None:
        """Remove an unpublished temporary directory and release the lock; a second call does nothing."""
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = None
        if self._lock is not None:
            unlock(self._lock)
            self._lock = None

    def _manifest(self, results: Sequence[WrittenShard], facts: dict[str, Any]) -> Manifest:
        pieces: dict[str, list[Piece]] = {name: [] for name in self._forms}
        files = {}
        for result in results:
            if result.pieces:
                files[result.file] = result.size
            for name, piece in result.pieces.items():
                pieces[name].append(piece)
        tensors = {}
        for name, (dtype, shape) in self._forms.items():
            tensors[name] = TensorEntry(shape, dtype, tuple(pieces[name]))
        manifest = Manifest(step=self._step, saved_at=time.time(), facts=facts, files=files, tensors=tensors)
        problem = find_problem(manifest)
        if problem:
            raise CheckpointError(
                f"the shards of all ranks do not form complete tensors: {problem}",
                code="checkpoint.tensors-incomplete",
            )
        return manifest


def publish_directory(temporary: Path, directory: Path, step: int) -> Path:
    """Rename a complete and flushed checkpoint to the name of its step, update `latest` and return its path.

    Previous saves of the step are removed afterwards. The caller must own the lock of the directory.
    """
    older = _attempts(step, directory)
    path = directory / name_of(step, max(older.values(), default=0) + 1)
    temporary.rename(path)
    sync_directory(directory)
    replace_synced(directory / LATEST, path.name.encode())
    for replaced in older:
        with contextlib.suppress(OSError):  # a previous save of the step that cannot be removed is harmless
            remove_atomically(replaced)
    return path


def _attempts(step: int, directory: Path) -> dict[Path, int]:
    """Return the existing checkpoints of a step and the attempt number of each."""
    found = {}
    for path in directory.glob(f"{name_of(step)}*"):
        named = parse_name(path.name)
        if named is not None and named[0] == step:
            found[path] = named[1]
    return found
