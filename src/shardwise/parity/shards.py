"""Pieces in the wrong place: whether a tensor is another one cut into equal pieces and put together wrongly."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

_CLOSE = 1e-6


def misplaced_pieces(found: Tensor, wanted: Tensor, degrees: Sequence[int]) -> str | None:
    """Say which pieces stand in for which when `found` is `wanted` with its pieces moved; None when it is not."""
    if found.shape != wanted.shape:
        return None
    for degree, dim in _cuts(wanted, degrees):
        pieces = wanted.chunk(degree, dim)
        sources = [_source(place, piece, pieces) for place, piece in enumerate(found.chunk(degree, dim))]
        if None not in sources and sources != list(range(degree)):
            return _words(sources, degree, dim)
    return None


def misplaced_use(found: Tensor, uses: Sequence[Tensor], degrees: Sequence[int]) -> str | None:
    """Say so when `found` is the sum of `uses` with the pieces of one of them moved round; None when it is not."""
    if any(use.shape != found.shape for use in uses):
        return None
    for number, use in enumerate(uses):
        others = sum((other for place, other in enumerate(uses) if place != number), torch.zeros_like(use))
        for degree, dim in _cuts(use, degrees):
            for shift in range(1, degree):
                moved = use.roll(shift * (use.shape[dim] // degree), dim)
                if _equal(found, others + moved):
                    sources = [(place - shift) % degree for place in range(degree)]
                    return _words(sources, degree, dim)
    return None


def _cuts(value: Tensor, degrees: Sequence[int]) -> Iterator[tuple[int, int]]:
    for degree in degrees:
        for dim in range(min(2, value.ndim)):
            if value.shape[dim] % degree == 0:
                yield degree, dim


def _source(place: int, piece: Tensor, pieces: Sequence[Tensor]) -> int | None:
    """Which piece stands at `place`: the right one if it can be, and no empty one in place of another."""
    if _equal(piece, pieces[place]):
        return place
    return next((number for number, each in enumerate(pieces) if each.any() and _equal(piece, each)), None)


def _equal(one: Tensor, other: Tensor) -> bool:
    return bool((one.double() - other.double()).abs().max() <= _CLOSE * other.double().abs().max())


def _words(sources: Sequence[int | None], degree: int, dim: int) -> str:
    moved = [f"{source} at {place}" for place, source in enumerate(sources) if source != place]
    return f"pieces in the wrong place ({', '.join(moved)} of {degree} along dim {dim})"
