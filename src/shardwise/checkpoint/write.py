"""Saving: every rank writes its own pieces, all agree, then the checkpoint becomes visible, whole."""

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
    is_seen,
    lock,
    remove_whole,
    replace_synced,
    sweep,
    sync_folder,
    temporary_name,
    unlock,
    write_synced,
)
from shardwise.checkpoint.errors import LATEST, CheckpointError, name_of, parse_name, rank_in, shard_name, together
from shardwise.checkpoint.manifest import CODES, MANIFEST, Manifest, Piece, TensorEntry, encode, find_problem
from shardwise.checkpoint.pieces import assign, box_of, local_data, propose
from shardwise.checkpoint.shard import ShardLayout, write_shard

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch.distributed as dist
    from torch import Tensor

    from shardwise.checkpoint.pieces import Form, WriteProposal


@dataclass(frozen=True)
class SaveReport:
    """What one save did."""

    path: Path
    step: int
    num_bytes: int
    """Bytes of all ranks together."""
    bytes_here: int
    """Bytes this rank wrote."""
    seconds: float
    """From the call until the checkpoint was durable and visible."""


def save(
    folder: Path | str,
    step: int,
    tensors: Mapping[str, Tensor],
    facts: Mapping[str, Any],
    *,
    group: dist.ProcessGroup | None,
) -> SaveReport:
    """Save `tensors` and `facts` as `folder`/step-NNNNNNNN; called on every rank, communicates over `group`.

    A name that several ranks hold is written once. `facts` are JSON values and rank 0's count. Either every rank
    returns and the checkpoint is durable and `latest`, or every rank raises the same CheckpointError and what was
    there before stays. Without a group this process is the whole world.
    """
    draft = Draft(Path(folder), step, tensors, facts, group)
    return draft.write(lambda: draft.pieces)


class Draft:
    """A save between its two halves: planned by all ranks, not yet written."""

    def __init__(
        self,
        folder: Path,
        step: int,
        tensors: Mapping[str, Tensor],
        facts: Mapping[str, Any],
        group: dist.ProcessGroup | None,
    ) -> None:
        """Plan the save and make its temporary folder; called on every rank, communicates over `group`."""
        self._began = time.perf_counter()
        self._step = step
        self._group = group
        self._doing = f"saving {folder / name_of(step)}"
        self._facts: dict[str, Any] = {}
        self._publication = Publication(folder, step)
        try:
            self._assignment = together(
                group, self._doing, lambda: self._propose(tensors, facts), self._publication.open
            )
        except BaseException:
            self._publication.close()
            raise
        self._offsets = {name: tuple(box_of(name, tensors[name]).offsets) for name in self._assignment.names}
        self.pieces = {name: local_data(tensors[name]) for name in self._assignment.names}
        """This rank's pieces by name: the memory of the given tensors themselves."""
        self.bytes_here = sum(piece.nbytes for piece in self.pieces.values())

    def write(self, get_pieces: Callable[[], Mapping[str, Tensor]]) -> SaveReport:
        """Write what `get_pieces` returns and publish it; called once on every rank, communicates over the group.

        It returns this rank's pieces with their values: `pieces`, a copy of them, or what reads them one after another.
        """
        try:
            published = together(
                self._group,
                self._doing,
                lambda: self._write(get_pieces()),
                lambda results: self._publication.publish(self._assignment.temporary, results, self._facts),
            )
        finally:
            self._publication.close()
        seconds = time.perf_counter() - self._began
        return SaveReport(published.path, self._step, published.num_bytes, self.bytes_here, seconds)

    def _propose(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> WriteProposal:
        if rank_in(self._group) == 0:
            # Through JSON and back: what cannot be written is refused now, and what changes later is not.
            self._facts = msgspec.json.decode(msgspec.json.encode(dict(facts)))
        return propose(tensors)

    def _write(self, pieces: Mapping[str, Tensor]) -> Written:
        assignment = self._assignment
        if not is_seen(assignment.temporary):
            made_on, here = assignment.maker, socket.gethostname()
            raise CheckpointError(
                f"{assignment.temporary}, made by rank 0 on {made_on}, does not exist on {here}",
                code="checkpoint.storage-not-shared",
                fix="save to storage that every node shares",
            )
        file = shard_name(rank_in(self._group))
        if not assignment.names:
            return Written(file, 0, {})
        layout = ShardLayout.of(
            {name: (CODES[piece.dtype], tuple(piece.shape)) for name, piece in self.pieces.items()},
        )
        checksums = write_shard(assignment.temporary / file, layout, pieces)
        written = {
            name: Piece(file, self._offsets[name], layout.places[name].shape, checksum)
            for name, checksum in checksums.items()
        }
        return Written(file, layout.size, written)


# Rank 0 of a save: the temporary folder, the manifest, and the moment when the checkpoint becomes visible.


@dataclass(frozen=True)
class WriteAssignment:
    """What one rank writes, and where."""

    temporary: Path
    maker: str
    """Host on which rank 0 made that folder."""
    names: list[str]


@dataclass(frozen=True)
class Written:
    """What one rank has written; no file at all where it had nothing to write."""

    file: str
    size: int
    pieces: dict[str, Piece]


@dataclass(frozen=True)
class Published:
    """The published checkpoint, as all ranks receive it."""

    path: Path
    num_bytes: int


class Publication:
    """One save from the temporary folder to the moment it is seen; on ranks other than 0 it does nothing."""

    def __init__(self, folder: Path, step: int) -> None:
        self._folder = folder
        self._step = step
        self._temporary: Path | None = None
        self._lock: int | None = None
        self._forms: dict[str, Form] = {}

    def open(self, proposals: list[WriteProposal]) -> list[WriteAssignment]:
        """Lock the folder, clear what dead saves left, make the temporary folder, and assign what each rank writes."""
        chosen, self._forms = assign(proposals)
        self._folder.mkdir(exist_ok=True)  # not its parents: if those have vanished, that is an error
        self._lock = lock(self._folder)
        sweep(self._folder)
        self._temporary = self._folder / temporary_name(name_of(self._step))
        self._temporary.mkdir()
        return [WriteAssignment(self._temporary, socket.gethostname(), names) for names in chosen]

    def publish(self, temporary: Path, results: list[Written], facts: dict[str, Any]) -> list[Published]:
        """Check what all ranks wrote, write the manifest, give the folder its name, and move `latest`."""
        manifest = self._manifest(results, facts)
        for file, size in manifest.files.items():
            found = (temporary / file).stat().st_size
            if found != size:
                raise CheckpointError(
                    f"{temporary / file} has {found} bytes after {size} were written",
                    code="checkpoint.write-incomplete",
                )
        write_synced(temporary / MANIFEST, encode(manifest))
        sync_folder(temporary)
        older = _saves_of(self._step, self._folder)
        attempt = max((parse_name(path.name) or (0, 0))[1] for path in older) + 1 if older else 1
        path = self._folder / name_of(self._step, attempt)
        temporary.rename(path)
        self._temporary = None
        sync_folder(self._folder)
        replace_synced(self._folder / LATEST, path.name.encode())
        for replaced in older:
            with contextlib.suppress(OSError):  # the new one is safe: an old one that stays does no harm
                remove_whole(replaced)
        return [Published(path, manifest.num_bytes)] * len(results)

    def close(self) -> None:
        """Remove what was not published and release the lock; safe to call twice."""
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = None
        if self._lock is not None:
            unlock(self._lock)
            self._lock = None

    def _manifest(self, results: Sequence[Written], facts: dict[str, Any]) -> Manifest:
        pieces: dict[str, list[Piece]] = {name: [] for name in self._forms}
        for result in results:
            for name, piece in result.pieces.items():
                pieces[name].append(piece)
        manifest = Manifest(
            step=self._step,
            saved_at=time.time(),
            facts=facts,
            files={result.file: result.size for result in results if result.pieces},
            tensors={
                name: TensorEntry(shape, dtype, tuple(pieces[name])) for name, (dtype, shape) in self._forms.items()
            },
        )
        problem = find_problem(manifest)
        if problem:
            raise CheckpointError(
                f"the tensors of all ranks are incomplete: {problem}", code="checkpoint.tensors-incomplete"
            )
        return manifest


def _saves_of(step: int, folder: Path) -> list[Path]:
    return [path for path in folder.glob(f"{name_of(step)}*") if (parse_name(path.name) or (None,))[0] == step]
