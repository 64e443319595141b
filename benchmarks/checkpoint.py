"""Checkpoint: what saving costs a training loop, and how close save and load come to the disk.

One process. The state is one model's worth of fp32 tensors with both moments of AdamW: 0.75 GiB on the CPU, 12 on a GPU
(`--device cuda`). A loop of matrix products stands for training. Contenders take turns; medians are reported.

raw            the same bytes written to one file in 8 MiB pieces, then fsync; read back, then CRC-32
sync save      shardwise.checkpoint.save, as `train` writes it: durable, checked, published
load           shardwise.checkpoint.load into tensors that are there, every byte checked first
torch          torch.load of a torch.save file, plain and with mmap=True (nothing is read then), printed beside
async          seconds that the loop lost until the checkpoint was durable: the stall of the call, plus what its steps
               took longer than usual while the save went on; shardwise.checkpoint.AsyncSaver against
               torch.distributed.checkpoint.async_save, the second save on (buffers are kept from the first)
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from figures import figure
from shardwise.checkpoint import AsyncSaver, load, save

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


def read_raw(path: Path) -> int:
    buffer, checksum = bytearray(PIECE), 0
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            checksum = zlib.crc32(memoryview(buffer)[:size], checksum)
    return checksum


class Steps:
    """A loop that stands for training; knows how long its steps take when nothing else goes on."""

    def __init__(self, device: str) -> None:
        side = 768 if device == "cpu" else 8192
        self.left, self.right = (torch.randn(side, side, device=device) for _ in range(2))
        self.count = 4 if device == "cpu" else 40
        self.device = device
        self.usual_s = statistics.median(self.run() for _ in range(12))

    def run(self) -> float:
        """Take one step; return its seconds."""
        began = time.perf_counter()
        for _ in range(self.count):
            torch.mm(self.left, self.right)
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began


def lost_seconds(begin: Callable[[], Callable[[], bool]], steps: Steps) -> tuple[float, float, float]:
    """Return the stall of the call, what steps lost until the save was durable, and their mean inflation."""
    steps.usual_s = statistics.median(steps.run() for _ in range(8))
    began = time.perf_counter()
    is_done = begin()
    stall = time.perf_counter() - began
    times = []
    while not is_done():
        times.append(steps.run())
    lost = sum(times) - len(times) * steps.usual_s
    return stall, max(0.0, lost), max(0.0, lost) / max(1e-9, len(times) * steps.usual_s)


def measure_async(state: dict[str, torch.Tensor], folder: Path, steps: Steps, rounds: int) -> dict[str, list]:
    """Take turns; the first save of each counts for nobody."""
    saver = AsyncSaver(None)
    found: dict[str, list] = {"shardwise": [], "dcp": []}
    for number in range(rounds + 1):

        def ours(number: int = number) -> Callable[[], bool]:
            saver.save(folder / "ours", number, state, {})
            return lambda: not saver.is_busy

        def theirs(number: int = number) -> Callable[[], bool]:
            future = dcp.async_save(state, checkpoint_id=folder / f"dcp{number}")
            return future.done

        for name, begin in (("shardwise", ours), ("dcp", theirs)):
            result = lost_seconds(begin, steps)
            if number:
                found[name].append(result)
        saver.finish()
        for path in (folder / f"dcp{number}", *(folder / "ours").glob("step-*")):
            shutil.rmtree(path)
    saver.close()
    return found


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure_disk(state: dict[str, torch.Tensor], folder: Path, rounds: int) -> dict[str, float]:
    """Medians of everything that waits for the disk, in seconds."""
    room = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    torch.save(state, folder / "torch.pt")
    times: dict[str, list[float]] = {}
    for number in range(rounds):
        saved = folder / "sync" / f"step-{number:08d}"
        for name, work in (
            ("raw write", lambda: write_raw(folder / "raw", state)),
            ("save", lambda number=number: save(folder / "sync", number, state, {}, group=None)),
            ("raw read", lambda: read_raw(folder / "raw")),
            ("load", lambda saved=saved: load(saved, room, group=None)),
            ("torch.load", lambda: torch.load(folder / "torch.pt")),
            ("torch.load mmap", lambda: torch.load(folder / "torch.pt", mmap=True)),
        ):
            times.setdefault(name, []).append(timed(work))
        shutil.rmtree(saved)
        (folder / "raw").unlink()
    assert all(torch.equal(room[name], tensor) for name, tensor in state.items())
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smaller state and fewer rounds")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    total = int((12.1 if on_gpu else 0.2 if options.quick else 0.75) * 2**30)
    rounds = 1 if on_gpu else 2 if options.quick else 5
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        folder = Path(name)
        state = make_state(total, options.device)
        size = sum(tensor.numel() * tensor.element_size() for tensor in state.values()) / 2**30
        print(f"{options.device}, torch {torch.__version__}, {size:.2f} GiB in {len(state)} tensors")
        if not on_gpu:
            report_disk(measure_disk(state, folder, rounds), size)
        report_async(measure_async(state, folder, Steps(options.device), rounds), on_gpu=on_gpu)
    dist.destroy_process_group()


def report_disk(times: dict[str, float], size: float) -> None:
    for name, seconds in times.items():
        print(f"{name:16} {seconds:7.3f} s {size / seconds:8.2f} GiB/s")
    figure("checkpoint.sync.speed", times["raw write"] / times["save"], "x-raw-write-and-fsync", at_least=0.85)
    figure("checkpoint.load.time", times["load"] / times["raw read"], "x-raw-read-and-checksum", at_most=1.2)


def report_async(found: dict[str, list], *, on_gpu: bool) -> None:
    medians = {name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in found.items()}
    for name, (stall, lost, inflation) in medians.items():
        print(f"async {name:10} stall {stall:6.3f} s, steps lost {lost:6.3f} s ({inflation:.1%} longer while saving)")
    ours, theirs = medians["shardwise"], medians["dcp"]
    if on_gpu:
        figure("checkpoint.async.stall", ours[0] / theirs[0], "x-dcp.async_save", at_most=0.1)
        figure("checkpoint.async.inflation", ours[2] * 100, "percent-of-a-step", at_most=5)
    else:
        figure("checkpoint.async.lost", sum(ours[:2]) / sum(theirs[:2]), "x-dcp.async_save", at_most=0.5)


if __name__ == "__main__":
    main()
