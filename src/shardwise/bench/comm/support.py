"""Which reduce operations and dtypes a backend has: found out by using each once on little data, and checked."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import torch

from shardwise.bench.comm.bus_bandwidth import KINDS, OPERATIONS, TYPES
from shardwise.bench.comm.check import count_wrong
from shardwise.bench.comm.collectives import CollectiveSpec, prepare
from shardwise.bench.comm.result import Check
from shardwise.dist.world import running_group
from shardwise.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardwise.bench.comm.spec import CommSpec
    from shardwise.dist import World
    from shardwise.dist.stores import Store

CHECKED_BYTES = 4096
"""Of every check: more than one period of inputs on each of a few ranks."""

_LONE_FACTOR = "one rank sums nothing, and nccl leaves the factor out of reduce_scatter and of bfloat16 then"


def check_all(spec: CommSpec, world: World, store: Store) -> list[Check]:
    """Communicate over the world, called on every rank: use everything once; wrong elements are this rank's."""
    root = min(spec.root, world.size - 1)
    found = []
    for number, (name, operation, dtype) in enumerate(_cases(spec)):
        if operation == "PREMUL_SUM" and world.size == 1:
            found.append(Check(collective=name, operation=operation, dtype=dtype, wrong=None, words=_LONE_FACTOR))
            continue
        asked = CollectiveSpec(
            name=name,
            num_bytes=CHECKED_BYTES,
            dtype=getattr(torch, dtype or "float32"),
            operation=operation or "SUM",
            root=root if KINDS[name].is_rooted else 0,
        )
        try:
            wrong, words = count_wrong(prepare(asked, running_group(), world.device), store, f"check {number}"), ""
        except (
            RuntimeError,
            ValueError,
            TypeError,
            AttributeError,
        ) as error:  # every backend has its own way to say no
            wrong, words = None, (str(error) or repr(error)).splitlines()[0]
        found.append(Check(collective=name, operation=operation, dtype=dtype, wrong=wrong, words=words))
    return found


def _cases(spec: CommSpec) -> Iterable[tuple[str, str, str]]:
    dtypes = dict.fromkeys((*spec.dtypes, *spec.checked_dtypes))
    operations = dict.fromkeys((*spec.operations, *spec.checked_operations))
    # gloo's barrier raises the error of an operation just refused if that is not cleared away yet, on this rank alone,
    # and the others wait in it for ever: it comes before them.
    for name in sorted(spec.collectives, key=lambda name: name != "barrier"):
        kind = KINDS[name]
        yield from product((name,), operations if kind.reduces else ("",), dtypes if kind.traffic != "none" else ("",))


def refuse_missing(spec: CommSpec, checks: Iterable[Check], backend: str) -> None:
    """Refuse an operation or dtype that was asked for by name, if the backend has none of what it was asked for."""
    timed = [check for check in checks if check.operation in ("", *spec.operations)]
    timed = [check for check in timed if check.dtype in ("", *spec.dtypes)]
    for name in spec.named:
        cases = [check for check in timed if name in (check.operation, check.dtype)]
        if cases and all(check.wrong is None for check in cases):
            what = f"{name} of {', '.join(spec.dtypes)}" if name in OPERATIONS else name
            raise InputError(
                f"{backend} has no {what} ({cases[0].words})",
                code="bench.backend-unsupported",
                fix=_others(name, checks),
            )


def _others(name: str, checks: Iterable[Check]) -> str:
    """Say what to type instead: dtypes that the operation works with, or the others of its kind."""
    has = [check for check in checks if check.wrong is not None]
    dtypes = dict.fromkeys(check.dtype for check in has if check.operation == name)
    if dtypes:
        return f"use --dtypes with {', '.join(dtypes)}"
    kind, option = (OPERATIONS, "--ops") if name in OPERATIONS else (TYPES, "--dtypes")
    others = {part for check in has for part in (check.operation, check.dtype)}
    names = [other for other in kind if other in others]
    return f"use {option} with {', '.join(names)}" if names else f"leave it out of {option}"
