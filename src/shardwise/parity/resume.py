"""Exact resume on the user's own job: killed, resumed, killed, resumed elsewhere, beside an uninterrupted run."""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.errors import InputError, PlanError, RankFailedError, TrainingError
from shardwise.parallel.support import require_supported
from shardwise.parity.compare import relative, relative_gaps
from shardwise.parity.kill import Kill, SeenSamples, SegmentFolder, choose_kills, run_segment
from shardwise.parity.noise import is_comparable
from shardwise.parity.plans import changed_numbers, in_precision, settle_plan
from shardwise.parity.runner import on_ranks
from shardwise.parity.spec import KEYED, Finding, Gap, PlanVerdict

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardwise.layout import Layout
    from shardwise.parity.compare import Limits
    from shardwise.parity.plans import Exact
    from shardwise.parity.runner import ParityRunner
    from shardwise.parity.spec import Kind
    from shardwise.plans import Plan


_KINDS: tuple[Kind, ...] = ("parameter", "buffer")


def verify_resume(runner: ParityRunner, name: str, plan: Plan, names: Sequence[str], precision: Exact) -> PlanVerdict:
    """Train `plan` uninterrupted; then killed, resumed, killed, and resumed on other ranks as the next of `names`.

    Each segment runs on forked ranks of its own; this process runs no tensor operation.
    """
    kills = choose_kills(name, runner.preparation.steps)
    one = runner.one(precision).traced[0]
    plan = in_precision(plan, precision)
    targets = _other_worlds(runner, name, plan, names, has_batch_norm=one.has_batch_norm)
    limits = runner.limits(precision)
    here = f"{name} on {_ranks(plan)}"
    with tempfile.TemporaryDirectory(dir=runner.folder) as folder:
        segments = _SegmentRunner(runner=runner, folder=Path(folder))
        whole = segments.run("whole", here, plan, saves=False)
        first = segments.run("first", here, plan, kill=kills[0])
        # The first kill comes before the checkpoint of its step, the second tears the one that it names.
        second = segments.run("second", f"{here}, resumed", plan, begins=kills[0].step, kill=kills[1])
        target, last = segments.run_first(targets, precision, begins=kills[1].step - 1)
        gaps = loss_gaps(whole, [first, second, last], limits.of("loss"))
        divergence = find_divergence(whole, [first, second, last], limits.of("loss"), drawn_by=one.drawn_by)
        finding = None if divergence is None else divergence.finding
        if divergence is None:
            final = runner.in_fork(lambda: value_gaps(segments.at("last"), segments.at("whole"), limits))
            noise = limits
            if any(gap.beyond > 1 for gap in final) and is_comparable(runner.noise(precision)):
                noise = runner.noise(precision)
                final = runner.in_fork(lambda: value_gaps(segments.at("last"), segments.at("whole"), noise))
            finding = name_values(final)
            gaps += final
        elif divergence.segment is last and not one.drawn_by:
            finding = segments.find_plan_error(whole, last.label, target, limits.of("loss")) or finding
    return PlanVerdict(
        plan=name,
        status="passed" if finding is None else "failed",
        measure=f"killed {kills[0]} and {kills[1]}, resumed on {_ranks(plan)}, then as {last.label}",
        worst=max(gaps, key=lambda gap: gap.beyond),
        first=next((gap for gap in gaps if gap.beyond > 1), None),
        findings=() if finding is None else (finding,),
    )


def value_gaps(folder: SegmentFolder, expected: SegmentFolder, limits: Limits) -> list[Gap]:
    """Return how far final parameters and buffers are apart; reads the files of both segments."""
    found, wanted = folder.values(), expected.values()
    masks = {"parameter": limits.masks(), "buffer": {}}
    return [
        Gap(kind=kind, name=name, step=None, relative=relative, limit=limits.of(kind, name), between=BETWEEN)
        for kind in _KINDS
        for name, relative in relative_gaps(found[kind], wanted[kind], masks[kind]).items()
    ]


def _other_worlds(
    runner: ParityRunner, name: str, plan: Plan, names: Sequence[str], *, has_batch_norm: bool
) -> list[tuple[str, Plan]]:
    """Return plans to continue under with their labels, best first: the next one named, this one, plain replicas."""
    here = plan.layout.world_size
    size = here // 2 or 2
    following = names[(names.index(name) + 1) % len(names)]
    found = {}
    for each, on in dict.fromkeys([(following, size), (name, size), ("ddp", size), ("ddp", min(size, 1))]):
        try:
            other = _settle_on(runner, each, on, usual=here)
            require_supported(other)
        except InputError:
            continue
        regrouped = has_batch_norm and max(plan.accumulation, other.accumulation) > 1
        if not regrouped and not changed_numbers(other, has_batch_norm=has_batch_norm):
            found[f"{each} on {_ranks(other)}"] = other
    if not found:
        raise PlanError(
            "batch statistics belong to a micro-batch, and on other ranks the batch is split into others",
            code="verify.batch-statistics",
            fix="use accumulation=1",
        )
    return list(found.items())


def _settle_on(runner: ParityRunner, name: str, size: int, *, usual: int) -> Plan:
    """Settle a plan on another number of ranks: by its name, or refitted from the usual number."""
    settle = partial(settle_plan, name, batch_size=runner.batch_size, framework=runner.framework)
    try:
        return settle(nproc=size)
    except InputError:
        return settle(nproc=usual).refit(size)


def _ranks(plan: Plan) -> str:
    size = plan.layout.world_size
    return f"{size} ranks" if size > 1 else "1 rank"


@dataclass(frozen=True, kw_only=True)
class _SegmentRunner:
    """Runs the segments of one plan, which share a folder of checkpoints."""

    runner: ParityRunner
    folder: Path

    def at(self, name: str) -> SegmentFolder:
        """Return the folder of a segment."""
        return SegmentFolder(self.folder / name)

    def run(
        self, name: str, label: str, plan: Plan, *, begins: int = 0, saves: bool = True, kill: Kill | None = None
    ) -> Segment:
        """Train from the newest checkpoint, which should be that of step `begins`, to the end or the kill."""
        here = self.at(name)
        here.path.mkdir(exist_ok=True)
        checkpoints = self.folder / "checkpoints" if saves else None
        size = plan.layout.world_size
        try:
            on_ranks(
                lambda world: run_segment(world, self.runner.preparation, plan, here, checkpoints, kill),
                size,
                timeout_s=self.runner.timeout_s,
                backend=self.runner.backend,
            )
        except RankFailedError:
            if not here.killed.exists():
                raise
        else:
            if kill is not None:
                raise TrainingError(
                    f"{label} ended by itself; it should have been killed {kill}", code="verify.not-killed"
                )
        return Segment(label=label, layout=plan.layout, begins=begins, ranks=here.read(size))

    def run_first(self, targets: Sequence[tuple[str, Plan]], precision: Exact, *, begins: int) -> tuple[Plan, Segment]:
        """Continue to the end under the first of the plans that fits the job."""
        refused: InputError | None = None
        for label, target in targets:
            plan = in_precision(target, precision)
            try:
                return plan, self.run("last", label, plan, begins=begins)
            except InputError as error:
                refused = refused or error
        raise refused or PlanError("no plan fits to continue under", code="verify.no-other-plan")

    def find_plan_error(self, whole: Segment, label: str, plan: Plan, limit: float) -> Finding | None:
        """Return a finding where a plan gives other numbers even without a kill."""
        alone = self.run("alone", label, plan, saves=False)
        gap = next((gap for gap in loss_gaps(whole, [alone], limit) if gap.beyond > 1), None)
        if gap is None:
            return None
        evidence = f"{label} differs even without a kill, first in the {gap} ({gap.relative:.1e}): verify it alone"
        return Finding(cause="another plan, other numbers", evidence=evidence, step=gap.step)


# The segments of one training beside an uninterrupted run: where they diverge, and why.


BETWEEN = "the resumed run and the uninterrupted one"


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
        reporting = [each for rank, each in enumerate(seen) if self.layout.reports_loss(rank)]
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
