"""Comparison of two training runs: all values in the order of training, and the first values that differ."""

from __future__ import annotations

import math
from functools import partial
from itertools import combinations
from pathlib import Path  # noqa: TC003 - msgspec reads the annotation
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from shardwise.parity.capture import Prints, Traced, grads_file, values_file
from shardwise.parity.spec import Gap, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from shardwise.layout import Layout
    from shardwise.parity.runner import Record

EXACT = 1e-9
"""Largest relative difference in fp64. Rounding causes about 1e-13, real differences about 1e-3."""
NOISE = 4.0
"""Largest difference in fp32, as a multiple of the noise floor, which is the maximum over only a few trials."""
SMALL = 1e-3
"""Smallest scale of a relative difference, as a fraction of the largest value in all tensors. A gradient that is
zero except for rounding, such as that of the bias of attention keys, has no scale of its own."""
KINDS: tuple[Kind, ...] = (
    "initial value",
    "loss",
    "gradient",
    "gradient norm",
    "parameter",
    "buffer",
    "evaluation",
    "metric",
)


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The largest relative differences (gaps) that count as equal, and the parameter elements that are compared."""

    kinds: dict[Kind, float]
    buffers: dict[str, float] = {}
    """Limits of individual buffers that depend on ill-conditioned parameters, such as the running mean after a bias."""
    compared: Path | None = None
    """File of masks for the parameters of which only some elements are compared; None if all are compared."""
    left_out: int = 0
    """Number of parameter elements that the masks exclude."""
    elements: int = 0
    """Number of elements of all parameters."""
    first_gradient: float = 0.0
    """Noise of the gradients of the first step, before the optimizer amplifies it."""

    def of(self, kind: Kind, name: str = "") -> float:
        """Return the limit for a kind of value; a buffer may have its own limit by name."""
        limit = self.kinds[kind]
        return max(limit, self.buffers.get(name, 0.0)) if kind == "buffer" else limit

    def masks(self) -> dict[str, Tensor]:
        """Return masks of the compared elements by parameter; parameters without a mask are compared in full."""
        return {} if self.compared is None else load_tensors(self.compared)


def strict_limits() -> Limits:
    """Return the fp64 limits for jobs that do not amplify rounding errors."""
    return Limits(kinds=dict.fromkeys(KINDS, EXACT))


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The differences between two training runs."""

    worst: Gap
    """The gap that is largest relative to its limit."""
    first: Gap | None
    """The largest gap at the first moment at which a gap exceeds its limit."""
    deviating: tuple[str, ...]
    """Names of the values that exceed their limits at that moment."""
    largest: dict[Kind, float]
    """Largest relative gap by kind."""


def compare(record: Record, expected: Record, limits: Limits) -> Comparison:
    """Compare a training run under a plan with training in one process; reads full tensors from both folders."""
    worst: Gap | None = None
    first: list[Gap] = []
    largest: dict[Kind, float] = {}
    for gaps in _moments(record, expected, limits):
        for gap in gaps:
            worst = gap if worst is None or gap.beyond > worst.beyond else worst
            largest[gap.kind] = max(largest.get(gap.kind, 0.0), gap.relative)
        first = first or [gap for gap in gaps if gap.beyond > 1]
    assert worst is not None, "a training has at least one loss"  # noqa: S101 - only we can break it
    return Comparison(
        worst=worst,
        first=max(first, key=lambda gap: gap.relative, default=None),
        deviating=tuple(dict.fromkeys(gap.name for gap in first)),
        largest=largest,
    )


def losses_of(traced: Sequence[Traced], layout: Layout) -> list[float]:
    """Return the mean loss of every step, summed over the ranks that report a share of it."""
    shares = [each.losses for each in traced if layout.reports_loss(each.rank)]
    return [sum(step) for step in zip(*shares, strict=True)]


def _moments(record: Record, reference: Record, limits: Limits) -> Iterator[list[Gap]]:
    """Yield the gaps at each moment, in the order of training."""
    observed, folder, layout = record.traced, record.folder, record.layout
    expected, expected_folder = reference.traced[0], reference.folder
    steps = len(expected.losses)
    start, expected_start = all_values(folder, 0), all_values(expected_folder, 0)
    yield _tensor_gaps("initial value", None, start, expected_start, limits)
    starts = [each.parameters[0] for each in observed]
    yield rank_gaps("initial value", None, starts, layout, partial(limits.of, "initial value"))
    losses = losses_of(observed, layout)
    for step in range(steps):
        yield [_number_gap("loss", step, losses[step], expected.losses[step], limits)]
        found, wanted = gradients_of(record, step), gradients_of(reference, step)
        yield _tensor_gaps("gradient", step, found, wanted, limits)
        by_rank = [each.gradients[step] for each in observed]
        yield rank_gaps("gradient", step, by_rank, layout, partial(limits.of, "gradient"))
        norms = [(each.rank, each.norms[step]) for each in observed]
        yield [
            _number_gap("gradient norm", step, norm, expected.norms[step], limits, f"rank {rank} and one process")
            for rank, norm in norms
            if norm is not None and expected.norms[step] is not None
        ]
        by_rank = [each.parameters[step + 1] for each in observed]
        yield rank_gaps("parameter", step, by_rank, layout, partial(limits.of, "parameter"))
    for kind in ("parameter", "buffer"):
        found, wanted = (load_tensors(values_file(each, steps))[f"{kind}s"] for each in (folder, expected_folder))
        yield _tensor_gaps(kind, None, found, wanted, limits, limits.masks() if kind == "parameter" else None)
    yield rank_gaps("buffer", None, [each.buffers for each in observed], layout, partial(limits.of, "buffer"))
    yield evaluation_gaps(observed, expected, limits.kinds)


def evaluation_gaps(observed: Sequence[Traced], expected: Traced, limits: Mapping[Kind, float]) -> list[Gap]:
    """Return the gaps between the final evaluation of each rank and that of one process.

    The loss is of kind "evaluation", the metrics of the job are of kind "metric". A kind without a limit is not
    compared. Two metrics that are both NaN count as equal.
    """
    gaps = []
    for name, wanted in expected.evaluation.items():
        kind: Kind = "evaluation" if name == "loss" else "metric"
        if kind not in limits:
            continue
        for each in observed:
            apart = relative(each.evaluation.get(name, math.inf), wanted)
            between = f"rank {each.rank} and one process"
            gaps.append(Gap(kind=kind, name=name, step=None, relative=apart, limit=limits[kind], between=between))
    return gaps


def load_tensors(path: Path, *, weights_only: bool = True) -> Any:
    """Load a file of a recorded run; pass weights_only=False for a `local_file`, whose batches may have any class."""
    return torch.load(path, weights_only=weights_only, mmap=True)


def gradients_of(record: Record, step: int) -> Mapping[str, Tensor]:
    """Return the full gradients of a step by parameter."""
    gradients: Mapping[str, Tensor] = load_tensors(grads_file(record.folder, step))
    return gradients


def all_values(folder: Path, step: int) -> dict[str, Tensor]:
    """Return the full parameters and buffers before a step by name."""
    values = load_tensors(values_file(folder, step))
    return {**values["parameters"], **values["buffers"]}


def relative_gaps(
    observed: Mapping[str, Tensor], expected: Mapping[str, Tensor], compared: Mapping[str, Tensor] | None = None
) -> dict[str, float]:
    """Return largest difference / largest value by name; infinite if a tensor is missing on one side or contains NaN.

    `compared` contains masks of the elements to compare; a tensor without a mask is compared in full.
    """
    compared = compared or {}
    overall = max((_top(value) for value in expected.values()), default=0.0)
    gaps = {name: math.inf for name in observed if name not in expected}
    for name, wanted in expected.items():
        found = observed.get(name)
        if found is None or found.shape != wanted.shape:
            gaps[name] = math.inf
            continue
        scale = max(_top(wanted), SMALL * overall)
        difference = found.double() - wanted.double()
        if name in compared:
            difference = difference[compared[name]]
        gaps[name] = ratio(_top(difference), scale)
    return gaps


def _top(value: Tensor) -> float:
    return float(value.double().abs().max()) if value.numel() else 0.0


def ratio(difference: float, scale: float) -> float:
    """Return a difference divided by its scale; infinite if either is NaN, or if only the scale is 0."""
    if math.isnan(difference) or math.isnan(scale):
        return math.inf
    if not scale:
        return math.inf if difference else 0.0
    return difference / scale


def relative(found: float, wanted: float) -> float:
    """Return the relative difference of two values: infinite if exactly one is NaN, 0 if both are."""
    if math.isnan(found) or math.isnan(wanted):
        return 0.0 if math.isnan(found) and math.isnan(wanted) else math.inf
    if not wanted:
        return math.inf if found else 0.0
    return abs(found - wanted) / abs(wanted)


def _tensor_gaps(  # noqa: PLR0917 - positions of private callers
    kind: Kind,
    step: int | None,
    observed: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    limits: Limits,
    compared: Mapping[str, Tensor] | None = None,
) -> list[Gap]:
    gaps = relative_gaps(observed, expected, compared)
    return [
        Gap(kind=kind, name=name, step=step, relative=apart, limit=limits.of(kind, name))
        for name, apart in gaps.items()
    ]


def rank_gaps(
    kind: Kind, step: int | None, prints: Sequence[Prints], layout: Layout, limit_of: Callable[[str], float]
) -> list[Gap]:
    """Compare ranks with the same shard within a stage, because a stage may have unused buffers of other stages."""
    overall = max((norm for each in prints for _, norm in each.values()), default=0.0)
    gaps = []
    for one, other in combinations(range(len(prints)), 2):
        if layout.coordinate(one).pp != layout.coordinate(other).pp:
            continue
        for key in prints[one].keys() & prints[other].keys():
            (print_, norm), (other_print, other_norm) = prints[one][key], prints[other][key]
            apart = ratio(abs(print_ - other_print), max(norm, other_norm, SMALL * overall))
            between = f"ranks {one} and {other}"
            gaps.append(Gap(kind=kind, name=key, step=step, relative=apart, limit=limit_of(key), between=between))
    return gaps


def _number_gap(  # noqa: PLR0917 - positions of private callers
    kind: Kind,
    step: int,
    observed: float | None,
    expected: float | None,
    limits: Limits,
    between: str = "the plan and one process",
) -> Gap:
    assert observed is not None  # noqa: S101 - callers pass only measured values
    assert expected is not None  # noqa: S101
    apart = ratio(abs(observed - expected), abs(expected))
    return Gap(kind=kind, name="", step=step, relative=apart, limit=limits.of(kind), between=between)
