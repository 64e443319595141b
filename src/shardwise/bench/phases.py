"""Where the time of a step goes: data, forward, backward and optimizer, without waiting for the device."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from shardwise.bench.timing import wait_for

if TYPE_CHECKING:
    from shardwise.job import Job

PHASES = ("data", "forward", "backward", "optimizer")


class PhaseClock:
    """Notes when each phase begins: as events in the queue of a GPU, by the host's clock elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[str, Any]] = []

    def begin(self, phase: str) -> None:
        """End the phase before and begin this one; "" begins none."""
        if self._device.type != "cuda":
            self._marks.append((phase, time.perf_counter()))
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append((phase, event))

    def finish(self) -> list[dict[str, float]]:
        """Wait for the device; return seconds by phase of each step since the last call. Steps begin with "data"."""
        wait_for(self._device)
        marks, self._marks = self._marks, []
        steps: list[dict[str, float]] = []
        for (phase, began), (_, ended) in pairwise(marks):
            if phase == "data":
                steps.append(dict.fromkeys(PHASES, 0.0))
            if phase and steps:
                steps[-1][phase] += began.elapsed_time(ended) / 1e3 if self._device.type == "cuda" else ended - began
        return steps

    def watch(self, job: Job) -> Job:
        """Return the job with a forward and a loss that tell this clock; pipelines, which interleave, blur the two."""

        def forward(model: torch.nn.Module, batch: Any) -> Any:
            self.begin("forward")
            return job.forward(model, batch)

        def loss_sum(output: Any, batch: Any) -> Any:
            result = job.loss.sum(output, batch)
            self.begin("backward")
            return result

        return replace(job, forward=forward, loss=replace(job.loss, sum=loss_sum))
