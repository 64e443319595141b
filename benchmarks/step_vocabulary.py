"""The largest micro-batch of a model with a large vocabulary: found by training one step, until memory ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import shardwise as sw
from figures import figure
from shardwise.data.cursor import Cursor
from shardwise.data.feed import MicroBatch, StepBatch
from shardwise.models import DecoderConfig
from shardwise.plans import Plan, Precision
from step_loops import RATE, forget

if TYPE_CHECKING:
    from collections.abc import Callable

LLAMA_3_2_1B = DecoderConfig(
    family="llama",
    width=2048,
    num_layers=16,
    num_heads=32,
    num_kv_heads=8,
    mlp_width=8192,
    vocab_size=128_256,
    context=2048,
    tie_head=True,
    rope_base=500_000.0,
)
FIRST, SECOND = 4, 8
"""Rows whose peaks predict the limit of memory; from there larger ones are tried."""


def largest_micro_batches(world: sw.World, make_job: Callable[[DecoderConfig, int], sw.Job]) -> None:
    """Print the largest micro-batches, and how much larger than the hand-written loop's they are."""
    if world.device.type != "cuda":
        print("vocabulary: the largest micro-batch depends on a GPU's memory, and this machine has no GPU")
        return
    found = {
        name: _largest(lambda rows, take=take: _peak(world, make_job(LLAMA_3_2_1B, rows), take))
        for name, take in {
            "hand-written": _hand_written,
            "fused_loss": lambda job, world: _planned(job, world, fused_loss=True),
            "fused_loss and recompute": lambda job, world: _planned(job, world, fused_loss=True, recompute="selective"),
        }.items()
    }
    total = torch.cuda.get_device_properties(world.device).total_memory / 2**30
    print(
        f"largest micro-batch of {LLAMA_3_2_1B.context} tokens, vocabulary {LLAMA_3_2_1B.vocab_size}, {total:.0f} GiB"
    )
    for name, rows in found.items():
        print(f"{name:34} {rows:4} rows")
    ratios = {name: rows / found["hand-written"] for name, rows in found.items()}
    figure("step.vocabulary.micro-batch", ratios["fused_loss"], "x-hand-written", at_least=2)
    figure("step.vocabulary.micro-batch.recompute", ratios["fused_loss and recompute"], "x-hand-written")


def _hand_written(job: sw.Job, world: sw.World) -> Callable:
    with world.device:
        model = job.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0, fused=True)
    for block in model.blocks:
        block.compile()

    def step(batch):
        tokens, targets = batch.micro_batches[0].batch
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()

    return step


def _planned(job: sw.Job, world: sw.World, **options: object) -> Callable:
    plan = Plan(micro_batch=job.batch_size, precision=Precision(compute="bf16"), compile="blocks", **options)
    return sw.build_step(job, plan, world)


def _peak(world: sw.World, job: sw.Job, take: Callable) -> int | None:
    """Train two steps and return the peak in bytes; None when memory ends."""
    forget(world.device)
    torch.cuda.reset_peak_memory_stats()
    shape = (job.batch_size, LLAMA_3_2_1B.context)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, LLAMA_3_2_1B.vocab_size, shape, generator=generator).to(world.device)
    try:
        step = take(job, world)
        batch = _batch(tokens)
        for _ in range(2):
            step(batch)
        torch.cuda.synchronize()
    except torch.cuda.OutOfMemoryError:
        return None
    return torch.cuda.max_memory_allocated()


def _batch(tokens: torch.Tensor) -> StepBatch:
    rows = len(tokens)
    return StepBatch([MicroBatch((tokens, tokens), rows, rows)], tokens.numel(), rows, Cursor(seed=0, epoch=0, index=0))


def _largest(peak: Callable[[int], int | None]) -> int:
    """Return the most rows that train: guessed from two peaks, then tried, first up and then down."""
    low, high = peak(FIRST), peak(SECOND)
    if low is None or high is None:
        return FIRST if low is not None else 0
    total = torch.cuda.get_device_properties(0).total_memory
    rows = int(SECOND + (0.96 * total - high) * (SECOND - FIRST) / (high - low))
    while peak(rows) is None:
        rows -= max(1, rows // 32)
    while peak(rows + max(1, rows // 32)) is not None:
        rows += max(1, rows // 32)
    return rows
