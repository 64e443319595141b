"""Low communication: bytes, loss and time of replicas that synchronize every 25 steps, beside DDP (every step).

The text job of examples/text.py trains on two hosts, one rank on each, with the same samples and as many steps: with
the example's own batches, and with small ones. Hosts are network namespaces joined by a link of 200 Mbit/s (tc's token
bucket); bytes are those that the kernel counted on the interface of the first one from the first step's end to the last
one's, both directions and everything included: packet headers, counts, losses for the log, checks of replicas. Losses
are of the whole test split after the last step. Runs take turns, and each has a seed of its own, none of them the seed
0 with which the outer optimizer's defaults were chosen. Without root the ranks communicate over the loopback, where
nothing limits them and other traffic counts, too: one line reports that, and no time is compared.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import shardwise as sw
from figures import figure
from shardwise.planner.settle import LocalDevice, settle

if TYPE_CHECKING:
    from shardwise.training.callbacks import CallbackContext

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from env.namespaces import hosts, why_not  # noqa: E402 - shared modules of the tests are not a package

STEPS, QUICK_STEPS = 1000, 150
SIZES = {"small": (16, 48), "example": (32, 128)}
"""Windows in a global batch, and bytes in a window."""
RUNS, QUICK_RUNS = 3, 1
ROUND = 25
RATE = "200mbit"
ADDRESS, PORT = "10.77.0.1", "29617"
MOST_BYTES, MOST_LOSS_PERCENT = 1 / 20, 2.0
PLANS = {"ddp": {}, "rounds": {"communication.sync_every": str(ROUND)}}


@dataclasses.dataclass(frozen=True)
class Case:
    """What both plans train."""

    size: str
    steps: int
    seed: int = 1


def work(name: str, case: Case) -> dict[str, float]:
    """Train as one rank of the world of the environment variables; return what was measured here."""
    torch.set_num_threads(1)
    clocks: list[tuple[float, int]] = []

    def record(context: CallbackContext) -> None:
        if context.step in {1, case.steps}:
            clocks.append((time.perf_counter(), wire_bytes()))

    job = runpy.run_path(str(ROOT / "examples" / "text.py"))["job"]
    batch_size, length = SIZES[case.size]
    changes = {"steps": case.steps, "seed": case.seed, "batch_size": batch_size, "metrics": {}, "on_step": record}
    job = dataclasses.replace(job, data=sw.datasets.text(length=length), **changes)
    with sw.world() as world:
        plan = settle("ddp", batch_size=job.batch_size, world_size=2, device=LocalDevice(), overrides=PLANS[name])
        report = sw.train(job, plan, world, show_progress=False)
    (began, before), (ended, after) = clocks
    return {"bytes": after - before, "seconds": ended - began, "loss": report.result.evaluation["loss"]}


def wire_bytes() -> int:
    """Bytes in and out so far on the interface that ranks use."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, columns = line.partition(":")
        if name.strip() == os.environ["GLOO_SOCKET_IFNAME"]:
            counts = columns.split()
            return int(counts[0]) + int(counts[8])
    raise SystemExit(f"interface {os.environ['GLOO_SOCKET_IFNAME']} does not exist")


def run_pair(made: list[Any], name: str, case: Case) -> dict[str, float]:
    """Train on two ranks, on hosts of their own where there are some; return what rank 0 measured."""
    options = {"--worker": name, "--size": case.size, "--steps": case.steps, "--seed": case.seed}
    argv = [sys.executable, __file__, *(str(value) for pair in options.items() for value in pair)]
    ranks = []
    for rank in range(2):
        environ = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0" if made else str(rank),
            "LOCAL_WORLD_SIZE": "1" if made else "2",
            "MASTER_ADDR": ADDRESS if made else "127.0.0.1",
            "MASTER_PORT": PORT,
            "GLOO_SOCKET_IFNAME": "eth0" if made else "lo",
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        command = made[rank].command(argv, ROOT) if made else argv
        ranks.append(subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True))
    outputs = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"{name} failed")
    found: dict[str, float] = json.loads(outputs[0].splitlines()[-1])
    return found


def compare(case: Case, runs: int) -> None:
    """Run both plans in turns, seed after seed, and print the table and the figures."""
    reason = why_not()
    found: dict[str, list[dict[str, float]]] = {name: [] for name in PLANS}
    with ExitStack() as stack:
        made = []
        if reason:
            print(f"{reason}: two ranks over loopback, bytes may be others' too, no wall-clock gain")
        else:
            made = stack.enter_context(hosts(2, shared=Path(stack.enter_context(tempfile.TemporaryDirectory()))))
            made[1].limit(RATE)
        for run in range(runs):
            for name in PLANS:
                found[name].append(run_pair(made, name, dataclasses.replace(case, seed=case.seed + run)))
    show(found, case, timed=not reason)


def show(found: dict[str, list[dict[str, float]]], case: Case, *, timed: bool) -> None:
    """Print medians with their spread, then the figures."""
    steps, (batch_size, length) = case.steps, SIZES[case.size]
    print(f"{case.size}: {steps} steps of {batch_size} x {length} bytes, 2 ranks; rounds of {ROUND} steps")
    print(f"{'plan':8} {'MB on the wire':>15} {'test loss':>10} {'ms per step':>12} {'spread':>15}")
    medians = {}
    for name, runs in found.items():
        median = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        paces = [run["seconds"] / (steps - 1) * 1e3 for run in runs]
        spread = f"{min(paces):.1f}..{max(paces):.1f}"
        pace = statistics.median(paces)
        print(f"{name:8} {median['bytes'] / 1e6:15.2f} {median['loss']:10.4f} {pace:12.1f} {spread:>15}")
        medians[name] = median
    ddp, rounds = medians["ddp"], medians["rounds"]
    name = f"low_communication.{case.size}"
    figure(f"{name}.bytes", rounds["bytes"] / ddp["bytes"], "x-ddp", at_most=MOST_BYTES)
    pairs = zip(found["rounds"], found["ddp"], strict=True)
    above = [100 * (ours["loss"] / theirs["loss"] - 1) for ours, theirs in pairs]
    print(f"loss above DDP's by seed: {', '.join(f'{each:.2f} %' for each in above)}")
    figure(f"{name}.loss", statistics.median(above), "percent-above-ddp", at_most=MOST_LOSS_PERCENT)
    if timed:
        figure(f"{name}.{RATE}.speed", ddp["seconds"] / rounds["seconds"], "x-ddp")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small batches, one short run: a loss that proves little")
    parser.add_argument("--size", choices=SIZES, help="one size instead of all")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--runs", type=int)
    parser.add_argument("--seed", type=int, default=1, help="of the first run")
    parser.add_argument("--worker", choices=PLANS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    steps = options.steps or (QUICK_STEPS if options.quick else STEPS)
    sizes = [options.size] if options.size else ["small"] if options.quick else list(SIZES)
    for size in sizes:
        case = Case(size, steps, options.seed)
        if options.worker:
            print(json.dumps(work(options.worker, case)))
        else:
            compare(case, options.runs or (QUICK_RUNS if options.quick else RUNS))


if __name__ == "__main__":
    main()
