"""The user's own state in a checkpoint: plain values go into its manifest, tensors into its shards, nothing else in."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardwise.errors import JobError

if TYPE_CHECKING:
    from collections.abc import Mapping

USER = "user/"
"""Tensors of the user's own: user/KEY, or user/KEY/KEY where dicts are nested."""


def split_state(state: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Take what `Job.state.state_dict()` returned apart into plain values and tensors by name.

    Dicts with names as keys, lists, str, bool, None, finite numbers and, in dicts, tensors come back as they are;
    anything else is refused by its place.
    """
    if not isinstance(state, dict):
        raise JobError(
            f"Job.state.state_dict() returned a {type(state).__name__}", code="job.state-not-dict", fix="return a dict"
        )
    tensors: dict[str, Tensor] = {}
    return _plain_dict(state, ("Job.state",), tensors), tensors


def join_state(values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Put together again what `split_state` took apart."""
    state = dict(values)
    for name, tensor in tensors.items():
        *outer, last = name.removeprefix(USER).split("/")
        place = state
        for key in outer:
            place = place[key]
        place[last] = tensor
    return state


def room_for(saved: Mapping[str, tuple[tuple[int, ...], torch.dtype]], now: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return fresh tensors for the user's own in `saved`: cut and placed as they are `now`, else whole on the host."""
    room = {}
    for name, (shape, dtype) in saved.items():
        if name.startswith(USER):
            like = now.get(name)
            if like is not None and (tuple(like.shape), like.dtype) == (shape, dtype):
                room[name] = torch.zeros_like(like, requires_grad=False)
            else:
                room[name] = torch.zeros(shape, dtype=dtype)
    return room


def _plain_dict(state: dict[Any, Any], place: tuple[str, ...], tensors: dict[str, Tensor]) -> dict[str, Any]:
    values = {}
    for key, value in state.items():
        if not isinstance(key, str) or "/" in key:
            raise JobError(
                f"{_words(place)} has the key {key!r}", code="job.state-key-invalid", fix="use names without '/'"
            )
        here = (*place, key)
        if isinstance(value, Tensor):
            tensors[USER + "/".join(here[1:])] = value.detach()
        elif isinstance(value, dict):
            values[key] = _plain_dict(value, here, tensors)
        else:
            values[key] = plain_value(value, here)
    return values


def plain_value(value: Any, place: tuple[str, ...]) -> Any:
    """Return a value that JSON gives back as it is; refuses any other by its place: what it is in, then keys."""
    if isinstance(value, list):
        return [plain_value(each, (*place, str(index))) for index, each in enumerate(value)]
    if isinstance(value, dict):
        inside: dict[str, Tensor] = {}
        values = _plain_dict(value, place, inside)
        if not inside:
            return values
        raise JobError(
            f"{_words(place)} is in a list and holds a tensor",
            code="job.state-tensor-in-list",
            fix="use a dict instead of the list",
        )
    # The very types: what JSON would return as another one (a tuple, an enum, numpy's numbers) does not come back.
    if type(value) not in {str, int, float, bool, type(None)}:
        words = f"a {type(value).__module__}.{type(value).__qualname__}".replace("a builtins.", "a ")
        raise JobError(
            f"{_words(place)} is {words}",
            code="job.state-type-unsupported",
            fix="use tensors, dicts, lists, str, numbers, bool and None",
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise JobError(
            f"{_words(place)} is {value}, which JSON cannot hold",
            code="job.state-not-finite",
            fix="use None, or a tensor",
        )
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise JobError(f"{_words(place)} has more than 64 bits", code="job.state-integer-too-large", fix="use a str")
    return value


def _words(place: tuple[str, ...]) -> str:
    return place[0] + "".join(f"[{key!r}]" for key in place[1:])
