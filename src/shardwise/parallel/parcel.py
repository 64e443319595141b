"""What travels between pipeline stages: all tensors of a layer's output, and how they were arranged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import JobError


@dataclass(frozen=True)
class _At:
    """Stands in a structure for the tensor at a position."""

    position: int


Structure = Any
"""A layer's output with every tensor replaced by its position; plain data, so that it can be sent."""


def pack(output: Any, layer: str) -> tuple[tuple[Tensor, ...], Structure]:
    """Take the tensors of a layer's output out of it, ready to be sent and to get a gradient back."""
    tensors: list[Tensor] = []
    structure = _take(output, tensors, layer)
    return tuple(_ready(tensor) for tensor in tensors), structure


def unpack(tensors: tuple[Tensor, ...], structure: Structure) -> Any:
    """Put tensors back where `pack` found them."""
    if isinstance(structure, _At):
        return tensors[structure.position]
    if isinstance(structure, dict):
        return {key: unpack(tensors, item) for key, item in structure.items()}
    if isinstance(structure, list | tuple):
        return type(structure)(unpack(tensors, item) for item in structure)
    return structure


def receive(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Have tensors that nobody uses get a gradient of zeros, since their sender waits for one."""
    if len(tensors) < 2 or not torch.is_grad_enabled():
        return tensors
    received: tuple[Tensor, ...] = _Received.apply(*tensors)  # type: ignore[no-untyped-call]
    return received


class _Received(torch.autograd.Function):
    """The identity, whose backward is called with zeros for unused outputs."""

    @staticmethod
    def forward(_: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients


def _take(value: Any, tensors: list[Tensor], layer: str) -> Structure:
    if isinstance(value, Tensor) and value.is_floating_point():
        tensors.append(value)
        return _At(len(tensors) - 1)
    if type(value) is dict:
        return {key: _take(item, tensors, layer) for key, item in value.items()}
    if type(value) in {list, tuple}:
        return type(value)(_take(item, tensors, layer) for item in value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    kind = f"{value.dtype} tensor" if isinstance(value, Tensor) else type(value).__name__
    raise JobError(
        f"layer {layer} returns a {kind}, which cannot go to the next pipeline stage",
        code="support.pipeline-layer-output",
        fix="return floating-point tensors, in plain tuples, lists or dicts",
    )


def _ready(tensor: Tensor) -> Tensor:
    if torch.is_grad_enabled() and not tensor.requires_grad:
        tensor = tensor.detach().requires_grad_()  # all in front of it is frozen; the schedule sends a gradient anyway
    return tensor.contiguous()
