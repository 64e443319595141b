"""Checkpoint: what saving costs a training loop, and how close save and load come to the disk.

One process. The state is one model's worth of fp32 tensors with both moments of AdamW: 0.75 GiB on the CPU, 12 on a GPU
(`--device cuda`, where only saving in the background is measured, in about 150 s). A loop of matrix products stands for
training. Contenders take turns; medians are reported.

raw            the same bytes written to one file in 8 MiB pieces, then fsync; read back with the standard library's
               CRC-32 of them, and beside it with zlib-ng's, which shardwise uses
sync save      shardwise.checkpoint.save, as `train` writes it: durable, checked, published
load           shardwise.checkpoint.load into existing tensors, every byte checked first
torch          torch.load of a torch.save file, plain and with mmap=True (nothing is read then), printed beside
async          seconds that the loop lost until the checkpoint was durable: the stall of the call, plus what its steps
               took longer than usual during the save; shardwise.checkpoint.AsyncSaver against
               torch.distributed.checkpoint.async_save, the second save on (buffers are kept from the first)
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from figures import figure
from shardwise.checkpoint import AsyncSaver, load, save
from shardwise.checkpoint.disk import crc32

if TYPE_CHECKING:
    from collections.abc import Callable

PIECE = 8 << 20


def make_state(total_bytes: int, device: str) -> dict[str, torch.Tensor]:
    """A model of equal square layers with both moments of AdamW."""
    side = 1024 if device == "cpu" else 4096
    count = total_bytes // (3 * 4 * side * side)
    return {
        f"{kind}/layer.{number}.weight{ending}": torch.randn(side, side, device=device)
        for number in range(count)
        for kind, ending in (("model", ""), ("optimizer", "/exp_avg"), ("optimizer", "/exp_avg_sq"))
    }


def write_raw(path: Path, state: dict[str, torch.Tensor]) -> None:
    with path.open("wb", buffering=0) as file:
        for tensor in state.values():
            data = memoryview(tensor.numpy()).cast("B")
            for start in range(0, len(data), PIECE):
                file.write(data[start : start + PIECE])
        os.fsync(file.fileno())


def read_raw(path: Path, crc32: Callable[..., int]) -> int:
    buffer, checksum = bytearray(PIECE), 0
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            checksum = crc32(memoryview(buffer)[:size], checksum)
    return checksum


class Steps:
    """A loop that stands for training; measures its steps when nothing else runs."""

    def __init__(self, device: str) -> None:
        # On an H200 250 products of 4096 x 4096 in bf16 take 45 ms: a step that keeps the GPU busy, and a thread that
        # launches all the time, which is what a writing thread could delay.
        side, dtype = (768, torch.float32) if device == "cpu" else (4096, torch.bfloat16)
        self.left, self.right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
        self.count, self.warm_up = (4, 8) if device == "cpu" else (250, 20)
        self.device = device

    def run(self) -> float:
        """Take one step; return its seconds."""
        began = time.perf_counter()
        for _ in range(self.count):
            torch.mm(self.left, self.right)
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    def usual_s(self) -> float:
        """Return what a step takes just now, while nothing is saved."""
        return statistics.median(self.run() for _ in range(self.warm_up))


class Loss(NamedTuple):
    """What one save in the background cost the loop."""

    stall_s: float
    steps_s: float
    """What steps took longer until the save was durable."""
    inflation: float
    """That, as a share of what the same steps take otherwise."""
    durable_s: float


def lost_to(begin: Callable[[], Callable[[], bool]], steps: Steps) -> Loss:
    """Begin a save and continue stepping until it is durable."""
    usual_s = steps.usual_s()
    began = time.perf_counter()
    is_done = begin()
    stall_s = time.perf_counter() - began
    times = []
    while not is_done():
        times.append(steps.run())
    lost_s = max(0.0, sum(times) - len(times) * usual_s)
    inflation = lost_s / (len(times) * usual_s) if times else 0.0
    return Loss(stall_s, lost_s, inflation, time.perf_counter() - began)


def measure_async(
    state: dict[str, torch.Tensor], folder: Path, steps: Steps, rounds: int, deadline: float
) -> dict[str, list[Loss]]:
    """Take turns, `rounds` times after a first save each, as long as the next one ends before `deadline`."""
    saver = AsyncSaver(None)
    found: dict[str, list[Loss]] = {"shardwise": [], "dcp": []}
    for number in range(rounds + 1):

        def ours(number: int = number) -> Callable[[], bool]:
            saver.save(folder / "ours", number, state, {})
            return lambda: not saver.is_busy

        def theirs(number: int = number) -> Callable[[], bool]:
            future = dcp.async_save(state, checkpoint_id=folder / f"dcp{number}")
            return lambda: future.done() and bool(future.result() or True)  # a failure is raised, not timed

        for name, begin in (("shardwise", ours), ("dcp", theirs)):
            rows = found[name]
            is_needed = number == 0 or (name == "shardwise" and number == 1)  # a second save of ours is the figure
            if not is_needed and time.monotonic() + rows[-1].durable_s > deadline:
                print(f"async {name:10} save {number + 1} left out: it would end beyond --budget-s")
                continue
            lost = lost_to(begin, steps)
            rows.append(lost)
            print(
                f"async {name:10} save {number + 1}: stall {lost.stall_s:6.3f} s, steps lost {lost.steps_s:6.3f} s"
                f" ({lost.inflation:.1%} longer while saving), durable after {lost.durable_s:.1f} s"
            )
            saver.finish()
            for path in (folder / f"dcp{number}", *(folder / "ours").glob("step-*")):
                shutil.rmtree(path, ignore_errors=True)
    saver.close()
    return found


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure_disk(state: dict[str, torch.Tensor], folder: Path, rounds: int) -> dict[str, float]:
    """Medians of everything that waits for the disk, in seconds."""
    targets = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    torch.save(state, folder / "torch.pt")
    times: dict[str, list[float]] = {}
    for number in range(rounds):
        saved = folder / "sync" / f"step-{number:08d}"
        for name, work in (
            ("raw write", lambda: write_raw(folder / "raw", state)),
            ("save", lambda number=number: save(folder / "sync", number, state, {}, group=None)),
            ("raw read", lambda: read_raw(folder / "raw", zlib.crc32)),
            ("raw read with zlib-ng", lambda: read_raw(folder / "raw", crc32)),
            ("load", lambda saved=saved: load(saved, targets, group=None)),
            ("torch.load", lambda: torch.load(folder / "torch.pt")),
            ("torch.load mmap", lambda: torch.load(folder / "torch.pt", mmap=True)),
        ):
            times.setdefault(name, []).append(timed(work))
        shutil.rmtree(saved)
        (folder / "raw").unlink()
    assert all(torch.equal(targets[name], tensor) for name, tensor in state.items())
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def main() -> None:
    options = parse_options()
    sys.stdout.reconfigure(line_buffering=True)  # each figure is visible at once, also through a pipe
    began = time.monotonic()
    on_gpu = options.device == "cuda"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        folder = Path(name)
        state = make_state(int(options.size_gib * 2**30), options.device)
        size = sum(tensor.nbytes for tensor in state.values()) / 2**30
        print(f"{options.device}, torch {torch.__version__}, {size:.2f} GiB in {len(state)} tensors")
        if not on_gpu:
            report_disk(measure_disk(state, folder, options.rounds), size)
        steps = Steps(options.device)
        print(f"a step takes {steps.usual_s() * 1000:.1f} ms")
        found = measure_async(state, folder, steps, options.rounds, began + options.budget_s)
        report_async(found, on_gpu=on_gpu)
    dist.destroy_process_group()
    print(f"{time.monotonic() - began:.0f} s in all")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smaller state and fewer rounds")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--size-gib", type=float, help="of the state (default: 0.75 on the CPU, 12.1 on a GPU)")
    parser.add_argument("--budget-s", type=float, default=150, help="no save in the background is begun beyond this")
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    options.size_gib = options.size_gib or (12.1 if on_gpu else 0.2 if options.quick else 0.75)
    options.rounds = 2 if on_gpu or options.quick else 5
    return options


def report_disk(times: dict[str, float], size: float) -> None:
    for name, seconds in times.items():
        print(f"{name:22} {seconds:7.3f} s {size / seconds:8.2f} GiB/s")
    figure("checkpoint.sync.speed", times["raw write"] / times["save"], "x-raw-write-and-fsync", at_least=0.85)
    figure("checkpoint.load.time", times["load"] / times["raw read"], "x-raw-read-and-checksum", at_most=1.2)


def report_async(found: dict[str, list[Loss]], *, on_gpu: bool) -> None:
    """Medians from the second save on, of the only one where there was no time for more."""
    ours, theirs = (
        Loss(*map(statistics.median, zip(*(rows[1:] or rows), strict=True)))
        for rows in (found["shardwise"], found["dcp"])
    )
    if on_gpu:
        figure("checkpoint.async.stall", ours.stall_s / theirs.stall_s, "x-dcp.async_save", at_most=0.1)
        figure("checkpoint.async.inflation", ours.inflation * 100, "percent-of-a-step", at_most=5)
    else:
        lost = (ours.stall_s + ours.steps_s) / (theirs.stall_s + theirs.steps_s)
        figure("checkpoint.async.lost", lost, "x-dcp.async_save", at_most=0.5)


if __name__ == "__main__":
    main()
