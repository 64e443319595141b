"""The jobs that engine deepspeed is proven on: a decoder with tied weights, a group-norm ResNet, and some oddities."""

import importlib.util

import pytest
import torch
from torch.utils.data import Subset

import shardwise as sw
from jobs import sentences_job, small_resnet

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="pip install 'shardwise[deepspeed]'"
)


def resnet_job(norm="group", **changes):
    fields = {
        "model": lambda: small_resnet(norm),
        "data": lambda split: Subset(sw.datasets.digits(split), range(101)) if split == "train" else None,
        "loss": sw.losses.cross_entropy,
        "optimizer": sw.sgd(lr=0.05, momentum=0.9, weight_decay=1e-3),
        "clip_norm": 0.5,
        "batch_size": 40,
        "steps": 3,
    }
    return sw.Job(**{**fields, **changes})


class HalfFrozen(torch.nn.Module):
    """A frozen layer, a parameter of one element, and values that no recipe draws."""

    def __init__(self, shape=(1,)):
        super().__init__()
        self.below = torch.nn.Linear(64, 32).requires_grad_(False)
        self.scale = torch.nn.Parameter(torch.full(shape, 1.25))
        self.head = torch.nn.Linear(32, 10)

    def forward(self, images):
        return self.head(torch.relu(self.below(images.flatten(1))) * self.scale)


class Unused(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.forgotten = torch.nn.Linear(64, 10), torch.nn.Linear(64, 10)

    def forward(self, images):
        return self.used(images.flatten(1))


class Poisoned(torch.nn.Module):
    """Gives infinite gradients for a batch that holds a certain image."""

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(64, 10)
        self.calls = 0

    def forward(self, images):
        self.calls += 1
        return self.head(images.flatten(1)) * (float("inf") if self.calls == 2 else 1.0)


def digits_job(model, **changes):
    return resnet_job(model=model, optimizer=sw.adamw(lr=1e-2), **changes)


job = decoder = sentences_job()
resnet = resnet_job()
normed = resnet_job("batch")
