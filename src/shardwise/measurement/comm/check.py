"""Correctness checks of collectives, and the reduce operations and dtypes that a backend supports."""

from __future__ import annotations

import time
from functools import cache, reduce
from itertools import product
from typing import TYPE_CHECKING

import torch

from shardwise.dist.world import running_group
from shardwise.errors import InputError
from shardwise.measurement.comm.collectives import PREMULTIPLIER, CollectiveSpec, prepare
from shardwise.measurement.comm.result import Check
from shardwise.measurement.comm.spec import KINDS, OPERATIONS, TYPES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from shardwise.dist import World
    from shardwise.dist.rendezvous import Store
    from shardwise.measurement.comm.collectives import Collective
    from shardwise.measurement.comm.spec import SweepSettings


PERIOD = 251
"""Elements after which inputs repeat: a prime, so that slices at round offsets differ from each other."""
_STRIDE = 89
"""Offset between the inputs of successive ranks, for collectives that only move data."""
_ROWS = 4096
"""Periods that are compared at once: a million elements, which limits the memory of a check."""
_LATE_S = 0.02
"""Delay in seconds of the last rank at a checked barrier."""
_UNSUPPORTED = (RuntimeError, ValueError, TypeError, AttributeError)
"""Exceptions that backends raise for an unsupported operation or dtype."""
_BITWISE = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}


def count_wrong(collective: Collective, store: Store, key: str) -> int:
    """Call a collective once and return the number of wrong elements on this rank; communicates over its group.

    `store` and `key`, which must be unique, are for barrier: a rank that leaves it before all ranks arrived counts as
    one wrong element. Ranks that receive nothing, such as all but the root of a reduce, return 0.
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
    """Return one period of every rank's input, integers [ranks, PERIOD] that are small enough for exact results.

    `operation` is None for collectives that do not reduce.
    """
    element, rank = torch.arange(PERIOD)[None], torch.arange(ranks)[:, None]
    most = _largest_exact(dtype)
    if operation is None:
        return (element + _STRIDE * rank) % PERIOD % (most + 1)
    turn = (element + rank) % PERIOD
    if operation in ("SUM", "PREMUL_SUM"):
        factor = PREMULTIPLIER if operation == "PREMUL_SUM" else 1
        most_per_rank = most // (ranks * factor)
        return turn % (most_per_rank + 1) if most_per_rank else (turn == 0).long()
    if operation == "AVG":  # one rank of each pair is above the mean and one below, so that the mean is an integer
        mean = 1 + element % max(1, min(PERIOD, most // ranks - 1))
        apart = torch.where(rank % 2 == 0, 1, -1)
        apart[-1] = apart[-1] * (1 - ranks % 2)
        return mean + apart
    if operation == "PRODUCT":  # a few factors of 2
        return 1 + (turn % max(2, -(-ranks // 4)) == 0).long()
    return turn % (most + 1)


@cache
def reduced(ranks: int, operation: str, dtype: torch.dtype) -> Tensor:
    """Return one period of the reduction of all ranks' inputs, in fp64 or int64."""
    values = inputs(ranks, operation, dtype)
    if operation in _BITWISE:
        return reduce(_BITWISE[operation], values.unbind())
    if operation == "AVG":
        return values.double().mean(0)
    if operation in ("MIN", "MAX"):
        return values.amin(0) if operation == "MIN" else values.amax(0)
    if operation == "PRODUCT":
        return values.prod(0)
    if operation == "PREMUL_SUM":
        return values.sum(0) * PREMULTIPLIER
    return values.sum(0)


def tolerance(ranks: int, operation: str, dtype: torch.dtype) -> float:
    """Return the relative tolerance of a correct result: 0 except for some averages.

    1 / ranks is not a binary fraction unless ranks is a power of two, and NCCL multiplies by it before it adds.
    """
    if operation != "AVG" or not dtype.is_floating_point:
        return 0.0
    is_exact = ranks & (ranks - 1) == 0 and 2 * ranks <= _largest_exact(dtype)
    return 0.0 if is_exact else min(0.25, ranks * torch.finfo(dtype).eps)


def _largest_exact(dtype: torch.dtype) -> int:
    """Return the largest integer up to which the dtype represents every integer."""
    return int(2 / torch.finfo(dtype).eps) if dtype.is_floating_point else torch.iinfo(dtype).max


def _input_of(collective: Collective) -> Tensor:
    spec = collective.spec
    operation = spec.operation if KINDS[spec.name].reduces else None
    return inputs(collective.ranks, operation, spec.dtype)[collective.rank]


def _expected(collective: Collective) -> list[tuple[Tensor, Tensor, int, float]]:
    """Return slices of the received tensor, each with its expected period, the offset into it, and the tolerance."""
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
    """Return the number of elements that differ from the repeated period, which starts at `offset`."""
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
    return ~((found - wanted).abs() <= allowed * wanted.abs())  # negated, so that NaN counts as different


def _leaves_early(collective: Collective, store: Store, key: str) -> int:
    if collective.rank == collective.ranks - 1:
        time.sleep(_LATE_S)
    store.add(key, 1)
    collective.call()
    if collective.device.type == "cuda":
        torch.cuda.synchronize(collective.device)  # NCCL's barrier blocks the device, not the host
    return int(store.add(key, 0) < collective.ranks)


# The reduce operations and dtypes that a backend supports: each is called once on a small tensor and checked.


CHECKED_BYTES = 4096
"""Size of every check: more than one period of inputs on each of a few ranks."""

_LONE_FACTOR = "on one rank NCCL omits the factor in reduce_scatter and for bfloat16"


def check_all(spec: SweepSettings, world: World, store: Store) -> list[Check]:
    """Check every collective, operation and dtype once. Communicates over the world; call on every rank."""
    root = min(spec.root, world.size - 1)
    found = []
    for number, (name, operation, dtype) in enumerate(_cases(spec)):
        if operation == "PREMUL_SUM" and world.size == 1:
            found.append(Check(collective=name, operation=operation, dtype=dtype, wrong=None, reason=_LONE_FACTOR))
            continue
        case = CollectiveSpec(
            name=name,
            num_bytes=CHECKED_BYTES,
            dtype=getattr(torch, dtype or "float32"),
            operation=operation or "SUM",
            root=root if KINDS[name].is_rooted else 0,
        )
        wrong, reason = None, ""
        try:
            wrong = count_wrong(prepare(case, running_group(), world.device), store, f"check {number}")
        except _UNSUPPORTED as error:
            reason = (str(error) or repr(error)).splitlines()[0]
        found.append(Check(collective=name, operation=operation, dtype=dtype, wrong=wrong, reason=reason))
    return found


def _cases(spec: SweepSettings) -> Iterable[tuple[str, str, str]]:
    dtypes = dict.fromkeys((*spec.dtypes, *spec.checked_dtypes))
    operations = dict.fromkeys((*spec.operations, *spec.checked_operations))
    # gloo's barrier can raise the error of an operation that was just refused, on this rank only, while the other ranks
    # wait in the barrier forever. So barrier is checked first.
    for name in sorted(spec.collectives, key=lambda name: name != "barrier"):
        kind = KINDS[name]
        own_operations = operations if kind.reduces else ("",)
        own_dtypes = dtypes if kind.traffic != "none" else ("",)
        yield from product((name,), own_operations, own_dtypes)


def refuse_missing(spec: SweepSettings, checks: Iterable[Check], backend: str) -> None:
    """Raise InputError for an operation or dtype, requested by name, that the backend does not support."""
    timed = [check for check in checks if check.operation in ("", *spec.operations)]
    timed = [check for check in timed if check.dtype in ("", *spec.dtypes)]
    for name in spec.named:
        cases = [check for check in timed if name in (check.operation, check.dtype)]
        if cases and all(check.wrong is None for check in cases):
            what = f"{name} of {', '.join(spec.dtypes)}" if name in OPERATIONS else name
            raise InputError(
                f"{backend} does not support {what} ({cases[0].reason})",
                code="bench.backend-unsupported",
                fix=_others(name, checks),
            )


def _others(name: str, checks: Iterable[Check]) -> str:
    """Return the fix of the error: dtypes that the operation supports, or supported operations or dtypes."""
    has = [check for check in checks if check.wrong is not None]
    dtypes = dict.fromkeys(check.dtype for check in has if check.operation == name)
    if dtypes:
        return f"use --dtypes with {', '.join(dtypes)}"
    kind, option = (OPERATIONS, "--ops") if name in OPERATIONS else (TYPES, "--dtypes")
    others = {part for check in has for part in (check.operation, check.dtype)}
    names = [other for other in kind if other in others]
    return f"use {option} with {', '.join(names)}" if names else f"omit {name} from {option}"
