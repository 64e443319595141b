"""What an interrupted training needs to continue exactly: its position, its random numbers, and a whole file."""

import os
import random
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler


@dataclass(frozen=True)
class Progress:
    """The position of the training in its data."""

    epoch: int = 0
    samples: int = 0
    """Of this epoch, over all ranks, that have been trained on. Not batches: a later start may have other ones."""
    loss_sum: float = 0.0
    """Of those samples; for the mean that is printed after the epoch."""


class StopSignal:
    """Records SIGTERM and Ctrl-C. Ranks are signalled one after the other, so they must agree on the step."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        """On gloo: the agreement then costs no synchronization with the GPU."""
        self.received = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.record)

    def record(self, number: int, _: object) -> None:
        """Remember the signal. A handler may interrupt any line, so it does nothing else."""
        self.received = True
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C ends this process at once

    def on_any_rank(self) -> bool:
        """Return whether any rank received a signal: equal on all ranks (all-reduces)."""
        flag = torch.tensor(int(self.received))
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self.group)
        return bool(flag)


class ResumableSampler(DistributedSampler):
    """A DistributedSampler that can begin in the middle of an epoch."""

    first = 0
    """Samples of this rank to leave out."""

    def __iter__(self) -> Iterator[int]:
        return islice(super().__iter__(), self.first, None)

    def __len__(self) -> int:
        return super().__len__() - self.first


def seed_everything(seed: int) -> None:
    """Seed torch's generators, on CPU and GPU, and Python's."""
    torch.manual_seed(seed)
    random.seed(seed)


def gather_random_states(device: torch.device) -> list:
    """Return every rank's states of Python's generator and of torch's, on CPU and GPU (gathers)."""
    own = [random.getstate(), torch.get_rng_state()]
    if device.type == "cuda":
        own.append(torch.cuda.get_rng_state(device))
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return everyone


def set_random_state(states: list, device: torch.device) -> None:
    random.setstate(states[0])
    torch.set_rng_state(states[1])
    if device.type == "cuda" and len(states) > 2:
        torch.cuda.set_rng_state(states[2], device)


def write(state: dict, path: Path) -> None:
    """Write `state` so that `path` always names a whole checkpoint, even if this process is killed (rank 0 only)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())  # on the disk before the name points to it
    unfinished.replace(path)
