"""The segments of one training, killed and resumed, beside an uninterrupted run: where they diverge, and why."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from shardwise.parity.spec import KEYED, Finding, Gap

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardwise.layout import Layout

BETWEEN = "the resumed run and the uninterrupted one"


class SeenSamples(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank saw of one step."""

    step: int
    loss: float | None
    """This rank's share of the mean loss; None for NaN."""
    rows: tuple[str, ...]
    """Digests of the rows in its loss."""
    rate: float
    """Learning rate."""
    draw: float
    """A random number, drawn after the step."""


@dataclass(frozen=True, kw_only=True)
class SegmentStep:
    """One step of one segment, over all ranks."""

    step: int
    loss: float
    rows: frozenset[str]
    """A set: a spare row, and a row that a pipeline is probed with, are rows of the step that are seen twice."""
    rate: float
    draws: tuple[float, ...]
    """By rank."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """One run, from where it began to its end or its death."""

    label: str
    """Such as "zero3 on 4 ranks"."""
    layout: Layout
    begins: int
    """The step it had to begin with."""
    ranks: Sequence[Sequence[SeenSamples]]

    def steps(self) -> list[SegmentStep]:
        """Return the steps that every rank has seen; a kill lets some ranks see one more than others."""
        return [self._step(seen) for seen in zip(*self.ranks, strict=False)]

    def _step(self, seen: Sequence[SeenSamples]) -> SegmentStep:
        reporting = [each for rank, each in enumerate(seen) if self.layout.tells_loss(rank)]
        return SegmentStep(
            step=seen[0].step,
            loss=sum(math.nan if each.loss is None else each.loss for each in reporting),
            rows=frozenset(row for each in reporting for row in each.rows),
            rate=seen[0].rate,
            draws=tuple(each.draw for each in seen),
        )


def loss_gaps(whole: Segment, segments: Sequence[Segment], limit: float) -> list[Gap]:
    """Return how far each loss of each segment is from that of the uninterrupted run."""
    wanted = {found.step: found for found in whole.steps()}
    gaps = []
    for segment in segments:
        for found in segment.steps():
            if found.step in wanted:
                apart = relative(found.loss, wanted[found.step].loss)
                gaps.append(Gap(kind="loss", name="", step=found.step, relative=apart, limit=limit, between=BETWEEN))
    return gaps


def relative(found: float, wanted: float) -> float:
    """Return the difference over the value; infinite where only one of the two is a number."""
    if math.isnan(found) or math.isnan(wanted):
        return 0.0 if math.isnan(found) and math.isnan(wanted) else math.inf
    if not wanted:
        return math.inf if found else 0.0
    return abs(found - wanted) / abs(wanted)


@dataclass(frozen=True)
class Divergence:
    """Which segment differs from the uninterrupted run, and why."""

    segment: Segment
    finding: Finding


def find_divergence(whole: Segment, segments: Sequence[Segment], limit: float, *, drawn_by: str) -> Divergence | None:
    """Return why the segments of a killed training differ from the uninterrupted run; None where they do not.

    `segments` are in order, the first from the start, the last to the end. `drawn_by` names the module that draws
    random numbers although every dropout is 0; empty if none does.
    """
    wanted = {found.step: found for found in whole.steps()}
    for segment in segments:
        finding = _wrong_start(segment) or next(_causes(segment, whole, wanted, limit, drawn_by=drawn_by), None)
        if finding is not None:
            return Divergence(segment, finding if segment is not segments[0] else _as_non_deterministic(finding))
    finding = _wrong_end(segments[-1], wanted)
    return None if finding is None else Divergence(segments[-1], finding)


def name_values(gaps: Sequence[Gap]) -> Finding | None:
    """Name what is not as it should be after the last step, though every loss is; None where all is."""
    off = [gap for gap in gaps if gap.beyond > 1]
    if not off:
        return None
    worst = max(off, key=lambda gap: gap.relative)
    cause = "buffers not restored" if all(gap.kind == "buffer" for gap in off) else "weights not restored"
    return Finding(
        cause=cause,
        evidence=f"every loss agrees; of the final values {len(off)} do not, {worst} most ({worst.relative:.1e})",
        parameter=worst.name,
    )


def _as_non_deterministic(finding: Finding) -> Finding:
    """Return the finding on the first segment, which ran on the same ranks from the start: kills do not explain it."""
    evidence = f"the same plan gives other numbers each time it is run ({finding.evidence})"
    return Finding(cause="non-deterministic operation", evidence=evidence, step=finding.step)


def _wrong_start(segment: Segment) -> Finding | None:
    steps = segment.steps()
    begun = steps[0].step if steps else None
    if begun == segment.begins:
        return None
    start = "with no step at all" if begun is None else f"with step {begun}"
    return Finding(
        cause="not resumed" if begun in {0, None} else "resumed from another checkpoint",
        evidence=f"{segment.label} began {start}; the newest whole checkpoint was that of step {segment.begins}",
        step=begun,
    )


def _wrong_end(segment: Segment, wanted: Mapping[int, SegmentStep]) -> Finding | None:
    steps = segment.steps()
    if steps[-1].step == max(wanted):
        return None
    return Finding(
        cause="steps missing",
        evidence=f"{segment.label} ended with step {steps[-1].step}, not {max(wanted)}",
        step=steps[-1].step,
    )


def _causes(
    segment: Segment, whole: Segment, wanted: Mapping[int, SegmentStep], limit: float, *, drawn_by: str
) -> Iterator[Finding]:
    """Yield what is wrong, step by step; within a step what may be the cause of the rest first."""
    for found in segment.steps():
        if found.step not in wanted:
            yield Finding(
                cause="steps added", evidence=f"{segment.label} continued to step {found.step}", step=found.step
            )
            continue
        right = wanted[found.step]
        if segment.layout.cp == whole.layout.cp and found.rows != right.rows:  # else a loss sees other slices of them
            yield _other_samples(segment, found, wanted)
        if relative(found.rate, right.rate) > limit:
            evidence = f"{segment.label}: step {found.step} has {found.rate:.6g}, not {right.rate:.6g}"
            yield Finding(cause="learning rate not restored", evidence=evidence, step=found.step)
        if segment.layout == whole.layout and found.draws != right.draws:
            yield _other_draws(segment, found, right)
        if relative(found.loss, right.loss) > limit:
            yield _other_loss(segment, found, same_layout=segment.layout == whole.layout, drawn_by=drawn_by)


def _other_samples(segment: Segment, found: SegmentStep, wanted: Mapping[int, SegmentStep]) -> Finding:
    right = wanted[found.step].rows
    instead = next((step for step, other in wanted.items() if other.rows == found.rows), None)
    if instead is not None:
        text = f"trained on the rows of step {instead}"
    else:
        lost, added = len(right - found.rows), len(found.rows - right)
        text = f"left {lost} of its {len(right)} rows out and took {added} others"
    return Finding(cause="other samples", evidence=f"{segment.label}: step {found.step} {text}", step=found.step)


def _other_draws(segment: Segment, found: SegmentStep, right: SegmentStep) -> Finding:
    ranks = tuple(rank for rank, draw in enumerate(found.draws) if draw != right.draws[rank])
    return Finding(
        cause="random numbers not restored",
        evidence=f"{segment.label}: on ranks {', '.join(map(str, ranks))} the number drawn after step {found.step} is"
        " another, at the same layout",
        step=found.step,
        ranks=ranks,
    )


def _other_loss(segment: Segment, found: SegmentStep, *, same_layout: bool, drawn_by: str) -> Finding:
    if drawn_by and not same_layout:
        return Finding(
            cause="random numbers",
            evidence=f"{drawn_by} draws some although every dropout is 0, and on another layout they start over:"
            f" {KEYED}",
            step=found.step,
        )
    at = f"{segment.label}, which began with step {segment.begins}"
    if found.step == segment.begins:
        return Finding(
            cause="weights not restored",
            evidence=f"{at}: its first loss is another, on the same rows",
            step=found.step,
        )
    return Finding(
        cause="optimizer not restored",
        evidence=f"{at}: its losses agree up to an update, and diverge in step {found.step}, on the same rows",
        step=found.step,
    )
