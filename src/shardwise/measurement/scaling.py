"""Throughput of a job or script on increasing numbers of ranks: strong and weak scaling, and the parts of a step."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import re
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from shardwise.dist import world
from shardwise.environment import base_environment
from shardwise.errors import InputError, RankFailedError
from shardwise.hardware import usable_cores
from shardwise.job import load_job
from shardwise.launcher.explain import explain_outcome
from shardwise.launcher.local.attempts import LocalLaunch, launch, starter_for
from shardwise.launcher.local.target import Module, Script
from shardwise.launcher.policy import root_cause
from shardwise.measurement.specs import PRELOAD, on_ranks
from shardwise.measurement.split import MeasuredTurns, measure_turns, pool, split
from shardwise.measurement.switch import SwitchedWorld
from shardwise.measurement.timing import Timing
from shardwise.planner.settle import settle
from shardwise.plans.toml import read_plan
from shardwise.runs import create_run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from shardwise.job import Job, JobReference
    from shardwise.launcher.local.starters import Starter
    from shardwise.planner.settle import LocalDevice
    from shardwise.plans import Plan
    from shardwise.runs import RunDirectory

Mode = Literal["strong", "weak"]
MODES: tuple[Mode, ...] = get_args(Mode)
_TURNS = 3
"""Turns per round, each with all measurements of a step."""


@dataclass(frozen=True, kw_only=True)
class ScalingPoint:
    """The throughput measured on one number of ranks."""

    ranks: int
    per_s: float
    """Samples per second of all ranks; for a script, the printed throughput or completed runs per second."""
    spread: float | None
    """Half the interquartile range, as a fraction of `per_s`; None for a single measurement."""
    batch_size: int | None = None
    """Global batch size; None for a script."""
    plan: str = ""
    parts: Mapping[str, float] | None = None
    """Seconds per step of a rank: compute, communication (exposed), data, idle; None if they were not measured."""
    predicted_per_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class ScalingCurve:
    """Strong or weak scaling over numbers of ranks."""

    mode: str
    unit: str
    points: tuple[ScalingPoint, ...]
    """In ascending order of ranks; the first point is the baseline of the efficiency."""
    note: str = ""
    """A remark about the measurement."""

    @property
    def title(self) -> str:
        """The title of the curve in reports."""
        return f"{self.mode} scaling" if self.mode in MODES else self.mode

    def efficiency(self, point: ScalingPoint) -> float:
        """Return the throughput per rank divided by that of the first point."""
        first = self.points[0]
        return point.per_s / point.ranks / (first.per_s / first.ranks)

    def efficiency_spread(self, point: ScalingPoint) -> float | None:
        """Return the spread of `efficiency`, the sum of both spreads; None if unknown."""
        first = self.points[0]
        if point is first or point.spread is None or first.spread is None:
            return None
        return self.efficiency(point) * (point.spread + first.spread)

    def growth(self, point: ScalingPoint) -> dict[str, float] | None:
        """Return the seconds by which each part of a step exceeds ideal scaling of the first point."""
        first = self.points[0]
        if point.parts is None or first.parts is None:
            return None
        share = first.ranks / point.ranks if self.mode == "strong" else 1.0
        return {name: seconds - share * first.parts[name] for name, seconds in point.parts.items()}


@dataclass(frozen=True, kw_only=True)
class ScalingCase:
    """A plan to measure on a number of ranks."""

    ranks: int
    plan: Plan

    @property
    def batch_size(self) -> int:
        """The global batch size."""
        return self.plan.batch_size


def plan_for(
    spec: str, mode: Mode, ranks: int, *, batch_size: int, device: LocalDevice, overrides: Mapping[str, str]
) -> Plan:
    """Return the plan of `ranks` ranks: strong scaling keeps the global batch size, weak the batch size per rank.

    A plan from a file is refitted to `ranks`; weak scaling keeps the batch size of each data-parallel rank.
    """
    if not spec.endswith(".toml"):
        wanted = batch_size * ranks if mode == "weak" else batch_size
        return settle(spec, batch_size=wanted, world_size=ranks, device=device, overrides=overrides)
    size = read_plan(Path(spec)).layout.world_size
    own = settle(spec, batch_size=batch_size, world_size=size, device=device, overrides=overrides)
    fitted = own.refit(ranks)
    if mode == "strong":
        return fitted
    return dataclasses.replace(fitted, micro_batch=own.micro_batch, accumulation=own.accumulation)


def powers_of_two(most: int) -> tuple[int, ...]:
    """Return 1, 2, 4 and so on, up to `most`."""
    return tuple(1 << power for power in range(most.bit_length()))


def measure_job(
    reference: JobReference,
    cases: Mapping[Mode, Sequence[ScalingCase]],
    *,
    rounds: int,
    opening: Mapping[str, str | None],
    predict: Callable[[Job, Plan], float | None],
) -> list[ScalingCurve]:
    """Measure a job on new ranks of this machine, alternating numbers of ranks; `opening` has the arguments of `world`.

    `predict` returns the predicted seconds of a step, or None.
    """
    # Strong and weak scaling have the same case for one rank, which is measured once.
    distinct = {(case.ranks, case.plan): case for mode_cases in cases.values() for case in mode_cases}
    found: dict[Any, list[list[MeasuredTurns]]] = {key: [] for key in distinct}
    with fork_parent() as starter:
        for _ in range(rounds):
            for ranks in sorted({case.ranks for case in distinct.values()}):
                keys = [key for key in distinct if key[0] == ranks]
                plans = [distinct[key].plan for key in keys]
                measured = on_ranks(
                    _measure_rank,
                    ranks,
                    reference,
                    plans,
                    dict(opening),
                    starter=starter,
                    backend=opening.get("backend"),
                )
                for key, turns in zip(keys, measured[0], strict=True):
                    found[key].append(turns)
    job = load_job(reference)
    points = {key: _point(case, found[key], job, predict) for key, case in distinct.items()}
    return [
        ScalingCurve(mode=mode, unit="samples/s", points=tuple(points[case.ranks, case.plan] for case in each))
        for mode, each in cases.items()
    ]


@contextlib.contextmanager
def fork_parent(preload: tuple[str, ...] = PRELOAD) -> Iterator[Starter]:
    """Start a process that forks the ranks of several launches, so that measured times exclude imports."""
    spec = LocalLaunch(target=Module("shardwise.launcher.local.function"), nproc=1, preload=preload)
    environ = base_environment(local_world_size=1, cores=usable_cores())
    with starter_for(spec, environ, lambda _: None) as starter:
        yield starter


def _measure_rank(reference: JobReference, plans: list[Plan], opening: dict[str, Any]) -> list[list[MeasuredTurns]]:
    """Measure the job under each plan and return the turns by plan and rank. Communicates; call on every rank."""
    with world(**opening) as opened:
        here, job, found = SwitchedWorld.around(opened), load_job(reference), []
        for plan in plans:
            mine = dataclasses.replace(job, batch_size=plan.batch_size)
            found.append(opened.gather(measure_turns(mine, plan, here, turns=_TURNS, reads=True)))
            gc.collect()  # frees the model before the next one is built
            if here.device.type == "cuda":
                torch.cuda.empty_cache()
        return found


def _point(
    case: ScalingCase, rounds: Sequence[Sequence[MeasuredTurns]], job: Job, predict: Callable[[Job, Plan], float | None]
) -> ScalingPoint:
    found = split(pool(rounds))
    predicted_s = predict(dataclasses.replace(job, batch_size=case.batch_size), case.plan)
    return ScalingPoint(
        ranks=case.ranks,
        per_s=case.batch_size / found.period.median_s,
        spread=found.period.spread,
        batch_size=case.batch_size,
        plan=str(case.plan.layout),
        parts=found.parts,
        predicted_per_s=case.batch_size / predicted_s if predicted_s else None,
    )


# Throughput of a script on increasing numbers of ranks, from its output or from its duration.


_EMPTY = """import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()  # a rank that exits while another one still connects would fail it
dist.destroy_process_group()
"""
"""Script whose duration is the start-up time: ranks join a process group and exit. Without torch, it is empty."""


def read_pattern(text: str) -> re.Pattern[str]:
    """Compile the regular expression of --pattern, whose single group matches the throughput in the output."""
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise InputError(
            f"--pattern {text!r} is not a regular expression ({error})",
            code="bench.pattern-not-regex",
            fix="escape special characters with a backslash",
        ) from None
    if pattern.groups != 1:
        raise InputError(
            f"--pattern {text!r} must have one group, got {pattern.groups}",
            code="bench.pattern-group-count",
            fix=r"put a group around the number, as in '([0-9.]+) samples/s'",
        )
    return pattern


def find_rates(pattern: re.Pattern[str], text: str) -> list[float]:
    """Return the numbers that the pattern matches; if there are three or more, the first is dropped as warm-up."""
    found = []
    for number in pattern.findall(text):
        try:
            found.append(float(number.replace(",", "")))
        except ValueError:
            raise InputError(
                f"--pattern found {number!r}, which is not a number",
                code="bench.pattern-not-number",
                fix="use a group that matches digits",
            ) from None
    return found[1:] if len(found) > 2 else found


def measure_script(
    script: Script, ranks: Sequence[int], *, rounds: int, mode: str, pattern: re.Pattern[str] | None
) -> ScalingCurve:
    """Launch a script on each number of ranks of this machine, alternating, and return its throughput.

    Without a pattern, the throughput is the inverse of the run time: the wall time minus the start-up time of an empty
    script. A run counts once in strong scaling, and once per rank in weak scaling.
    """
    values: dict[int, list[float]] = {number: [] for number in ranks}
    startup: dict[int, list[float]] = {number: [] for number in ranks}
    uses_torch = "torch" in Path(script.path).read_text(errors="replace")
    with (
        fork_parent(PRELOAD if uses_torch else ()) as starter,
        tempfile.TemporaryDirectory(prefix="shardwise-") as name,
    ):
        empty = Path(name) / "empty.py"
        empty.write_text(_EMPTY if uses_torch else "")
        for _ in range(rounds):
            for number in ranks:
                seconds, output = _run(script, number, starter)
                if pattern is not None:
                    values[number] += _rates(pattern, output, script, number)
                    continue
                values[number].append(seconds)
                startup[number].append(_run(Script(str(empty)), number, starter)[0])
    if pattern is not None:
        points = [_script_point(number, [1 / rate for rate in values[number]], work=1) for number in ranks]
        return ScalingCurve(mode="throughput as printed", unit="/s", points=tuple(points))
    start_s = {number: statistics.median(startup[number]) for number in ranks}
    points = [
        _script_point(
            number,
            [max(wall - start_s[number], 1e-3) for wall in values[number]],
            work=number if mode == "weak" else 1,
        )
        for number in ranks
    ]
    startups = ", ".join(f"{1e3 * start_s[number]:.0f} ms for {number}" for number in ranks)
    note = f"start-up time of ranks subtracted: {startups}"
    return ScalingCurve(mode=mode, unit="times/s", points=tuple(points), note=note)


def _script_point(ranks: int, seconds: Sequence[float], *, work: int) -> ScalingPoint:
    timing = Timing.of(seconds)
    return ScalingPoint(ranks=ranks, per_s=work / timing.median_s, spread=timing.spread if timing.repeats > 1 else None)


def _rates(pattern: re.Pattern[str], output: list[str], script: Script, ranks: int) -> list[float]:
    """Return the throughputs in the output of the first rank that printed one."""
    for text in output:
        rates = [rate for rate in find_rates(pattern, text) if rate > 0]
        if rates:
            return rates
    raise InputError(
        f"--pattern {pattern.pattern!r} matches no number above 0 in the output of {script.path} on {ranks} ranks",
        code="bench.pattern-unmatched",
        fix=f"check the output of shardwise launch --nproc {ranks} {script.path}",
    )


def _run(script: Script, ranks: int, starter: Starter) -> tuple[float, list[str]]:
    """Return the seconds from the start of the forked ranks to their end, and the output of each rank."""
    with tempfile.TemporaryDirectory(prefix="shardwise-") as name:
        run = create_run(Path(name) / "run", script.name)
        began = time.perf_counter()
        outcome = launch(LocalLaunch(target=script, nproc=ranks), run, starter=starter).outcome
        seconds = time.perf_counter() - began
        if outcome.interrupted:
            raise KeyboardInterrupt
        if root_cause(outcome.exits) is not None or outcome.lost:
            raise RankFailedError(explain_outcome(outcome, run), code="bench.script-failed")
        return seconds, [_written(run, rank) for rank in range(ranks)]


def _written(run: RunDirectory, rank: int) -> str:
    paths = (run.stdout(rank), run.stderr(rank))
    return "\n".join(path.read_text(errors="replace") for path in paths if path.exists())
