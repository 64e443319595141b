"""The difference of two checkpoints of any kind: which tensors, by how much, and which facts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shardwise.checkpoint.convert.contents import BATCH_BYTES

if TYPE_CHECKING:
    from torch import Tensor

    from shardwise.checkpoint.convert.contents import Contents


@dataclass(frozen=True)
class TensorDifference:
    """How the values of one tensor differ."""

    name: str
    num_different: int
    """Elements with other bits."""
    num_elements: int
    largest: float
    """Largest difference of two elements; nan where only one of them is a number."""
    relative: float
    """That, divided by the largest magnitude in either."""


@dataclass(frozen=True)
class DiffReport:
    """Two checkpoints side by side."""

    num_equal: int
    """Tensors with the same bits."""
    only_left: tuple[str, ...]
    only_right: tuple[str, ...]
    other_form: tuple[str, ...]
    """Of another shape or dtype, each with both."""
    values: tuple[TensorDifference, ...]
    facts: tuple[tuple[str, Any, Any], ...]
    """Name, left and right value; None where it is missing."""

    @property
    def are_tensors_equal(self) -> bool:
        """Whether both hold the same tensors, bit for bit."""
        return not (self.only_left or self.only_right or self.other_form or self.values)


def diff(left: Contents, right: Contents) -> DiffReport:
    """Compare two checkpoints; holds a few hundred megabytes of each at a time."""
    shared = [name for name in left.forms if name in right.forms]
    alike = [name for name in shared if left.forms[name] == right.forms[name]]
    values = []
    for names in left.split(alike, BATCH_BYTES):
        ours, theirs = left.read(names), right.read(names)
        for name in names:
            found = _compare(name, ours[name], theirs[name])
            if found is not None:
                values.append(found)
    return DiffReport(
        num_equal=len(alike) - len(values),
        only_left=tuple(name for name in left.forms if name not in right.forms),
        only_right=tuple(name for name in right.forms if name not in left.forms),
        other_form=tuple(
            f"{name}: {_words(left.forms[name])} and {_words(right.forms[name])}"
            for name in shared
            if left.forms[name] != right.forms[name]
        ),
        values=tuple(values),
        facts=tuple(_differing(flatten(left.facts), flatten(right.facts))),
    )


def flatten(facts: Any, prefix: str = "") -> dict[str, Any]:
    """Return nested facts under dotted names."""
    if not isinstance(facts, dict) or not facts:
        return {prefix: facts} if prefix else {}
    flat: dict[str, Any] = {}
    for name, value in facts.items():
        flat |= flatten(value, f"{prefix}.{name}" if prefix else name)
    return flat


def _differing(left: dict[str, Any], right: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    names = dict.fromkeys((*left, *right))
    return [(name, left.get(name), right.get(name)) for name in names if left.get(name) != right.get(name)]


def _compare(name: str, left: Tensor, right: Tensor) -> TensorDifference | None:
    if not left.numel():
        return None
    one, other = (
        tensor.contiguous().reshape(-1).view(torch.uint8).view(tensor.numel(), -1) for tensor in (left, right)
    )
    different = (one != other).any(dim=1)
    count = int(different.sum())
    if not count:
        return None
    a, b = (_wide(tensor.contiguous().reshape(-1)[different]) for tensor in (left, right))
    gap = (a - b).abs()
    gap = torch.where(gap.isnan() & a.isnan() & b.isnan(), torch.zeros_like(gap), gap)
    largest = float(gap.max())
    scale = max(float(_wide(tensor).abs().nan_to_num(0.0, 0.0, 0.0).max()) for tensor in (left, right))
    return TensorDifference(name, count, left.numel(), largest, largest / scale if scale else largest)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _words(form: tuple[str, tuple[int, ...]]) -> str:
    return f"{form[0]} {list(form[1])}"
