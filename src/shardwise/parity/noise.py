"""The rounding noise of a job itself, and the elements of parameters that it decides.

One process is compared with itself, rows in another order and weights moved by one rounding error. The largest gaps are
the noise floors. Adam and its relatives divide a gradient by its own size, so an element whose exact gradient is zero
(the bias of a convolution before batch normalization) moves by a full step in a direction that rounding chose: no two
correct runs agree on it. An element counts as ill-conditioned where its gradient in some step is not well above the
noise that the gradient of its tensor has. Those elements are left out and counted; all others keep a sharp limit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardwise.parity.capture import values_file
from shardwise.parity.compare import (
    EXACT,
    KINDS,
    NOISE,
    Limits,
    compare,
    gradients_of,
    load_tensors,
    relative_gaps,
    strict_limits,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

    from shardwise.parity.plans import Exact
    from shardwise.parity.runner import Record
    from shardwise.parity.spec import Gap, Kind

LOOSEST = 1e-6
"""Largest limit of fp64: a job whose own noise asks for more computes in less than fp64, or is not a function."""

_LEAST = {"fp64": EXACT / NOISE, "fp32": 2.0**-23}
"""Least floors, one rounding error in fp32: a floor of zero only means that the trials happened to agree."""
_AMPLIFIED = {"fp64": EXACT / 10, "fp32": 1e-5}
"""Gaps of one process to itself above which something amplifies rounding errors."""
_CONDITION = {"fp64": 1e7, "fp32": 1e2}
"""How far above its noise a gradient must be: Adam's update then has a relative error of at most the inverse."""

_LARGEST_DOUBLE = 1e-10
"""Noise of a first gradient that fp64 can explain: its rounding is 1e-16, that of fp32 6e-8."""
_LARGEST_NOISE = 1e-3
"""Gaps of losses and gradients above this are not rounding, whatever amplifies it."""


def measure_noise(dtype: Exact, base: Record, whole: Sequence[Record], split: Sequence[Record], masks: Path) -> Limits:
    """Return the limits of a job from trainings that differ by rounding alone; writes the masks of parameters.

    Those of `split` have several micro-batches in a step. A buffer that counts forward passes differs there by more
    than rounding, so the noise of buffers comes from `whole` alone.
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
    """Whether the noise of a job in fp64 is that of fp64, and leaves limits that still mean something."""
    # A metric may jump: one row that rounding tips shows nothing about the precision of the model.
    sharp = all(limit <= LOOSEST for kind, limit in limits.kinds.items() if kind not in {"initial value", "metric"})
    return sharp and limits.first_gradient <= _LARGEST_DOUBLE


def computes_in_less(limits: Limits) -> bool:
    """Whether the noise of a job in fp64 is that of a lower precision inside the model, and not of chance."""
    return _LARGEST_DOUBLE < limits.first_gradient <= _LARGEST_NOISE


def may_be_noise(first: Gap) -> bool:
    """Whether amplified rounding could explain where two trainings part: values the optimizer made, or small gaps."""
    if first.kind == "initial value":
        return False
    return first.kind in {"parameter", "buffer"} or first.relative <= _LARGEST_NOISE


def conditions(limits: Limits) -> str:
    """Return what was left out or compared with its own noise, as the end of a sentence; empty for nothing."""
    text = ""
    if limits.left_out:
        text += (
            f"; {limits.left_out} of {limits.elements} elements of parameters left out: their gradient is rounding"
            " noise, which the optimizer amplifies"
        )
    if limits.buffers:
        text += f"; {len(limits.buffers)} buffers within 4 times their own noise"
    return text


def _well_conditioned(dtype: Exact, base: Record, others: Sequence[Record]) -> dict[str, Tensor]:
    """Return a mask of the elements to compare for each parameter on which the trainings disagree."""
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
    """Return which elements of a gradient are not well above the noise; an exact zero in every run is not noise."""
    spread = torch.stack([(each - gradient).abs() for each in varied]).amax(0)
    touched = (gradient != 0) | (spread != 0)
    return touched & (gradient.abs() <= condition * spread.max())


def _gaps(base: Record, others: Sequence[Record], which: str) -> dict[str, float]:
    """Return by name the largest gap of final values between one process and its variants."""
    wanted = _values(base, which)
    found = [relative_gaps(_values(other, which), wanted) for other in others]
    return {name: max(gaps[name] for gaps in found) for name in wanted}


def _values(record: Record, which: str) -> dict[str, Tensor]:
    values: dict[str, Tensor] = load_tensors(values_file(record.folder, len(record.traced[0].losses)))[which]
    return values
