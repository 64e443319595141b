"""Waiting for data: the share of the time that steps of a training wait for their batches.

One process trains through `sw.train`, with the plan that it chooses without options, on a file of random tokens with
documents of 800 tokens on average: GPT-2 124M on a GPU, 64 rows of 1,024 tokens per step; on a CPU, where the figure
has no target, a tiny model. The share is that of the events of the run, without those of the first steps: the time in
which the loader had not delivered the next batch while the device had no work left. Windows and packed rows, each
without loader workers.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

import shardwise as sw
from data_feed import END, write_tokens
from figures import figure
from shardwise.data.corpus import Corpus, MixtureStage
from shardwise.data.mixture import Mixture
from shardwise.data.sources.open import open_source
from shardwise.runs.data_wait import DataWait

NUM_TOKENS = 50_000_000
MOST = 0.01


@dataclass(frozen=True)
class Shape:
    """A model and its batches."""

    decoder: str
    length: int
    rows: int
    steps: int


ON_GPU = Shape("gpt2", length=1024, rows=64, steps=200)
ON_CPU = Shape("gpt2-tiny", length=128, rows=8, steps=60)


def train(path: Path, shape: Shape, folder: Path, *, packed: bool) -> DataWait:
    """Train and return the waits of the steps after the first windows."""
    corpus = Corpus(
        sources={"tokens": open_source(path, end_id=END)},
        stages=(MixtureStage(mixture=Mixture(shares=(1,))),),
        length=shape.length,
        packed=frozenset({"tokens"} if packed else ()),
    )
    job = sw.Job(
        model=lambda: sw.models.decoder(shape.decoder, vocab_size=END + 1, context=shape.length),
        data=lambda split: corpus if split == "train" else None,
        loss=sw.losses.token_cross_entropy,
        optimizer=sw.adamw(lr=3e-4),
        batch_size=shape.rows,
        steps=shape.steps,
    )
    with sw.world() as world:
        sw.train(job, "auto", world, run_dir=folder, show_progress=False)
    events = [json.loads(line) for line in (folder / "events" / "rank0.jsonl").read_text().splitlines()]
    windows = [event for event in events if event["kind"] == "steps"][2:]
    total = DataWait()
    for event in windows:
        total += DataWait(steps=len(event["losses"]), seconds=event["seconds"], waited_s=event["data_s"])
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    quick = parser.parse_args().quick
    on_gpu = torch.cuda.is_available()
    shape = ON_GPU if on_gpu else ON_CPU
    if quick:
        shape = Shape(shape.decoder, shape.length, shape.rows, shape.steps // 2)
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "tokens.bin"
        write_tokens(path, NUM_TOKENS // (1 if on_gpu else 10))
        for form in ("windows", "packed"):
            total = train(path, shape, Path(name) / form, packed=form == "packed")
            print(f"{form}: {total.text}, over {total.steps} steps of {shape.decoder}")
            figure(f"data.wait.{form}", total.share, "share-of-the-time", at_most=MOST if on_gpu else None)


if __name__ == "__main__":
    main()
