"""The document probe: before the first step, verify that packed documents do not influence each other.

A model that ignores document ids trains on packed rows without an error: its documents attend to each other, and its
loss is only a little wrong. The probe runs the model on one packed row three times: as it is, with the tokens of the
first document changed, and with the second document alone. Logits of the second document must be the same each time.
The idea is that of causality tests of attention kernels: change an input and see which outputs change. All ranks probe
the same row, so that they run the same collectives and raise together.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardwise.errors import JobError
from shardwise.job.losses import IGNORE, logits_of
from shardwise.parallel.fused_loss import DeferredLogits
from shardwise.training.step.compiled import uncompiled_probe
from shardwise.training.step.module_step import user_class

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from torch import nn

    from shardwise.data.feed import StepBatch
    from shardwise.dist import World

_CLOSE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""Largest difference of logits, relative to the largest logit, between shapes whose kernels sum in another order."""
_NUM_TRIED = 8
"""Steps in which a row with two documents is searched."""

PackedRow = tuple[Tensor, Tensor, Tensor, Tensor]
"""Tokens, position ids, document ids and targets, each [1, length]."""


class DocumentProbe:
    """Rejects a model in which packed documents influence each other; for plans without pipeline stages."""

    def __init__(
        self,
        model: nn.Module,
        forward: Callable[[Any, Any], Any],
        autocast: Callable[[], AbstractContextManager[Any]],
        world: World,
        note: Callable[[str], None],
    ) -> None:
        """Create the probe of `model`; `note` receives a message if no row of the first steps can be probed."""
        self._model, self._forward, self._autocast, self._world = model, forward, autocast, world
        self._note = note
        self._num_left = _NUM_TRIED

    def __call__(self, batch: StepBatch) -> None:
        """Probe the model on a row of this batch. Communicates over the world; call on every rank."""
        if not self._num_left:
            return
        self._num_left -= 1
        own = find_row(batch.micro_batches[0].batch)
        rows = self._world.gather(None if own is None else [values.tolist() for values in own])
        found = next((row for row in rows if row is not None), None)
        if found is None:
            if not self._num_left:
                self._note(f"no row of the first {_NUM_TRIED} steps has two documents, so that leaks were not checked")
            return
        self._num_left = 0
        device = batch.micro_batches[0].batch[0].device
        tokens, positions, documents, targets = (torch.tensor(values, device=device) for values in found)
        row = tokens, positions, documents, targets
        codes = self._world.gather(self._find_leak(row))
        code = next(filter(None, codes), "")
        if code:
            raise _leak(code, user_class(self._model).__name__)

    def _find_leak(self, row: PackedRow) -> str:
        """Return the code of what is wrong, or an empty string."""
        tokens, positions, documents, targets = row
        first, second = documents == documents[0, 0], documents == documents[0, 0] + 1
        packed = self._logits(row)[second]
        changed = torch.where(first, tokens.roll(1, dims=1), tokens)
        after_change = self._logits((changed, positions, documents, targets))[second]
        alone, here = _moved_to_start(row, second)
        moved = self._logits(alone)[here]
        if not _is_close(after_change, packed):
            return "support.packed-attention"
        return "" if _is_close(moved, packed) else "support.packed-positions"

    def _logits(self, row: PackedRow) -> Tensor:
        with _evaluation_mode(self._model), uncompiled_probe(self._model), self._autocast():
            output = self._forward(self._model, list(row))
        if isinstance(output, DeferredLogits):  # a fused loss returns the head's input
            return output.hidden
        logits: Tensor = logits_of(output)
        return logits


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Turn dropout off in this context, since its masks differ between positions."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, is_training in modes:
            module.training = is_training


def _leak(code: str, name: str) -> JobError:
    if code == "support.packed-positions":
        return JobError(
            f"the logits of {name} for a packed document differ from those of the same document alone",
            code="support.packed-positions",
            fix="compute position embeddings from position_ids, which start at 0 in each document",
        )
    return JobError(
        f"packed documents influence each other: a change of one document changed the logits of {name} in another",
        code="support.packed-attention",
        fix="restrict attention to equal document_ids (for transformers, set Job.forward=sw.losses.packed), or use"
        " packed=False",
    )


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
