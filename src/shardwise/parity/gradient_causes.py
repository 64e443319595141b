"""Causes that show in the gradient of one step, each a pure function over the evidence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardwise.parity.compare import relative_gaps
from shardwise.parity.evidence import SAME, mean_gradient, plain_average, total_gradient
from shardwise.parity.report import Finding
from shardwise.parity.shards import misplaced_pieces, misplaced_use

if TYPE_CHECKING:
    from shardwise.parity.evidence import Evidence


def no_gradient(evidence: Evidence) -> Finding | None:
    """Whether parameters got no gradient at all that have one in one process."""
    missing = [name for name in evidence.expected_gradients if name not in evidence.gradients]
    if not missing:
        return None
    return Finding(
        cause="no gradient",
        evidence=f"{len(missing)} parameters got no gradient in step {evidence.step}, {missing[0]} is the first",
        parameter=missing[0],
        step=evidence.step,
    )


def state_between_passes(evidence: Evidence) -> Finding | None:
    """Whether a model changes from one forward pass to the next, and the plan has more of them than one process."""
    has_more = evidence.micro_batches > 1 or evidence.plan.layout.pp > 1
    if not has_more or evidence.repeat_gap <= max(SAME, evidence.tolerance):
        return None
    return Finding(
        cause="state between forward passes",
        evidence=f"the gradient of one micro-batch of step {evidence.step} is {evidence.repeat_gap:.1e} apart when the"
        " model runs it again: it counts forward passes, or keeps something from one to the next, and"
        f" {evidence.plan.layout} runs {evidence.micro_batches} micro-batches a step where one process runs 1",
        step=evidence.step,
    )


def depends_on_grouping(evidence: Evidence) -> Finding | None:
    """Whether the plan has exactly the sum over its micro-batches, and the job itself is not such a sum."""
    cells = [cell for row in evidence.cells for cell in row if cell.count]
    if len(cells) < 2 or not evidence.is_explained_by(mean_gradient(cells)):
        return None
    counts = (
        f"the gradient of step {evidence.step} is exactly that of the {len(cells)} micro-batches, summed and divided"
    )
    if evidence.expected.remarks:
        return Finding(
            cause="loss over the whole batch",
            evidence=f"{counts} by their count, and {evidence.expected.remarks[0]}",
            step=evidence.step,
        )
    return Finding(
        cause="model or loss over the whole batch",
        evidence=f"{counts} by their count, and one process with all rows in one has another: what the model or the"
        " loss computes for a row depends on the other rows of its micro-batch (minibatch statistics, prototypes,"
        " contrastive terms)",
        step=evidence.step,
    )


def missing_all_reduce(evidence: Evidence) -> Finding | None:
    """Whether ranks kept their own gradient of a parameter, and together they have the right one."""
    split = evidence.split
    if not split or len(split) < len(evidence.off):
        return None
    for name in split:
        together = torch.stack([each[name] for each in evidence.locals]).sum(0)
        wanted = {name: evidence.expected_gradients[name]}
        shares = ({name: together / divisor} for divisor in (1, *evidence.degrees))
        if not any(relative_gaps(share, wanted)[name] <= max(SAME, evidence.tolerance) for share in shares):
            return None
    every = len(split) == len(evidence.expected_gradients)
    return Finding(
        cause="missing all-reduce",
        evidence=f"the gradient of {'every parameter' if every else ', '.join(split)} in step {evidence.step} differs"
        " by rank, and only the ranks together have that of one process",
        parameter=split[0],
        step=evidence.step,
        ranks=tuple(range(len(evidence.locals))),
    )


def double_scaling(evidence: Evidence) -> Finding | None:
    """Whether every gradient is off by the same factor."""
    found, wanted = evidence.gradients, evidence.expected_gradients
    if not evidence.off or found.keys() != wanted.keys():
        return None
    square = sum(float(value.double().square().sum()) for value in wanted.values())
    product = sum(float((found[name].double() * value.double()).sum()) for name, value in wanted.items())
    if not square or not product:
        return None
    factor = product / square
    if not evidence.is_explained_by({name: value * factor for name, value in wanted.items()}):
        return None
    layout = evidence.plan.layout
    known = {
        "the number of readers": layout.dp,
        "the number of micro-batches": evidence.plan.accumulation,
        "the number of ranks": layout.world_size,
        "the tensor-parallel degree": layout.tp,
    }
    why = [words for words, value in known.items() if value > 1 and abs(max(factor, 1 / factor) / value - 1) < 1e-6]
    return Finding(
        cause="double loss scaling",
        evidence=f"every gradient of step {evidence.step} is {factor:.6g} times that of one process"
        + (f" ({why[0]}{'' if factor > 1 else ', divided by'})" if why else ""),
        step=evidence.step,
    )


def mean_of_means(evidence: Evidence) -> Finding | None:
    """Whether means of unequal counts were averaged as if they were equal."""
    readers = [[cell for cell in row if cell.count] for row in evidence.cells]
    columns = [
        [row[number] for row in readers if number < len(row)] for number in range(max(map(len, readers), default=0))
    ]
    groups = {
        "ranks": [row for row in readers if row],
        "micro-batches": [column for column in columns if column],
        "micro-batches of all ranks": [[cell] for row in readers for cell in row],
    }
    for words, parts in groups.items():
        counts = [sum(cell.count for cell in part) for part in parts]
        if len(set(counts)) < 2:  # the plain average of equal counts is the mean over all
            continue
        if evidence.is_explained_by(plain_average([mean_gradient(part) for part in parts])):
            return Finding(
                cause="mean of means",
                evidence=f"the gradient of step {evidence.step} is the plain average over {words}, whose counts differ"
                f" ({', '.join(f'{count:g}' for count in counts)})",
                step=evidence.step,
            )
    return None


def skipped_micro_batch(evidence: Evidence) -> Finding | None:
    """Whether the gradient is that of a step without the last micro-batch."""
    if not evidence.cells or min(map(len, evidence.cells)) < 2:
        return None
    every = [cell for row in evidence.cells for cell in row]
    without = [cell for row in evidence.cells for cell in row[:-1]]
    denominator, kept = sum(cell.count for cell in every), sum(cell.count for cell in without)
    for divisor in {denominator, kept} - {0}:
        if evidence.is_explained_by({name: value / divisor for name, value in total_gradient(without).items()}):
            words = (
                f"the gradient is that of the step without the last {denominator - kept:g} of {denominator:g} counted"
            )
            return skipped_last(evidence, evidence.step, words)
    return None


def wrong_tied_shard(evidence: Evidence) -> Finding | None:
    """Whether one module's share of a tied gradient landed in another rank's piece."""
    if len(evidence.off) != 1:
        return None
    (name,) = evidence.off
    found, wanted = evidence.gradients.get(name), evidence.expected_gradients.get(name)
    if found is None or wanted is None:
        return None
    places = misplaced_pieces(found, wanted, evidence.degrees) or misplaced_use(
        found, evidence.uses.get(name, ()), evidence.degrees
    )
    if places is None:
        return None
    return wrong_shard(evidence, name, f"the pieces of its gradient hold {places}", evidence.step)


def skipped_last(evidence: Evidence, step: int, words: str) -> Finding:
    """Say that the last micro-batch of a step was left out."""
    ranks = tuple(each.rank for each in evidence.traced)
    return Finding(cause="skipped last micro-batch", evidence=f"step {step}: {words}", step=step, ranks=ranks)


def wrong_shard(evidence: Evidence, name: str, words: str, step: int | None) -> Finding:
    """Say that the pieces of a parameter are in the wrong places."""
    others = evidence.tied.get(name, ())
    tied = f" (tied to {', '.join(others)})" if others else ""
    return Finding(
        cause="wrong shard of a tied weight" if others else "wrong shard",
        evidence=f"{name}{tied}: {words}",
        parameter=name,
        step=step,
    )
