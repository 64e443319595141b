"""The lives of one training, killed and resumed, beside a run that nobody stopped: where they part, and why."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from shardwise.parity.spec import KEYED, Finding, Gap

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardwise.layout import Layout

BETWEEN = "the resumed run and the one that nobody stopped"


class SeenSamples(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank saw of one step."""

    step: int
    loss: float | None
    """This rank's share of the mean loss; None for what is no number."""
    rows: tuple[str, ...]
    """Digests of the rows in its loss."""
    rate: float
    """Learning rate."""
    draw: float
    """A random number, drawn after the step."""


@dataclass(frozen=True, kw_only=True)
class LifeMoment:
    """One step of one life, over all ranks."""

    step: int
    loss: float
    rows: frozenset[str]
    """A set: a spare row, and a row that a pipeline is probed with, are rows of the step that are seen twice."""
    rate: float
    draws: tuple[float, ...]
    """By rank."""


@dataclass(frozen=True, kw_only=True)
class Life:
    """One run, from where it began to its end or its death."""

    words: str
    """Such as "zero3 on 4 ranks"."""
    layout: Layout
    begins: int
    """The step it had to begin with."""
    ranks: Sequence[Sequence[SeenSamples]]

    def moments(self) -> list[LifeMoment]:
        """Return the steps that every rank has seen; a kill lets some ranks see one more than others."""
        return [self._moment(seen) for seen in zip(*self.ranks, strict=False)]

    def _moment(self, seen: Sequence[SeenSamples]) -> LifeMoment:
        telling = [each for rank, each in enumerate(seen) if self.layout.tells_loss(rank)]
        return LifeMoment(
            step=seen[0].step,
            loss=sum(math.nan if each.loss is None else each.loss for each in telling),
            rows=frozenset(row for each in telling for row in each.rows),
            rate=seen[0].rate,
            draws=tuple(each.draw for each in seen),
        )


def loss_gaps(whole: Life, lives: Sequence[Life], limit: float) -> list[Gap]:
    """Return how far each loss of each life is from that of the run that nobody stopped."""
    wanted = {moment.step: moment for moment in whole.moments()}
    gaps = []
    for life in lives:
        for moment in life.moments():
            if moment.step in wanted:
                apart = relative(moment.loss, wanted[moment.step].loss)
                gaps.append(Gap(kind="loss", name="", step=moment.step, relative=apart, limit=limit, between=BETWEEN))
    return gaps


def relative(found: float, wanted: float) -> float:
    """Return the difference over the value; infinite where only one of the two is a number."""
    if math.isnan(found) or math.isnan(wanted):
        return 0.0 if math.isnan(found) and math.isnan(wanted) else math.inf
    if not wanted:
        return math.inf if found else 0.0
    return abs(found - wanted) / abs(wanted)


@dataclass(frozen=True)
class Parting:
    """Which life is not the run that nobody stopped, and why."""

    life: Life
    finding: Finding


def find_parting(whole: Life, lives: Sequence[Life], limit: float, *, drawn_by: str) -> Parting | None:
    """Return why the lives of a killed training are not the run that nobody stopped; None where they are.

    `lives` are in order, the first from the start, the last to the end. `drawn_by` names the module that draws
    random numbers although every dropout is 0; empty if none does.
    """
    wanted = {moment.step: moment for moment in whole.moments()}
    for life in lives:
        finding = _wrong_start(life) or next(_causes(life, whole, wanted, limit, drawn_by=drawn_by), None)
        if finding is not None:
            return Parting(life, finding if life is not lives[0] else _restless(finding))
    finding = _wrong_end(lives[-1], wanted)
    return None if finding is None else Parting(lives[-1], finding)


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


def _restless(finding: Finding) -> Finding:
    """What the first life does otherwise, on the same ranks and from the start, has nothing to do with kills."""
    evidence = f"the same plan gives other numbers each time it is run ({finding.evidence})"
    return Finding(cause="non-deterministic operation", evidence=evidence, step=finding.step)


def _wrong_start(life: Life) -> Finding | None:
    moments = life.moments()
    begun = moments[0].step if moments else None
    if begun == life.begins:
        return None
    words = "with no step at all" if begun is None else f"with step {begun}"
    return Finding(
        cause="not resumed" if begun in {0, None} else "resumed from another checkpoint",
        evidence=f"{life.words} began {words}; the newest whole checkpoint was that of step {life.begins}",
        step=begun,
    )


def _wrong_end(life: Life, wanted: Mapping[int, LifeMoment]) -> Finding | None:
    moments = life.moments()
    if moments[-1].step == max(wanted):
        return None
    return Finding(
        cause="steps missing",
        evidence=f"{life.words} ended with step {moments[-1].step}, not {max(wanted)}",
        step=moments[-1].step,
    )


def _causes(
    life: Life, whole: Life, wanted: Mapping[int, LifeMoment], limit: float, *, drawn_by: str
) -> Iterator[Finding]:
    """Yield what is wrong, step by step; within a step what may be the cause of the rest first."""
    for moment in life.moments():
        if moment.step not in wanted:
            yield Finding(cause="steps added", evidence=f"{life.words} went on to step {moment.step}", step=moment.step)
            continue
        right = wanted[moment.step]
        if life.layout.cp == whole.layout.cp and moment.rows != right.rows:  # else a loss sees other slices of them
            yield _other_samples(life, moment, wanted)
        if relative(moment.rate, right.rate) > limit:
            evidence = f"{life.words}: step {moment.step} has {moment.rate:.6g}, not {right.rate:.6g}"
            yield Finding(cause="learning rate not restored", evidence=evidence, step=moment.step)
        if life.layout == whole.layout and moment.draws != right.draws:
            yield _other_draws(life, moment, right)
        if relative(moment.loss, right.loss) > limit:
            yield _other_loss(life, moment, same_layout=life.layout == whole.layout, drawn_by=drawn_by)


def _other_samples(life: Life, moment: LifeMoment, wanted: Mapping[int, LifeMoment]) -> Finding:
    right = wanted[moment.step].rows
    instead = next((step for step, other in wanted.items() if other.rows == moment.rows), None)
    words = (
        f"trained on the rows of step {instead}"
        if instead is not None
        else f"left {len(right - moment.rows)} of its {len(right)} rows out and took {len(moment.rows - right)} others"
    )
    return Finding(cause="other samples", evidence=f"{life.words}: step {moment.step} {words}", step=moment.step)


def _other_draws(life: Life, moment: LifeMoment, right: LifeMoment) -> Finding:
    ranks = tuple(rank for rank, draw in enumerate(moment.draws) if draw != right.draws[rank])
    return Finding(
        cause="random numbers not restored",
        evidence=f"{life.words}: on ranks {', '.join(map(str, ranks))} the number drawn after step {moment.step} is"
        " another, at the same layout",
        step=moment.step,
        ranks=ranks,
    )


def _other_loss(life: Life, moment: LifeMoment, *, same_layout: bool, drawn_by: str) -> Finding:
    if drawn_by and not same_layout:
        return Finding(
            cause="random numbers",
            evidence=f"{drawn_by} draws some although every dropout is 0, and on another layout they begin anew:"
            f" {KEYED}",
            step=moment.step,
        )
    at = f"{life.words}, which began with step {life.begins}"
    if moment.step == life.begins:
        return Finding(
            cause="weights not restored",
            evidence=f"{at}: its first loss is another, on the same rows",
            step=moment.step,
        )
    return Finding(
        cause="optimizer not restored",
        evidence=f"{at}: its losses agree up to an update, and part in step {moment.step}, on the same rows",
        step=moment.step,
    )
