"""Whether a collective computes what it should: inputs that differ by rank and element, and what must come of them."""

from __future__ import annotations

import time
from functools import cache, reduce
from typing import TYPE_CHECKING

import torch

from shardwise.bench.comm.bus_bandwidth import KINDS
from shardwise.bench.comm.collectives import PREMULTIPLIER

if TYPE_CHECKING:
    from torch import Tensor

    from shardwise.bench.comm.collectives import Collective
    from shardwise.dist.stores import Store

PERIOD = 251
"""Elements after which inputs repeat: a prime, so that no piece cut at a round number looks like its neighbour."""
_STRIDE = 89
"""By how much a rank's moved values are ahead of those of the rank before it."""
_ROWS = 4096
"""Periods that are compared at once: a million elements, so that checking takes little memory."""
_LATE_S = 0.02
"""How much later than the others the last rank comes to a barrier that is checked."""
_BITWISE = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}


def count_wrong(collective: Collective, store: Store, key: str) -> int:
    """Communicate over the collective's group: call it once, and count the wrong elements that this rank received.

    `store` and `key`, one of its own for each call, are for barrier: a rank that leaves it before all came has one
    wrong. Ranks that receive nothing, as those that are no root of a reduce, have none.
    """
    spec = collective.spec
    if spec.name == "barrier":
        return _leaves_early(collective, store, key)
    _fill(collective.sent, _input_of(collective))
    if collective.received is not collective.sent:
        collective.received.fill_(1)
    collective.call()
    if spec.name in ("reduce", "gather") and collective.rank != spec.root:
        return 0
    return sum(_differing(*piece) for piece in _expected(collective))


def inputs(ranks: int, operation: str | None, dtype: torch.dtype) -> Tensor:
    """Return one period of every rank's input, [ranks, PERIOD] whole numbers: so small that every result is exact.

    `operation` is None for what is moved and not reduced.
    """
    element, rank = torch.arange(PERIOD)[None], torch.arange(ranks)[:, None]
    most = _largest_exact(dtype)
    if operation is None:
        return (element + _STRIDE * rank) % PERIOD % (most + 1)
    turn = (element + rank) % PERIOD
    if operation in ("SUM", "PREMUL_SUM"):
        each = most // (ranks * (PREMULTIPLIER if operation == "PREMUL_SUM" else 1))
        return turn % (each + 1) if each else (turn == 0).long()
    if operation == "AVG":  # pairs of ranks are as far above the mean as below it, so that whole numbers have a mean
        mean = 1 + element % max(1, min(PERIOD, most // ranks - 1))
        apart = torch.where(rank % 2 == 0, 1, -1)
        apart[-1] = apart[-1] * (1 - ranks % 2)
        return mean + apart
    if operation == "PRODUCT":  # a few factors of 2
        return 1 + (turn % max(2, -(-ranks // 4)) == 0).long()
    return turn % (most + 1)


@cache
def reduced(ranks: int, operation: str, dtype: torch.dtype) -> Tensor:
    """Return one period of what all ranks' inputs become, in fp64 or int64."""
    values = inputs(ranks, operation, dtype)
    if operation in _BITWISE:
        return reduce(_BITWISE[operation], values.unbind())
    if operation == "AVG":
        return values.double().mean(0)
    if operation in ("MIN", "MAX"):
        return values.amin(0) if operation == "MIN" else values.amax(0)
    if operation == "PRODUCT":
        return values.prod(0)
    return values.sum(0) * (PREMULTIPLIER if operation == "PREMUL_SUM" else 1)


def tolerance(ranks: int, operation: str, dtype: torch.dtype) -> float:
    """Return how far from the expected value a right result may be, as a fraction of it: 0 but for some means.

    1 / ranks is no binary fraction unless ranks is a power of two, and nccl multiplies by it before it adds.
    """
    if operation != "AVG" or not dtype.is_floating_point:
        return 0.0
    is_exact = ranks & (ranks - 1) == 0 and 2 * ranks <= _largest_exact(dtype)
    return 0.0 if is_exact else min(0.25, ranks * torch.finfo(dtype).eps)


def _largest_exact(dtype: torch.dtype) -> int:
    """Return the number up to which the dtype holds every whole number."""
    return int(2 / torch.finfo(dtype).eps) if dtype.is_floating_point else torch.iinfo(dtype).max


def _input_of(collective: Collective) -> Tensor:
    spec = collective.spec
    return inputs(collective.ranks, spec.operation if KINDS[spec.name].reduces else None, spec.dtype)[collective.rank]


def _expected(collective: Collective) -> list[tuple[Tensor, Tensor, int, float]]:
    """Return pieces of what was received, each with the period it repeats, where in it it begins, and the tolerance."""
    spec, ranks, rank, count = collective.spec, collective.ranks, collective.rank, collective.count
    received = collective.received
    if KINDS[spec.name].reduces:
        offset = rank * count if spec.name == "reduce_scatter" else 0
        allowed = tolerance(ranks, spec.operation, spec.dtype)
        return [(received, reduced(ranks, spec.operation, spec.dtype), offset, allowed)]
    moved = inputs(ranks, None, spec.dtype)
    if spec.name in ("broadcast", "scatter"):
        return [(received, moved[spec.root], rank * count if spec.name == "scatter" else 0, 0.0)]
    offset = rank * count if spec.name == "all_to_all" else 0
    return [(part, moved[source], offset, 0.0) for source, part in enumerate(received.split(count))]


def _fill(tensor: Tensor, period: Tensor) -> None:
    values = period.to(tensor.dtype).to(tensor.device)
    rows, rest = divmod(tensor.numel(), PERIOD)
    tensor[: rows * PERIOD].view(rows, PERIOD).copy_(values.expand(rows, PERIOD))
    tensor[rows * PERIOD :].copy_(values[:rest])


def _differing(tensor: Tensor, period: Tensor, offset: int, allowed: float) -> int:
    """Count elements that are not those of the repeated period, begun at `offset`."""
    values = period.roll(-(offset % PERIOD)).to(tensor.dtype).to(tensor.device)
    rows, rest = divmod(tensor.numel(), PERIOD)
    pieces = tensor[: rows * PERIOD].view(rows, PERIOD).split(_ROWS)
    wrong = [_far(piece, values, allowed).sum() for piece in pieces]
    return int(sum(wrong) + _far(tensor[rows * PERIOD :], values[:rest], allowed).sum())


def _far(found: Tensor, wanted: Tensor, allowed: float) -> Tensor:
    if found.is_floating_point() and found.dtype.itemsize == 1:  # torch does not compare eight-bit floats
        found, wanted = found.float(), wanted.float()
    if not allowed:
        return found != wanted
    return ~((found - wanted).abs() <= allowed * wanted.abs())  # so that NaN is far


def _leaves_early(collective: Collective, store: Store, key: str) -> int:
    if collective.rank == collective.ranks - 1:
        time.sleep(_LATE_S)
    store.add(key, 1)
    collective.call()
    if collective.device.type == "cuda":
        torch.cuda.synchronize(collective.device)  # nccl's barrier holds the device, not the host
    return int(store.add(key, 0) < collective.ranks)
