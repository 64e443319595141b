"""Snapshots of a training: one moment's tensors, optimizer states and random streams, and the way back to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardwise.parallel.gradsync import local

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from torch.optim import Optimizer


def snapshot(tensors: Sequence[Tensor], optimizer: Optimizer) -> Callable[[], None]:
    """Keep tensors and an optimizer's states on the host; returns what writes them back, and takes out what is new."""
    states = optimizer.state
    held = [value for state in states.values() for value in state.values() if isinstance(value, torch.Tensor)]
    known = {parameter: set(state) for parameter, state in states.items()}
    plain = {
        parameter: {key: value for key, value in state.items() if not isinstance(value, torch.Tensor)}
        for parameter, state in states.items()
    }
    pairs = [(local(tensor), on_host(local(tensor))) for tensor in (*tensors, *held)]

    @torch.no_grad()
    def restore() -> None:
        for tensor, before in pairs:
            tensor.copy_(before)
        for parameter in list(states):
            if parameter not in known:
                del states[parameter]
                continue
            for key in set(states[parameter]) - known[parameter]:
                del states[parameter][key]
            states[parameter].update(plain[parameter])

    return restore


def on_host(tensor: Tensor) -> Tensor:
    """Return a copy on the host."""
    return tensor.detach().to("cpu", copy=True)
