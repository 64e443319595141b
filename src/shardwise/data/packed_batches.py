"""Batches of packed rows: recognize those of any dataset, and put documents into rows of their own."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from shardwise.job.losses import IGNORE
from shardwise.models.documents import number_documents

_NUM_FIELDS = 4


class PackedBatch(NamedTuple):
    """The fields of packed rows, each an integer tensor [rows, length]."""

    tokens: Tensor
    position_ids: Tensor
    document_ids: Tensor
    targets: Tensor

    @property
    def numbers(self) -> Tensor:
        """The numbers of documents, counted from 0 in each row."""
        return number_documents(self.document_ids)

    @property
    def ends(self) -> Tensor:
        """Whether another document follows each token in its row, bool [rows, length]."""
        return functional.pad(self.document_ids.diff(dim=1) != 0, (0, 1))

    def replaced(self, chosen: Tensor) -> PackedBatch:
        """Return these rows with another token in the chosen places, mostly the same: order must not hide a change."""
        lowest, highest = self.tokens.min(), self.tokens.max()
        other = torch.where(self.tokens == highest, lowest, highest)
        return self._replace(tokens=torch.where(chosen, other, self.tokens))

    @property
    def has_documents(self) -> bool:
        """Whether the fields are those of packed rows, as opposed to other integers of the same shape.

        Positions start at 0 in each row and increase by 1, or start at 0 again.
        """
        positions = self.position_ids
        steps = positions.diff(dim=1)
        return bool((positions[:, 0] == 0).all() and positions.any() and ((steps == 1) | (positions[:, 1:] == 0)).all())

    @property
    def crossing(self) -> Tensor:
        """Whether the target of a document's last token is the first token of the next document, [rows, length]."""
        following = functional.pad(self.tokens[:, 1:], (0, 1), value=IGNORE)
        return self.ends & (self.targets == following)

    @property
    def num_crossing(self) -> int:
        """Number of targets that cross documents; 0 if other targets at ends show that equal tokens are a coincidence.

        The target of a document's last token may be its next token, in another row.
        """
        num_counted = int((self.ends & (self.targets != IGNORE)).sum())
        num_crossing = int(self.crossing.sum())
        return num_crossing if num_crossing == num_counted else 0


def packed_batch(batch: Any) -> PackedBatch | None:
    """Return the fields of a batch that has the form of packed rows; None for another form.

    The result does not depend on values, so that all ranks agree.
    """
    if not isinstance(batch, list | tuple) or len(batch) != _NUM_FIELDS:
        return None
    if not all(isinstance(field, Tensor) and field.ndim == 2 for field in batch):
        return None
    if any(field.is_floating_point() or field.shape != batch[0].shape for field in batch):
        return None
    return PackedBatch(*batch)


def split_first(packed: PackedBatch) -> PackedBatch:
    """Return rows whose first document is split in two, so that rows with one document show leaks as well."""
    numbers = packed.numbers
    along = torch.arange(numbers.shape[1], device=numbers.device)
    middle = (numbers == 0).sum(dim=1, keepdim=True) // 2
    is_second = (numbers == 0) & (along >= middle)
    return PackedBatch(
        packed.tokens,
        torch.where(is_second, along - middle, packed.position_ids),
        numbers + (is_second | (numbers > 0)),
        torch.where(along == middle - 1, IGNORE, packed.targets),
    )


class SeparateDocuments(NamedTuple):
    """Documents in rows of their own, and the places of the tokens of packed rows in them."""

    batch: PackedBatch
    """[documents, length]: a document at the start of each row, followed by padding, a document of its own."""
    rows: Tensor
    """The row of each token of the packed rows, int64 [packed rows, length]."""
    places: Tensor
    """The place in that row."""


def separate(packed: PackedBatch) -> SeparateDocuments:
    """Return each document in a row of its own, with positions from 0; targets that cross documents are ignored."""
    tokens, numbers = packed.tokens, packed.numbers
    along = torch.arange(tokens.shape[1], device=tokens.device)
    num_documents = numbers[:, -1] + 1
    rows = numbers + (num_documents.cumsum(0) - num_documents)[:, None]
    is_start = functional.pad(packed.ends[:, :-1], (1, 0), value=True)
    places = along - torch.where(is_start, along, 0).cummax(dim=1).values
    sizes = rows.flatten().bincount()[:, None]
    alone = torch.zeros(len(sizes), len(along), dtype=tokens.dtype, device=tokens.device)
    targets = torch.full_like(alone, IGNORE)
    alone[rows, places] = tokens
    targets[rows, places] = torch.where(packed.crossing, IGNORE, packed.targets).to(targets.dtype)
    is_padding = along >= sizes
    positions = torch.where(is_padding, along - sizes, along)
    batch = PackedBatch(alone, positions, is_padding.to(tokens.dtype), targets)
    return SeparateDocuments(batch, rows, places)
