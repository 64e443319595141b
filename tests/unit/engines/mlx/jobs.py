"""Jobs in two forms, of torch and of MLX, with the same names, weights and samples."""

import dataclasses

import mlx.core as mx
import torch
from mlx import nn
from torch.utils.data import IterableDataset, TensorDataset

import shardwise as sw
from shardwise.plans import Precision


class Net(nn.Module):
    """Points to classes."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

    def __call__(self, x):
        return self.b(nn.relu(self.a(x)))


class TorchNet(torch.nn.Module):
    """The same in torch."""

    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(6, 8), torch.nn.Linear(8, 3)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


class Picture(nn.Module):
    """Pictures, channels first as torch has them, to classes: a convolution and a batch norm."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(2, 4, 3), nn.BatchNorm(4), nn.Linear(4, 3)

    def __call__(self, x):
        return self.head(nn.relu(self.norm(self.conv(x.transpose(0, 2, 3, 1)))).mean((1, 2)))


class TorchPicture(torch.nn.Module):
    """The same in torch."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = torch.nn.Conv2d(2, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


class Longer(Net):
    """Adds the output of the second half of the columns, in batches that have one."""

    def __init__(self):
        super().__init__()
        self.far = nn.Linear(6, 3)

    def __call__(self, x):
        near = super().__call__(x[:, :6])
        return near + self.far(x[:, 6:]) if x.shape[1] > 6 else near


class Sentences(nn.Module):
    """Tokens to the next token, through one matrix that is used twice."""

    def __init__(self):
        super().__init__()
        self.embed, self.mix = nn.Embedding(11, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def __call__(self, tokens):
        return self.head(nn.tanh(self.mix(self.embed(tokens))))


class TorchSentences(torch.nn.Module):
    """The same in torch."""

    def __init__(self):
        super().__init__()
        self.embed, self.mix = torch.nn.Embedding(11, 8), torch.nn.Linear(8, 8)
        self.head = torch.nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.mix(self.embed(tokens))))


def _points(number):
    x = torch.randn(number, 6, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long())


def _pictures(number):
    x = torch.randn(number, 2, 5, 5, generator=torch.Generator().manual_seed(2))
    return TensorDataset(x, (x.mean((2, 3)) > 0).sum(1))


def _sentences(number):
    tokens = torch.randint(0, 11, (number, 7), generator=torch.Generator().manual_seed(3))
    target = (tokens * 3 + 1) % 11
    target[:, 0] = -100
    target[::3, 1:5] = -100  # so that micro-batches count unevenly
    return TensorDataset(tokens, target)


KINDS = {
    "points": (Net, TorchNet, _points, sw.losses.cross_entropy),
    "pictures": (Picture, TorchPicture, _pictures, sw.losses.cross_entropy),
    "sentences": (Sentences, TorchSentences, _sentences, sw.losses.token_cross_entropy),
}


def make_job(kind="points", *, engine="mlx", samples=37, **options):
    """Return a job of one of KINDS; batches of 8 leave a short last one."""
    ours, theirs, data, loss = KINDS[kind]
    given = {
        "model": ours if engine == "mlx" else theirs,
        "data": lambda split: data(samples) if split == "train" else data(13),
        "loss": loss,
        "optimizer": sw.adamw(lr=1e-2),
        "batch_size": 8,
        "epochs": 2,
        "metrics": {"accuracy": sw.metrics.accuracy},
        "engine": engine,
    }
    return sw.Job(**{**given, **options})


class Stream(IterableDataset):
    """Samples in order, of which those in `long` have both halves."""

    def __init__(self, long):
        self.long = long

    def __iter__(self):
        for number in range(16):
            yield torch.ones(12 if number in self.long else 6) * number, number % 3


def padded(rows):
    """Put rows side by side, filled to the longest."""
    x, y = zip(*rows, strict=True)
    return torch.nn.utils.rnn.pad_sequence(x, batch_first=True), torch.tensor(y)


def longer_job(long, **options):
    """Return a job of four steps."""
    given = {"batch_size": 4, "epochs": None, "steps": 4, "metrics": {}}
    return make_job(model=Longer, data=lambda _: Stream(long), collate=padded, **{**given, **options})


def make_plan(job, world_size=1, *, engine="mlx", accumulation=1, precision="fp32", **options):
    """Return the plan of one process, or of replicas; precision is of compute, or fp64 of all."""
    plan = sw.Plan.preset("ddp", world_size, batch_size=job.batch_size, accumulation=accumulation)
    if precision == "fp64":
        options["precision"] = Precision(parameter="fp64", compute="fp64", reduce="fp64", optimizer="fp64")
    elif precision != "fp32":
        options["precision"] = Precision(compute=precision)
    return dataclasses.replace(plan, engine=engine, **options)


def save_first_weights(path, kind="points", seed=0):
    """Save weights that both forms can begin with."""
    torch.manual_seed(seed)
    torch.save(KINDS[kind][1]().state_dict(), path)
    return str(path)


def run(step, num_steps=None):
    """Train so many steps, or to the end; returns losses, by step this rank's part."""
    losses = []
    for batch in step.feed:
        losses.append(float(step(batch).loss_share))
        if len(losses) == num_steps:
            break
    return losses


def values_of(step):
    """Copies of all values, statistics and states."""
    state = step.local_state()
    mx.synchronize()
    return {**_copied(state.values), **_copied(state.buffers), **_copied(state.states)}


def _copied(tensors):
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}
