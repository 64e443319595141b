"""The leak check of `verify`: in one process, packed documents do not influence each other, and none is lost.

Rows of the first steps are examined in three ways. A change of one document must not change a bit of the logits of the
others in its row. The logits of a document must be those of the same document alone in its row, and the loss of packed
rows the sum over documents alone. Targets must not cross documents. What differs names the leak: tokens that changed
inside of other documents show that nothing restricts attention; tokens at their edges, a mask that is off by one; and
logits that do not depend on other documents but on the place in the row, positions that are not reset. If no row of a
corpus has two documents, the first document of each row is split in two.
"""

from __future__ import annotations

from contextlib import nullcontext
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardwise.data.packed_batches import PackedBatch, packed_batch, separate, split_first
from shardwise.job.losses import logits_of
from shardwise.parity.prepare import prepare_job
from shardwise.parity.reference import plain_model, true_double
from shardwise.parity.spec import Finding, PlanVerdict
from shardwise.training.build import prepare_meta_model
from shardwise.training.loading import make_feed
from shardwise.training.step.document_probe import find_row

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shardwise.dist import World
    from shardwise.job import Job
    from shardwise.parity.prepare import Preparation
    from shardwise.plans import Plan

NAME = "packed documents"
"""Name of the verdict in the report."""
NO_MASK, OFF_BY_ONE = "no document mask", "document mask off by one"
NOT_RESET, CROSSING, OTHER_LOSS = "positions not reset", "targets across documents", "loss of packed rows"
LIMITS = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Largest relative difference between shapes whose kernels sum in another order."""
_STEPS = 4
"""Steps whose targets are examined, and in which a row with several documents is searched."""
_MOST_CHANGED = 4
"""Documents of a row that are changed one after the other."""


class _Changes(NamedTuple):
    """What changes of documents changed in other documents of a row."""

    largest: float
    """Largest difference, relative to the largest logit."""
    inside: float
    """The same, if neither the changed tokens nor the others are at the edges of their documents."""


def check_documents(world: World, preparation: Preparation, plan: Plan) -> PlanVerdict:
    """Examine the packed rows of a job in one process, in the precision of a one-rank `plan`."""
    double = plan.precision.compute == "fp64"
    with true_double() if double else nullcontext(), torch.no_grad():
        job = prepare_job(preparation)
        feed, _ = make_feed(job, plan, world, None, 0, fill=False)
        model = plain_model(job, prepare_meta_model(job, plan, world), double=double).eval()
        batches = [packed_batch(step.micro_batches[0].batch) for step in islice(feed, _STEPS)]
        packed = [batch for batch in batches if batch is not None]
        if not any(map(find_row, packed)):
            if not feed.packs_documents:
                measure = f"not examined: no row of the first {len(packed)} steps has two documents"
                return PlanVerdict(plan=NAME, status="does not apply", measure=measure)
            packed = [split_first(batch) for batch in packed]
        return _verdict(job, model, packed)


def _verdict(job: Job, model: nn.Module, packed: list[PackedBatch]) -> PlanVerdict:
    findings = list(_crossing(packed))
    batch = max(packed, key=lambda each: int(each.ends.any(dim=1).sum()))
    logits, loss = _outputs(job, model, batch)
    limit = LIMITS[logits.dtype]
    changes = _change_documents(job, model, batch)
    alone, sums = _alone(job, model, batch)
    if changes.largest > limit:
        findings.append(_attention_leak(changes, limit))
    elif _relative(alone, logits) > limit:
        findings.append(_positions_leak(batch, _relative(alone, logits)))
    gap = 0.0
    if loss is not None and sums is not None:
        gap = float((loss - sums).abs() / sums.abs().clamp(min=torch.finfo(sums.dtype).tiny))
    if gap > limit and not findings:
        evidence = f"the loss of packed rows differs by {gap:.1e} from the sum over documents alone, the logits do not"
        findings.append(Finding(cause=OTHER_LOSS, evidence=evidence))
    isolation = "bit-equal" if changes.largest == 0 else f"equal within {changes.largest:.1e}"
    measure = f"a change of one document leaves logits of others {isolation}; each document as alone"
    if loss is not None:
        measure += f", the loss within {gap:.1e}"
    return PlanVerdict(plan=NAME, status="failed" if findings else "passed", measure=measure, findings=tuple(findings))


def _crossing(packed: list[PackedBatch]) -> list[Finding]:
    """Return a finding if targets cross documents in all examined rows that have a target at such a place."""
    num_crossing = sum(batch.num_crossing for batch in packed)
    if not num_crossing:
        return []
    evidence = f"{num_crossing} targets of a document's last token are the first token of the next document"
    return [Finding(cause=CROSSING, evidence=evidence)]


def _attention_leak(changes: _Changes, limit: float) -> Finding:
    if changes.inside > limit:
        evidence = f"a change of one document changed logits of others by {changes.largest:.1e}"
        return Finding(cause=NO_MASK, evidence=evidence)
    evidence = f"a change of one document changed logits of others by {changes.largest:.1e}, at edges of documents only"
    return Finding(cause=OFF_BY_ONE, evidence=evidence)


def _positions_leak(batch: PackedBatch, gap: float) -> Finding:
    starts = batch.ends.roll(1, dims=1)
    owner = "the model does not use position_ids"
    if batch.position_ids[starts].any():
        owner = "position_ids do not start at 0 in each document"
    evidence = (
        f"logits differ by {gap:.1e} from those of the same documents alone, whatever the other documents: {owner}"
    )
    return Finding(cause=NOT_RESET, evidence=evidence)


def _change_documents(job: Job, model: nn.Module, batch: PackedBatch) -> _Changes:
    """Change documents of the row with the most of them, one after the other: all tokens, and those inside."""
    index = int(batch.numbers[:, -1].argmax())
    row = PackedBatch(*(field[index : index + 1] for field in batch))
    before, _ = _outputs(job, model, row)
    starts = row.ends.roll(1, dims=1)
    starts[:, 0] = True
    at_edge = row.ends | starts
    largest = inside = 0.0
    for number in range(min(_MOST_CHANGED, int(row.numbers[0, -1]) + 1)):
        changed = row.numbers == number
        after, _ = _outputs(job, model, row.replaced(changed))
        largest = max(largest, _relative(after[~changed], before[~changed]))
        after, _ = _outputs(job, model, row.replaced(changed & ~at_edge))
        others = ~changed & ~at_edge
        inside = max(inside, _relative(after[others], before[others]))
    return _Changes(largest, inside)


def _alone(job: Job, model: nn.Module, batch: PackedBatch) -> tuple[Tensor, Tensor | None]:
    """Return the logits of documents alone, in the places of the packed rows, and the sum of their losses."""
    documents = separate(batch)
    size = len(batch.tokens)
    logits, losses = [], []
    for start in range(0, len(documents.batch.tokens), size):
        part = PackedBatch(*(field[start : start + size] for field in documents.batch))
        found, loss = _outputs(job, model, part)
        logits.append(found)
        losses.append(loss)
    sums = [loss for loss in losses if loss is not None]
    return torch.cat(logits)[documents.rows, documents.places], torch.stack(sums).sum() if sums else None


def _outputs(job: Job, model: nn.Module, batch: PackedBatch) -> tuple[Tensor, Tensor | None]:
    """Return the logits and the loss sum of a batch; None for the loss if the model computes its own mean."""
    fields: list[Any] = list(batch)
    output = job.forward(model, fields)
    return logits_of(output), job.loss.sum_of(output, fields) if job.loss.by_row else None


def _relative(one: Tensor, other: Tensor) -> float:
    """Return the largest difference, relative to the largest value; 0 if there are no values."""
    if not other.numel():
        return 0.0
    largest = other.abs().max().clamp(min=torch.finfo(other.dtype).tiny)
    return float((one - other).abs().max() / largest)
