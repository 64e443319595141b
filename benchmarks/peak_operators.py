"""The operators of a step with the highest allocated bytes on a GPU, and what each takes beside its results.

Before each operator the allocator's peak is reset; the peak during the operator, minus the larger of the bytes before
and after it, are workspaces of its kernels, which no tensor shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shardwise.torch_private.dispatch import TorchDispatchMode, is_in_backward

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1 << 20


@dataclass(frozen=True, order=True)
class OperatorPeak:
    """Allocated bytes during one operator."""

    peak: int
    workspace: int
    name: str
    shapes: str
    phase: str

    def __str__(self) -> str:
        return (
            f"peak {self.peak / MIB:8.1f} MiB, of it workspace {self.workspace / MIB:7.1f}: {self.phase:8} {self.name}"
            f" {self.shapes}"
        )


class PeakOperators(TorchDispatchMode):
    """Records the peak of allocated bytes during every operator."""

    def __init__(self) -> None:
        super().__init__()
        self._found: dict[tuple[str, str, str], OperatorPeak] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator and record its peak."""
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = func(*args, **(kwargs or {}))
        peak = torch.cuda.max_memory_allocated()
        workspace = peak - max(before, torch.cuda.memory_allocated())
        phase = "backward" if is_in_backward() else "forward"
        shapes = " ".join(str(list(tensor.shape)) for tensor in _tensors(args))[:100]
        found = OperatorPeak(peak, workspace, str(func), shapes, phase)
        key = (found.name, shapes, phase)
        self._found[key] = max(found, self._found.get(key, found))
        return result

    def highest(self, number: int) -> list[OperatorPeak]:
        """Return the operators with the highest peaks, then those with the largest workspaces."""
        found = sorted(self._found.values(), reverse=True)
        largest = sorted(found, key=lambda one: -one.workspace)
        return [*found[:number], *largest[: number // 2]]


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
