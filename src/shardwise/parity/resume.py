"""Verifies exact resume: kills a run, resumes it, also on other ranks, and compares it with an uninterrupted run."""

from __future__ import annotations

import math
import shutil
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.engines.engine import require_supported
from shardwise.errors import InputError, PlanError, RankFailedError, TrainingError
from shardwise.parity.compare import relative, relative_gaps
from shardwise.parity.kill import Kill, SeenSamples, SegmentFolder, choose_kills, run_segment
from shardwise.parity.noise import is_comparable
from shardwise.parity.spec import KEYED, RANDOM, Finding, Gap, PlanVerdict, changed_numbers, in_precision, settle_plan
from shardwise.runs.console import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardwise.layout import Layout
    from shardwise.parity.compare import Limits
    from shardwise.parity.runner import ParityRunner
    from shardwise.parity.spec import Exact, Kind
    from shardwise.plans import Plan


_KINDS: tuple[Kind, ...] = ("parameter", "buffer")


def verify_resume(runner: ParityRunner, name: str, plan: Plan, names: Sequence[str], precision: Exact) -> PlanVerdict:
    """Compare an uninterrupted run of `plan` with one that is killed and resumed twice, the last time on other ranks.

    Each segment runs on newly forked ranks, the last one under the next of `names`. This process runs no tensor ops.
    """
    kills = choose_kills(name, runner.preparation.steps)
    one = runner.one(precision).traced[0]
    plan = in_precision(plan, precision)
    targets = other_worlds(runner, name, plan, names, has_batch_norm=one.has_batch_norm)
    limits = runner.limits(precision)
    ranks = counted(plan.layout.world_size, "rank")
    here = f"{name} on {ranks}"
    with tempfile.TemporaryDirectory(dir=runner.folder) as folder:
        segments = _SegmentRunner(runner=runner, folder=Path(folder))
        whole = segments.run("whole", here, plan, saves=False)
        first = segments.run("first", here, plan, kill=kills[0])
        # The first kill precedes the checkpoint of its step, the second interrupts the save of its step.
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
        measure=f"killed {kills[0]} and {kills[1]}, resumed on {ranks}, then as {last.label}",
        worst=max(gaps, key=lambda gap: gap.beyond),
        first=next((gap for gap in gaps if gap.beyond > 1), None),
        findings=() if finding is None else (finding,),
    )


def value_gaps(folder: SegmentFolder, expected: SegmentFolder, limits: Limits) -> list[Gap]:
    """Return the gaps of the final parameters and buffers; reads the files of both segments."""
    found, wanted = folder.values(), expected.values()
    masks = {"parameter": limits.masks(), "buffer": {}}
    return [
        Gap(kind=kind, name=name, step=None, relative=relative, limit=limits.of(kind, name), between=BETWEEN)
        for kind in _KINDS
        for name, relative in relative_gaps(found[kind], wanted[kind], masks[kind]).items()
    ]


def other_worlds(
    runner: ParityRunner, name: str, plan: Plan, names: Sequence[str], *, has_batch_norm: bool
) -> list[tuple[str, Plan]]:
    """Return the plans to resume with and their labels, in order of preference: the next of `names`, `name`, ddp."""
    here = plan.layout.world_size
    size = here // 2 or 2
    following = names[(names.index(name) + 1) % len(names)]
    choices = [(following, size), (name, size), ("ddp", size), ("ddp", min(size, 1))]
    if size == 1 and following != name:
        choices.insert(0, (following, here))
    found = {}
    for each, on in dict.fromkeys(choices):
        try:
            other = _settle_on(runner, each, on, usual=here)
            require_supported(other)
        except InputError:
            continue
        if on == here and other.layout.dp > 1:
            continue  # only plans that do not shard anything on one rank, such as tp, keep all ranks
        regrouped = has_batch_norm and max(plan.accumulation, other.accumulation) > 1
        if not regrouped and not changed_numbers(other, has_batch_norm=has_batch_norm):
            found[f"{each} on {counted(other.layout.world_size, 'rank')}"] = other
    if not found:
        raise PlanError(
            "batch statistics depend on the micro-batches, which change with the number of ranks",
            code="verify.batch-statistics",
            fix="set accumulation=1 in the plan, as in ddp+accumulation=1",
        )
    return list(found.items())


def _settle_on(runner: ParityRunner, name: str, size: int, *, usual: int) -> Plan:
    """Return the plan `name` resolved for `size` ranks, or resolved for `usual` ranks and refitted to `size`."""
    settle = partial(settle_plan, name, batch_size=runner.batch_size, framework=runner.framework)
    try:
        return settle(nproc=size)
    except InputError:
        return settle(nproc=usual).refit(size)


@dataclass(frozen=True, kw_only=True)
class _SegmentRunner:
    """Runs the segments of a plan, which share a checkpoint directory."""

    runner: ParityRunner
    folder: Path

    def at(self, name: str) -> SegmentFolder:
        """Return the folder of a segment."""
        return SegmentFolder(self.folder / name)

    def run(
        self, name: str, label: str, plan: Plan, *, begins: int = 0, saves: bool = True, kill: Kill | None = None
    ) -> Segment:
        """Train from the newest checkpoint, expected to be that of step `begins`, to the end or the kill."""
        here = self.at(name)
        shutil.rmtree(here.path, ignore_errors=True)  # files of a previous plan that does not support the job
        here.path.mkdir()
        checkpoints = self.folder / "checkpoints" if saves else None
        limit = self.runner.pause_limit(plan)
        try:
            self.runner.on_ranks(
                lambda world: run_segment(world, self.runner.preparation, plan, here, checkpoints, kill, limit),
                plan,
                here.path,
                label=label,
            )
        except RankFailedError:
            if not here.killed.exists():
                raise
        else:
            if kill is not None:
                raise TrainingError(f"{label} exited before it was killed {kill}", code="verify.not-killed")
        return Segment(label=label, layout=plan.layout, begins=begins, ranks=here.read(plan.layout.world_size))

    def run_first(self, targets: Sequence[tuple[str, Plan]], precision: Exact, *, begins: int) -> tuple[Plan, Segment]:
        """Resume with the first plan that supports the job and train to the end; return the plan and the segment."""
        first_error: InputError | None = None
        for label, target in targets:
            plan = in_precision(target, precision)
            try:
                return plan, self.run("last", label, plan, begins=begins)
            except InputError as error:
                first_error = first_error or error
        raise first_error or PlanError("no plan supports the job at another world size", code="verify.no-other-plan")

    def find_plan_error(self, whole: Segment, label: str, plan: Plan, limit: float) -> Finding | None:
        """Return a finding if the losses of a plan differ from `whole` even without a kill."""
        alone = self.run("alone", label, plan, saves=False)
        gap = next((gap for gap in loss_gaps(whole, [alone], limit) if gap.beyond > 1), None)
        if gap is None:
            return None
        evidence = f"{label} differs even without a kill, first in the {gap} ({gap.relative:.1e}): verify it separately"
        return Finding(cause="another plan, other numbers", evidence=evidence, step=gap.step)


# Comparison of the segments of a training with an uninterrupted run.


BETWEEN = "the resumed run and the uninterrupted one"


@dataclass(frozen=True, kw_only=True)
class SegmentStep:
    """The recordings of one step of a segment, combined over all ranks."""

    step: int
    loss: float
    rows: frozenset[str]
    """Digests of the rows; a set, because padding and the pipeline probe repeat rows of the step."""
    rate: float
    draws: tuple[float, ...]
    """Random numbers by rank."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """The recording of a run from its first step to its end or its kill."""

    label: str
    """Name in findings, such as "zero3 on 4 ranks"."""
    layout: Layout
    begins: int
    """The expected first step."""
    ranks: Sequence[Sequence[SeenSamples]]

    def steps(self) -> list[SegmentStep]:
        """Return the steps that all ranks have recorded; before a kill, some ranks may record one more step."""
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
    """Return the gaps between the losses of the segments and those of the uninterrupted run."""
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
    """The segment that differs from the uninterrupted run, and the finding."""

    segment: Segment
    finding: Finding


def find_divergence(whole: Segment, segments: Sequence[Segment], limit: float, *, drawn_by: str) -> Divergence | None:
    """Return the first divergence of the segments of a killed run from the uninterrupted run, or None.

    `segments` are in order, from the first to the last step. `drawn_by` is the name of the module that samples random
    numbers although dropout modules are set to 0; empty if no module does.
    """
    wanted = {found.step: found for found in whole.steps()}
    for segment in segments:
        finding = _wrong_start(segment) or next(_causes(segment, whole, wanted, limit, drawn_by=drawn_by), None)
        if finding is not None:
            return Divergence(segment, finding if segment is not segments[0] else _as_non_deterministic(finding))
    finding = _wrong_end(segments[-1], wanted)
    return None if finding is None else Divergence(segments[-1], finding)


def name_values(gaps: Sequence[Gap]) -> Finding | None:
    """Return a finding about final values that differ although all losses are equal; None if none differ."""
    off = [gap for gap in gaps if gap.beyond > 1]
    if not off:
        return None
    worst = max(off, key=lambda gap: gap.relative)
    cause = "buffers not restored" if all(gap.kind == "buffer" for gap in off) else "weights not restored"
    return Finding(
        cause=cause,
        evidence=f"all losses agree, but {len(off)} final values differ, {worst} most ({worst.relative:.1e})",
        parameter=worst.name,
    )


def _as_non_deterministic(finding: Finding) -> Finding:
    """Return the finding for a divergence of the first segment, which no kill precedes."""
    evidence = f"repeated runs of the same plan have different results ({finding.evidence})"
    return Finding(cause="non-deterministic operation", evidence=evidence, step=finding.step)


def _wrong_start(segment: Segment) -> Finding | None:
    steps = segment.steps()
    begun = steps[0].step if steps else None
    if begun == segment.begins:
        return None
    start = "without a step" if begun is None else f"with step {begun + 1}"
    return Finding(
        cause="not resumed" if begun in {0, None} else "resumed from another checkpoint",
        evidence=f"{segment.label} began {start}; the newest intact checkpoint was that of step {segment.begins}",
        step=begun,
    )


def _wrong_end(segment: Segment, wanted: Mapping[int, SegmentStep]) -> Finding | None:
    steps = segment.steps()
    if steps[-1].step == max(wanted):
        return None
    return Finding(
        cause="steps missing",
        evidence=f"{segment.label} ended with step {steps[-1].step + 1}, not {max(wanted) + 1}",
        step=steps[-1].step,
    )


def _causes(
    segment: Segment, whole: Segment, wanted: Mapping[int, SegmentStep], limit: float, *, drawn_by: str
) -> Iterator[Finding]:
    """Yield findings step by step; within a step, causes precede their consequences."""
    for found in segment.steps():
        if found.step not in wanted:
            yield Finding(
                cause="steps added", evidence=f"{segment.label} continued to step {found.step + 1}", step=found.step
            )
            continue
        right = wanted[found.step]
        if segment.layout.cp == whole.layout.cp and found.rows != right.rows:  # slices of rows depend on cp
            yield _other_samples(segment, found, wanted)
        if relative(found.rate, right.rate) > limit:
            evidence = f"{segment.label}: step {found.step + 1} has {found.rate:.6g}, expected {right.rate:.6g}"
            yield Finding(cause="learning rate not restored", evidence=evidence, step=found.step)
        if segment.layout == whole.layout and found.draws != right.draws:
            yield _other_draws(segment, found, right)
        if relative(found.loss, right.loss) > limit:
            yield _other_loss(segment, found, same_layout=segment.layout == whole.layout, drawn_by=drawn_by)


def _other_samples(segment: Segment, found: SegmentStep, wanted: Mapping[int, SegmentStep]) -> Finding:
    right = wanted[found.step].rows
    instead = next((step for step, other in wanted.items() if other.rows == found.rows), None)
    if instead is not None:
        text = f"trained on the rows of step {instead + 1}"
    else:
        lost, added = len(right - found.rows), len(found.rows - right)
        text = f"skipped {lost} of its {len(right)} rows and used {added} others"
    return Finding(cause="other samples", evidence=f"{segment.label}: step {found.step + 1} {text}", step=found.step)


def _other_draws(segment: Segment, found: SegmentStep, right: SegmentStep) -> Finding:
    ranks = tuple(rank for rank, draw in enumerate(found.draws) if draw != right.draws[rank])
    return Finding(
        cause="random numbers not restored",
        evidence=f"{segment.label}: on ranks {', '.join(map(str, ranks))} the random number sampled after step"
        f" {found.step + 1} differs although the layout is the same",
        step=found.step,
        ranks=ranks,
    )


def _other_loss(segment: Segment, found: SegmentStep, *, same_layout: bool, drawn_by: str) -> Finding:
    if drawn_by and not same_layout:
        return Finding(
            cause=RANDOM,
            evidence=f"{drawn_by} samples random numbers, which change with the layout: {KEYED}",
            step=found.step,
        )
    at = f"{segment.label}, which began with step {segment.begins + 1}"
    if found.step == segment.begins:
        return Finding(
            cause="weights not restored",
            evidence=f"{at}: its first loss differs although the rows are the same",
            step=found.step,
        )
    return Finding(
        cause="optimizer not restored",
        evidence=f"{at}: its losses agree at first, but diverge in step {found.step + 1} on the same rows",
        step=found.step,
    )
