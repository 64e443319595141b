"""Recording: what a run directory costs each step of a training: phases in the recorder, events, peak memory.

One model trains on one thread, and its steps take turns: bare, with nobody listening to its marks, and recorded, with
the recorder's ring as listener. Both listeners are timed where they are called, in the midst of a step that has left
little of them in the processor's caches; the difference of the medians is what recording a step costs. Beside it stands
the difference of whole steps, each compared with the mean of its neighbours, in CPU time: true as well, but noisier on
a shared machine than what it looks for.

What a run directory costs beside the marks is one publication a second: losses and peak memory as an event in a file.
The whole of it is counted, though most of it, the sum of losses over ranks, is made without a run directory too.

Not in the figure is what a run directory adds beside these, such as the question whether a save is due.
The step is made to take about 5 ms on the machine at hand. `overhead.py` has all of it together on a step so small that
a training is little else.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.utils.data import TensorDataset

import shardwise as sw
from figures import figure
from shardwise.runs import EventLog, RunDirectory
from shardwise.runs.recorder import Recorder
from shardwise.training.journal import Journal
from shardwise.training.step.step import ignore_mark

if TYPE_CHECKING:
    from shardwise.training.step.step import Mark, Step

STEPS, QUICK_STEPS = 4000, 800
BATCH, FEATURES, CLASSES = 32, 64, 10
STEP_S = 5e-3
TARGET_PERCENT = 1.0


def make_step(world: sw.World, hidden: int, steps: int) -> Step:
    generator = torch.Generator().manual_seed(0)
    dataset = TensorDataset(
        torch.randn(BATCH * 64, FEATURES, generator=generator),
        torch.randint(CLASSES, (BATCH * 64,), generator=generator),
    )
    job = sw.Job(
        model=lambda: torch.nn.Sequential(
            torch.nn.Linear(FEATURES, hidden),
            torch.nn.ReLU(),
            torch.nn.Linear(hidden, hidden),
            torch.nn.ReLU(),
            torch.nn.Linear(hidden, CLASSES),
        ),
        data=lambda split: dataset if split == "train" else None,
        loss=sw.losses.cross_entropy,
        optimizer=sw.adamw(lr=1e-3),
        batch_size=BATCH,
        steps=steps,
    )
    return sw.build_step(job, sw.Plan.preset("ddp", 1, batch_size=BATCH), world)


class Listener:
    """A listener, timed: seconds that it took of every step it heard."""

    def __init__(self, mark: Mark) -> None:
        self._mark = mark
        self.seconds: list[float] = []

    def begin_step(self) -> None:
        """Begin to count anew."""
        self.seconds.append(0.0)

    def mark(self, phase: str, step: int) -> None:
        """Hand a mark on."""
        began = time.perf_counter()
        self._mark(phase, step)
        self.seconds[-1] += time.perf_counter() - began


def timed_steps(step: Step, listeners: list[Listener]) -> list[float]:
    """Train to the end, with the listeners taking turns; return CPU seconds of every step."""
    seconds = []
    for number, batch in enumerate(step.feed):
        listener = listeners[number % len(listeners)]
        listener.begin_step()
        step.mark = listener.mark
        began = time.process_time()
        step(batch)
        seconds.append(time.process_time() - began)
    return seconds


def fit_width(world: sw.World) -> int:
    """Return the width whose step takes about STEP_S here."""
    hidden = 512
    for _ in range(4):
        seconds = statistics.median(timed_steps(make_step(world, hidden, 60), [Listener(ignore_mark)]))
        hidden = max(64, round(hidden * math.sqrt(STEP_S / seconds) / 32) * 32)
    return hidden


def over_neighbours(seconds: list[float]) -> list[float]:
    """Return what every second step took over the mean of those before and after it."""
    return [seconds[i] - (seconds[i - 1] + seconds[i + 1]) / 2 for i in range(3, len(seconds) - 1, 2)]


def publication_seconds(world: sw.World, events: Path, step: Step) -> float:
    """Return the median CPU time of publishing one second of steps to a file, with their peak memory."""
    journal = Journal(world, EventLog(events), step)
    batches = iter(step.feed)
    report = step(next(batches))
    samples = []
    for _ in range(30):
        for _ in range(round(1 / STEP_S) - 1):
            journal._window._reports.append(report)
        began = time.process_time()
        journal.add(report, publish=True, stop=False)
        samples.append(time.process_time() - began)
    return statistics.median(samples)


def mark_seconds(recorder: Recorder) -> float:
    """Return what one mark takes by itself, at best of a few tries."""
    tries = []
    for _ in range(5):
        began = time.perf_counter()
        for step in range(20_000):
            recorder.mark("forward", step)
        tries.append((time.perf_counter() - began) / 20_000)
    return min(tries)


def show(name: str, seconds: list[float]) -> float:
    low, middle, high = statistics.quantiles(seconds, n=4)
    print(f"{name:34}{middle * 1e6:10.1f} us   quartiles {low * 1e6:.1f} .. {high * 1e6:.1f}")
    return middle


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STEPS} steps instead of {STEPS}")
    steps = QUICK_STEPS if parser.parse_args().quick else STEPS
    torch.set_num_threads(1)
    print(f"{steps} steps on one thread, torch {torch.__version__}, load {os.getloadavg()[0]:.1f} of {os.cpu_count()}")
    with tempfile.TemporaryDirectory() as folder, sw.world(device="cpu") as world:
        run = RunDirectory(Path(folder))
        recorder = Recorder(run.recorder(0))
        hidden = fit_width(world)
        bare, recorded = Listener(ignore_mark), Listener(recorder.mark)
        seconds = timed_steps(make_step(world, hidden, steps), [bare, recorded])
        step_s = show("bare step", seconds[2::2])
        listening_s = show("recorder, called in a step", recorded.seconds[1:])
        listening_s -= show("nobody, called in a step", bare.seconds[1:])
        show("recorded step over bare ones", over_neighbours(seconds))
        published_s = publication_seconds(world, run.events(0), make_step(world, hidden, 1))
        print(f"{'a publication, once a second':34}{published_s * 1e6:10.1f} us")
        mark_s = mark_seconds(recorder)
        recorder.close()
    figure("recording.mark.us", mark_s * 1e6, "microseconds-per-mark")
    figure("recording.step.us", listening_s * 1e6, "microseconds-per-step")
    share = listening_s / step_s + published_s
    figure("recording.share", share * 100, "percent-of-a-5-ms-step", at_most=TARGET_PERCENT)


if __name__ == "__main__":
    main()
