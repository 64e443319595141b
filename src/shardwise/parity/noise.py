"""Measures the rounding noise of a job, and excludes parameter elements that rounding determines.

Training in one process is compared with itself, with rows in a different order and weights changed by one rounding
error. The largest gaps are the noise floors. Adam and similar optimizers divide a gradient by its own magnitude, so an
element whose exact gradient is zero, such as the bias of a convolution before batch normalization, moves by a full step
in a direction that depends on rounding, and no two correct runs agree on it. An element is ill-conditioned if its
gradient in some step is not well above the noise of the gradients of its tensor. Ill-conditioned elements are excluded
and counted; all others keep a strict limit.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import torch

from shardwise.parity.capture import values_file
from shardwise.parity.compare import (
    EXACT,
    KINDS,
    NOISE,
    Limits,
    compare,
    evaluation_gaps,
    gradients_of,
    load_tensors,
    losses_of,
    rank_gaps,
    ratio,
    relative_gaps,
    strict_limits,
)
from shardwise.parity.spec import Finding, Gap, in_precision

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from shardwise.parity.runner import Record
    from shardwise.parity.spec import Exact, Kind
    from shardwise.plans import Plan

    Tensors = Mapping[str, Tensor]

LOOSEST = 1e-6
"""Largest useful limit in fp64. A job with more noise computes in a lower precision, or is not deterministic."""

_LEAST = {"fp64": EXACT / NOISE, "fp32": 2.0**-23}
"""Smallest noise floors (in fp32, one rounding error): a measured floor of zero only means that the trials agreed."""
_AMPLIFIED = {"fp64": EXACT / 10, "fp32": 1e-5}
"""Gaps between one process and its variants above which the job amplifies rounding errors."""
_CONDITION = {"fp64": 1e7, "fp32": 1e2}
"""Smallest ratio of a gradient to its noise; its inverse bounds the relative error of Adam's update."""

_LARGEST_DOUBLE = 1e-10
"""Largest noise of the first gradient that fp64 can explain: fp64 has a rounding error of 1e-16, fp32 of 6e-8."""
_LARGEST_NOISE = 1e-3
"""Larger gaps of losses and gradients are not due to rounding, even if the optimizer amplifies rounding."""


def measure_noise(dtype: Exact, base: Record, whole: Sequence[Record], split: Sequence[Record], masks: Path) -> Limits:
    """Return the limits of a job from training runs that differ only by rounding; writes parameter masks to `masks`.

    Training runs in `split` have several micro-batches per step, so a buffer that counts forward passes differs
    by more than rounding. The noise of buffers is therefore measured with `whole` only.
    """
    others = [*whole, *split]
    compared = _well_conditioned(dtype, base, others)
    torch.save(compared, masks)
    kept = Limits(kinds=strict_limits().kinds, compared=masks)
    floors: dict[Kind, float] = dict.fromkeys(KINDS, _LEAST[dtype])
    for other in others:
        for kind, gap in compare(other, base, kept).largest.items():
            floors[kind] = max(floors[kind], gap)
    first = gradients_of(base, 0)
    buffers = _gaps(base, whole, "buffers")
    own = {name: NOISE * gap for name, gap in buffers.items() if gap > _AMPLIFIED[dtype]}
    floors["buffer"] = max([_LEAST[dtype], *(gap for name, gap in buffers.items() if name not in own)])
    return Limits(
        kinds={kind: NOISE * floor for kind, floor in floors.items()},
        buffers=own,
        compared=masks,
        left_out=sum(int((~mask).sum()) for mask in compared.values()),
        elements=sum(value.numel() for value in _values(base, "parameters").values()),
        first_gradient=max(max(relative_gaps(gradients_of(each, 0), first).values()) for each in others),
    )


def is_comparable(limits: Limits) -> bool:
    """Return whether the noise floor of an fp64 job is as low as expected of fp64, so that limits are useful."""
    # A metric may change by a whole row because of rounding, which is unrelated to the precision of the model.
    sharp = all(limit <= LOOSEST for kind, limit in limits.kinds.items() if kind not in {"initial value", "metric"})
    return sharp and limits.first_gradient <= _LARGEST_DOUBLE


def computes_in_less(limits: Limits) -> bool:
    """Return whether the noise of an fp64 job is that of a lower precision inside the model."""
    return _LARGEST_DOUBLE < limits.first_gradient <= _LARGEST_NOISE


def may_be_noise(first: Gap) -> bool:
    """Return whether rounding, possibly amplified by the optimizer, could explain a divergence."""
    if first.kind == "initial value":
        return False
    return first.kind in {"parameter", "buffer"} or first.relative <= _LARGEST_NOISE


def conditions(limits: Limits) -> str:
    """Return text about values that were excluded or have their own limits, for a verdict; empty if there are none."""
    text = ""
    if limits.left_out:
        text += (
            f"; {limits.left_out} of {limits.elements} elements of parameters excluded: their gradient is rounding"
            " noise, which the optimizer amplifies"
        )
    if limits.buffers:
        text += f"; {len(limits.buffers)} buffers within 4 times their own noise"
    return text


def _well_conditioned(dtype: Exact, base: Record, others: Sequence[Record]) -> dict[str, Tensor]:
    """Return a mask of the elements to compare for each parameter on which the training runs disagree."""
    moved = [name for name, gap in _gaps(base, others, "parameters").items() if gap > _AMPLIFIED[dtype]]
    values = _values(base, "parameters")
    masks = {name: torch.ones(values[name].shape, dtype=torch.bool) for name in moved}
    for step in range(len(base.traced[0].losses)):
        wanted = gradients_of(base, step)
        varied = [gradients_of(other, step) for other in others]
        for name in moved:
            if name in wanted and all(name in each for each in varied):
                masks[name] &= ~_is_noise(wanted[name], [each[name] for each in varied], _CONDITION[dtype])
    return {name: mask for name, mask in masks.items() if not bool(mask.all())}


def _is_noise(gradient: Tensor, varied: Sequence[Tensor], condition: float) -> Tensor:
    """Return a mask of the gradient elements that are not well above the noise, except those that are always 0."""
    spread = torch.stack([(each - gradient).abs() for each in varied]).amax(0)
    touched = (gradient != 0) | (spread != 0)
    return touched & (gradient.abs() <= condition * spread.max())


def _gaps(base: Record, others: Sequence[Record], which: str) -> dict[str, float]:
    """Return the largest gap of each final value between one process and its variants, by name."""
    wanted = _values(base, which)
    found = [relative_gaps(_values(other, which), wanted) for other in others]
    return {name: max(gaps[name] for gaps in found) for name in wanted}


def _values(record: Record, which: str) -> dict[str, Tensor]:
    values: dict[str, Tensor] = load_tensors(values_file(record.folder, len(record.traced[0].losses)))[which]
    return values


# Plans that change the arithmetic: losses within a band, gradients and updates as close to fp32 as rounding permits.
#
# In lower precision values are not equal, but the magnitude of rounding can be measured: one process trains in fp32 and
# in the precision of the plan. The relative L2 distance between the two gradients bounds that of the plan, and
# therefore its direction and norm: the distance is 1.0 for a gradient scaled by 2, and about 0.01 for rounding in bf16.
# Replicas are compared with each other as well. Plans whose gradients differ by design (PowerSGD, local steps, local
# batch statistics) are compared by the band of their losses only.


_LOWER = ("float8", "bf16", "fp16")
"""Lower precisions, the least precise first."""
_TIMES, _TIMES_LATER, _TIMES_SHARDED = 3.0, 6.0, 10.0
"""Largest distance of a plan from fp32, as a multiple of that of one process: in the first step, in later steps, and in
later steps with FSDP2. One process uses autocast; FSDP2 casts parameters, so norms and residuals are rounded too. The
measured multiple was 2 for FSDP2 in the first step. In the third step it was up to 6 for FSDP2 and 5.3 for other plans,
because Adam turns the rounding of a small gradient into a full update."""
_LEAST_WHOLE, _LEAST_ONE, _LEAST_UPDATE = 0.015, 0.2, 0.15
"""Smallest limits of the full gradient and its norm, of the gradient of a parameter, and of the full update. One
process does not compress gradients, so correct plans with compression differed by up to 0.004, 0.05 and 0.02; Adam
amplifies rounding."""
_SMALL_GRADIENT = 0.03
"""A gradient with a norm below this fraction of the largest norm is compared relative to that fraction, because small
gradients are mostly rounding errors of terms that cancel."""
_WIDEST = 0.5
"""Largest useful limit; a value with a larger limit is dominated by rounding in one process and is not compared."""


def rounds_in(plan: Plan) -> str | None:
    """Return the lower precision to which a plan rounds; None if it does not, or differs for other reasons as well."""
    by_design = plan.communication.compression == "powersgd" or plan.communication.sync_every > 1
    if by_design or plan.batch_norm == "local":
        return None
    used = (plan.precision.compute, plan.communication.compression)
    return next((each for each in _LOWER if each in used), None)


def exact_counterpart(plan: Plan, precision: Exact) -> Plan:
    """Return the plan in a single dtype and without compression, so that its values can be compared exactly."""
    communication = dataclasses.replace(plan.communication, compression="none")
    return dataclasses.replace(in_precision(plan, precision), communication=communication)


def loss_band_gaps(record: Record, expected: Record, band: float) -> list[Gap]:
    """Return the gaps to fp32 of the loss of each step and of the final evaluation."""
    pairs = zip(losses_of(record.traced, record.layout), expected.traced[0].losses, strict=True)
    gaps = [
        Gap(kind="loss", name="", step=step, relative=ratio(abs(found - wanted), abs(wanted)), limit=band)
        for step, (found, wanted) in enumerate(pairs)
    ]
    # A metric such as accuracy counts rows: with few rows, rounding that changes one row exceeds any band.
    return gaps + evaluation_gaps(record.traced, expected.traced[0], {"evaluation": band})


def rounding_gaps(record: Record, expected: Record, lower: Record, plan: Plan) -> list[Gap]:
    """Return the gaps to fp32 of gradients, norms and the full update; `lower` is one process in the plan's dtype.

    Reads full tensors from all three folders.
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
    """Return the finding that a plan differs from one process in lower precision only."""
    return Finding(
        cause=f"wrong in {dtype} alone",
        evidence=f"the same plan equals one process in fp64, but in {dtype} {first} differs by {first.relative:.1e}"
        f" from fp32, more than the limit from rounding in one process ({first.limit:.1e})",
        parameter=first.name or None,
        step=first.step,
    )


def _whole_gap(
    kind: Kind, step: int | None, tensors: tuple[Tensors, Tensors, Tensors], least: float, times: float
) -> Iterator[Gap]:
    """Yield the relative L2 distance of all tensors together; `tensors` are those of the plan, one process and fp32."""
    found, usual, wanted = tensors
    limit = max(least, times * _distance(usual, wanted))
    if limit <= _WIDEST:
        yield Gap(kind=kind, name="", step=step, relative=_distance(found, wanted), limit=limit)


def _parameter_gaps(step: int, found: Tensors, usual: Tensors, wanted: Tensors, times: float) -> Iterator[Gap]:
    """Yield the relative L2 distance of each gradient; `_SMALL_GRADIENT` sets the smallest scale."""
    least = _SMALL_GRADIENT * max(float(value.double().norm()) for value in wanted.values())
    for name in wanted:
        limit = max(_LEAST_ONE, times * _one_distance(usual.get(name), wanted[name], least))
        if limit <= _WIDEST:
            apart = _one_distance(found.get(name), wanted[name], least)
            yield Gap(kind="gradient", name=name, step=step, relative=apart, limit=limit)


def _norm_gaps(step: int, record: Record, expected: Record, farthest: float) -> Iterator[Gap]:
    """Yield the gaps of gradient norms to fp32; norms differ at most as much as gradients (triangle inequality).

    The limit is not derived from the norm of one process, which is a single number that may be close by chance.
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
    """Compare the gradients, and the weights after the step, of ranks with the same shard."""
    gradients = [each.gradients[step] for each in record.traced]
    parameters = [each.parameters[step + 1] for each in record.traced]
    return [
        *rank_gaps("gradient", step, gradients, record.layout, lambda _: _LEAST_WHOLE),
        *rank_gaps("parameter", step, parameters, record.layout, lambda _: _LEAST_WHOLE),
    ]


def _at_norm(gradients: Tensors, record: Record, step: int, dtype: str | None) -> Tensors:
    """Return fp16 gradients scaled to their reported norm, which does not include the loss scale."""
    norm = record.traced[0].norms[step]
    if dtype != "fp16" or norm is None:
        return gradients
    scaled = _norm(gradients.values())
    return {name: value.double() * (norm / scaled) for name, value in gradients.items()} if scaled else gradients


def _update(record: Record, steps: int) -> Tensors:
    """Return the difference between the final and the initial value of each parameter."""
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
