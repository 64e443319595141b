"""Float8 loss: the mean loss of the last steps with float8 layers, relative to bf16, for several seeds.

A decoder of 6 layers of width 1024 trains on the bytes of a text with bf16 autocast, and once more from the same
initial weights on the same batches with the linear layers of its blocks in float8 (tensorwise). Both are compiled.

Without a GPU, `--quick` tries the script with a tiny decoder and emulated products; its figures mean nothing there.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
from pathlib import Path

import torch

import shardwise as sw
from board_loops import block_linears
from figures import figure
from shardwise.plans.sections import Float8, Precision
from step_loops import forget

STEPS, LAST = 500, 50
BAND = 0.01
SIZES = {"width": 1024, "num_layers": 6, "num_heads": 16, "num_kv_heads": 16, "mlp_width": 2816, "context": 512}
TINY = {"width": 32, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2, "mlp_width": 64, "context": 32}


def text_job(text: Path | None, sizes: dict[str, int], *, batch_size: int, steps: int, seed: int) -> sw.Job:
    """Return the training of a decoder on the bytes of a file."""
    return sw.Job(
        model=lambda: sw.models.decoder("llama-tiny", vocab_size=256, **sizes),
        data=sw.datasets.text(sizes["context"], text),
        loss=sw.losses.token_cross_entropy,
        optimizer=sw.adamw(lr=3e-4),
        schedule=sw.schedules.Cosine(warmup=steps // 10, floor=0.1),
        clip_norm=1.0,
        batch_size=batch_size,
        steps=steps,
        seed=seed,
    )


def plan_of(job: sw.Job, compute: str, device: torch.device) -> sw.Plan:
    """Return the plan of one rank in bf16 or float8, whose layers are named where they are too narrow by default."""
    precision = Precision(compute=compute)
    if device.type == "cuda":
        return sw.Plan(micro_batch=job.batch_size, precision=precision, compile="model")
    with torch.device("meta"):
        names = tuple(sorted(block_linears(job.model())))
    float8 = Float8(modules=names) if compute == "float8" else Float8()
    return sw.Plan(micro_batch=job.batch_size, precision=precision, float8=float8)


def mean_last_loss(job: sw.Job, compute: str) -> float:
    """Train on one rank; return the mean loss of the last steps."""
    with sw.world() as world:
        step = sw.build_step(job, plan_of(job, compute, world.device), world)
        losses = [float(step(batch).loss) for batch in step.feed]
    forget(world.device)
    return statistics.mean(losses[-LAST:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, help="a file of text; by default modules of the standard library")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="few steps of a tiny decoder on the CPU")
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    if importlib.util.find_spec("torchao") is None:
        print("torchao is not installed: pip install 'shardwise[float8]'")
        return
    if not on_gpu and not options.quick:
        print("no CUDA device: float8 is measured on a GPU only (--quick tries the script on the CPU)")
        return
    sizes, batch_size, steps = (SIZES, 32, STEPS) if on_gpu else (TINY, 4, 20)
    for seed in range(options.seeds):
        job = text_job(options.text, sizes, batch_size=batch_size, steps=steps, seed=seed)
        losses = {compute: mean_last_loss(job, compute) for compute in ("bf16", "float8")}
        difference = losses["float8"] / losses["bf16"] - 1
        print(f"seed {seed}: bf16 {losses['bf16']:.4f}, float8 {losses['float8']:.4f}, {difference:+.1%}")
        figure(f"float8_loss.seed{seed}", abs(difference), "of-bf16", at_most=BAND)


if __name__ == "__main__":
    main()
