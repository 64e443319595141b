"""Saving: every rank writes its own pieces, all agree, then the checkpoint is seen, whole."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from shardwise.checkpoint.agreement import rank_in, together
from shardwise.checkpoint.disk import is_seen
from shardwise.checkpoint.dtypes import CODES
from shardwise.checkpoint.errors import CheckpointError
from shardwise.checkpoint.manifest import Piece
from shardwise.checkpoint.names import name_of, shard_name
from shardwise.checkpoint.pieces import box_of, local_data, propose
from shardwise.checkpoint.publish import Publication, Written
from shardwise.checkpoint.shard import ShardLayout, write_shard

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch.distributed as dist
    from torch import Tensor

    from shardwise.checkpoint.pieces import Proposal


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
            self._order = together(group, self._doing, lambda: self._propose(tensors, facts), self._publication.open)
        except BaseException:
            self._publication.close()
            raise
        self._offsets = {name: tuple(box_of(name, tensors[name]).offsets) for name in self._order.names}
        self.pieces = {name: local_data(tensors[name]) for name in self._order.names}
        """This rank's part by name: the very memory of the tensors that were given."""
        self.bytes_here = sum(piece.nbytes for piece in self.pieces.values())

    def write(self, get_pieces: Callable[[], Mapping[str, Tensor]]) -> SaveReport:
        """Write what `get_pieces` returns and publish it; called once on every rank, communicates over the group.

        It returns this rank's part with its values: `pieces`, a copy of them, or what reads them one after another.
        """
        try:
            published = together(
                self._group,
                self._doing,
                lambda: self._write(get_pieces()),
                lambda results: self._publication.publish(self._order.temporary, results, self._facts),
            )
        finally:
            self._publication.close()
        seconds = time.perf_counter() - self._began
        return SaveReport(published.path, self._step, published.num_bytes, self.bytes_here, seconds)

    def _propose(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Proposal:
        if rank_in(self._group) == 0:
            # Through JSON and back: what cannot be written is refused now, and what changes later is not.
            self._facts = msgspec.json.decode(msgspec.json.encode(dict(facts)))
        return propose(tensors)

    def _write(self, pieces: Mapping[str, Tensor]) -> Written:
        order = self._order
        if not is_seen(order.temporary):
            raise CheckpointError(
                f"{order.temporary} was made by rank 0 on {order.maker} and is not there on {socket.gethostname()}",
                code="checkpoint.storage-not-shared",
                fix="save to storage that every node shares",
            )
        file = shard_name(rank_in(self._group))
        if not order.names:
            return Written(file, 0, {})
        layout = ShardLayout.of(
            {name: (CODES[piece.dtype], tuple(piece.shape)) for name, piece in self.pieces.items()},
        )
        checksums = write_shard(order.temporary / file, layout, pieces)
        written = {
            name: Piece(file, self._offsets[name], layout.places[name].shape, checksum)
            for name, checksum in checksums.items()
        }
        return Written(file, layout.size, written)
