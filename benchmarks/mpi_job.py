"""The jobs whose steps benchmarks/mpi.py takes apart: 8 MiB of gradients, which come evenly over backward."""

import time

import torch
from torch import nn

import shardwise as sw

WIDTH, LAYERS = 512, 8
ROWS = 1024
"""Of a step of layers that compute: about 80 ms for two cores that have nothing else to do."""
PAUSE_S = 0.01
"""What a layer that waits takes in backward, and half of it in forward."""


class Noise(torch.utils.data.Dataset):
    """Rows of random numbers, the same on every rank."""

    def __len__(self) -> int:
        """Return how many rows there are."""
        return ROWS * 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """Return a row and its class."""
        drawn = torch.Generator().manual_seed(index)
        return torch.randn(WIDTH, generator=drawn), index % 10


class Pause(torch.autograd.Function):
    """Time that passes without a core, as it does for a host while its accelerator computes."""

    @staticmethod
    def forward(_, rows):
        """Wait, and return the rows."""
        time.sleep(PAUSE_S / 2)
        return rows.view_as(rows)

    @staticmethod
    def backward(_, gradient):
        """Wait, and return the gradient."""
        time.sleep(PAUSE_S)
        return gradient


class Waiting(nn.Module):
    """A layer that takes its time by `Pause`."""

    def forward(self, rows):
        """Return the rows, after a while."""
        return Pause.apply(rows)


def network(between: type[nn.Module]) -> nn.Module:
    """Return layers with one of `between` after each."""
    hidden = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), between())]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, 10))


def described(between: type[nn.Module], batch_size: int) -> sw.Job:
    """Return the job of one kind of network."""
    return sw.Job(
        model=lambda: network(between),
        data=lambda split: Noise() if split == "train" else None,
        loss=sw.losses.cross_entropy,
        optimizer=sw.sgd(lr=1e-3),
        batch_size=batch_size,
        epochs=1,
    )


computing = described(nn.ReLU, ROWS)
waiting = described(Waiting, 16)
