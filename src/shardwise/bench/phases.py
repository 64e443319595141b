"""Where the time of a step goes: data, forward, backward and optimizer, without waiting for the device."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import torch

from shardwise.bench.timing import wait_for

PHASES = ("data", "forward", "backward", "optimizer")


class PhaseClock:
    """Listens to a Step's marks and notes when each was made: in the queue of a GPU, by the host's clock elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[str, int, Any]] = []

    def mark(self, phase: str, step: int) -> None:
        """End the phase before and begin this one; one that is not in PHASES is not counted."""
        if self._device.type != "cuda":
            self._marks.append((phase, step, time.perf_counter()))
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append((phase, step, event))

    def finish(self) -> list[dict[str, float]]:
        """Wait for the device; return seconds by phase of each step marked since the last call, in order.

        The last mark ends the phase before it and begins none.
        """
        wait_for(self._device)
        marks, self._marks = self._marks, []
        steps: dict[int, dict[str, float]] = {}
        for (phase, step, began), (_, _, ended) in pairwise(marks):
            if phase in PHASES:
                seconds = began.elapsed_time(ended) / 1e3 if self._device.type == "cuda" else ended - began
                steps.setdefault(step, dict.fromkeys(PHASES, 0.0))[phase] += seconds
        return list(steps.values())
