"""Overhead: microseconds per optimizer step that shardwise and its peers add to a hand-written loop.

Every contender trains the same small MLP (fp32) from the same weights on the same map-style dataset in memory, with the
same `torch.optim.AdamW(lr=1e-3, fused=True)`, in shuffled batches of 32 that the process itself reads and collates (the
hand-written loop and the peers by a DataLoader without workers), on one thread. A run is one epoch; the clock starts
after step WARM_UP and stops after the last step, so imports, set-up, first steps and the end of the epoch count for
nobody. The end of a step is one call of `Clock.tick` in every contender.

Contenders take turns in an order that is drawn anew each round, with a hand-written run between any two: a contender's
overhead is its time less the mean of the hand-written runs before and after it, which cancels the drift of a shared
machine. Reported are the median over rounds and the quartiles; the hand-written loop measured as a contender shows the
noise. Figures are CPU time of the process, which leaves out the moments when other programs had the core; wall time
stands beside it, and is the same on a quiet machine.

What is armed:

hand-written      nothing: zero_grad, forward, loss, backward, optimizer step
shardwise         everything: `sw.train` with a run directory (every step's loss as events, report), a live progress bar
                  on a terminal, a cosine schedule with warm-up, an `on_step` callback (the clock); it gathers the rows
                  of a TensorDataset by index, so it may be faster than the hand-written loop
shardwise sampled the same with a dataset that it must read sample by sample, as the hand-written loop does: what is
                  left is the cost of the step itself
accelerate        the loop of its quick tour: prepare(model, optimizer, loader), accelerator.backward; no logging, no
                  progress bar, no schedule
accelerate best   the same with device_placement=False
fabric            the loop of its guide: setup, setup_dataloaders, fabric.backward; no logging, no progress bar, no
                  schedule
fabric best       the same with move_to_device=False and use_distributed_sampler=False
trainer           Lightning's Trainer as it comes: live progress bar on a terminal, CSV logger, a checkpoint at the end
                  of the epoch (off the clock); the module logs its loss with self.log; no schedule
trainer best      Trainer(barebones=True), which its documentation gives for measuring raw speed; no self.log

A peer that is not installed is left out, with a message.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import logging
import os
import platform
import random
import statistics
import subprocess
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import shardwise as sw
from shardwise.runs import create_run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

TARGET_US = 15.0
UNIT = "microseconds-per-step-over-hand-written"
ROUNDS, QUICK_ROUNDS = 15, 3
BATCH = 32
FEATURES, HIDDEN, CLASSES = 32, 64, 10
WARM_UP = 100
"""Steps before the clock starts: shardwise publishes often until it knows its pace, peers fill their caches."""
MEASURED = 1000
"""Steps on the clock: the most that shardwise collects before it publishes, so every run pays for one publication."""


class Clock:
    """Takes the time from the end of step WARM_UP to the end of step WARM_UP + MEASURED."""

    def __init__(self) -> None:
        self.steps = 0
        self.began = self.ended = (0.0, 0.0)

    def tick(self, _context: object = None) -> None:
        """Count a step that has ended."""
        self.steps += 1
        if self.steps == WARM_UP:
            self.began = (time.process_time(), time.perf_counter())
        elif self.steps == WARM_UP + MEASURED:
            self.ended = (time.process_time(), time.perf_counter())

    def read(self) -> Reading:
        """Return the mean over the measured steps."""
        if self.steps != WARM_UP + MEASURED:
            raise RuntimeError(f"the run had {self.steps} steps, not {WARM_UP + MEASURED}")
        cpu, wall = ((end - begin) / MEASURED * 1e6 for begin, end in zip(self.began, self.ended, strict=True))
        return Reading(cpu, wall)


@dataclass(frozen=True)
class Reading:
    """Microseconds per step."""

    cpu: float
    wall: float


@dataclass(frozen=True)
class Stage:
    """What a contender is given for one round."""

    clock: Clock
    dataset: TensorDataset
    folder: Path
    """Empty, for whatever the contender writes."""


def make_dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    samples = BATCH * (WARM_UP + MEASURED)
    inputs = torch.randn(samples, FEATURES, generator=generator)
    return TensorDataset(inputs, torch.randint(CLASSES, (samples,), generator=generator))


def make_loader(dataset: TensorDataset) -> DataLoader:
    return DataLoader(dataset, batch_size=BATCH, shuffle=True)


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(FEATURES, HIDDEN),
        torch.nn.ReLU(),
        torch.nn.Linear(HIDDEN, CLASSES),
    )


def make_optimizer(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def run_by_hand(stage: Stage) -> None:
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    for inputs, targets in make_loader(stage.dataset):
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        stage.clock.tick()


class SampledDataset(TensorDataset):
    """A TensorDataset by another name, whose rows shardwise does not gather by index."""


def run_shardwise(stage: Stage) -> None:
    _run_shardwise(stage, stage.dataset)


def run_shardwise_sampled(stage: Stage) -> None:
    _run_shardwise(stage, SampledDataset(*stage.dataset.tensors))


def _run_shardwise(stage: Stage, dataset: TensorDataset) -> None:
    job = sw.Job(
        model=make_model,
        data=lambda split: dataset if split == "train" else None,
        loss=sw.losses.cross_entropy,
        optimizer=lambda named: make_optimizer([parameter for _, parameter in named]),
        batch_size=BATCH,
        epochs=1,
        schedule=sw.schedules.Cosine(warmup=100),
        on_step=stage.clock.tick,
    )
    run = create_run(stage.folder / "run", "overhead")
    with sw.world(device="cpu") as world:
        sw.train(job, sw.Plan.preset("ddp", 1, batch_size=BATCH), world, run=run)


def run_accelerate(stage: Stage, **options: object) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, **options)
    model = make_model()
    model, optimizer, loader = accelerator.prepare(
        model, make_optimizer(model.parameters()), make_loader(stage.dataset)
    )
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        stage.clock.tick()
    accelerator.end_training()


def run_accelerate_best(stage: Stage) -> None:
    run_accelerate(stage, device_placement=False)


def run_fabric(stage: Stage) -> None:
    _run_fabric(stage, {}, {})


def run_fabric_best(stage: Stage) -> None:
    _run_fabric(stage, {"move_to_device": False}, {"move_to_device": False, "use_distributed_sampler": False})


def _run_fabric(stage: Stage, setup: dict[str, bool], setup_dataloaders: dict[str, bool]) -> None:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    model = make_model()
    model, optimizer = fabric.setup(model, make_optimizer(model.parameters()), **setup)
    loader = fabric.setup_dataloaders(make_loader(stage.dataset), **setup_dataloaders)
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        fabric.backward(loss)
        optimizer.step()
        stage.clock.tick()


def run_trainer(stage: Stage) -> None:
    _run_trainer(stage, logs=True, default_root_dir=stage.folder)


def run_trainer_best(stage: Stage) -> None:
    _run_trainer(stage, logs=False, barebones=True)


def _run_trainer(stage: Stage, *, logs: bool, **options: object) -> None:
    from lightning.pytorch import LightningModule, Trainer

    class Classifier(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()

        def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
            inputs, targets = batch
            loss = cross_entropy(self.model(inputs), targets)
            if logs:
                self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make_optimizer(self.parameters())

        def on_train_batch_end(self, *_: object) -> None:
            stage.clock.tick()

    Trainer(accelerator="cpu", devices=1, max_epochs=1, **options).fit(Classifier(), make_loader(stage.dataset))


@dataclass(frozen=True)
class Turn:
    """One run of a contender, and the hand-written runs before and after it."""

    before: Reading
    own: Reading
    after: Reading

    def over(self, kind: str) -> float:
        """Microseconds per step over the hand-written loop; `kind` is cpu or wall."""
        before, own, after = (getattr(reading, kind) for reading in (self.before, self.own, self.after))
        return own - (before + after) / 2


@dataclass(frozen=True)
class Contender:
    """One row of the table."""

    name: str
    run: Callable[[Stage], None]
    package: str
    target_us: float | None = None
    turns: list[Turn] = field(default_factory=list)

    def over(self, kind: str) -> list[float]:
        """Microseconds per step over the hand-written loop, turn by turn."""
        return [turn.over(kind) for turn in self.turns]

    def figure(self) -> str:
        """The line a program reads."""
        value = round(statistics.median(self.over("cpu")), 1)
        line = f"FIGURE overhead.{self.name.replace(' ', '_')}.us {value} {UNIT}"
        if self.target_us is None:
            return line
        return f"{line} target <={self.target_us:g} {'met' if value <= self.target_us else 'missed'}"


def contenders() -> list[Contender]:
    return [
        Contender("hand-written", run_by_hand, "torch"),
        Contender("shardwise", run_shardwise, "shardwise", TARGET_US),
        Contender("shardwise sampled", run_shardwise_sampled, "shardwise", TARGET_US),
        Contender("accelerate", run_accelerate, "accelerate"),
        Contender("accelerate best", run_accelerate_best, "accelerate"),
        Contender("fabric", run_fabric, "lightning"),
        Contender("fabric best", run_fabric_best, "lightning"),
        Contender("trainer", run_trainer, "lightning"),
        Contender("trainer best", run_trainer_best, "lightning"),
    ]


def installed(package: str) -> bool:
    try:
        importlib.import_module(package)
    except ImportError:
        return False
    return True


@contextlib.contextmanager
def terminal() -> Iterator[None]:
    """Make standard output and error a pseudo-terminal that another process reads, as a terminal program would."""
    master, slave = os.openpty()
    with subprocess.Popen(["cat"], stdin=master, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
        os.close(master)
        with os.fdopen(slave, "w") as stream, contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
            yield


def measure(run: Callable[[Stage], None], dataset: TensorDataset) -> Reading:
    """Train one fresh run and return its time per step."""
    with tempfile.TemporaryDirectory() as folder, terminal():
        stage = Stage(Clock(), dataset, Path(folder))
        torch.set_num_threads(1)
        gc.collect()  # nobody pays for the garbage of the run before
        run(stage)
    return stage.clock.read()


def compete(rivals: list[Contender], rounds: int) -> None:
    """Give every contender one turn per round."""
    dataset = make_dataset()
    before = measure(run_by_hand, dataset)
    order = random.Random(0)
    for _ in range(rounds):
        for rival in order.sample(rivals, len(rivals)):
            own, after = measure(rival.run, dataset), measure(run_by_hand, dataset)
            rival.turns.append(Turn(before, own, after))
            before = after


def show(rivals: list[Contender]) -> None:
    print(f"\n{'microseconds per step':<20}{'CPU':>8}{'wall':>8}{'over hand-written':>20}{'quartiles':>18}{'wall':>8}")
    for rival in rivals:
        cpu, wall = (statistics.median(getattr(turn.own, kind) for turn in rival.turns) for kind in ("cpu", "wall"))
        low, middle, high = statistics.quantiles(rival.over("cpu"), n=4, method="inclusive")
        over_wall = statistics.median(rival.over("wall"))
        print(
            f"{rival.name:<20}{cpu:>8.0f}{wall:>8.0f}{middle:>20.1f}{f'{low:.1f} .. {high:.1f}':>18}{over_wall:>8.1f}"
        )
    print()


def quiet() -> None:
    """Keep the peers' advice off the table, and have every terminal take live progress bars."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.environ["TERM"] = "xterm-256color"


def main() -> None:
    parser = argparse.ArgumentParser(description="Microseconds per step over a hand-written loop.")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds instead of {ROUNDS}")
    rounds = QUICK_ROUNDS if parser.parse_args().quick else ROUNDS
    quiet()
    known = contenders()
    missing = {package for package in {rival.package for rival in known} if not installed(package)}
    for package in sorted(missing):
        print(f"{package} is not installed: left out (pip install -r benchmarks/peers.txt)")
    rivals = [rival for rival in known if rival.package not in missing]
    versions = ", ".join(f"{name} {version(name)}" for name in dict.fromkeys(rival.package for rival in rivals))
    print(f"{rounds} rounds of {MEASURED} steps on one thread; Python {platform.python_version()}, {versions}")
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start", flush=True)
    compete(rivals, rounds)
    show(rivals)
    for rival in rivals[1:]:
        print(rival.figure())


if __name__ == "__main__":
    main()
