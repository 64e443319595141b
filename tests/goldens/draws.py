"""What comes from a key and must never change: parameter names, first weights, dropout masks, the order of samples."""

import dataclasses
import hashlib
import re
from collections import Counter
from functools import partial

import torch
from torch import nn
from torch.utils.data import Dataset

import shardwise as sw
from goldens.entry import in_double, run_ranks, whole_weights
from goldens.gallery import checksums

PUBLISHED = {
    "decoder": [
        *("gpt2-tiny", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "llama-tiny", "llama-7b", "llama-13b"),
        *("llama-70b", "llama3-8b", "llama3-70b", "llama3-405b"),
    ],
    "t5": ["t5-tiny", "t5-small", "t5-11b"],
    "byt5": ["byt5-tiny", "byt5-small"],
}
DRAWN = {
    "gpt2-tiny": lambda: sw.models.decoder("gpt2-tiny", width=16, num_heads=2, vocab_size=32, context=16),
    "llama-tiny": lambda: sw.models.decoder("llama-tiny", width=16, num_heads=2, num_kv_heads=1, vocab_size=32),
    "resnet18": lambda: sw.models.resnet18(num_classes=10, in_channels=1, stem="small"),
    "byt5-tiny": lambda: sw.models.byt5("byt5-tiny", d_model=16, d_kv=4, d_ff=24),
}
SEEDS = (0, 7)
ORDERS = {"10 samples": (10, 4, 9), "101 samples": (101, 16, 14), "1000003 samples": (1_000_003, 16, 2)}
"""Name: samples of the dataset, global batch, steps; the first two go through three and two epochs."""


def parameter_names():
    """Return the parameter names and shapes of every model of sw.models; layers alike are counted, "*" for a number."""
    found = {}
    with torch.device("meta"):
        for name in ("resnet18", "resnet34", "resnet50"):
            found[name] = _pattern(getattr(sw.models, name)(num_classes=10))
        found["resnet18 small"] = _pattern(sw.models.resnet18(num_classes=10, in_channels=1, stem="small"))
        for kind, sizes in PUBLISHED.items():
            found.update({size: _pattern(getattr(sw.models, kind)(size)) for size in sizes})
    return found


def _pattern(model):
    lines = Counter(
        f"{re.sub(r'[.][0-9]+[.]', '.*.', name)} {list(value.shape)}" for name, value in model.state_dict().items()
    )
    return [f"{count} x {line}" for line, count in lines.items()]


class Numbers(Dataset):
    """The sample of index i is the number i."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.ones(8), torch.tensor(index)


class Recording(nn.Module):
    """Drops elements in several places and keeps what the last forward pass dropped."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.early, self.late = nn.Dropout(0.5), nn.Sequential(nn.Dropout(0.1))
        self.masks = []

    def forward(self, x):
        """[rows, 8] to [rows, 8]."""
        early, late = self.early(x), self.late(x)
        self.masks.append(
            [_bits(early), _bits(late), _bits(nn.functional.dropout(x, 0.5, training=True)), _bits(self.early(x))]
        )
        return x * self.weight


def _bits(output):
    """Return which elements are kept, a string of 0 and 1 for each row."""
    return ["".join(str(int(kept)) for kept in row) for row in (output != 0).tolist()]


def _job(model, length, batch_size, steps, seed, **fields):
    return sw.Job(
        model=model,
        data=lambda split: Numbers(length) if split == "train" else None,
        loss=sw.Loss(sum=lambda output, batch: output.sum(), count=lambda batch: len(batch[0])),
        optimizer=sw.sgd(lr=0.1),
        batch_size=batch_size,
        steps=steps,
        seed=seed,
        **fields,
    )


def _built(job, world):
    plan = sw.Plan.preset("ddp", world.size, batch_size=job.batch_size)
    return sw.build_step(job, in_double(plan), world)


def _first_weights(world):
    return {
        f"{name} seed {seed}": checksums(whole_weights(_built(_job(model, 16, 4, 1, seed), world)))
        for name, model in DRAWN.items()
        for seed in SEEDS
    }


def _masks(world):
    found = {}
    for seed in SEEDS:
        step = _built(_job(Recording, 10, 4, 4, seed, masks="keyed"), world)
        for batch in step.feed:
            step(batch)
        found[f"seed {seed}"] = sw.unwrap(step.model).masks
    return found


def _order(world):
    found = {}
    for seed in (*SEEDS, 2**40 + 1):
        for name, (length, batch_size, steps) in ORDERS.items():
            found[f"{name}, seed {seed}"] = _read_by(
                world, _job(partial(nn.Linear, 8, 1), length, batch_size, steps, seed)
            )
    return found


def _read_by(world, job):
    """Return the samples that this rank reads in each step."""
    read = []

    def forward(model, batch):
        read.append(batch[1].tolist())
        return model(batch[0])

    step = _built(dataclasses.replace(job, forward=forward), world)
    for batch in step.feed:
        step(batch)
    return read


def _draw_all(world):
    return {"first weights": _first_weights(world), "masks": _masks(world), "order": _order(world)}


def draws():
    """Return what one process draws, and the order of samples of each of two ranks."""
    alone = run_ranks(_draw_all, 1)[0]
    masks = {
        seed: {"first": steps[0], "all": hashlib.sha256(repr(steps).encode()).hexdigest()}
        for seed, steps in alone["masks"].items()
    }
    return {
        "first weights": alone["first weights"],
        "masks": masks,
        "order": alone["order"],
        "order of two ranks": {f"rank {rank}": order for rank, order in enumerate(run_ranks(_order, 2))},
    }
