"""The window: steps since the last publication, so that losses cost one collective a second, not one a step."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from shardwise.dist import World
    from shardwise.training.step.step import StepReport

PUBLISH_S = 1.0
_MOST_STEPS = 1000


class Window:
    """Collects step reports until it is full; all ranks agree on when that is, since `size` is."""

    def __init__(self) -> None:
        self.size = 1
        self._reports: list[StepReport] = []
        self._began = time.perf_counter()

    def restart_clock(self) -> None:
        """Leave the time since the last publication out: it was not spent on steps."""
        self._began = time.perf_counter()

    def add(self, report: StepReport) -> bool:
        """Take a report; return whether it is time to publish."""
        self._reports.append(report)
        return len(self._reports) >= self.size

    def publish(self, world: World, *, stop: bool = False) -> dict[str, Any]:
        """Return the window's steps with global losses, and start the next; communicates over the world.

        `stop` on any rank is "stop" on every rank. Losses stay on the device until here: one wait for the device and
        one small all-reduce per window.
        """
        reports = self._reports
        sums = torch.stack([report.loss_sum for report in reports]).double().cpu()  # here the device is waited for
        now = time.perf_counter()
        counts = torch.tensor([report.denominator for report in reports], dtype=torch.float64)
        seconds = now - self._began
        summed = torch.cat([sums, counts, torch.tensor([seconds, float(stop)], dtype=torch.float64)])
        if world.size > 1:
            dist.all_reduce(summed, group=world.host_group)
        *_, all_seconds, stops = summed.tolist()
        # All ranks know one denominator, or that of their own replica: its mean over the world is the global one.
        counts = summed[len(reports) : 2 * len(reports)] / world.size
        losses = (summed[: len(reports)] / counts.where(counts > 0, 1)).tolist()
        self._reports, self._began = [], now
        # Every rank computes the same size from the same reduced time.
        self.size = min(_MOST_STEPS, max(1, round(len(reports) * PUBLISH_S / max(all_seconds / world.size, 1e-6))))
        last = reports[-1]
        norms = [report.grad_norm for report in reports if report.grad_norm is not None]
        return {
            "first": reports[0].number,
            "epoch": last.cursor.epoch,
            "losses": losses,
            "lr": last.lr,
            "samples": sum(report.samples for report in reports),
            "counted": round(float(counts.sum())),
            "grad_norm": float(norms[-1]) if norms else None,
            "skipped": int(sum(report.skipped for report in reports)),
            "seconds": seconds,
            "stop": stops > 0,
        }
