"""Launch: seconds from the command to the first collective and DDP step, and from a kill to the next collective.

Both launchers run the same script, which knows neither and calls `init_process_group("gloo")` itself. Ranks append
`time.time()` stamps to a file; the clock starts right before the command's process is created, and stops when the last
rank is through.

cold       1, 2 and 4 ranks on one machine: a script up to its first all_reduce, and one up to its first optimizer step
           of a small model under DDP (its construction included). Nothing of either launcher runs beforehand.
restart    2 ranks with restarts allowed: rank 1 kills itself (SIGKILL) after the first collective; the clock runs from
           there to the first collective of the restarted world. A launcher that is not through within LIMIT_S has not
           recovered: such trials are counted apart and are no times.

shardwise  `shardwise launch`, as it comes
torchrun   `torchrun --standalone`, as it comes: it polls its workers every 0.1 s
torchrun best   for the restart: with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, which spares it the keys of the dead
           attempt. Its times are what the restart is compared with: as it comes, it often never recovers

Launchers take turns, in an order that is drawn anew each round. Ratios are of medians of one run.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

COLD_TARGET, RESTART_TARGET = 0.55, 0.2
ROUNDS, QUICK_ROUNDS = 5, 2
LIMIT_S, QUICK_LIMIT_S = 25.0, 10.0
"""A recovery by torchrun takes 2 to 4 s where it succeeds."""
COLD_LIMIT_S = 100.0
RANKS, QUICK_RANKS = (1, 2, 4), (2,)
LAUNCHERS = {
    "shardwise": [sys.executable, "-m", "shardwise", "launch"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone"],
}
BEST = "torchrun best"
BEST_ENVIRON = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

STAMP = """
import os, signal, sys, time
import torch, torch.distributed as dist

def stamp(name):
    with open(sys.argv[1], "a") as file:
        file.write(f"{name} {time.time()}\\n")

attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
"""
COLLECTIVE = f"""{STAMP}
stamp("collective")
dist.destroy_process_group()
"""
DDP = f"""{STAMP}
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(4, 8)).sum().backward()
optimizer.step()
stamp("ddp")
dist.destroy_process_group()
"""
RESTART = f"""{STAMP}
stamp(f"collective.{{attempt}}")
if attempt == 0:
    if dist.get_rank() == 1:
        stamp("kill")
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
"""


@dataclass
class Series:
    """Seconds that one launcher took, trial by trial, and the trials that came to nothing."""

    seconds: list[float] = field(default_factory=list)
    lost: int = 0

    def add(self, seconds: float | None) -> None:
        """Take in a trial; None is one that did not get through."""
        if seconds is None:
            self.lost += 1
        else:
            self.seconds.append(seconds)

    def row(self) -> str:
        """Median, least and most, and how many got through."""
        trials = f"{len(self.seconds)} of {len(self.seconds) + self.lost}"
        if not self.seconds:
            return f"{'-':>8}{'-':>18}{trials:>10}"
        spread = f"{min(self.seconds):.2f} .. {max(self.seconds):.2f}"
        return f"{statistics.median(self.seconds):>8.2f}{spread:>18}{trials:>10}"


SCRIPTS = {"collective": COLLECTIVE, "ddp": DDP}

Readings = dict[str, dict[str, Series]]
"""By what is measured, then by launcher."""


def run(launcher: str, options: list[str], script: str, limit_s: float) -> dict[str, float]:
    """Launch once; return the last stamp of each name, and the start under `start`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "script.py").write_text(script)
        stamps = folder / "stamps"
        stamps.touch()
        command = [*LAUNCHERS[launcher.partition(" ")[0]], *options, "script.py", str(stamps)]
        environ = {**os.environ, **(BEST_ENVIRON if launcher == BEST else {})}
        output = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        start = time.time()
        process = subprocess.Popen(command, cwd=folder, env=environ, **output)
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.terminate()  # both launchers take their ranks with them
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LIMIT_S)
            process.kill()
            process.wait()
        found = sorted(((name, float(when)) for name, when in map(str.split, stamps.read_text().splitlines())))
    return {"start": start, **dict(found)}


def between(stamps: dict[str, float], first: str, then: str) -> float | None:
    return stamps[then] - stamps[first] if first in stamps and then in stamps else None


def compete(ranks: tuple[int, ...], rounds: int, limit_s: float) -> Readings:
    """Give every launcher one turn at everything per round."""
    cold = {f"cold.{what}.{size}": (what, size) for what in SCRIPTS for size in ranks}
    readings = {kind: {launcher: Series() for launcher in LAUNCHERS} for kind in cold}
    readings["restart"] = {launcher: Series() for launcher in [*LAUNCHERS, BEST]}
    order = random.Random(0)
    trials = [(kind, launcher) for kind, by_launcher in readings.items() for launcher in by_launcher]
    for _ in range(rounds):
        for kind, launcher in order.sample(trials, len(trials)):
            if kind == "restart":
                stamps = run(launcher, ["--nproc-per-node=2", "--max-restarts=1"], RESTART, limit_s)
                readings[kind][launcher].add(between(stamps, "kill", "collective.1"))
            else:
                what, size = cold[kind]
                stamps = run(launcher, [f"--nproc-per-node={size}"], SCRIPTS[what], COLD_LIMIT_S)
                readings[kind][launcher].add(between(stamps, "start", what))
    return readings


def show(readings: Readings) -> None:
    print(f"\n{'seconds':<20}{'launcher':<16}{'median':>8}{'least .. most':>18}{'through':>10}")
    for kind, by_launcher in readings.items():
        for launcher, series in by_launcher.items():
            print(f"{kind:<20}{launcher:<16}{series.row()}")


def figure_of(kind: str, by_launcher: dict[str, Series]) -> str:
    """Return the line for programs; without a time of both launchers the ratio is nan, and the target missed."""
    if kind == "restart":
        return figure("restart.ratio", by_launcher["shardwise"], by_launcher[BEST], RESTART_TARGET)
    return figure(kind, by_launcher["shardwise"], by_launcher["torchrun"], COLD_TARGET)


def figure(name: str, ours: Series, theirs: Series, target: float) -> str:
    found = bool(ours.seconds and theirs.seconds)
    ratio = round(statistics.median(ours.seconds) / statistics.median(theirs.seconds), 3) if found else math.nan
    return f"FIGURE launch.{name} {ratio} x-torchrun target <={target:g} {'met' if ratio <= target else 'missed'}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Seconds to the first collective, DDP step and recovery.")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds of 2 ranks only")
    quick = parser.parse_args().quick
    ranks, rounds, limit_s = (QUICK_RANKS, QUICK_ROUNDS, QUICK_LIMIT_S) if quick else (RANKS, ROUNDS, LIMIT_S)
    versions = ", ".join(f"{name} {version(name)}" for name in ("shardwise", "torch"))
    print(f"{rounds} rounds, {limit_s:g} s for a recovery; Python {platform.python_version()}, {versions}")
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start", flush=True)
    for launcher in LAUNCHERS:
        run(launcher, ["--nproc-per-node=2"], COLLECTIVE, COLD_LIMIT_S)  # files into the page cache, for all alike
    readings = compete(ranks, rounds, limit_s)
    show(readings)
    for kind, by_launcher in readings.items():
        print(figure_of(kind, by_launcher))


if __name__ == "__main__":
    main()
