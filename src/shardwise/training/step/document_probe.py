"""The document probe: before the first step, verify that packed documents do not influence each other.

A model that ignores document ids trains on packed rows without an error: its documents attend to each other, and its
loss is only a little wrong. The probe runs the model on one packed row three times: as it is, with the tokens of the
first document changed, and with the second document alone. Logits of the second document must be the same each time.
A row also shows whether labels cross the boundary of documents, which the data decides. The idea of the first test is
that of causality tests of attention kernels: change an input and see which outputs change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardwise.errors import DataError, JobError
from shardwise.job.losses import IGNORE, logits_of
from shardwise.training.step.compiled import uncompiled_probe

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from torch import nn

    from shardwise.data.feed import StepBatch

_CLOSE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""Largest difference of logits, relative to the largest logit, between shapes whose kernels sum in another order."""
_NUM_TRIED = 8
"""Steps in which a row with two documents is searched."""

PackedRow = tuple[Tensor, Tensor, Tensor, Tensor]
"""Tokens, position ids, document ids and targets, each [1, length]."""


class DocumentProbe:
    """Rejects a model or data in which packed documents influence each other; for plans without pipeline stages."""

    def __init__(
        self,
        model: nn.Module,
        forward: Callable[[Any, Any], Any],
        autocast: Callable[[], AbstractContextManager[Any]],
        is_agreed: Callable[[bool], bool],
    ) -> None:
        """Create the probe of `model`; `is_agreed` communicates and returns whether a condition holds on all ranks."""
        self._model, self._forward, self._autocast, self._is_agreed = model, forward, autocast, is_agreed
        self._num_left = _NUM_TRIED

    def __call__(self, batch: StepBatch) -> None:
        """Probe the model on a row of this batch. Communicates over the world; call on every rank."""
        if not self._num_left:
            return
        row = find_row(batch.micro_batches[0].batch)
        # Under FSDP, a forward pass of one rank alone would wait for the others.
        if not self._is_agreed(row is not None) or row is None:
            self._num_left -= 1
            return
        self._num_left = 0
        check_labels(row)
        self._check_attention(row)

    def _check_attention(self, row: PackedRow) -> None:
        tokens, positions, documents, targets = row
        first, second = documents == documents[0, 0], documents == documents[0, 0] + 1
        changed = torch.where(first, tokens.roll(1, dims=1), tokens)
        packed = self._logits((tokens, positions, documents, targets))[second]
        name = type(self._model).__name__
        fix = (
            "restrict attention to equal document_ids (for transformers, set Job.forward=sw.losses.packed), or use"
            " packed=False"
        )
        if not _is_close(self._logits((changed, positions, documents, targets))[second], packed):
            raise JobError(
                f"packed documents influence each other: a change of one document changed the logits of {name} in"
                " another",
                code="support.packed-attention",
                fix=fix,
            )
        alone, here = _moved_to_start((tokens, positions, documents, targets), second)
        if not _is_close(self._logits(alone)[here], packed):
            raise JobError(
                f"the logits of {name} for a packed document differ from those of the same document alone",
                code="support.packed-positions",
                fix="compute position embeddings from position_ids, which start at 0 in each document",
            )

    def _logits(self, row: PackedRow) -> Tensor:
        with uncompiled_probe(self._model), self._autocast():
            output = self._forward(self._model, list(row))
        deferred: Tensor | None = getattr(output, "hidden", None)  # a fused loss returns the head's input
        if deferred is not None:
            return deferred
        logits: Tensor = logits_of(output)
        return logits


def find_row(batch: Any) -> PackedRow | None:
    """Return the first row whose first two documents have at least two tokens each and a change is visible; or None."""
    tokens, _, documents, targets = batch
    for index in range(len(tokens)):
        ids = documents[index]
        sizes = [int((ids == ids[0] + number).sum()) for number in (0, 1)]
        has_targets = bool((targets[index][ids == ids[0] + 1] != IGNORE).any())  # padding has none
        is_changed = bool((tokens[index].roll(1) != tokens[index])[ids == ids[0]].any())
        if min(sizes) > 1 and has_targets and is_changed:
            found = tuple(values[index : index + 1] for values in batch)
            return found[0], found[1], found[2], found[3]
    return None


def check_labels(row: PackedRow) -> None:
    """Raise DataError if the target at the end of the row's first document is the first token of the next one.

    A document that was split has its own next token as target, which can be equal by chance, so that targets of every
    boundary of the row must be the next document's.
    """
    tokens, _, documents, targets = (values[0] for values in row)
    ends = (documents[:-1] != documents[1:]).nonzero().flatten()
    if bool((targets[ends] == tokens[ends + 1]).all()):
        raise DataError(
            "labels cross the boundaries of packed documents: the target of each document's last token is the first"
            " token of the next document",
            code="data.packed-labels",
            fix=f"set the target of the last token of a document to {IGNORE}",
        )


def _moved_to_start(row: PackedRow, wanted: Tensor) -> tuple[PackedRow, Tensor]:
    """Return a row of the same length that has only the wanted document, at its start, and where its tokens are."""
    tokens, positions, documents, targets = row
    size, length = int(wanted.sum()), tokens.shape[1]
    place = torch.arange(length, device=tokens.device)[None]
    here = place < size
    moved = torch.zeros_like(tokens)
    moved[here] = tokens[wanted]
    restarted = torch.where(here, place, place - size)
    return (moved, restarted.to(positions.dtype), (~here).to(documents.dtype), targets), here


def _is_close(one: Tensor, other: Tensor) -> bool:
    limit = _CLOSE.get(one.dtype, _CLOSE[torch.bfloat16])
    largest = other.abs().max().clamp(min=torch.finfo(other.dtype).tiny)
    return bool((one - other).abs().max() <= limit * largest)
