"""Throughput of any script on more and more ranks, and the report on scaling of scripts and jobs."""

from __future__ import annotations

import re
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.bench.ranks import PRELOAD
from shardwise.bench.report.findings import Bars, Findings, Plot, Section, Series, Table
from shardwise.bench.scaling import ScalingCurve, ScalingPoint, fork_parent
from shardwise.bench.timing import Timing
from shardwise.errors import InputError, RankFailedError
from shardwise.launcher.explain import explain_outcome
from shardwise.launcher.local.attempts import LocalLaunch, launch
from shardwise.launcher.local.target import Script
from shardwise.launcher.policy import root_cause
from shardwise.runs import create_run
from shardwise.units import format_rate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.launcher.local.starters import Starter
    from shardwise.runs import RunDirectory


_CLOSE = 0.95
"""From this efficiency on, nothing is said to limit."""
_TOO_NOISY = 0.3
"""A spread of efficiency above which nothing can be said."""
PARTS = {
    "compute": "compute",
    "communication": "communication that steps wait for",
    "data": "reading data",
    "idle": "waiting for the slowest rank",
}
JOB_METHOD = (
    "Ranks are fresh processes, with the threads a training would give them; numbers of ranks take turns.",
    "Strong scaling keeps the global batch, weak scaling keeps the batch of every rank.",
    "Throughput is of steps that read their data.",
    "The same steps are timed again on data that is there, and once more with every collective left out.",
    "compute: without collectives, mean of all ranks; idle: what the slowest of them takes longer.",
    "communication: what the whole step takes longer than the slowest rank's compute; data: what reading adds.",
    "efficiency = throughput / (ranks x throughput of one); medians, with half the distance of the quartiles of both.",
    "predicted: what `shardwise plan` says of the same plan on this machine.",
)
SCRIPT_METHOD = (
    "The script is started as by `shardwise launch`, by a process with torch imported; numbers of ranks take turns.",
    "efficiency = throughput / (ranks x throughput of one); medians, with half the distance of the quartiles of both.",
)


def scaling_table(curve: ScalingCurve) -> Table:
    """Return one row for each number of ranks."""
    has_parts = any(point.parts is not None for point in curve.points)
    has_batch = any(point.batch_size is not None for point in curve.points)
    has_predicted = any(point.predicted_per_s is not None for point in curve.points)
    header = ["ranks", *(["batch", "plan"] if has_batch else []), curve.unit, "spread", "efficiency"]
    header += ["predicted"] if has_predicted else []
    header += [f"{name} ms" for name in PARTS] if has_parts else []
    rows = []
    for point in curve.points:
        row = [str(point.ranks), *([str(point.batch_size), point.plan] if has_batch else [])]
        row += [format_rate(point.per_s), "" if point.spread is None else f"±{point.spread:.1%}"]
        row += [_efficiency(curve, point)]
        if has_predicted:
            row.append(format_rate(point.predicted_per_s) if point.predicted_per_s else "")
        if has_parts:
            parts = point.parts
            row += ["" if parts is None else f"{1e3 * parts[name]:.2f}" for name in PARTS]
        rows.append(tuple(row))
    return Table(header=tuple(header), rows=tuple(rows))


@dataclass(frozen=True, kw_only=True)
class Room:
    """What ranks on this machine have to share."""

    cores: int | None = None
    """Of a CPU that they compute on; None for ranks on GPUs."""
    threads: int | None = None
    """That each rank was told to use; None shares out the cores."""
    gpus: int = 0

    def crowd(self, ranks: int, first: int) -> str:
        """Say how so many ranks stand in each other's way where the `first` ones did not; empty if they do not."""
        if self.cores is None:
            return f"they share {self.gpus} GPU" + "s" * (self.gpus > 1) if ranks > self.gpus else ""
        if self.threads is None:
            return (
                f"they share {self.cores} cores, which {'one had to itself' if first == 1 else f'{first} had before'}"
            )
        crowded = ranks * self.threads > self.cores
        return (
            f"they share {self.cores} cores, with {self.threads} thread{'s' * (self.threads > 1)} each"
            if crowded
            else ""
        )


def limits(curve: ScalingCurve, room: Room) -> list[str]:
    """Say, for each number of ranks after the first, what keeps it from the ideal."""
    return [f"{point.ranks} ranks: {_limit(curve, point, room)}" for point in curve.points[1:]]


def _limit(curve: ScalingCurve, point: ScalingPoint, room: Room) -> str:
    crowd = room.crowd(point.ranks, curve.points[0].ranks)
    reasons = [crowd] if crowd else []
    growth = curve.growth(point) or {}
    worst = max(growth, key=lambda name: growth[name], default=None)
    if (curve.efficiency_spread(point) or 0.0) > _TOO_NOISY:
        reasons.append("times vary too much to say more")
    elif curve.efficiency(point) >= _CLOSE:
        reasons.append("close to ideal")
    elif worst is not None and growth[worst] > 0:
        reasons.append(f"most is lost to {PARTS[worst]} ({1e3 * growth[worst]:+.1f} ms a step)")
    return f"{_efficiency(curve, point)} of ideal" + "".join(f"; {reason}" for reason in reasons)


def _efficiency(curve: ScalingCurve, point: ScalingPoint) -> str:
    spread = curve.efficiency_spread(point)
    return f"{curve.efficiency(point):.0%}" + ("" if spread is None else f" ± {spread:.0%}")


def verdict(curves: Sequence[ScalingCurve]) -> str:
    """Return the one sentence to read: what the most ranks gave."""
    return "; ".join(_gain(curve) for curve in curves) + "."


def _gain(curve: ScalingCurve) -> str:
    first, last = curve.points[0], curve.points[-1]
    if (curve.efficiency_spread(last) or 0.0) > _TOO_NOISY:
        return f"{curve.mode}: times vary too much to say (efficiency {_efficiency(curve, last)} on {last.ranks} ranks)"
    words = f"{curve.mode}: {last.ranks} ranks do {last.per_s / first.per_s:.2f} times the work of {first.ranks}"
    return f"{words} (efficiency {_efficiency(curve, last)})"


def scaling_findings(
    curves: Sequence[ScalingCurve], *, title: str, facts: tuple[tuple[str, str], ...], notes: Sequence[Sequence[str]]
) -> Findings:
    """Return what a report shows; `notes` say of each curve what limits it."""
    is_job = any(point.batch_size is not None for curve in curves for point in curve.points)
    return Findings(
        title=title,
        verdict=verdict(curves),
        facts=facts,
        method=JOB_METHOD if is_job else SCRIPT_METHOD,
        sections=tuple(_section(curve, words) for curve, words in zip(curves, notes, strict=True)),
    )


def _section(curve: ScalingCurve, words: Sequence[str]) -> Section:
    parts: list[Plot | Bars | Table] = [scaling_table(curve), _throughput(curve)]
    split = [
        (f"{point.ranks} rank{'s' * (point.ranks > 1)}", point.parts)
        for point in curve.points
        if point.parts is not None
    ]
    if split:
        parts.append(
            Bars(
                title="Where the time of a step goes",
                unit="ms",
                parts=tuple(PARTS.values()),
                rows=tuple((label, tuple(1e3 * values[name] for name in PARTS)) for label, values in split),
            )
        )
    text = " ".join(f"{sentence[0].upper()}{sentence[1:]}." for sentence in (*words, curve.note) if sentence)
    return Section(title=curve.title.capitalize(), text=text, parts=tuple(parts))


def _throughput(curve: ScalingCurve) -> Plot:
    first = curve.points[0]
    series = [
        Series(name="measured", points=tuple((point.ranks, point.per_s) for point in curve.points)),
        Series(
            name="ideal",
            points=tuple((point.ranks, first.per_s * point.ranks / first.ranks) for point in curve.points),
            dashed=True,
        ),
    ]
    predicted = tuple((point.ranks, point.predicted_per_s) for point in curve.points if point.predicted_per_s)
    if predicted:
        series.append(Series(name="predicted", points=predicted, dashed=True))
    return Plot(title="Throughput", x_label="ranks", y_label=curve.unit, series=tuple(series))


# Throughput of any script on more and more ranks: what it prints, or how soon it is done.


_EMPTY = """import torch.distributed as dist
dist.init_process_group("gloo")
dist.destroy_process_group()
"""
"""A script that only starts: ranks meet and leave. Of one that does not use torch, nothing but the process is left."""


def read_pattern(text: str) -> re.Pattern[str]:
    """Return the pattern that finds a throughput in what a script writes: its one group is the number."""
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise InputError(
            f"--pattern {text!r} is no regular expression ({error})",
            code="bench.pattern-not-regex",
            fix="quote what stands for itself",
        ) from None
    if pattern.groups != 1:
        raise InputError(
            f"--pattern {text!r} has {pattern.groups} groups",
            code="bench.pattern-group-count",
            fix=r"put one around the number, as in '([0-9.]+) samples/s'",
        )
    return pattern


def find_rates(pattern: re.Pattern[str], text: str) -> list[float]:
    """Return the numbers that the pattern finds, without the first where there are three or more: it warms up."""
    found = []
    for number in pattern.findall(text):
        try:
            found.append(float(number.replace(",", "")))
        except ValueError:
            raise InputError(
                f"--pattern found {number!r}, which is no number",
                code="bench.pattern-not-number",
                fix="let its group hold digits",
            ) from None
    return found[1:] if len(found) > 2 else found


def measure_script(
    script: Script, ranks: Sequence[int], *, rounds: int, mode: str, pattern: re.Pattern[str] | None
) -> ScalingCurve:
    """Launch a script on each number of ranks of this machine, all in turns, and return its throughput.

    Without a pattern that is how often a second its work would be done: by the wall clock, less what a script takes
    that only starts. Work is one for all ranks in strong scaling, one for each rank in weak scaling.
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
        points = [_point(number, [1 / rate for rate in values[number]], work=1) for number in ranks]
        return ScalingCurve(mode="throughput as printed", unit="/s", points=tuple(points))
    start_s = {number: statistics.median(startup[number]) for number in ranks}
    points = [
        _point(
            number,
            [max(wall - start_s[number], 1e-3) for wall in values[number]],
            work=number if mode == "weak" else 1,
        )
        for number in ranks
    ]
    taken = ", ".join(f"{1e3 * start_s[number]:.0f} ms for {number}" for number in ranks)
    return ScalingCurve(mode=mode, unit="times/s", points=tuple(points), note=f"start-up of ranks taken off: {taken}")


def _point(ranks: int, seconds: Sequence[float], *, work: int) -> ScalingPoint:
    timing = Timing.of(seconds)
    return ScalingPoint(ranks=ranks, per_s=work / timing.median_s, spread=timing.spread if timing.repeats > 1 else None)


def _rates(pattern: re.Pattern[str], output: list[str], script: Script, ranks: int) -> list[float]:
    """Return the throughputs that the first rank to print any has printed."""
    for text in output:
        rates = [rate for rate in find_rates(pattern, text) if rate > 0]
        if rates:
            return rates
    raise InputError(
        f"--pattern {pattern.pattern!r} matches no number above 0 in what {script.path} wrote on {ranks} ranks",
        code="bench.pattern-unmatched",
        fix=f"look at it: shardwise launch --nproc {ranks} {script.path}",
    )


def _run(script: Script, ranks: int, starter: Starter) -> tuple[float, list[str]]:
    """Return the seconds from the start of ranks that need no imports to their end, and what each rank wrote."""
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
