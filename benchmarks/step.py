"""Step: tokens per second of a 1.2-billion-parameter Llama shape on one GPU, against a hand-written loop and peers.

Every contender trains the same decoder (sw.models, bf16 autocast over fp32 weights, `AdamW(lr=1e-4, fused=True)`, no
clipping) from the same weights on the same batches of 8 x 2048 tokens, which lie on the GPU already: the step is what
is timed. Contenders take turns, a few steps each in an order drawn anew every round, first all eager, then all
compiled; a turn ends with one wait for the device. Reported are medians over rounds and quartiles.

hand-written   zero_grad, autocast around forward and loss, backward, optimizer step; compiled: torch.compile(model),
               and beside it every block by block.compile(); the faster is what the others are compared with
shardwise      sw.build_step with plan one; checks every gradient for NaN and reports losses; compiled: once with
               compile = "blocks", once with compile = "model"
accelerate     Accelerator(mixed_precision="bf16"), prepare, accelerator.backward; compiled: torch.compile first
fabric         Fabric(precision="bf16-mixed"), setup, fabric.backward; compiled: torch.compile first

A peer that is not installed is left out, and said so. Without a GPU, `--quick` runs a tiny shape on the CPU: its
figures mean nothing there, its losses are compared all the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import random
import statistics
import time
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import cross_entropy

import shardwise as sw
from figures import figure
from shapes import LLAMA_1B
from shardwise.plan import Plan, Precision

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.models import DecoderConfig

TINY = dataclasses.replace(
    LLAMA_1B, width=32, num_layers=2, num_heads=4, num_kv_heads=2, mlp_width=64, vocab_size=100, context=16
)
RATE = 1e-4


class Tokens(torch.utils.data.Dataset):
    """Random rows of tokens."""

    def __init__(self, config: DecoderConfig) -> None:
        self.config = config

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        row = torch.randint(0, self.config.vocab_size, (self.config.context + 1,), generator=generator)
        return row[:-1], row[1:]


class Loop:
    """A contender: its own model and optimizer, and one step on a batch."""

    def __init__(self, setup: Callable) -> None:
        self._setup = setup
        self.run = None
        self.losses: list[torch.Tensor] = []
        self.rates: list[float] = []

    def turn(self, batches: list, device: torch.device) -> float:
        """Train on `batches`; return seconds."""
        if self.run is None:
            self.run = self._setup()
        wait(device)
        began = time.perf_counter()
        for batch in batches:
            self.losses.append(self.run(batch))
        wait(device)
        return time.perf_counter() - began


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def hand_written(fresh: Callable, device: torch.device, *, compile_: str) -> Callable:
    model = fresh()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0, fused=True)
    run = torch.compile(model) if compile_ == "model" else model
    if compile_ == "blocks":
        for block in model.blocks:
            block.compile()

    def step(batch):
        tokens, targets = batch.micro_batches[0].batch
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            loss = loss_of(run(tokens), targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def shardwise(job: sw.Job, world: sw.World, compile_: str) -> Callable:
    plan = Plan(micro_batch=job.batch_size, precision=Precision(compute="bf16"), compile=compile_)
    step = sw.build_step(job, plan, world)
    return lambda batch: step(batch).loss_share


def accelerate(fresh: Callable, device: torch.device, *, compiled: bool) -> Callable:
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16", cpu=device.type == "cpu")
    model = fresh()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0, fused=True)
    model, optimizer = accelerator.prepare(torch.compile(model) if compiled else model, optimizer)

    def step(batch):
        tokens, targets = batch.micro_batches[0].batch
        optimizer.zero_grad()
        with accelerator.autocast():
            loss = loss_of(model(tokens), targets)
        accelerator.backward(loss)
        optimizer.step()
        return loss.detach()

    return step


def fabric(fresh: Callable, device: torch.device, *, compiled: bool) -> Callable:
    from lightning.fabric import Fabric

    runtime = Fabric(accelerator=device.type, devices=1, precision="bf16-mixed")
    model = fresh()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0, fused=True)
    model, optimizer = runtime.setup(torch.compile(model) if compiled else model, optimizer)

    def step(batch):
        tokens, targets = batch.micro_batches[0].batch
        optimizer.zero_grad()
        with runtime.autocast():
            loss = loss_of(model(tokens), targets)
        runtime.backward(loss)
        optimizer.step()
        return loss.detach()

    return step


def contenders(job: sw.Job, world: sw.World, fresh: Callable, *, compiled: bool) -> dict[str, Loop]:
    """Everybody who is installed."""
    device = world.device
    loops = {}
    for kind in ("blocks", "model") if compiled else ("none",):
        ending = f" {kind}" if compiled else ""
        loops[f"hand-written{ending}"] = Loop(lambda kind=kind: hand_written(fresh, device, compile_=kind))
        loops[f"shardwise{ending}"] = Loop(lambda kind=kind: shardwise(job, world, kind))
    for name, module, setup in (("accelerate", "accelerate", accelerate), ("fabric", "lightning", fabric)):
        if importlib.util.find_spec(module) is None:
            print(f"{name} is not installed and left out")
        else:
            loops[name] = Loop(lambda setup=setup: setup(fresh, device, compiled=compiled))
    return loops


def race(loops: dict[str, Loop], batches: list, tokens: int, device: torch.device, rounds: int) -> None:
    """Let contenders take turns; the first turn warms up and compiles and counts for nobody."""
    size = len(batches) // (rounds + 1)
    for number in range(rounds + 1):
        order = list(loops)
        random.shuffle(order)
        for name in order:
            seconds = loops[name].turn(batches[number * size : (number + 1) * size], device)
            if number:
                loops[name].rates.append(tokens * size / seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few rounds; a tiny shape where there is no GPU")
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    if not on_gpu and not options.quick:
        print("no CUDA device: steps are measured on a GPU only (--quick tries the script on the CPU)")
        return
    random.seed(0)
    torch.set_float32_matmul_precision("high")
    config, rows = (LLAMA_1B, 8) if on_gpu else (TINY, 2)
    rounds = 2 if options.quick else options.rounds
    size = 4
    with sw.world() as world:
        job = sw.Job(
            model=lambda: sw.models.decoder(config),
            data=lambda split: Tokens(config) if split == "train" else None,
            loss=sw.losses.token_cross_entropy,
            optimizer=sw.adamw(lr=RATE, weight_decay=0.0),
            batch_size=rows,
            steps=size * (rounds + 1),
        )
        first = sw.build_step(job, Plan(micro_batch=rows, precision=Precision(compute="bf16")), world)
        batches = list(first.feed)
        weights = {name: value.cpu().clone() for name, value in first.model.state_dict().items()}
        del first

        def fresh() -> torch.nn.Module:
            with torch.device("meta"):
                model = sw.models.decoder(config)
            model = model.to_empty(device=world.device)
            model.load_state_dict(weights)
            return model

        name = torch.cuda.get_device_name() if on_gpu else "CPU"
        total = sum(value.numel() for value in weights.values())
        print(
            f"{name}, torch {torch.__version__}, {total / 1e9:.2f} billion parameters, {rows} x {config.context} tokens"
        )
        for compiled in (False, True):
            loops = contenders(job, world, fresh, compiled=compiled)
            race(loops, batches, rows * config.context, world.device, rounds)
            report(loops, "compiled" if compiled else "eager")
            del loops
            if on_gpu:
                torch.cuda.empty_cache()


def report(loops: dict[str, Loop], kind: str) -> None:
    """Print the table and figures of one race."""
    own = [name for name in loops if name.startswith("hand-written")]
    best = max(own, key=lambda name: statistics.median(loops[name].rates))
    reference = statistics.median(loops[best].rates)
    exact = torch.stack([loss.float() for loss in loops[best].losses])
    print(f"{kind:18} {'tokens/s':>10} {'quartiles':>19} {'x hand-written':>15} {'loss gap':>9}")
    for name, loop in loops.items():
        middle = statistics.median(loop.rates)
        low, _, high = statistics.quantiles(loop.rates, n=4) if len(loop.rates) > 1 else (middle,) * 3
        losses = torch.stack([loss.float() for loss in loop.losses])
        gap = float(((losses - exact) / exact).abs().max())
        print(f"{name:18} {middle:10.0f} {low:9.0f}-{high:9.0f} {middle / reference:15.3f} {gap:9.1e}")
        label = name.replace(" ", "-")
        goal = {"at_least": 0.99} if label in {"shardwise", "shardwise-blocks"} else {}
        if name not in own:
            figure(f"step.{kind}.{label}", middle / reference, "x-hand-written", **goal)
        if name.startswith("shardwise"):
            figure(f"step.{kind}.{label}.loss", gap, "relative-to-hand-written", at_most=5e-3)


if __name__ == "__main__":
    main()
