"""Verifies a job: trains it in one process and under each plan, and returns a verdict on each plan."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from shardwise.engines.backends import backend_row
from shardwise.engines.engine import engine_named, require_supported
from shardwise.errors import InputError
from shardwise.job import Job
from shardwise.launcher.local.function import run_forked
from shardwise.measurement.specs import require_backend
from shardwise.parity.compare import EXACT
from shardwise.parity.documents import check_documents
from shardwise.parity.investigate import Case, investigate
from shardwise.parity.kill import choose_kills
from shardwise.parity.masks import MaskReport
from shardwise.parity.noise import (
    computes_in_less,
    conditions,
    exact_counterpart,
    loss_band_gaps,
    may_be_noise,
    no_exact_cause,
    rounding_gaps,
    rounds_in,
)
from shardwise.parity.prepare import Preparation, job_name, job_source, source_job
from shardwise.parity.progress import StuckError
from shardwise.parity.reference import Variant
from shardwise.parity.resume import verify_resume
from shardwise.parity.runner import ParityRunner, preload
from shardwise.parity.spec import (
    NPROC,
    Exact,
    Finding,
    Gap,
    PlanVerdict,
    VerifyReport,
    VerifySpec,
    all_plans,
    changed_numbers,
    in_precision,
    measured_in,
    named_plans,
    one_process,
    settle_plan,
)
from shardwise.spec import signature_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardwise.job.job import Framework, Masks
    from shardwise.parity.capture import Traced
    from shardwise.parity.compare import Comparison, Limits
    from shardwise.plans import Plan

_MEASURES = {"fp64": "every value within 1e-09 in fp64", "fp32": "every value within 4 noise floors in fp32"}
_NOTES = {
    "drawn": "dropout modules and attributes such as drop_rate are 0, except in one step in which masks are compared",
    "keyed": "dropout is on, because its masks are keyed",
}


def verify(job: Job | VerifySpec | str | Path, plans: str | Sequence[str] = "all", **options: Any) -> VerifyReport:
    """Train a job under each plan and in one process, with the same weights and data, and compare all values.

    `job` is a Job or the path of a job file. `plans` is "all" or plans in the form SPEC+KEY=VALUE. `options` are fields
    of `VerifySpec`. Ranks are forks of this process on the CPU, and this process runs no tensor operations.
    """
    if isinstance(job, VerifySpec):
        return verify_job(job)
    if isinstance(job, Job):
        return verify_job(VerifySpec.of(job="", plans=plans, **options), job=job)
    return verify_job(VerifySpec.of(job=str(job), plans=plans, **options))


verify.__signature__ = signature_of(VerifySpec, "VerifyReport")  # type: ignore[attr-defined]


def verify_job(
    spec: VerifySpec, *, job: Job | None = None, on_verdict: Callable[[PlanVerdict], None] = lambda _: None
) -> VerifyReport:
    """Compare each plan with one process and return the report; `job` replaces the job file.

    With `--plans all`, a plan that does not support the job is not a failure. With `spec.resume`, a run of
    each plan is killed and resumed, also on other ranks under the next plan, and compared with an uninterrupted run.
    """
    source, plan_settings = job_source(spec, job)
    named = named_plans(spec.plans, plan_settings)
    nproc, steps = spec.nproc or NPROC, spec.num_steps
    if spec.resume:
        choose_kills("", steps)  # raises if there are too few steps
    if backend_row(spec.backend).is_rare:
        require_backend(spec.backend)
    preload()
    # In a fork: a job file may run tensor operations when it is loaded, and this process must stay able to fork.
    facts = run_forked(lambda _: _facts(source_job(source)), 1, timeout_s=spec.timeout_s)[0]
    batch_size, masks, framework = facts
    engine_named(framework).require()
    names = all_plans(nproc) if named is None else named
    if named is not None:
        _check_plans(names, batch_size=batch_size, nproc=nproc, framework=framework)
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="shardwise-verify-") as folder:
        runner = ParityRunner(
            preparation=Preparation(source=source, steps=steps, shrink=spec.shrink),
            batch_size=batch_size,
            folder=Path(folder),
            timeout_s=spec.timeout_s,
            backend=spec.backend,
            framework=framework,
        )
        precision, notes = runner.exact(spec.precision)
        one = runner.one(precision).traced[0]
        preload(one.imported)
        if one.is_packed:
            verdicts.append(_verify_documents(runner, precision))
            on_verdict(verdicts[-1])
        for name in names:
            began = time.perf_counter()
            verdict = verify_plan(runner, name, nproc, precision, resumed_as=names if spec.resume else None)
            if named is None and verdict.status == "refused":
                verdict = msgspec.structs.replace(verdict, status="does not apply")
            verdicts.append(msgspec.structs.replace(verdict, seconds=time.perf_counter() - began))
            on_verdict(verdicts[-1])
    return VerifyReport.of(
        verdicts,
        job=job_name(source),
        nproc=nproc,
        steps=steps,
        precision=precision,
        beside="an uninterrupted run" if spec.resume else "one process",
        notes=(_NOTES[masks], *_backend_notes(spec.backend), *notes, *_coverage(one, batch_size), *one.remarks),
    )


def _verify_documents(runner: ParityRunner, precision: Exact) -> PlanVerdict:
    """Return the verdict on the documents of packed rows in one process."""
    began = time.perf_counter()
    plan = one_process(runner.batch_size, dtype=precision, framework=runner.framework)
    preparation, folder = runner.preparation, runner.folder
    verdict = runner.on_ranks(lambda world: check_documents(world, preparation, plan), plan, folder)[0]
    return msgspec.structs.replace(verdict, seconds=time.perf_counter() - began)


def _coverage(one: Traced, batch_size: int) -> tuple[str, ...]:
    """Return a note if no step had a partial batch, or if no full batch followed a partial one."""
    shorts = [step for step, rows in enumerate(one.rows) if len(rows) < batch_size]
    if batch_size == 1:
        return ()
    if not shorts:
        return ("no step had a partial batch: the training data is a stream, or only one step was trained",)
    if all(step in shorts for step in range(shorts[0], len(one.rows))):
        return ("no full step followed a partial one, so the state after a partial step was not verified",)
    return ()


def _backend_notes(backend: str) -> tuple[str, ...]:
    if not backend_row(backend).starts_by_mpirun:
        return ()
    return (f"plans on several ranks ran over {backend}, started by mpirun",)


def _check_plans(names: Sequence[str], *, batch_size: int, nproc: int, framework: Framework) -> None:
    """Raise InputError for plans that cannot run, before any process starts, and preload the modules of engines."""
    for name in names:
        plan = settle_plan(name, batch_size=batch_size, nproc=nproc, framework=framework)
        engine = engine_named(plan.engine)
        engine.check(plan)
        engine.require()
        engine.preload()


def _facts(job: Job) -> tuple[int, Masks, Framework]:
    return job.batch_size, job.masks, job.engine


def verify_plan(
    runner: ParityRunner, name: str, nproc: int, precision: Exact, *, resumed_as: Sequence[str] | None = None
) -> PlanVerdict:
    """Train under a plan and return the verdict, also on errors; if `resumed_as` lists plans, verify exact resume."""
    try:
        plan = settle_plan(name, batch_size=runner.batch_size, nproc=nproc, framework=runner.framework)
        require_supported(plan)
        precision = measured_in(plan, precision)
        changes = changed_numbers(plan, has_batch_norm=runner.one(precision).traced[0].has_batch_norm)
        if resumed_as is not None:
            _require_exact(changes)
            return verify_resume(runner, name, plan, resumed_as, precision)
        if changes:
            return _verify_by_band(runner, name, plan, changes)
        return _verify_by_value(runner, name, in_precision(plan, precision), precision)
    except InputError as error:
        return PlanVerdict(plan=name, status="refused", reason=str(error), code=error.code)
    except StuckError as error:
        ranks = tuple(each.rank for each in error.stuck)
        return PlanVerdict(
            plan=name, status="failed", findings=(Finding(cause="hang", evidence=str(error), ranks=ranks),)
        )
    except Exception as error:  # noqa: BLE001 - a plan that crashes has failed, and the other plans still run
        return PlanVerdict(plan=name, status="failed", reason=_crash_text(error))


def _require_exact(changes: dict[str, float]) -> None:
    if changes:
        raise InputError(
            f"the plan {' and '.join(changes)}, so it is compared by a loss band, which a resumed run cannot be",
            code="verify.plan-not-exact",
            fix="use an exact plan such as ddp or zero3 with --resume",
        )


def _crash_text(error: Exception) -> str:
    """Return the error of a rank and its location in one line."""
    message = (str(error).strip().splitlines() or [""])[0]
    lines = [line.strip() for note in getattr(error, "__notes__", []) for line in note.splitlines()]
    frames = [line for line in lines if line.startswith("File ")]
    ours = [line for line in frames if "site-packages" not in line]
    places = ours or frames or [line for line in lines if line.startswith("last output")]
    return f"a rank raised {type(error).__name__}: {message}" + (f" ({places[-1]})" if places else "")


def _verify_by_value(runner: ParityRunner, name: str, plan: Plan, precision: Exact) -> PlanVerdict:
    """Compare all values of a plan with one process, and find the cause if a value differs."""
    variant = _twin(runner, plan, precision)
    record = runner.run(plan)
    comparison, limits = runner.compare_with_one(record, runner.one(precision, variant), precision)
    if precision == "fp64" and _casts_inside(runner, comparison):
        record.discard()
        verdict = _verify_by_value(runner, name, in_precision(plan, "fp32"), "fp32")
        note = "; not in fp64, in which one process differs from itself because the model casts to a lower precision"
        return msgspec.structs.replace(verdict, measure=verdict.measure + note)
    masks = MaskReport()
    if comparison.first is None:
        masks = _compare_masks(runner, plan, precision)
        findings = [*not_applied(plan, record.traced), *masks.findings]
    elif not engine_named(plan.engine).has_plain_reference:
        evidence = f"{comparison.first} diverged first; only the causes in torch models are diagnosed"
        findings = [Finding(cause="not known", evidence=evidence)]
    else:
        case = Case(plan=plan, precision=precision, twin=variant, record=record, comparison=comparison)
        findings = investigate(runner, case)
    record.discard()
    return PlanVerdict(
        plan=name,
        status="failed" if findings else "passed",
        measure=_measure(precision, limits) + masks.note,
        left_out=limits.left_out,
        worst=comparison.worst,
        first=comparison.first,
        findings=tuple(findings),
    )


def _casts_inside(runner: ParityRunner, comparison: Comparison) -> bool:
    """Return whether rounding in a model that casts to a lower precision can explain the differences in fp64."""
    first = comparison.first
    return first is not None and may_be_noise(first) and computes_in_less(runner.noise("fp64"))


def _measure(precision: Exact, limits: Limits) -> str:
    """Return text about the limits of the compared values and about excluded values."""
    loosest = max(limits.kinds.values())
    if precision == "fp64" and loosest > EXACT:
        return f"every value within 4 noise floors in fp64 (at most {loosest:.1e}){conditions(limits)}"
    return _MEASURES[precision] + conditions(limits)


def _compare_masks(runner: ParityRunner, plan: Plan, precision: Exact) -> MaskReport:
    """Compare dropout masks in an extra step with dropout on, if dropout was set to 0 in the other steps."""
    has_peers = plan.layout.world_size > 1 and engine_named(plan.engine).has_plain_reference
    if not has_peers or not runner.one(precision).traced[0].silenced:
        return MaskReport()
    return runner.compare_masks(plan)


def not_applied(plan: Plan, traced: Sequence[Traced]) -> list[Finding]:
    """Return findings about mesh axes that should shard the model but replicate it, which equal values do not show."""
    shards_weights = plan.zero == 3 or (plan.zero == 2 and engine_named(plan.engine).uses_fsdp)
    findings = []
    for axis in ("pp", "tp", "shard"):
        shards = axis != "shard" or shards_weights
        if shards and _all_alike(traced, plan.layout.groups(axis)[0]):
            evidence = f"{axis} is {getattr(plan.layout, axis)}, but all ranks along it have the same parameters"
            findings.append(Finding(cause="plan not applied", evidence=evidence))
    if plan.zero and not shards_weights and any(each.optimized >= each.num_parameters for each in traced):
        evidence = f"zero is {plan.zero}, but the optimizer states are not sharded"
        findings.append(Finding(cause="plan not applied", evidence=evidence))
    return findings


def _all_alike(traced: Sequence[Traced], ranks: Sequence[int]) -> bool:
    return len(ranks) > 1 and len({tuple(traced[rank].parameters[0]) for rank in ranks}) == 1


def _twin(runner: ParityRunner, plan: Plan, precision: Exact) -> Variant:
    """Return how one process must group its rows so that batch norms compute the same statistics as the plan."""
    has_batch_norm = runner.one(precision).traced[0].has_batch_norm
    if has_batch_norm and plan.accumulation > 1:
        return Variant(dp_size=plan.layout.dp, accumulation=plan.accumulation)
    return Variant()


def _verify_by_band(runner: ParityRunner, name: str, plan: Plan, changes: dict[str, float]) -> PlanVerdict:
    """Compare losses with a band, and gradients and updates with the measured rounding of one process."""
    steps = _band_steps(plan, runner.preparation.steps)
    twin = _twin(runner, plan, "fp32")
    expected = runner.one("fp32", twin, steps=steps)
    record = runner.run(plan, steps=steps)
    band = sum(changes.values())
    gaps = loss_band_gaps(record, expected, band)
    measure = f"losses within {band:.0%} of fp32, because the plan {' and '.join(changes)}"
    dtype = rounds_in(plan)
    if dtype is not None:
        lower = runner.one_in(plan, twin)
        gaps += runner.in_fork(lambda: rounding_gaps(record, expected, lower, plan))
        measure += f"; gradients and updates as close to fp32 as one process in {dtype}"
    record.discard()
    first = next((gap for gap in gaps if not gap.beyond <= 1), None)
    findings: Sequence[Finding] = ()
    if first is None:
        masks = _compare_masks(runner, plan, "fp32")
        findings = masks.findings
        measure += masks.note
    elif dtype is not None:
        findings = _exact_causes(runner, name, plan, first, dtype)
    return PlanVerdict(
        plan=name,
        status="failed" if first is not None or findings else "passed",
        measure=measure,
        worst=max(gaps, key=lambda gap: gap.beyond),
        first=first,
        findings=tuple(findings),
    )


def _band_steps(plan: Plan, steps: int) -> int:
    """Return the number of steps for the comparison of losses with a band."""
    if plan.communication.compression == "powersgd":
        return max(steps, 14)  # PowerSGD does not compress gradients in its first ten steps
    if plan.communication.sync_every > 1:
        return min(steps, plan.communication.sync_every + 1)  # replicas diverge further in every round
    return steps


def _exact_causes(runner: ParityRunner, name: str, plan: Plan, first: Gap, dtype: str) -> list[Finding]:
    """Find the cause in the plan without lower precision, in which values can be compared."""
    precision = measured_in(plan, "fp64")
    exact = _verify_by_value(runner, name, exact_counterpart(plan, precision), precision)
    return list(exact.findings) or [no_exact_cause(first, dtype)]
