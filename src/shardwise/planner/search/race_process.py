"""The process that measures the candidates of a race (`measurement/race_worker.py`): its input, results and restarts.

A child process keeps CUDA out of the launching one. A candidate may kill it: a compiler or a kernel that crashes takes
the process along. That candidate gets the reason as its error, and a new process continues with the next one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from shardwise.environment import rank_environment
from shardwise.job import JobReference  # noqa: TC001 - read at run time by msgspec
from shardwise.launcher.local.processes import RankProcess, compile_cache

if TYPE_CHECKING:
    from collections.abc import Sequence

COMPILE_LIMIT_S = 240.0
"""Seconds of compilation in addition to those of measuring, after which the race ends with what it has measured."""
MOST_RESTARTS = 2
"""New processes after one that ended early; each imports torch and builds the model again."""
DEVICE_FAILED = 3
"""Exit code of a process whose device fails after the last result: a new process has to measure the rest."""
WORKER = "shardwise.measurement.race_worker"
VERSION = 3
"""Version of the measurement and of its files."""


class RaceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The input of the process that measures plans."""

    reference: JobReference
    plans: tuple[str, ...]
    """The candidates as TOML."""
    first: int = 0
    """Index of the first candidate to measure; an earlier process has measured those before it."""
    device: str
    budget_s: float
    results: str
    """File that the process creates when it begins to measure, and to which it appends each TimedPlan as one line of
    JSON."""
    parent_pid: int


class TimedPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The measurement of one candidate."""

    number: int
    """Index of the candidate."""
    step_s: float = 0.0
    """Seconds of one optimizer step of the whole model on one rank, without communication."""
    compile_s: float = 0.0
    """Predicted seconds to compile the whole model."""
    measuring_s: float = 0.0
    """Seconds that the measurement took, without compilation."""
    compiling_s: float = 0.0
    """Seconds that compilation took during the measurement, of truncated models if there were any."""
    is_captured: bool = False
    """Whether the measured steps ran as a CUDA graph; a step with host synchronization does not."""
    peak_bytes: float | None = None
    """Peak of allocated device memory of the whole model; None on a CPU."""
    error: str = ""
    """Why the candidate cannot be used; empty if it was measured."""
    blocks: tuple[int, ...] = ()
    """Numbers of blocks of the measured models, which were extrapolated; empty if the whole model was measured."""


class RaceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements of one race, as cached."""

    version: int = VERSION
    timed: tuple[TimedPlan, ...]
    """The candidates in their order; those at the end are absent if they were not reached."""
    seconds: float
    """Seconds of the whole race."""


class _Ended(NamedTuple):
    """How one process ended: its results, its exit code (None if the limit ended it), and the reason of a failure."""

    timed: tuple[TimedPlan, ...]
    code: int | None
    began: bool
    """Whether it had loaded the job and begun to measure."""
    reason: str


def run_race(
    reference: JobReference,
    plans: Sequence[str],
    *,
    device: str,
    budget_s: float,
    first: int = 0,
    compile_limit_s: float = COMPILE_LIMIT_S,
) -> RaceRecord:
    """Measure the plans from index `first` on in child processes; a plan that was not reached has no TimedPlan.

    A plan that ends the process has the reason as its error; a new process measures the next ones.
    """
    start, timed = time.monotonic(), list[TimedPlan]()
    with tempfile.TemporaryDirectory(prefix="shardwise-") as name:
        for attempt in range(1 + MOST_RESTARTS):
            left_s = budget_s - sum(each.measuring_s for each in timed)
            if timed and left_s <= 0:
                break
            spec = RaceSpec(
                reference=reference,
                plans=tuple(plans),
                first=first + len(timed),
                device=device,
                budget_s=left_s,
                results=str(Path(name, f"results{attempt}")),
                parent_pid=os.getpid(),
            )
            ended = _run_process(spec, Path(name, f"output{attempt}"), until=start + budget_s + compile_limit_s)
            timed += ended.timed
            if _is_at_fault(ended, has_results=bool(timed)):
                timed.append(TimedPlan(number=first + len(timed), error=ended.reason))
            is_over = not ended.code or not ended.began or first + len(timed) >= len(plans)
            if is_over:
                break
    return RaceRecord(timed=tuple(timed), seconds=time.monotonic() - start)


def _is_at_fault(ended: _Ended, *, has_results: bool) -> bool:
    """Return whether the plan after the last result ended the process, or used up the time limit alone."""
    if ended.code is None:
        return ended.began and not has_results
    return ended.code not in (0, DEVICE_FAILED) and (ended.began or not has_results)


def _run_process(spec: RaceSpec, output: Path, *, until: float) -> _Ended:
    """Run one process to its end, or end it at the time `until`."""
    environ = rank_environment(rank=0, world_size=1, local_rank=0, local_world_size=1)
    environ |= compile_cache(environ)
    with output.open("wb") as file:
        argv = [sys.executable, "-m", WORKER, msgspec.json.encode(spec).decode()]
        popen = subprocess.Popen(argv, env=environ, stdin=subprocess.DEVNULL, stdout=file, stderr=file, process_group=0)
    process = RankProcess(0, popen.pid, popen)
    try:
        while process.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
        code = process.poll()
    finally:
        process.end()
    results = Path(spec.results)
    reason = _reason(code, output.read_text(errors="replace"))
    return _Ended(read_results(results), code, results.exists(), reason)


def _reason(code: int | None, output: str) -> str:
    """Return why a process ended: the limit, a signal, or the last line of its output."""
    if code is None:
        return "its measurement did not end within the time limit"
    if code < 0:
        return f"the measuring process was killed by {signal.Signals(-code).name}"
    lines = [line for line in output.split("\n") if line.strip()]
    return lines[-1] if lines else f"the measuring process ended with exit code {code}"


def read_results(path: Path) -> tuple[TimedPlan, ...]:
    """Return the measurements in a file of JSON lines; a line that is not complete is ignored."""
    found = []
    lines = path.read_bytes().splitlines() if path.exists() else []
    for line in lines:
        with contextlib.suppress(msgspec.DecodeError):
            found.append(msgspec.json.decode(line, type=TimedPlan))
    return tuple(found)
