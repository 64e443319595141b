"""The history of training runs: predicted beside measured, and the correction of predictions that follows from it.

The idea: a run that was long enough to measure appends one line to the history of its machine (device, number of
devices, versions of torch and shardwise). `plan` multiplies its predictions for the same machine by the median ratio of
measured to predicted of the newest runs. The invariants: records hold uncorrected predictions, so corrections do not
compound; a correction is bounded and never applies to another device, number of devices or version; lines are appended
whole, and damaged ones are skipped, so that concurrent runs cannot spoil the file.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import statistics
import time
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec

from shardwise.environment import cache_directory
from shardwise.hardware.probe import package_version
from shardwise.planner.cost.time import KNOWN
from shardwise.planner.search.choices import family_of
from shardwise.planner.search.search import Candidate, choose
from shardwise.planner.search.subject import describe_job, job_question

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from shardwise.hardware.machine import Cluster
    from shardwise.job import Job
    from shardwise.planner.cost.time import Time
    from shardwise.planner.search.question import Question
    from shardwise.planner.search.search import Answer, Rejected
    from shardwise.plans.plan import Plan

STUDENT = (
    *(2.92, 2.35, 2.13, 2.02, 1.94, 1.89, 1.86, 1.83, 1.81),
    *(1.80, 1.78, 1.77, 1.76, 1.75, 1.75, 1.74, 1.73, 1.73),
)
"""Quantile 0.95 of Student's t distribution for LEAST_RUNS to NEWEST runs: few runs do not show their whole spread."""
LEAST_RUNS = 3
"""Runs from which a median is robust against one disturbed run."""
NEWEST = 20
"""Newest runs of a kind that count, so that the correction follows changes of the machine."""
TIME_BOUNDS = (0.5, 2.0)
"""Bounds of the correction of times; a larger error is a defect of the prediction, not a property of the machine."""
MEMORY_BOUNDS = (1.0, 1.25)
"""Bounds of the correction of memory; it only lowers what plans may use, since too little memory ends a run."""
MOST_BYTES = 2**20
"""Size above which the history of a machine is shortened to its newest half."""


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One training run: its kind of plan, and what was predicted and measured."""

    version: int = 1
    at: float
    """Time of the record, in seconds since the epoch."""
    device: str
    num_devices: int
    torch: str
    shardwise: str
    model: str
    family: str
    compute: str
    compile: str
    predicted_step_s: float
    measured_step_s: float
    predicted_bytes: float
    measured_bytes: float | None = None
    """Peak of allocated memory on rank 0; None on a CPU, and in a pipeline, whose ranks differ."""


def predict_run(job: Job, plan: Plan) -> tuple[Question, Time, float]:
    """Return the machine of a run on this host, and the predicted time and allocated bytes, without a correction."""
    _, question = job_question(job, plan.layout.world_size)
    if question.precision.activations != plan.precision.activations:
        question = dataclasses.replace(question, model=describe_job(job, plan.precision.activations))
    predicted = question.time_model().predict(question.model.for_plan(plan), plan)
    return question, predicted, question.memory_of(plan).peak


def record_of(job: Job, plan: Plan, *, step_s: float, peak_bytes: int | None) -> RunRecord:
    """Return the record of a run from its measured step time and peak memory; traces the model once."""
    question, predicted, num_bytes = predict_run(job, plan)
    is_comparable = plan.layout.pp == 1 and question.cluster.device.kind != "cpu"
    return RunRecord(
        at=time.time(),
        device=question.cluster.device.name,
        num_devices=question.cluster.num_devices,
        torch=package_version("torch"),
        shardwise=package_version("shardwise"),
        model=question.model.plain.name,
        family=family_of(plan),
        compute=plan.precision.compute,
        compile=plan.compile,
        predicted_step_s=predicted.seconds,
        measured_step_s=step_s,
        predicted_bytes=num_bytes,
        measured_bytes=float(peak_bytes) if peak_bytes and is_comparable else None,
    )


# The file of a machine: one JSON object per line.


def history_path(device: str, num_devices: int, folder: Path | None = None) -> Path:
    """Return the history of a machine; the file need not exist."""
    folder = folder or cache_directory() / "history"
    return folder / f"{num_devices}x{re.sub(r'[^a-z0-9.]+', '-', device.lower())}.jsonl"


def append_record(record: RunRecord, folder: Path | None = None) -> Path:
    """Append a record to the history of its machine in one write, and return the path."""
    path = history_path(record.device, record.num_devices, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    # The line break comes first as well, so that a line that a full disk truncated does not spoil this one.
    line = b"\n" + msgspec.json.encode(record) + b"\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, line)
        size = os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)
    if size > MOST_BYTES:
        _shorten(path)
    return path


def _shorten(path: Path) -> None:
    """Replace a file by its newest half; a line that another run appends meanwhile may be lost, none is damaged."""
    lines = path.read_bytes().splitlines(keepends=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_bytes(b"".join(lines[len(lines) // 2 :]))
    part.replace(path)


def read_records(cluster: Cluster, folder: Path | None = None) -> tuple[list[RunRecord], int]:
    """Return the records of a machine with these versions, oldest first, and the number of damaged lines."""
    path = history_path(cluster.device.name, cluster.num_devices, folder)
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return [], 0
    records, num_damaged = [], 0
    versions = (package_version("torch"), package_version("shardwise"))
    for line in filter(None, lines):
        try:
            record = msgspec.json.decode(line, type=RunRecord)
        except (ValueError, RecursionError):  # the latter from thousands of brackets
            num_damaged += 1
            continue
        same_machine = (record.device, record.num_devices) == (cluster.device.name, cluster.num_devices)
        is_positive = record.predicted_step_s > 0 and record.measured_step_s > 0 and record.predicted_bytes > 0
        if same_machine and is_positive and (record.torch, record.shardwise) == versions:
            records.append(record)
    return records, num_damaged


# The correction of predictions by the ratios of measured to predicted.


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """The median ratio of measured to predicted over some runs, within bounds."""

    value: float
    interval: tuple[float, float]
    """Interval of the ratio of a further run at the quantiles 0.05 and 0.95, as multiples of `value`."""
    num_runs: int


@dataclass(frozen=True, kw_only=True)
class MachineHistory:
    """The runs on one machine, which correct the predictions for it."""

    records: tuple[RunRecord, ...] = ()
    num_damaged: int = 0
    """Lines of the file that could not be read."""

    def time_ratio(self, plan: Plan) -> Ratio | None:
        """Return the ratio of step times of the plan's family, else of all families; None with too few runs.

        It is of eager or of compiled runs, as the plan is. All plans that a report compares are of one kind, so that
        either all of them are corrected or none.
        """
        kind = (plan.precision.compute, plan.compile != "none")
        alike = [each for each in self.records if (each.compute, each.compile != "none") == kind]
        own = [each for each in alike if each.family == family_of(plan)]
        for records in (own, alike):
            ratios = [each.measured_step_s / each.predicted_step_s for each in records]
            found = median_ratio(ratios, TIME_BOUNDS)
            if found is not None:
                return found
        return None

    def has_other_kind(self, plan: Plan) -> bool:
        """Whether enough runs in the plan's compute dtype are compiled and the plan is eager, or vice versa."""
        same = [each for each in self.records if each.compute == plan.precision.compute]
        other = [each for each in same if (each.compile != "none") != (plan.compile != "none")]
        return len(other) >= LEAST_RUNS

    def memory_ratio(self) -> Ratio | None:
        """Return the ratio of peak memory over all runs; None with too few runs."""
        known = [each for each in self.records if each.measured_bytes]
        return median_ratio([(each.measured_bytes or 0.0) / each.predicted_bytes for each in known], MEMORY_BOUNDS)


def read_history(cluster: Cluster, folder: Path | None = None) -> MachineHistory:
    """Return the history of runs on a machine; empty without any."""
    records, num_damaged = read_records(cluster, folder)
    return MachineHistory(records=tuple(records), num_damaged=num_damaged)


def median_ratio(ratios: Sequence[float], bounds: tuple[float, float]) -> Ratio | None:
    """Return the median of the newest ratios within bounds; None for fewer than LEAST_RUNS."""
    newest = ratios[-NEWEST:]
    if len(newest) < LEAST_RUNS:
        return None
    middle = statistics.median(newest)
    value = min(max(middle, bounds[0]), bounds[1])
    low, high = _interval(newest, middle)
    interval = min(1.0, low * middle / value), max(1.0, high * middle / value)  # of a bounded value, one end is at 1
    return Ratio(value=value, interval=interval, num_runs=len(newest))


def _interval(ratios: Sequence[float], middle: float) -> tuple[float, float]:
    """Return the interval of a further ratio as multiples of the median, at least that of a measured machine."""
    logs = [math.log(ratio / middle) for ratio in ratios]
    half = STUDENT[len(logs) - LEAST_RUNS] * statistics.stdev(logs) * math.sqrt(1 + 1 / len(logs))
    return min(math.exp(-half), 1 - KNOWN), max(math.exp(half), 1 + KNOWN)


def with_memory_margin(question: Question, history: MachineHistory) -> Question:
    """Return the question with less capacity if runs on this machine needed more memory than predicted."""
    found = history.memory_ratio()
    return question if found is None else dataclasses.replace(question, memory_ratio=found.value)


def corrected(answer: Answer, history: MachineHistory) -> Answer:
    """Return an answer with the times of all plans corrected by the runs on this machine, and the best chosen again."""
    if not history.records:
        return answer
    notes: dict[str, str] = {}
    if answer.question.memory_ratio > 1:
        notes["capacity"] = f"divided by {answer.question.memory_ratio:.2f}, measured in own runs"
    changed = {id(each): corrected_candidate(each, history, notes) for each in _candidates(answer)}
    candidates = sorted((changed[id(each)] for each in answer.candidates), key=lambda each: each.time.seconds)
    families: dict[str, Candidate | Rejected] = {}
    for family, entry in answer.families.items():
        families[family] = changed[id(entry)] if isinstance(entry, Candidate) else entry
    found = [entry for entry in families.values() if isinstance(entry, Candidate)]
    best = choose(found, answer.question.widest)
    return dataclasses.replace(answer, best=best, families=families, candidates=tuple(candidates), uncorrected=answer)


def _candidates(answer: Answer) -> Iterable[Candidate]:
    yield from answer.candidates
    for entry in answer.families.values():
        if isinstance(entry, Candidate):
            yield entry


def corrected_candidate(
    candidate: Candidate, history: MachineHistory, notes: Mapping[str, str] = MappingProxyType({})
) -> Candidate:
    """Return a candidate with its time multiplied, and with `notes` and the factor in the basis of its time."""
    found, before = history.time_ratio(candidate.plan), candidate.time
    if found is None:
        kind = "eager" if candidate.plan.compile != "none" else "compiled"
        if history.has_other_kind(candidate.plan):
            notes = {"step": f"not corrected, since own runs are {kind}", **notes}
        return dataclasses.replace(candidate, time=dataclasses.replace(before, basis={**before.basis, **notes}))
    factor, tokens = found.value, before.tokens_per_second_per_device
    after = dataclasses.replace(
        before,
        seconds=before.seconds * factor,
        parts={name: seconds * factor for name, seconds in before.parts.items()},
        samples_per_second=before.samples_per_second / factor,
        tokens_per_second_per_device=None if tokens is None else tokens / factor,
        mfu=before.mfu / factor,
        uncertainty=(found.interval[1] - found.interval[0]) / 2,
        interval=found.interval,
        interval_from="own_runs",
        basis={**before.basis, "step": f"corrected by {factor:.2f} from {found.num_runs} own runs", **notes},
    )
    return dataclasses.replace(candidate, time=after)
