"""Exact resume on the user's own job: killed, resumed, killed, resumed elsewhere, beside an uninterrupted run."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.errors import InputError, PlanError, RankFailedError, TrainingError
from shardwise.parallel.support import require_supported
from shardwise.parity.compare import relative_gaps
from shardwise.parity.kill import Kill, SegmentFolder, choose_kills, run_segment
from shardwise.parity.noise import is_comparable
from shardwise.parity.plans import changed_numbers, in_precision, settle_plan
from shardwise.parity.runner import on_ranks
from shardwise.parity.segments import BETWEEN, Segment, find_divergence, loss_gaps, name_values
from shardwise.parity.spec import Finding, Gap, PlanVerdict

if TYPE_CHECKING:
    from collections.abc import Sequence

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
