"""Throughput of any script on more and more ranks: what it prints, or how soon it is done."""

from __future__ import annotations

import contextlib
import re
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.bench.ranks import PRELOAD
from shardwise.bench.scaling import Curve, Point, fork_parent
from shardwise.bench.timing import Timing
from shardwise.errors import InputError, RankFailedError
from shardwise.launcher.explain import explain_outcome
from shardwise.launcher.local.attempts import LaunchSpec, launch
from shardwise.launcher.local.target import Script
from shardwise.launcher.policy import root_cause
from shardwise.runs import create_run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.launcher.local.starters import Starter
    from shardwise.runs import RunDirectory

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
) -> Curve:
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
        return Curve(mode="throughput as printed", unit="/s", points=tuple(points))
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
    return Curve(mode=mode, unit="times/s", points=tuple(points), note=f"start-up of ranks taken off: {taken}")


def _point(ranks: int, seconds: Sequence[float], *, work: int) -> Point:
    timing = Timing.of(seconds)
    return Point(ranks=ranks, per_s=work / timing.median_s, spread=timing.spread if timing.repeats > 1 else None)


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
        outcome = launch(LaunchSpec(target=script, nproc=ranks), run, warm=contextlib.nullcontext(starter)).outcome
        seconds = time.perf_counter() - began
        if outcome.interrupted:
            raise KeyboardInterrupt
        if root_cause(outcome.exits) is not None or outcome.lost:
            raise RankFailedError(explain_outcome(outcome, run), code="bench.script-failed")
        return seconds, [_written(run, rank) for rank in range(ranks)]


def _written(run: RunDirectory, rank: int) -> str:
    paths = (run.stdout(rank), run.stderr(rank))
    return "\n".join(path.read_text(errors="replace") for path in paths if path.exists())
