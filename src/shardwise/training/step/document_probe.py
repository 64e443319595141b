"""The document probe: before the first step, verify that packed documents do not influence each other.

A model that ignores document ids trains on packed rows without an error: its documents attend to each other, and its
loss is only a little wrong. The probe runs the model on one packed row three times: as it is, with the tokens of the
first document changed, and with each document in a row of its own. Logits of the second document must be the same each
time. The idea is that of causality tests of attention kernels: change an input and see which outputs change. If no row
of a corpus has two documents yet, the first document of a row is split in two, so that a leak ends the run before its
first step. All ranks probe the same row, so that they run the same collectives and raise together. `verify` has a
stricter form of this check (parity/documents.py). Two things differ from a training step: under context parallelism the
model runs on whole rows, and float8 layers compute in the dtype of their input, because the scales of a tensor depend
on all of its tokens.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from shardwise.data.packed_batches import PackedBatch, packed_batch, separate, split_first
from shardwise.errors import DataError, JobError
from shardwise.job import losses
from shardwise.job.losses import IGNORE, logits_of
from shardwise.parallel.collectives import stages_of
from shardwise.parallel.float8 import without_float8
from shardwise.parallel.fused_loss import DeferredLogits
from shardwise.training.step.compiled import uncompiled_probe
from shardwise.training.step.module_step import user_class

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from torch import nn

    from shardwise.data.feed import StepBatch
    from shardwise.training.step.step import StepContext

    Program = Callable[[nn.Module], None]

_CLOSE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""Largest difference of logits, relative to the largest logit, between shapes whose kernels sum in another order."""
_NUM_TRIED = 8
"""Steps in which a row with two documents is searched, if the rows are not those of a corpus."""
_LENGTH = 1024
"""Longest row of the probe, which may materialize attention scores; longer rows are replaced by two documents."""
_LEAST_CROSSING = 3
"""Number of targets across documents that are no coincidence."""


class ProbedModel(NamedTuple):
    """How the probe runs a model."""

    model: nn.Module
    forward: Callable[[Any, Any], Any]
    run: Callable[[Program], None]
    """Runs a program on the model, or on this rank's pipeline stages, of which the last one completes it."""
    autocast: Callable[[], AbstractContextManager[Any]]
    compute: torch.dtype | None = None
    """Dtype in which logits are computed, if the model casts them to another one."""


class DocumentProbe:
    """Rejects a model in which packed documents influence each other, and targets across documents."""

    def __init__(self, probed: ProbedModel, context: StepContext) -> None:
        """Create the probe; the note of `context` receives a message if no row of the first steps can be probed."""
        self._probed, self._world, self._note = probed, context.source.world, context.note
        self._packs_documents = context.feed.packs_documents
        self._num_left = _NUM_TRIED

    def __call__(self, batch: StepBatch) -> None:
        """Probe the model on a row of this batch. Communicates over the world; call on every rank."""
        packed = packed_batch(batch.micro_batches[0].unsharded)
        if packed is None:
            self._num_left = 0
        if not self._num_left or packed is None:
            return
        self._num_left -= 1
        is_packed = self._packs_documents or packed.has_documents
        own = find_row(packed) if is_packed else None
        if own is None and self._packs_documents:
            own = find_row(split_first(packed))
        num_crossing = packed.num_crossing if is_packed else 0
        mine = None if own is None else [values.tolist() for values in own]
        gathered = self._world.gather((is_packed, num_crossing, mine))
        if sum(num for _, num, _ in gathered) >= _LEAST_CROSSING:
            raise targets_cross()
        found = next((row for _, _, row in gathered if row is not None), None)
        if found is not None:
            self._num_left = 0
            self._probe(found, batch.micro_batches[0].batch[0].device)
        elif not self._num_left and any(is_packed for is_packed, _, _ in gathered):
            self._note(f"no row of the first {_NUM_TRIED} steps has two documents, so that leaks were not checked")

    def _probe(self, found: list[Any], device: torch.device) -> None:
        """Raise JobError on all ranks if the documents of a row influence each other. Communicates over the world."""
        row = PackedBatch(*(torch.tensor(values, device=device) for values in found))
        code = next(filter(None, self._world.gather(self._find_leak(row))), "")
        if code:
            raise _leak(code, self._probed)

    def _find_leak(self, row: PackedBatch) -> str:
        """Return the code of what is wrong, or an empty string; also without the last pipeline stage."""
        first, second = row.numbers == 0, row.numbers == 1
        changed = row.replaced(first)
        only_second = PackedBatch(*(field[1:2] for field in separate(row).batch))
        here = only_second.document_ids == 0
        packed, after_change, moved = (self._logits(each) for each in (row, changed, only_second))
        if packed is None or after_change is None or moved is None:
            return ""
        compute = self._probed.compute or packed.dtype
        if not _is_close(after_change[second], packed[second], compute):
            return "support.packed-attention"
        return "" if _is_close(moved[here], packed[second], compute) else "support.packed-positions"

    def _logits(self, row: PackedBatch) -> Tensor | None:
        """Return the logits of a row; None on a rank without the last pipeline stage. Communicates in the model."""
        probed = self._probed
        model = probed.model
        outputs: list[Any] = []
        with ExitStack() as stack:
            for context in (_evaluation_mode(model), uncompiled_probe(model), without_float8(model), probed.autocast()):
                stack.enter_context(context)
            probed.run(lambda module: outputs.append(probed.forward(module, list(row))))
        if not outputs:
            return None
        if isinstance(outputs[0], DeferredLogits):  # a fused loss returns the head's input
            return outputs[0].hidden
        logits: Tensor = logits_of(outputs[0])
        return logits


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Turn off dropout, whose masks differ between positions, and context parallelism in this context."""
    modes = [(module, module.training) for module in model.modules()]
    switches = [stage.context_switch for stage in stages_of(model) if hasattr(stage, "context_switch")]
    model.eval()
    for switch in switches:
        switch.is_on = False  # type: ignore[union-attr]
    try:
        yield
    finally:
        for switch in switches:
            switch.is_on = True  # type: ignore[union-attr]
        for module, is_training in modes:
            module.training = is_training


def _leak(code: str, probed: ProbedModel) -> JobError:
    name = user_class(probed.model).__name__
    if code == "support.packed-positions":
        return JobError(
            f"the logits of {name} for a packed document differ from those of the same document alone",
            code="support.packed-positions",
            fix="compute position embeddings from position_ids, which start at 0 in each document",
        )
    mask = "restrict attention to equal document_ids (for transformers, set Job.forward=sw.losses.packed)"
    if probed.forward is losses.packed:
        mask = f"use a model whose attention finds documents by position_ids, which {name} does not"
    return JobError(
        f"packed documents influence each other: a change of one document changed the logits of {name} in another",
        code="support.packed-attention",
        fix=f"{mask}, or use packed=False",
    )


def targets_cross() -> DataError:
    """Return the error for packed rows whose targets cross documents."""
    return DataError(
        "targets of packed rows cross documents: a document's last token has the next document's first token as target",
        code="data.packed-targets",
        fix=f"set the target of the last token of each document to {IGNORE}",
    )


def find_row(packed: PackedBatch) -> PackedBatch | None:
    """Return the first row whose first two documents have at least two tokens each and a change is visible; or None."""
    for index in range(len(packed.tokens)):
        row = PackedBatch(*(field[index : index + 1] for field in packed))
        first, second = row.numbers == 0, row.numbers == 1
        has_targets = bool((row.targets[second] != IGNORE).any())  # padding has none
        is_changed = bool(row.tokens.min() != row.tokens.max())
        if min(int(first.sum()), int(second.sum())) > 1 and has_targets and is_changed:
            return row if row.tokens.shape[1] <= _LENGTH else _shortened(row)
    return None


def _shortened(row: PackedBatch) -> PackedBatch:
    """Return a row of `_LENGTH` tokens with the beginnings of the first two documents of a longer row."""
    size = _LENGTH // 2
    starts = [int((row.numbers == number).nonzero()[0, 1]) for number in (0, 1)]
    stops = [min(starts[0] + size, starts[1]), starts[1] + size]
    stops[1] = min(stops[1], int((row.numbers == 1).nonzero()[-1, 1]) + 1)
    kept = torch.cat([torch.arange(start, stop) for start, stop in zip(starts, stops, strict=True)])
    num_missing = _LENGTH - len(kept)
    tokens, positions, numbers, targets = (field[:, kept] for field in (*row[:2], row.numbers, row.targets))
    padding = torch.arange(num_missing)[None]
    return PackedBatch(
        torch.cat([tokens, torch.zeros_like(padding)], dim=1),
        torch.cat([positions, padding], dim=1),
        torch.cat([numbers, torch.full_like(padding, 2)], dim=1),
        torch.cat([targets, torch.full_like(padding, IGNORE)], dim=1),
    )


def _is_close(one: Tensor, other: Tensor, compute: torch.dtype) -> bool:
    limit = _CLOSE.get(compute, _CLOSE[torch.bfloat16])
    largest = other.abs().max().clamp(min=torch.finfo(other.dtype).tiny)
    return bool((one - other).abs().max() <= limit * largest)
