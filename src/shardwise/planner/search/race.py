"""The measured race of `--plan auto`: a few plans whose predicted times are close train some steps on the real device.

The time model does not know how well the compiler fuses a model. Predictions choose the layout, the precision and at
most five candidates with other options of speed (compilation, CUDA graph, fused loss, recompute, micro-batches); their
measured times choose between the candidates. A child process measures them (`race_process.py`). The invariant: a
candidate passes the rules of `train` and computes the same results as the predicted plan. Measurements are cached per
job, device and versions; a race that did not reach all candidates is continued by the next run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from shardwise.checkpoint.disk import replace_synced
from shardwise.engines.engine import engine_named
from shardwise.environment import cache_directory
from shardwise.errors import ShardwiseError
from shardwise.hardware.probe import driver_version, gpu_utilization, package_version
from shardwise.parallel.meta_model import structure
from shardwise.planner.cost.time import WAITING
from shardwise.planner.search.choices import RECOMPUTES, SPEED_OPTIONS, divisors
from shardwise.planner.search.question import FixedFields
from shardwise.planner.search.race_process import VERSION, RaceRecord, TimedPlan, run_race
from shardwise.planner.search.search import refused_by_rule
from shardwise.planner.search.speed import Measured, count_steps, decide, differing, explain_choice, is_capturable
from shardwise.planner.search.subject import job_question
from shardwise.planner.trace.trace import fingerprint
from shardwise.plans.toml import plan_to_toml
from shardwise.training.step.captured import sampled_forms
from shardwise.units import format_gb

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from pathlib import Path

    from shardwise.job import Job
    from shardwise.planner.search.question import Question
    from shardwise.planner.settle import Tuning
    from shardwise.plans.plan import Plan

MOST_CANDIDATES = 5
MOST_KINDS = 4
"""Candidates that differ in compilation or fused loss; the others have different micro-batches or recompute."""
KIND_ERROR = 0.4
"""Largest predicted excess over the fastest plan, as a fraction, of a candidate with another kind of compilation or of
loss: on an H200, blocks took 1.7 times as long as the whole GPT-2 124M in one graph, and 1.14 were predicted."""
SPLIT_ERROR = 0.1
"""The same of a candidate that differs in its micro-batches, recompute or CUDA graph only."""
MOST_UTILIZATION = 10
"""Percentage of time in which other processes may use the GPU before a race whose measurements are cached."""
LEAST_JOB_S = 1200.0
"""Predicted seconds of the shortest job for which plans are measured: a race takes one to two minutes."""


def tune_plan(job: Job, plan: Plan, tuning: Tuning, *, fixed: Collection[str]) -> Plan:
    """Return the plan with the options of the fastest measured candidate; `sources` has what each option gained.

    `fixed` are fields that the user has set. The plan is returned unchanged if measuring would not pay.
    """
    try:
        known = FixedFields(plan=plan, names=frozenset((*fixed, "precision")))
        question = job_question(job, plan.layout.world_size, known)[1]
    except ShardwiseError:
        return plan  # auto is ddp without a search
    num_steps = count_steps(job)
    if not is_worth_racing(job, plan, question, num_steps):
        return plan
    plans = race_candidates(job, plan, question, fixed=fixed)
    record = cached_race(job, plans, question, tuning) if plans else None
    if record is None:
        return plan
    measured = measured_plans(record, plans, question, fixed=fixed)
    best = decide(measured, num_steps, plan)
    if best is None or plan not in [plans[timed.number] for timed in record.timed]:
        return plan  # the predicted plan was not reached, so nothing is known about it
    return explain_choice(best, measured, plan)


def measured_plans(
    record: RaceRecord, plans: Sequence[Plan], question: Question, *, fixed: Collection[str] = ()
) -> list[Measured]:
    """Return the measured candidates, with the predicted communication of each added to its measured compute.

    A plan whose step could not be captured was measured without a CUDA graph, and is returned without it.
    """
    found = []
    for timed in record.timed:
        plan = plans[timed.number]
        error = timed.error or lacking_memory(timed, plan, question)
        step_s = timed.step_s + _communication_s(question, plan)
        failed_capture = plan.capture == "step" and not timed.is_captured and "capture" not in fixed
        if failed_capture and not error:
            plan = dataclasses.replace(plan, capture="none")
        found.append(
            Measured(
                plan=plan,
                step_s=step_s,
                compile_s=timed.compile_s,
                error=error,
                failed_capture=failed_capture,
            )
        )
    return found


def lacking_memory(timed: TimedPlan, plan: Plan, question: Question) -> str:
    """Return a sentence if a plan needs more memory by measurement than the device has; empty otherwise."""
    if timed.peak_bytes is None:
        return ""
    predicted = question.memory_of(plan)
    needed = timed.peak_bytes * predicted.reserved / predicted.peak + predicted.outside
    if needed <= question.capacity:
        return ""
    measured = f"with {' and '.join(map(str, sorted(set(timed.blocks))))} blocks" if timed.blocks else "of the model"
    device = format_gb(question.cluster.device.memory_bytes)
    return f"it needs {format_gb(needed)} of {device}, by its measured peak {measured}"


def is_worth_racing(job: Job, plan: Plan, question: Question, num_steps: int | None) -> bool:
    """Return whether a race can pay: a long job with constant shapes, trained by torch without pipeline stages."""
    if plan.layout.pp > 1 or not engine_named(plan.engine).uses_fsdp:  # fake ranks send no activations
        return False
    seconds = question.time_model().predict(question.model.for_plan(plan), plan).seconds
    if num_steps is not None and num_steps * seconds < LEAST_JOB_S:
        return False
    return len(set(sampled_forms(job, plan.micro_batch))) <= 1


def _communication_s(question: Question, plan: Plan) -> float:
    """Return the predicted seconds of a step in which compute waits for or competes with communication."""
    if plan.layout.world_size == 1:
        return 0.0
    parts = question.time_model().predict(question.model.for_plan(plan), plan).parts
    return sum(parts.get(name, 0.0) for name in (*WAITING, "contention"))


# The candidates: the eager plan, the predicted plan, other kinds of compilation, then other splits of the batch.


def race_candidates(job: Job, plan: Plan, question: Question, *, fixed: Collection[str]) -> list[Plan]:
    """Return the plans to measure: the eager one, the predicted one, and others with a close prediction.

    Empty if no other plan is within model error of the fastest one.
    """
    changes: dict[str, Any] = {"compile": "none", "capture": "none"}
    eager = dataclasses.replace(plan, **{name: value for name, value in changes.items() if name not in fixed})
    times: dict[Plan, float] = {}
    model = question.time_model()
    for candidate in (plan, *plan_variants(job, plan, question, fixed)):
        if candidate not in times:
            times[candidate] = model.predict(question.model.for_plan(candidate), candidate).seconds
    least = min(times.values())
    # Of plans with equal predictions, those that differ least from the predicted plan come first.
    ordered = sorted(times, key=lambda each: (round(times[each] / least, 2), len(differing(each, plan))))
    chosen = list(dict.fromkeys((eager, plan)))
    first = len(chosen)
    kinds = {_kind(each) for each in chosen}
    for candidate in ordered:
        is_close = times[candidate] <= least * (1 + KIND_ERROR) and len(chosen) < MOST_KINDS
        if is_close and _kind(candidate) not in kinds and not refused_by_rule(question, candidate):
            kinds.add(_kind(candidate))
            chosen.append(candidate)
    for candidate in ordered:
        is_close = times[candidate] <= least * (1 + SPLIT_ERROR) and len(chosen) < MOST_CANDIDATES
        if is_close and candidate not in chosen and not refused_by_rule(question, candidate):
            chosen.append(candidate)
    return chosen if len(chosen) > first else []


def _kind(plan: Plan) -> tuple[str, bool]:
    return plan.compile, plan.fused_loss


def plan_variants(job: Job, plan: Plan, question: Question, fixed: Collection[str]) -> Iterator[Plan]:
    """Yield the plan with every combination of options that fits into memory, by the rules of the search."""
    shape = question.model.plain
    choices: dict[str, tuple[Any, ...]] = {"compile": ("none", "blocks", "model"), "fused_loss": (False, True)}
    if not shape.num_blocks:
        choices["compile"] = ("none", "model")
    if plan.layout.world_size > 1:
        choices["compile"] = ("none", "blocks")
    if shape.head is None or shape.head.rows <= 1:  # a few logits per sample, as of images
        choices["fused_loss"] = (False,)
    choices["capture"] = ("none", "step")
    choices["recompute"] = RECOMPUTES
    choices["micro_batch"] = _micro_batches(plan)
    if "accumulation" in fixed or shape.ties_samples:  # batch-norm statistics depend on the micro-batch
        choices["micro_batch"] = (plan.micro_batch,)
    for name in choices:
        if name in fixed:
            choices[name] = (getattr(plan, name),)
    per_rank = plan.micro_batch * plan.accumulation
    for values in itertools.product(*choices.values()):
        changes = dict(zip(choices, values, strict=True))
        changes["accumulation"] = per_rank // changes["micro_batch"]
        if changes["recompute"] == "none":
            changes["recompute_blocks"] = 0
        candidate = dataclasses.replace(plan, **changes)
        if _is_possible(job, candidate, question):
            yield candidate


def _micro_batches(plan: Plan) -> tuple[int, ...]:
    """Return the micro-batch and the next smaller and larger ones that divide the samples of a rank."""
    known = divisors(plan.micro_batch * plan.accumulation)
    place = known.index(plan.micro_batch)
    return tuple(known[max(0, place - 1) : place + 2])


def _is_possible(job: Job, plan: Plan, question: Question) -> bool:
    if plan.compile == "model" and plan.fused_loss:
        return False  # a fused loss runs kernels of its own behind the model: blocks compile as well
    if plan.capture == "step" and not is_capturable(job, plan, question):
        return False
    return question.has_capacity(question.memory_of(plan))


# The cache: one file of measurements per job, device, candidates and versions.


def cached_race(job: Job, plans: Sequence[Plan], question: Question, tuning: Tuning) -> RaceRecord | None:
    """Return the measurements of these plans from the cache; measure those that it lacks if `tuning` permits.

    None if there are no measurements.
    """
    if tuning.reference is None:
        return None
    texts = tuple(plan_to_toml(dataclasses.replace(plan, sources={})) for plan in plans)
    folder = tuning.folder or cache_directory() / "races"
    path = folder / f"{_race_key(job, texts, question, tuning)}.json"
    known = _read_record(path, num_plans=len(plans))
    num_known = len(known.timed) if known is not None else 0
    if num_known == len(plans) or not tuning.may_measure:
        return known
    tuning.note(
        f"shardwise: measuring {len(plans) - num_known} plans for at most {tuning.budget_s:.0f} s, and the time of"
        " their compilation; --no-tune skips this, and later runs of this job read the result"
    )
    used = _utilization(tuning.device)  # before the race, which uses the GPU itself
    record = run_race(tuning.reference, texts, device=tuning.device, budget_s=tuning.budget_s, first=num_known)
    _report_race(record, plans, question, tuning)
    if known is not None:
        record = RaceRecord(timed=(*known.timed, *record.timed), seconds=known.seconds + record.seconds)
    if used > MOST_UTILIZATION:
        tuning.note(f"note: the measurements are not kept, because other processes used {used} % of {tuning.device}")
    elif sum(not timed.error for timed in record.timed) > 1:
        with contextlib.suppress(OSError):  # in a read-only home, plans are measured again next time
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_synced(path, msgspec.json.format(msgspec.json.encode(record), indent=1))
    return record


def _utilization(device: str) -> int:
    """Return the percentage of time in which processes use a device such as "cuda:0"; 0 if it is unknown."""
    kind, _, number = device.partition(":")
    return gpu_utilization(int(number or 0)) if kind == "cuda" else 0


def _read_record(path: Path, *, num_plans: int) -> RaceRecord | None:
    """Return the record in a file; None if there is none, or it is damaged or of another version."""
    try:
        record = msgspec.json.decode(path.read_bytes(), type=RaceRecord)
    except (OSError, UnicodeDecodeError, msgspec.DecodeError):
        return None
    numbers = [timed.number for timed in record.timed]
    is_usable = record.version == VERSION and numbers == list(range(len(numbers))) and len(numbers) <= num_plans
    return record if is_usable else None


def _race_key(job: Job, texts: Sequence[str], question: Question, tuning: Tuning) -> str:
    """Return a digest of everything that a measurement depends on."""
    reference = tuning.reference
    digest = hashlib.sha256(fingerprint(job, question.precision.activations).encode())
    versions = [package_version(name) for name in ("shardwise", "torch", "torchao", "triton")]
    versions.append(driver_version())
    if _uses_transformers(job):
        versions.append(package_version("transformers"))
    given = (reference and (reference.digest, reference.attribute, sorted(reference.overrides.items())), job.batch_size)
    digest.update(f"{VERSION} {versions} {torch.version.cuda} {question.cluster.device.name} {given}".encode())
    digest.update(f"{tuning.device.partition(':')[0]} {question.cluster.num_devices}".encode())
    for text in texts:
        digest.update(text.encode())
    return digest.hexdigest()[:32]


def _uses_transformers(job: Job) -> bool:
    """Return whether modules of the model are defined in transformers, or derived from those."""
    kinds = {type(module) for module in structure(job.model, job.seed).module.modules()}
    bases = itertools.chain.from_iterable(kind.__mro__ for kind in kinds)
    return any(base.__module__.partition(".")[0] == "transformers" for base in bases)


def _report_race(record: RaceRecord, plans: Sequence[Plan], question: Question, tuning: Tuning) -> None:
    """Pass to `note` how long the race took, and which candidates were removed or not reached."""
    compiling_s = sum(timed.compiling_s for timed in record.timed)
    measured = [plans[timed.number] for timed in record.timed if not timed.error]
    tuning.note(
        f"shardwise: measured {len(measured)} of {len(plans)} plans in {record.seconds:.0f} s,"
        f" {compiling_s:.0f} s of them compilation"
    )
    for timed in record.timed:
        plan = plans[timed.number]
        if timed.error:
            tuning.note(f"note: {describe_options(plan)} was not measured: {timed.error}")
        elif lacking := lacking_memory(timed, plan, question):
            tuning.note(f"note: {describe_options(plan)} is not used: {lacking}")


def describe_options(plan: Plan) -> str:
    """Return the options of speed of a plan as text."""
    return ", ".join(f"{name} = {str(getattr(plan, name)).lower()}" for name in SPEED_OPTIONS)
