"""Board: training speed of one GPU as users get it, against the hand-written compiled loop and peers.

Every contender trains the same model from the same weights on the same global batches, which lie on the GPU already,
with fused AdamW and bf16 autocast over fp32 weights. The reference is the loop of step_loops.py with model and loss in
one torch.compile region. Contenders take turns in random order; the first turn, in which kernels are compiled, counts
for nobody but is printed. `as it comes` is the plan that `shardwise train` settles on without any option.

Model FLOP/s count matrix products and causal attention, forward and backward, without recomputation and without the
input embedding: 6 x parameters x tokens + 6 x layers x width x context x tokens. The share is of the bf16 matrix rate
that this GPU reaches at 8192 x 8192 x 8192 in the same run.

Without a GPU, `--quick` tries the script on tiny shapes; its figures mean nothing there.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import time

import torch

import shardwise as sw
from figures import figure
from shapes import LLAMA_1B
from shardwise.models import DecoderConfig
from shardwise.planner.settle import local_device, settle_job_plan
from step import TINY, mlp_job, text_job, token_loss
from step_loops import Loop, Race, forget, installed, speed

GPT2 = DecoderConfig(
    family="gpt2",
    width=768,
    num_layers=12,
    num_heads=12,
    num_kv_heads=12,
    mlp_width=3072,
    vocab_size=50_257,
    context=1024,
)
LLAMA_3B = dataclasses.replace(LLAMA_1B, width=3072, num_layers=24, num_heads=24, num_kv_heads=8, mlp_width=8192)
WIDE = dataclasses.replace(
    LLAMA_1B, width=4096, num_layers=8, num_heads=32, num_kv_heads=8, mlp_width=14_336, context=4096
)
SHAPES = {"gpt2-124m": (GPT2, 64), "llama-1.2b": (LLAMA_1B, 8), "llama-3b": (LLAMA_3B, 4), "width-4096": (WIDE, 2)}
GOALS = {"gpt2-124m": 1.0, "llama-1.2b": 1.0}
"""Least speed of shardwise as it comes, in multiples of the reference."""


class Board(Race):
    """The contenders of the board."""

    def together(self):
        """The reference: the hand-written loop around one compiled region of model and loss."""
        model = self.fresh()
        optimizer = self.optimizer(model)
        run = torch.compile(lambda batch: self.loss_of(model, batch))

        def step(batch):
            optimizer.zero_grad()
            with torch.autocast(self.device.type, torch.bfloat16):
                loss = run(batch.micro_batches[0].batch)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    def as_it_comes(self):
        """The plan that `shardwise train` settles on for this job and this GPU."""
        long_job = dataclasses.replace(self.job, steps=100_000)  # a short job would stay eager
        plan = settle_job_plan(long_job, "auto", world_size=1, device=local_device(None, 1), overrides={})
        for name in ("layout", "compile", "capture"):
            print(f"  as it comes: {name} = {getattr(plan, name)} ({plan.source(name)})")
        print(f"  as it comes: micro_batch = {plan.micro_batch}, accumulation = {plan.accumulation}")
        step = sw.build_step(self.job, plan, self.world, note=lambda text: print(f"  as it comes: {text}"))
        batches = iter(list(step.feed))
        return lambda _: step(next(batches)).loss_share


def matmul_rate(device: torch.device) -> float:
    """Return the FLOP/s of a large bf16 matrix product, the median of twenty."""
    size = 8192 if device.type == "cuda" else 256
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds = []
    for _ in range(22):
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        a @ b
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return 2 * size**3 / statistics.median(seconds[2:])


def step_flops(config: DecoderConfig, rows: int, num_parameters: int) -> float:
    """Return the model FLOPs of one step, by the formula above."""
    tokens = rows * config.context
    embedding = config.vocab_size * config.width + (config.context * config.width if config.family == "gpt2" else 0)
    return 6 * tokens * (num_parameters - embedding + config.num_layers * config.width * config.context)


def take_turns(race: Board, setups: dict, *, rounds: int, size: int) -> dict[str, Loop]:
    """Let contenders take turns of `size` steps in random order; print the seconds of the first turn of each."""
    loops = {name: Loop(setup) for name, setup in setups.items()}
    for number in range(rounds + 1):
        for name in random.sample(list(loops), len(loops)):
            began = time.perf_counter()
            seconds = loops[name].turn(race.batches[number * size : (number + 1) * size], race.device)
            if number:
                loops[name].rates.append(size / seconds)
            else:
                print(f"  first turn of {name}: {time.perf_counter() - began:.1f} s", flush=True)
    return loops


def show(name: str, loops: dict[str, Loop], *, flops: float, tokens: int, rate: float) -> None:
    """Print the table of one shape and its figures."""
    reference = loops["hand-written"]
    exact = torch.stack([loss.float() for loss in reference.losses])
    print(f"{name:28} {'tokens/s':>10} {'x hand-written':>15} {'TFLOP/s':>8} {'share':>6} {'GiB':>7} {'loss gap':>9}")
    for contender, loop in loops.items():
        losses = torch.stack([loss.float() for loss in loop.losses])
        gap = float(((losses - exact) / exact).abs().max())
        per_s, ratio = speed(loop), speed(loop) / speed(reference)
        achieved = flops * per_s
        print(
            f"{contender:28} {tokens * per_s:10,.0f} {ratio:15.3f} {achieved / 1e12:8.0f} {achieved / rate:6.1%}"
            f" {loop.peak_bytes / 2**30:7.2f} {gap:9.1e}",
            flush=True,
        )
    ours = loops["as it comes"]
    goal = {"at_least": GOALS[name]} if name in GOALS else {}
    figure(f"board.{name}.as-it-comes", speed(ours) / speed(reference), "x-hand-written", **goal)
    figure(
        f"board.{name}.as-it-comes.memory", ours.peak_bytes / max(1, reference.peak_bytes), "x-hand-written", at_most=1
    )


def race_shape(world: sw.World, name: str, rate: float, *, rounds: int, size: int) -> None:
    config, rows = SHAPES[name] if world.device.type == "cuda" else (TINY, 2)
    race = Board(text_job(config, rows, size * (rounds + 1)), world, token_loss)
    print(f"{race.num_parameters / 1e9:.2f} billion parameters, {rows} x {config.context} tokens")
    setups = {"hand-written": race.together, "as it comes": race.as_it_comes}
    peers = {"accelerate compiled": lambda: race.accelerate("default"), "fabric": race.fabric}
    if name == "gpt2-124m" and world.device.type == "cuda":
        setups |= installed(peers)
    flops = step_flops(config, rows, race.num_parameters)
    loops = take_turns(race, setups, rounds=rounds, size=size)
    show(name, loops, flops=flops, tokens=rows * config.context, rate=rate)


def race_launch_bound(world: sw.World, *, rounds: int) -> None:
    """A model whose kernels are shorter than their launches, against the eager hand-written loop."""
    size = 20
    race = Board(mlp_job(size * (rounds + 1)), world, torch.nn.functional.cross_entropy)
    loops = take_turns(
        race, {"hand-written": race.hand_written, "as it comes": race.as_it_comes}, rounds=rounds, size=size
    )
    ratio = speed(loops["as it comes"]) / speed(loops["hand-written"])
    figure("board.launch-bound.as-it-comes", ratio, "x-eager-hand-written", at_least=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few rounds; tiny shapes where there is no GPU")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--shapes", nargs="+", choices=[*SHAPES, "launch-bound"], default=[*SHAPES, "launch-bound"])
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    if not on_gpu and not options.quick:
        print("no CUDA device: the board is measured on a GPU only (--quick tries the script on the CPU)")
        return
    random.seed(0)
    torch.set_float32_matmul_precision("high")
    rounds = 2 if options.quick else options.rounds
    with sw.world() as world:
        rate = matmul_rate(world.device)
        print(
            f"{torch.cuda.get_device_name() if on_gpu else 'CPU'}, torch {torch.__version__}, {rate / 1e12:.0f} TFLOP/s"
        )
        for name in options.shapes:
            if name == "launch-bound":
                race_launch_bound(world, rounds=rounds)
            else:
                race_shape(world, name, rate, rounds=rounds, size=5)
            forget(world.device)


if __name__ == "__main__":
    main()
