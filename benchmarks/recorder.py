"""Recorder: what the record of collectives costs a rank: each call, and each step of a DDP training.

A world of one. Calls and steps take turns: with torch's process group as it is, and with the methods that record.

collective   all_reduce of one small tensor, in a loop; the difference of the medians of the CPU time of its thread.
share        of a DDP step: collectives recorded in it x the cost of one in a step, and two looks a second at torch's
             flight recorder, which is on by default in torch. DDP issues its own in C++: none of these is recorded one
             by one, so they cost nothing. Left out: a dump of 30 ms after 5 s, then ever more rarely, to 5 minutes.
in a step    what a collective of one's own costs in the midst of such a step, where nothing of the recorder is left in
             the processor's caches (nor of torch: the collective itself takes ten times as long there); no target.

Beside them stands the difference of whole steps, each compared with the mean of its neighbours, in CPU time. On a CPU a
step is made to take about 5 ms; on a GPU it is that of a 1.2-billion-parameter Llama shape under NCCL.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.nn.functional import cross_entropy

import shardwise as sw
from figures import figure
from shapes import LLAMA_1B
from shardwise.recorder import flight
from shardwise.recorder.flight import FlightThread
from shardwise.recorder.operations import OPERATIONS
from shardwise.recorder.torch_calls import record_collectives
from shardwise.runs import calls
from shardwise.runs.call_reader import CallReader

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS, QUICK_STEPS = 3000, 600
STEP_S = 5e-3
MOST_US, MOST_PERCENT = 10.0, 0.5
LOOKS_PER_S = 2
LOOP = 50


class Switch:
    """Puts torch's own methods of process groups in place, or those that record."""

    def __init__(self, ring: calls.CallRing) -> None:
        self._plain = self._methods()
        record_collectives(ring, 1)
        self._recording = self._methods()

    def _methods(self) -> dict[tuple[type, str], Any]:
        names = [(c10d.ProcessGroup, name) for name in OPERATIONS if hasattr(c10d.ProcessGroup, name)]
        return {(owner, name): vars(owner)[name] for owner, name in [*names, (c10d.Work, "wait")]}

    def turn(self, *, on: bool) -> None:
        """Record from now on, or do not."""
        for (owner, name), method in (self._recording if on else self._plain).items():
            setattr(owner, name, method)


def small_step(hidden: int) -> Callable[[], torch.Tensor]:
    model = torch.nn.Sequential(torch.nn.Linear(64, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, hidden))
    return trained(model, lambda wrapped: wrapped(torch.ones(32, 64)).square().mean())


def large_step() -> Callable[[], torch.Tensor]:
    model = sw.models.decoder(LLAMA_1B).cuda()
    tokens = torch.randint(LLAMA_1B.vocab_size, (8, LLAMA_1B.context), device="cuda")

    def loss_of(wrapped: torch.nn.Module) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return cross_entropy(wrapped(tokens).flatten(0, 1), tokens.flatten())

    return trained(model, loss_of)


def trained(model: torch.nn.Module, loss_of: Callable) -> Callable[[], torch.Tensor]:
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(wrapped)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def in_turns(switch: Switch, body: Callable[[], float], times: int) -> list[float]:
    """Return what `body` measures, bare and recorded in turns, without the first of each."""
    found = []
    for number in range(times):
        switch.turn(on=bool(number % 2))
        found.append(body())
    switch.turn(on=True)
    return found[2:]


def difference(samples: list[float]) -> float:
    """Return by how much the recorded ones exceed the bare ones."""
    return statistics.median(samples[1::2]) - statistics.median(samples[::2])


def over_neighbours(samples: list[float]) -> list[float]:
    """Return by how much each recorded one exceeds the mean of the bare ones around it."""
    return [samples[i] - (samples[i - 1] + samples[i + 1]) / 2 for i in range(1, len(samples) - 1, 2)]


def in_a_loop(tensor: torch.Tensor) -> Callable[[], float]:
    def body() -> float:
        began = time.thread_time()
        for _ in range(LOOP):
            dist.all_reduce(tensor)
        return (time.thread_time() - began) / LOOP

    return body


def cpu_of(step: Callable[[], torch.Tensor]) -> Callable[[], float]:
    def body() -> float:
        began = time.process_time()
        if step().is_cuda:
            torch.cuda.synchronize()
        return time.process_time() - began

    return body


def after(step: Callable[[], torch.Tensor]) -> Callable[[], float]:
    def body() -> float:
        loss = step()
        began = time.thread_time()
        dist.all_reduce(loss)
        return time.thread_time() - began

    return body


def wall_seconds(step: Callable[[], torch.Tensor], steps: int = 40) -> float:
    """Return the median wall time of a step."""
    took = []
    for _ in range(steps):
        began = time.perf_counter()
        loss = step()
        if loss.is_cuda:
            torch.cuda.synchronize()
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def fitting_step(switch: Switch) -> Callable[[], torch.Tensor]:
    """Return a step that takes about STEP_S here."""
    hidden = 512
    switch.turn(on=False)
    for _ in range(4):
        hidden = max(64, round(hidden * math.sqrt(STEP_S / wall_seconds(small_step(hidden))) / 32) * 32)
    return small_step(hidden)


def look_seconds(ring: calls.CallRing) -> float:
    """Return what one look at the flight recorder takes."""
    thread = FlightThread(ring, lambda _name: 0)
    place = ring.intern(calls.GroupKey("0", 0, (0,)))
    thread._slots = dict.fromkeys(flight._status(), (0, place))
    took = []
    for _ in range(300):
        began = time.perf_counter()
        thread._look()
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STEPS} steps instead of {STEPS}")
    steps = QUICK_STEPS if parser.parse_args().quick else STEPS
    torch.set_num_threads(1)
    on_gpu = torch.cuda.is_available()
    name, steps = ("1.2B", 60) if on_gpu else ("5ms", steps)
    print(f"{steps} steps, torch {torch.__version__}, load {os.getloadavg()[0]:.1f} of {os.cpu_count()}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rank0.calls"
        ring = calls.CallRing(path)
        switch = Switch(ring)
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=0, world_size=1)
        step = large_step() if on_gpu else fitting_step(switch)
        for _ in range(3):
            loss = step()
        call_s = difference(in_turns(switch, in_a_loop(loss), 400))
        reader = CallReader(path)
        reader.refresh()
        before = reader.header(calls.COUNT)
        whole = in_turns(switch, cpu_of(step), steps)
        per_step = (reader.header(calls.COUNT) - before) / (steps // 2)
        cold_s = difference(in_turns(switch, after(step), steps // 4))
        step_s, look_s = wall_seconds(step), look_seconds(ring)
        dist.destroy_process_group()
    low, middle, high = statistics.quantiles(over_neighbours(whole), n=4)
    print(f"step {step_s * 1e3:.2f} ms, {per_step:g} collectives recorded in each; a look takes {look_s * 1e6:.1f} us")
    print(f"recorded step over bare ones: {middle * 1e6:.1f} us, quartiles {low * 1e6:.1f} .. {high * 1e6:.1f}")
    figure(f"recorder.{name}.collective.us", call_s * 1e6, "microseconds-per-collective", at_most=MOST_US)
    figure(f"recorder.{name}.collective.in-a-step.us", cold_s * 1e6, "microseconds-per-collective")
    share = per_step * cold_s / step_s + LOOKS_PER_S * look_s
    figure(f"recorder.{name}.share", share * 100, "percent-of-a-step", at_most=MOST_PERCENT)


if __name__ == "__main__":
    main()
