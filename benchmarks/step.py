"""Step: one training step on one GPU, against a hand-written loop and peers; and the largest micro-batch.

Every contender trains the same model (bf16 autocast over fp32 weights, `AdamW(lr=1e-4, fused=True)`, no clipping) from
the same weights on the same batches, which lie on the GPU already: the step is what is timed. Contenders take turns, a
few steps each in an order drawn anew every round; a turn ends with one wait for the device; the first turn, in which
kernels are compiled and captured, counts for nobody. Reported are medians over rounds, quartiles, and the peak memory
of each: the allocator's, less what the others hold.

launch       a small MLP whose kernels are shorter than the time to launch them: shardwise as it is and with capture =
             "step", against the hand-written loop, Accelerate as it is, with torch.compile, and with torch.compile in
             the mode "reduce-overhead", which captures too
eager        a 1.2-billion-parameter Llama shape, 8 x 2048 tokens, nothing compiled
compiled     the same compiled. The reference is the hand-written loop around torch.compile(model); beside it stands
             the same loop with every block compiled by itself. shardwise: compile = "blocks", fused_loss, capture
vocabulary   Llama 3.2's 1B shape, whose vocabulary is 128,256: the largest micro-batch of 2048 tokens that trains,
             hand-written with blocks compiled, and shardwise with fused_loss; and with selective recompute as well

Without a GPU, `--quick` runs tiny shapes on the CPU: its figures mean nothing there, its losses are compared all the
same.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import shardwise as sw
from figures import figure
from shapes import LLAMA_1B
from step_loops import RATE, Race, forget, installed, speed, table
from step_vocabulary import largest_micro_batches

if TYPE_CHECKING:
    from shardwise.models import DecoderConfig

TINY = dataclasses.replace(
    LLAMA_1B, width=32, num_layers=2, num_heads=4, num_kv_heads=2, mlp_width=64, vocab_size=100, context=16
)
PARTS = ("launch", "eager", "compiled", "vocabulary")


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


class Points(torch.utils.data.Dataset):
    """Random points of ten kinds."""

    def __len__(self) -> int:
        return 65_536

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(64, generator=generator), torch.tensor(index % 10)


def mlp() -> nn.Module:
    """Eight layers of 256 units with norms: about 200 kernels a step, of some microseconds each."""
    layers: list[nn.Module] = [nn.Linear(64, 256)]
    for _ in range(8):
        layers += [nn.LayerNorm(256), nn.GELU(), nn.Linear(256, 256)]
    return nn.Sequential(*layers, nn.Linear(256, 10))


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def text_job(config: DecoderConfig, rows: int, steps: int) -> sw.Job:
    return sw.Job(
        model=lambda: sw.models.decoder(config),
        data=lambda split: Tokens(config) if split == "train" else None,
        loss=sw.losses.token_cross_entropy,
        optimizer=sw.adamw(lr=RATE, weight_decay=0.0),
        batch_size=rows,
        steps=steps,
    )


def mlp_job(steps: int) -> sw.Job:
    return sw.Job(
        model=mlp,
        data=lambda split: Points() if split == "train" else None,
        loss=sw.losses.cross_entropy,
        optimizer=sw.adamw(lr=RATE, weight_decay=0.0),
        batch_size=64,
        steps=steps,
    )


def race_launch(world: sw.World, rounds: int) -> None:
    """A step that is bound by launches."""
    size = 20
    race = Race(mlp_job(size * (rounds + 1)), world, cross_entropy)
    setups = {
        "hand-written": race.hand_written,
        "hand-written compiled": lambda: race.hand_written("model"),
        "shardwise": race.shardwise,
        "shardwise captured": lambda: race.shardwise(capture="step"),
        "accelerate": race.accelerate,
        "accelerate compiled": lambda: race.accelerate("default"),
        "accelerate reduce-overhead": lambda: race.accelerate("reduce-overhead"),
    }
    if world.device.type == "cpu":  # where compiling takes longer than all else, and shows nothing about launches
        setups = {name: setup for name, setup in setups.items() if "compiled" not in name and "reduce" not in name}
    loops = race.run(installed(setups), rounds=rounds, size=size)
    table(loops, "hand-written", "launch")
    captured = speed(loops["shardwise captured"])
    goals = {"hand-written": 5, "accelerate compiled": 3}
    for name, loop in loops.items():
        if not name.startswith("shardwise"):
            goal = {"at_least": goals[name]} if name in goals else {}
            label = name.replace(" ", "-")
            figure(f"step.launch.captured.{label}", captured / speed(loop), f"x-{label}", **goal)


def race_eager(world: sw.World, config: DecoderConfig, rows: int, rounds: int) -> None:
    """A large step, nothing compiled."""
    race = Race(text_job(config, rows, 4 * (rounds + 1)), world, token_loss)
    setups = {
        "hand-written": race.hand_written,
        "shardwise": race.shardwise,
        "accelerate": race.accelerate,
        "fabric": race.fabric,
    }
    loops = race.run(installed(setups), rounds=rounds, size=4)
    table(loops, "hand-written", "eager")
    for name in loops.keys() - {"hand-written"}:
        goal = {"at_least": 0.99} if name == "shardwise" else {}
        figure(f"step.eager.{name}", speed(loops[name]) / speed(loops["hand-written"]), "x-hand-written", **goal)


def race_compiled(world: sw.World, config: DecoderConfig, rows: int, rounds: int) -> None:
    """A large step, compiled, with all that shardwise has for it."""
    race = Race(text_job(config, rows, 5 * (rounds + 1)), world, token_loss)
    print(f"{race.num_parameters / 1e9:.2f} billion parameters, {rows} x {config.context} tokens")
    setups = {
        "hand-written model": lambda: race.hand_written("model"),
        "hand-written blocks": lambda: race.hand_written("blocks"),
        "shardwise blocks fused captured": lambda: race.shardwise(compile="blocks", fused_loss=True, capture="step"),
    }
    loops = race.run(setups, rounds=rounds, size=5)
    table(loops, "hand-written model", "compiled")
    ours = loops["shardwise blocks fused captured"]
    for name, goal in (("model", {"at_least": 1.05}), ("blocks", {})):
        peer = loops[f"hand-written {name}"]
        figure(f"step.compiled.{name}", speed(ours) / speed(peer), f"x-hand-written-{name}", **goal)
        if peer.peak_bytes:
            memory = ours.peak_bytes / peer.peak_bytes
            figure(f"step.compiled.{name}.memory", memory, f"x-hand-written-{name}", at_most=0.9999)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few rounds; tiny shapes without a GPU")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    if not on_gpu and not options.quick:
        print("no CUDA device: steps are measured on a GPU only (--quick tries the script on the CPU)")
        return
    random.seed(0)
    torch.set_float32_matmul_precision("high")
    config, rows = (LLAMA_1B, 8) if on_gpu else (TINY, 2)
    rounds = 2 if options.quick else options.rounds
    with sw.world() as world:
        name = torch.cuda.get_device_name() if on_gpu else "CPU"
        print(f"{name}, torch {torch.__version__}")
        races = {
            "launch": lambda: race_launch(world, rounds),
            "eager": lambda: race_eager(world, config, rows, rounds),
            "compiled": lambda: race_compiled(world, config, rows, rounds),
            "vocabulary": lambda: largest_micro_batches(world, lambda shape, batch: text_job(shape, batch, 2)),
        }
        for part in options.parts:
            races[part]()
            forget(world.device)


if __name__ == "__main__":
    main()
