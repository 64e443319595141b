"""Plans that change the arithmetic: losses within a band, gradients and updates as close as rounding lets them be.

Lower precision gives other numbers, so nothing is equal. But rounding has a size, which one process shows: it trains in
fp32 and once more in the precision of the plan. The relative L2 distance between the two gradients bounds that of the
plan, and with it both direction and norm: a gradient scaled by 2 is 1.0 away, rounding in bf16 about 0.01. Replicas
are compared with each other as well. Plans whose gradients are different by design (PowerSGD, local rounds, local batch
statistics) are compared by the band of their losses only.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from shardwise.parity.capture import values_file
from shardwise.parity.compare import evaluation_gaps, gradients_of, load_tensors, losses_of, rank_gaps, ratio
from shardwise.parity.plans import in_precision
from shardwise.parity.spec import Finding, Gap

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from shardwise.parity.plans import Exact
    from shardwise.parity.runner import Record
    from shardwise.parity.spec import Kind
    from shardwise.plans import Plan

    Tensors = Mapping[str, Tensor]

_LOWER = ("bf16", "fp16")
"""The one that rounds more comes first."""
_TIMES, _TIMES_LATER, _TIMES_SHARDED = 3.0, 6.0, 10.0
"""How many times farther than one process a plan may be: in the first step, in later ones, and in those with FSDP2.
One process computes under autocast; FSDP2 casts parameters, so norms and residuals round too. In the first step such
plans were twice as far. In the third they were up to 6 times as far, others up to 5.3 times, since Adam turns the
rounding of a small gradient into a whole update."""
_LEAST_WHOLE, _LEAST_ONE, _LEAST_UPDATE = 0.015, 0.2, 0.15
"""Least limits of the whole gradient and its norm, of one parameter's gradient, of the whole update. Sound plans with
compression, where one process rounds nothing, were up to 0.004, 0.05 and 0.02 away; Adam amplifies rounding."""
_SMALL_GRADIENT = 0.03
"""A gradient below this share of the largest one is measured against that: large terms that cancel left it rounding."""
_WIDEST = 0.5
"""A larger limit proves nothing: a value that one process itself does not hold in this precision is passed over."""


def rounds_in(plan: Plan) -> str | None:
    """Return the lower precision that alone makes the plan's gradients differ; None if they differ by design."""
    by_design = plan.communication.compression == "powersgd" or plan.communication.sync_every > 1
    if by_design or plan.batch_norm == "local":
        return None
    used = (plan.precision.compute, plan.communication.compression)
    return next((each for each in _LOWER if each in used), None)


def exact_counterpart(plan: Plan, precision: Exact) -> Plan:
    """Return the plan in one dtype with gradients sent as they are, in which a cause can be found by value."""
    communication = dataclasses.replace(plan.communication, compression="none")
    return dataclasses.replace(in_precision(plan, precision), communication=communication)


def loss_band_gaps(record: Record, expected: Record, band: float) -> list[Gap]:
    """Return how far the loss of each step, and of the evaluation at the end, is from fp32."""
    pairs = zip(losses_of(record.traced, record.layout), expected.traced[0].losses, strict=True)
    gaps = [
        Gap(kind="loss", name="", step=step, relative=ratio(abs(found - wanted), abs(wanted)), limit=band)
        for step, (found, wanted) in enumerate(pairs)
    ]
    # A metric such as accuracy counts whole rows: rounding that tips one of a few moves it by more than any band.
    return gaps + evaluation_gaps(record.traced, expected.traced[0], {"evaluation": band})


def rounding_gaps(record: Record, expected: Record, lower: Record, plan: Plan) -> list[Gap]:
    """Return how far gradients, norms and the whole update are from fp32; `lower` is one process in the plan's dtype.

    Reads whole tensors from all three folders.
    """
    steps = len(expected.traced[0].losses)
    dtype = rounds_in(plan)
    times_later = _TIMES_SHARDED if plan.zero >= 2 else _TIMES_LATER
    gaps: list[Gap] = []
    for step in range(steps):
        times = times_later if step else _TIMES
        wanted = gradients_of(expected, step)
        found, usual = (_at_norm(gradients_of(each, step), each, step, dtype) for each in (record, lower))
        gaps += _whole_gap("gradient", step, (found, usual, wanted), _LEAST_WHOLE, times)
        gaps += _norm_gaps(step, record, expected, times * _distance(usual, wanted))
        gaps += _parameter_gaps(step, found, usual, wanted, times)
        gaps += _replica_gaps(step, record)
    moved, usual, wanted = (_update(each, steps) for each in (record, lower, expected))
    gaps += _whole_gap("parameter", None, (moved, usual, wanted), _LEAST_UPDATE, times_later)
    return gaps


def no_exact_cause(first: Gap, dtype: str) -> Finding:
    """Return the finding that a plan fails in lower precision only."""
    return Finding(
        cause=f"wrong in {dtype} alone",
        evidence=f"the same plan equals one process in fp64, but in {dtype} {first} is {first.relative:.1e} from fp32,"
        f" more than rounding takes one process ({first.limit:.1e})",
        parameter=first.name or None,
        step=first.step,
    )


def _whole_gap(
    kind: Kind, step: int | None, tensors: tuple[Tensors, Tensors, Tensors], least: float, times: float
) -> Iterator[Gap]:
    """Yield the relative L2 distance of all tensors together; `tensors` are the plan's, one process's, and fp32's."""
    found, usual, wanted = tensors
    limit = max(least, times * _distance(usual, wanted))
    if limit <= _WIDEST:
        yield Gap(kind=kind, name="", step=step, relative=_distance(found, wanted), limit=limit)


def _parameter_gaps(step: int, found: Tensors, usual: Tensors, wanted: Tensors, times: float) -> Iterator[Gap]:
    """Yield the relative L2 distance of each gradient; small ones relative to the largest."""
    least = _SMALL_GRADIENT * max(float(value.double().norm()) for value in wanted.values())
    for name in wanted:
        limit = max(_LEAST_ONE, times * _one_distance(usual.get(name), wanted[name], least))
        if limit <= _WIDEST:
            apart = _one_distance(found.get(name), wanted[name], least)
            yield Gap(kind="gradient", name=name, step=step, relative=apart, limit=limit)


def _norm_gaps(step: int, record: Record, expected: Record, farthest: float) -> Iterator[Gap]:
    """Yield how far norms are from fp32; two norms are at most as far apart as the gradients (triangle inequality).

    The norm of one process alone would not do as a measure: it is a single number, which may be close by chance.
    """
    wanted = expected.traced[0].norms[step]
    if not wanted:
        return
    limit = max(_LEAST_WHOLE, farthest)
    for each in record.traced:
        norm = each.norms[step]
        if norm is not None and limit <= _WIDEST:
            apart = ratio(abs(norm - wanted), abs(wanted))
            between = f"rank {each.rank} and one process"
            yield Gap(kind="gradient norm", name="", step=step, relative=apart, limit=limit, between=between)


def _replica_gaps(step: int, record: Record) -> list[Gap]:
    """Compare ranks that hold the same piece, in the gradient and in the weights after the step."""
    gradients = [each.gradients[step] for each in record.traced]
    parameters = [each.parameters[step + 1] for each in record.traced]
    return [
        *rank_gaps("gradient", step, gradients, record.layout, lambda _: _LEAST_WHOLE),
        *rank_gaps("parameter", step, parameters, record.layout, lambda _: _LEAST_WHOLE),
    ]


def _at_norm(gradients: Tensors, record: Record, step: int, dtype: str | None) -> Tensors:
    """Return gradients of fp16 without the scale of the loss, which their reported norm does not have."""
    norm = record.traced[0].norms[step]
    if dtype != "fp16" or norm is None:
        return gradients
    scaled = _norm(gradients.values())
    return {name: value.double() * (norm / scaled) for name, value in gradients.items()} if scaled else gradients


def _update(record: Record, steps: int) -> Tensors:
    """Return what the whole training added to each parameter."""
    before, after = (load_tensors(values_file(record.folder, number))["parameters"] for number in (0, steps))
    return {name: after[name].double() - before[name].double() for name in before}


def _distance(found: Tensors, wanted: Tensors) -> float:
    if found.keys() != wanted.keys():
        return math.inf
    size = _norm(wanted.values())
    apart = _norm([found[name].double() - wanted[name].double() for name in wanted])
    return ratio(apart, size)


def _one_distance(found: Tensor | None, wanted: Tensor, least: float) -> float:
    if found is None or found.shape != wanted.shape:
        return math.inf
    return ratio(float((found.double() - wanted.double()).norm()), max(float(wanted.double().norm()), least))


def _norm(values: Any) -> float:
    return math.sqrt(sum(float(value.double().square().sum()) for value in values))
