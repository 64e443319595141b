"""Contenders for one training step: a hand-written loop, shardwise, Accelerate and Lightning Fabric, on one model."""

from __future__ import annotations

import gc
import importlib.util
import random
import statistics
import time
from typing import TYPE_CHECKING

import torch

import shardwise as sw
from figures import figure
from shardwise.plans import Plan, Precision

if TYPE_CHECKING:
    from collections.abc import Callable

RATE = 1e-4


class Loop:
    """A contender: its own model and optimizer, one step on a batch, and what these take."""

    def __init__(self, setup: Callable) -> None:
        self._setup = setup
        self.run = None
        self.losses: list[torch.Tensor] = []
        self.rates: list[float] = []
        self._own_bytes = 0
        self.peak_bytes = 0

    def turn(self, batches: list, device: torch.device) -> float:
        """Train on `batches`; return seconds."""
        before = allocated(device)
        if self.run is None:
            self.run = self._setup()
        wait(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        for batch in batches:
            self.losses.append(self.run(batch))
        wait(device)
        seconds = time.perf_counter() - began
        if device.type == "cuda":
            # The memory of the others does not change meanwhile, so the peak less that is this one's. The first turn
            # counts too: what a captured graph uses later is no longer counted as allocated.
            others = before - self._own_bytes
            self.peak_bytes = max(self.peak_bytes, torch.cuda.max_memory_allocated() - others)
            self._own_bytes = allocated(device) - others
        return seconds


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def forget(device: torch.device) -> None:
    """Give back what contenders of an earlier race have left."""
    gc.collect()
    torch.compiler.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class Race:
    """What contenders have in common: the job, fresh weights, the loss, the device."""

    def __init__(self, job: sw.Job, world: sw.World, loss: Callable) -> None:
        self.job, self.world, self.device, self._loss = job, world, world.device, loss
        first = sw.build_step(job, Plan(micro_batch=job.batch_size, precision=Precision(compute="bf16")), world)
        self.batches = list(first.feed)
        self._weights = {name: value.cpu().clone() for name, value in first.model.state_dict().items()}
        self.num_parameters = sum(value.numel() for value in self._weights.values())
        del first
        forget(self.device)

    def fresh(self) -> torch.nn.Module:
        """Return the job's model with the weights everybody starts from."""
        with torch.device("meta"):
            model = self.job.model()
        model = model.to_empty(device=self.device)
        model.load_state_dict(self._weights)
        return model

    def loss_of(self, model: Callable, batch: tuple) -> torch.Tensor:
        """Return the mean loss."""
        return self._loss(model(*batch[:-1]), batch[-1])

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """Return what everybody optimizes with."""
        return torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0, fused=True)

    def hand_written(self, compile_: str = "none") -> Callable:
        """zero_grad, autocast around forward and loss, backward, optimizer step."""
        model = self.fresh()
        optimizer = self.optimizer(model)
        run = torch.compile(model) if compile_ == "model" else model
        for block in model.blocks if compile_ == "blocks" else ():
            block.compile()

        def step(batch):
            optimizer.zero_grad()
            with torch.autocast(self.device.type, torch.bfloat16):
                loss = self.loss_of(run, batch.micro_batches[0].batch)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    def shardwise(self, **options: object) -> Callable:
        """A plan for one process; checks every gradient for NaN and reports losses."""
        plan = Plan(micro_batch=self.job.batch_size, precision=Precision(compute="bf16"), **options)
        step = sw.build_step(self.job, plan, self.world, note=lambda text: print(f"  shardwise: {text}"))
        return lambda batch: step(batch).loss_share

    def accelerate(self, mode: str | None = None, **options: object) -> Callable:
        """Accelerator(mixed_precision="bf16"), prepare, accelerator.backward; torch.compile first with a `mode`."""
        from accelerate import Accelerator

        accelerator = Accelerator(mixed_precision="bf16", cpu=self.device.type == "cpu", **options)
        model = self.fresh()
        optimizer = self.optimizer(model)
        model, optimizer = accelerator.prepare(model if mode is None else torch.compile(model, mode=mode), optimizer)

        def step(batch):
            if mode == "reduce-overhead":
                torch.compiler.cudagraph_mark_step_begin()
            optimizer.zero_grad()
            with accelerator.autocast():
                loss = self.loss_of(model, batch.micro_batches[0].batch)
            accelerator.backward(loss)
            optimizer.step()
            return loss.detach().clone() if mode == "reduce-overhead" else loss.detach()

        return step

    def fabric(self, compiled: Callable = lambda model: model) -> Callable:
        """Fabric(precision="bf16-mixed"), setup of the `compiled` model, fabric.backward."""
        from lightning.fabric import Fabric

        runtime = Fabric(accelerator=self.device.type, devices=1, precision="bf16-mixed")
        model = self.fresh()
        model, optimizer = runtime.setup(compiled(model), self.optimizer(model))

        def step(batch):
            optimizer.zero_grad()
            with runtime.autocast():
                loss = self.loss_of(model, batch.micro_batches[0].batch)
            runtime.backward(loss)
            optimizer.step()
            return loss.detach()

        return step

    def run(self, setups: dict[str, Callable], *, rounds: int, size: int) -> dict[str, Loop]:
        """Let contenders take turns of `size` steps; the first turn warms up and counts for nobody."""
        loops = {name: Loop(setup) for name, setup in setups.items()}
        for number in range(rounds + 1):
            order = list(loops)
            random.shuffle(order)
            for name in order:
                try:
                    seconds = loops[name].turn(self.batches[number * size : (number + 1) * size], self.device)
                except RuntimeError as error:
                    if not name.startswith("accelerate"):
                        raise
                    print(f"{name} fails and is left out: {str(error).splitlines()[0]}")
                    del loops[name]
                    continue
                if number:
                    loops[name].rates.append(size / seconds)
        return loops


def installed(setups: dict[str, Callable]) -> dict[str, Callable]:
    """Leave out peers that are not installed, with a message."""
    modules = {"accelerate": "accelerate", "fabric": "lightning"}
    missing = {name for name in setups if importlib.util.find_spec(modules.get(name.split()[0], "torch")) is None}
    for name in sorted(missing):
        print(f"{name} is not installed and left out")
    return {name: setup for name, setup in setups.items() if name not in missing}


def speed(loop: Loop) -> float:
    """Median steps per second."""
    return statistics.median(loop.rates)


def table(loops: dict[str, Loop], reference: str, kind: str) -> None:
    """Print steps per second, peak memory and the largest gap to the reference's losses; losses are figures."""
    exact = torch.stack([loss.float() for loss in loops[reference].losses])
    print(f"{kind:34} {'steps/s':>9} {'quartiles':>17} {'x reference':>12} {'peak GiB':>9} {'loss gap':>9}")
    for name, loop in loops.items():
        low, _, high = statistics.quantiles(loop.rates, n=4) if len(loop.rates) > 1 else (speed(loop),) * 3
        losses = torch.stack([loss.float() for loss in loop.losses])
        gap = float(((losses - exact) / exact).abs().max())
        ratio, peak = speed(loop) / speed(loops[reference]), loop.peak_bytes / 2**30
        print(f"{name:34} {speed(loop):9.2f} {low:8.2f}-{high:8.2f} {ratio:12.3f} {peak:9.2f} {gap:9.1e}")
        if name.startswith("shardwise"):
            label = name.replace(" ", "-")
            figure(f"step.{kind}.{label}.loss", gap, "relative-to-reference", at_most=5e-3)
