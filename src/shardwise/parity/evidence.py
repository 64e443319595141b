"""Evidence about a plan that diverged from one process, and arithmetic that the hypotheses share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from shardwise.parity.compare import relative_gaps

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from shardwise.parity.capture import Traced
    from shardwise.parity.compare import Comparison
    from shardwise.parity.spec import Gap
    from shardwise.plans import Plan

    Tensors = Mapping[str, Tensor]

MATCH = 1e-3
"""Largest distance of the plan's gradient from a hypothesis, as a fraction of its distance from one process."""
SAME = 1e-6
"""Relative difference up to which two gradients are considered the same."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Contribution of a micro-batch of a data-parallel rank: the gradient of its loss sum, and its count."""

    gradients: Tensors
    count: float


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All evidence about a plan that diverged from one process."""

    plan: Plan
    comparison: Comparison
    tolerance: float
    """Relative difference up to which gradients are equal."""
    step: int
    """The step that is examined in detail, because the plan diverged from one process in it; counted from 0."""
    traced: Sequence[Traced]
    again: Sequence[Traced]
    """A second run of the same plan."""
    expected: Traced
    start: Tensors
    """Initial parameters and buffers of the plan; `expected_start` are those of one process."""
    expected_start: Tensors
    before: Tensors
    """Parameters of the plan before `step`; `expected_before` are those of one process."""
    expected_before: Tensors
    gradients: Tensors
    """Full gradients of the plan in `step`; `expected_gradients` are those of one process."""
    expected_gradients: Tensors
    locals: Sequence[Tensors]
    """Gradient shards of each rank in `step`."""
    micro_batches: int
    """Number of micro-batches of each data-parallel rank in `step`."""
    cells: Sequence[Sequence[Cell]] = ()
    """Contributions by data-parallel rank and micro-batch, with the weights of one process."""
    repeat_gap: float = 0.0
    """Relative difference of the gradients of a micro-batch when the model repeats it with the same random numbers."""
    repeated_bias: Mapping[int, Tensors] = field(default_factory=dict)
    """Number of times -> gradient of one process in which row-parallel modules add their bias that many times."""
    restarted_positions: Tensors = field(default_factory=dict)
    """Gradient of one process in which positions restart in each shard of a sequence; empty without context
    parallelism."""
    uses: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)
    """Shared parameter -> its gradient by module."""
    tied: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Shared parameter -> its other names."""

    @property
    def nth(self) -> int:
        """The number of `step` counted from 1, for messages."""
        return self.step + 1

    @property
    def first(self) -> Gap:
        """The first gap beyond its limit, which made the plan fail."""
        assert self.comparison.first is not None  # noqa: S101 - only diverged plans are investigated
        return self.comparison.first

    @property
    def all_cells(self) -> list[Cell]:
        """All micro-batches of all data-parallel ranks."""
        return [cell for row in self.cells for cell in row]

    @property
    def degrees(self) -> list[int]:
        """The numbers of shards into which the layout may split a tensor."""
        layout = self.plan.layout
        degrees = {layout.world_size, layout.dp, layout.shard, layout.tp, layout.shard * layout.tp}
        return sorted(degree for degree in degrees if degree > 1)

    @property
    def split(self) -> list[str]:
        """Parameters whose full gradients differ between ranks."""
        found = []
        for name in self.expected_gradients:
            values = [each[name] for each in self.locals if name in each]
            if len(values) == len(self.locals) and self._differ(values):
                found.append(name)
        return found

    @property
    def off(self) -> list[str]:
        """Parameters whose gradient in the step differs from that of one process on some rank."""
        gaps = relative_gaps(self.gradients, self.expected_gradients)
        return list(dict.fromkeys([*(name for name, gap in gaps.items() if gap > self.tolerance), *self.split]))

    def is_explained_by(self, hypothesis: Tensors) -> bool:
        """Return whether the plan's gradient equals the hypothesis and is far from the gradient of one process."""
        here = max(relative_gaps(self.gradients, self.expected_gradients).values(), default=0.0)
        there = max(relative_gaps(self.gradients, hypothesis).values(), default=0.0)
        return there < min(MATCH * here, max(SAME, self.tolerance))

    def _differ(self, values: Sequence[Tensor]) -> bool:
        gaps = (relative_gaps({"": each}, {"": values[0]})[""] for each in values[1:])
        return any(gap > max(SAME, self.tolerance) for gap in gaps)


def total_gradient(cells: Sequence[Cell]) -> dict[str, Tensor]:
    """Return the sum of the gradients of cells by parameter."""
    return _sum_by_name([cell.gradients for cell in cells])


def mean_gradient(cells: Sequence[Cell]) -> dict[str, Tensor]:
    """Return the gradient of the mean loss over the counts of all cells."""
    count = sum(cell.count for cell in cells)
    return {name: value / count for name, value in total_gradient(cells).items()}


def plain_average(means: Sequence[Tensors]) -> dict[str, Tensor]:
    """Return the unweighted average of gradients by parameter."""
    return {name: value / len(means) for name, value in _sum_by_name(means).items()}


def _sum_by_name(gradients: Sequence[Tensors]) -> dict[str, Tensor]:
    """Return the sum of gradients by name; a missing gradient counts as zero."""
    values: dict[str, list[Tensor]] = {}
    for each in gradients:
        for name, value in each.items():
            values.setdefault(name, []).append(value)
    return {name: torch.stack(some).sum(0) for name, some in values.items()}


# Misplaced shards: tests whether one tensor is another tensor with its shards in a different order.


_CLOSE = 1e-6


def misplaced_pieces(found: Tensor, wanted: Tensor, degrees: Sequence[int]) -> str | None:
    """Return a description of the permutation if `found` is `wanted` with its shards permuted, else None."""
    if found.shape != wanted.shape:
        return None
    for degree, dim in _splits(wanted, degrees):
        pieces = wanted.chunk(degree, dim)
        sources = [_source(place, piece, pieces) for place, piece in enumerate(found.chunk(degree, dim))]
        if None not in sources and sources != list(range(degree)):
            return _moved_text(sources, degree, dim)
    return None


def misplaced_use(found: Tensor, uses: Sequence[Tensor], degrees: Sequence[int]) -> str | None:
    """Return a description if `found` is the sum of `uses` with the shards of one of them rotated, else None."""
    if any(use.shape != found.shape for use in uses):
        return None
    for number, use in enumerate(uses):
        others = sum((other for place, other in enumerate(uses) if place != number), torch.zeros_like(use))
        for degree, dim in _splits(use, degrees):
            for shift in range(1, degree):
                moved = use.roll(shift * (use.shape[dim] // degree), dim)
                if _equal(found, others + moved):
                    sources = [(place - shift) % degree for place in range(degree)]
                    return _moved_text(sources, degree, dim)
    return None


def _splits(value: Tensor, degrees: Sequence[int]) -> Iterator[tuple[int, int]]:
    for degree in degrees:
        for dim in range(min(2, value.ndim)):
            if value.shape[dim] % degree == 0:
                yield degree, dim


def _source(place: int, piece: Tensor, pieces: Sequence[Tensor]) -> int | None:
    """Return the index of a shard that equals the piece at `place`, preferably `place`; skip other zero shards."""
    if _equal(piece, pieces[place]):
        return place
    return next((number for number, each in enumerate(pieces) if each.any() and _equal(piece, each)), None)


def _equal(one: Tensor, other: Tensor) -> bool:
    return bool((one.double() - other.double()).abs().max() <= _CLOSE * other.double().abs().max())


def _moved_text(sources: Sequence[int | None], degree: int, dim: int) -> str:
    moved = [f"{source} at {place}" for place, source in enumerate(sources) if source != place]
    return f"shards in the wrong order ({', '.join(moved)} of {degree} along dim {dim})"
