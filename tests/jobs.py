"""Small jobs and datasets that tests share; what a sample holds depends on its index alone."""

import torch

import shardwise as sw
from shardwise.plans import Precision

FP64 = Precision(parameter="fp64", compute="fp64", reduce="fp64", optimizer="fp64")


class Points(torch.utils.data.Dataset):
    """Rows of normal numbers, labelled with their index modulo `classes`."""

    def __init__(self, length, *shape, classes=3, dtype=torch.float32):
        self.length, self.shape, self.classes, self.dtype = length, shape, classes, dtype

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(self.shape, generator=generator, dtype=self.dtype), torch.tensor(index % self.classes)


class Tokens(torch.utils.data.Dataset):
    """Rows of `size` random tokens, and for each the token after it; `ignored(index)` are targets that do not count."""

    def __init__(self, length, size, vocab_size, ignored=lambda _: slice(0)):
        self.length, self.size, self.vocab_size, self.ignored = length, size, vocab_size, ignored

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        row = torch.randint(0, self.vocab_size, (self.size + 1,), generator=torch.Generator().manual_seed(index))
        targets = row[1:].clone()
        targets[self.ignored(index)] = -100
        return row[:-1], targets


SENTENCES = Tokens(22, 8, 50, ignored=lambda index: slice(index % 5))
"""Counts differ between rows, and the last batch of 8 is short."""


def train_split(dataset):
    """Return the `data` of a job that has this dataset to train on and none to evaluate on."""
    return lambda split: dataset if split == "train" else None


def sentences_job(decoder="gpt2-tiny", **changes):
    """Return a job that trains a tiny decoder on SENTENCES, with clipping and decay; `changes` are its fields."""
    fields = {
        "model": lambda: sw.models.decoder(decoder, vocab_size=50, context=16),
        "data": train_split(SENTENCES),
        "loss": sw.losses.token_cross_entropy,
        "optimizer": sw.adamw(lr=1e-2, weight_decay=0.1),
        "batch_size": 8,
        "steps": 4,
        "clip_norm": 0.5,
    }
    return sw.Job(**{**fields, **changes})


def points_job(model, dataset=Points(24, 6), **changes):  # noqa: B008 - it has no state
    """Return a job that trains a classifier of points; `changes` are its fields."""
    return sentences_job(model=model, data=train_split(dataset), loss=sw.losses.cross_entropy, **changes)


class Pooled(torch.nn.Module):
    """Accepts rows of any length."""

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(1, 3)

    def forward(self, x):
        return self.head(x.mean(-1, keepdim=True))


def small_resnet(norm="batch"):
    """Return the real class with its first stage: enough for every kind of layer."""
    model = sw.models.resnet18(num_classes=10, in_channels=1, norm=norm, stem="small")
    model.stages = model.stages[:1]
    model.head = torch.nn.Linear(64, 10)
    return model


_TOKEN_JOB = """
import torch
import shardwise as sw


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(32, 32)

    def forward(self, x):
        return torch.relu(self.linear(x))


rows = torch.arange(640).reshape(40, 16) % 50
job = sw.Job(
    model=lambda: torch.nn.Sequential(
        torch.nn.Embedding(50, 32),
        *(Block() for _ in range(NUM_BLOCKS)),
        torch.nn.Linear(32, 50),
    ),
    data=lambda split: torch.utils.data.TensorDataset(rows, rows),
    loss=sw.losses.token_cross_entropy,
    optimizer=sw.adamw(lr=1e-3),
    batch_size=8,
    epochs=1,
)
"""


def token_job_text(num_blocks=0):
    """Return a job file that any process can load: a model of tokens with `num_blocks` linear blocks."""
    return _TOKEN_JOB.replace("NUM_BLOCKS", str(num_blocks))
