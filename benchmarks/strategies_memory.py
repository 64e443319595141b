"""Memory of strategies: peak bytes on one rank of eight, measured on one GPU, beside what each strategy promises.

Rank 0 of a fake world of 8 runs on one CUDA device: its collectives move nothing, but every tensor it would hold is
there. A decoder of 1.2 billion parameters (Llama shape, fp32 throughout) trains on one short sequence with blocks
recomputed, so that states are what costs. The peak is that of the second and third step, when optimizer states exist.

Promised, for P bytes of parameters in fp32 and N ranks (Rajbhandari et al. 2020, plus what FSDP2 holds in flight):

DDP      P parameters + P gradients + 2P AdamW                                              = 4P
ZeRO-1   P + P + 2P/N
ZeRO-2   P gathered for use + (P parameters + P gradients + 2P AdamW)/N
ZeRO-3   4P/N + what is in flight

In flight is the larger of two moments of backward: amid the blocks, the parameters of the root unit (embedding and
head), those of two blocks (at work, and next), and a block's gradients with the buffer they are sent from; in the end,
the root unit three times: parameters, gradients, buffer.
A last line trains a 30-billion-parameter decoder as rank 0 of 64.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
from typing import TYPE_CHECKING

import torch

import shardwise as sw
from figures import figure
from shapes import LLAMA_1B
from shardwise.plans import Plan, Precision
from shardwise.testing import fake_world

if TYPE_CHECKING:
    from shardwise.models import DecoderConfig

LARGE = dataclasses.replace(
    LLAMA_1B, width=6656, num_layers=60, num_heads=52, num_kv_heads=52, mlp_width=17_920, vocab_size=32_000
)
NAMES = ("ddp", "zero1", "zero2", "zero3")


class Tokens(torch.utils.data.Dataset):
    """Random rows of tokens."""

    def __init__(self, config: DecoderConfig, length: int) -> None:
        self.vocab_size = config.vocab_size
        self.length = length

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        row = torch.randint(0, self.vocab_size, (self.length + 1,), generator=torch.Generator().manual_seed(index))
        return row[:-1], row[1:]


def make_job(config: DecoderConfig, length: int, ranks: int, steps: int) -> sw.Job:
    return sw.Job(
        model=lambda: sw.models.decoder(config),
        data=lambda split: Tokens(config, length) if split == "train" else None,
        loss=sw.losses.token_cross_entropy,
        optimizer=sw.adamw(lr=1e-4),
        batch_size=ranks,
        steps=steps,
    )


def measure(name: str, config: DecoderConfig, *, length: int, ranks: int, precision: Precision, device: str) -> dict:
    """Train three steps as rank 0; return peak bytes, bytes at rest, and the sizes of units."""
    with fake_world(ranks, device=device) as world:
        job = make_job(config, length, ranks, steps=3)
        plan = dataclasses.replace(Plan.preset(name, ranks, batch_size=ranks), precision=precision, recompute="full")
        step = sw.build_step(job, plan, world)
        units = [sum(p.numel() for p in part.parameters()) for part in step.model.modules() if is_block(part)]
        whole = sum(p.numel() for _, p in step.named_parameters())
        loss = 0.0
        for batch in step.feed:
            report = step(batch)
            loss = float(report.loss_share)
            if report.number == 0 and device == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
        peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
        return {"peak": peak, "parameters": whole, "block": max(units), "root": whole - sum(units), "loss": loss}


def is_block(part: torch.nn.Module) -> bool:
    return type(part).__name__.removeprefix("FSDP") == "Block"


def promised(name: str, found: dict, ranks: int) -> float:
    """Bytes by the formulas above."""
    whole, block, root = (4 * found[key] for key in ("parameters", "block", "root"))
    return {
        "ddp": 4 * whole,
        "zero1": 2 * whole + 2 * whole / ranks,
        "zero2": whole + 4 * whole / ranks,
        "zero3": 4 * whole / ranks + max(root + 4 * block, 3 * root),
    }[name]


def in_process(name: str, config: DecoderConfig, **options) -> dict:
    """Measure in a process of its own, so that no strategy inherits the memory of another."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, (name, config), options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="skip the large model")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: memory of strategies is measured on a GPU only")
        return
    ranks = 8
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, rank 0 of {ranks} (fake), fp32, blocks recomputed"
    )
    print(f"{'strategy':10} {'measured GB':>12} {'promised GB':>12} {'gap':>7}")
    for name in NAMES:
        found = in_process(name, LLAMA_1B, length=64, ranks=ranks, precision=Precision(), device="cuda")
        theory = promised(name, found, ranks)
        gap = abs(found["peak"] / theory - 1) * 100
        print(f"{name:10} {found['peak'] / 1e9:12.2f} {theory / 1e9:12.2f} {gap:6.1f}%")
        figure(f"strategies_memory.{name}.gap", gap, "percent-of-theory", at_most=10)
    if not options.quick:
        found = in_process("zero3", LARGE, length=2048, ranks=64, precision=Precision(compute="bf16"), device="cuda")
        print(
            f"{found['parameters'] / 1e9:.1f} billion parameters, rank 0 of 64, zero3, bf16: peak"
            f" {found['peak'] / 1e9:.1f} GB, loss {found['loss']:.3f} after three steps"
        )
        figure("strategies_memory.large.peak", found["peak"] / 1e9, "GB", at_most=139 * 1.0737)


if __name__ == "__main__":
    main()
