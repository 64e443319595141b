"""Replicas: weights and buffers that should be equal over ranks are compared now and then, and drift is explained."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardwise.data.rows import tensors
from shardwise.errors import TrainingError
from shardwise.layout.layout import AXES
from shardwise.parallel.gradsync import local
from shardwise.parallel.support import uses_ddp
from shardwise.recorder.fingerprint import combined, fingerprints, settings_print
from shardwise.runs.drift import Copies, DriftEvidence, ReplicaSpec, find_drift
from shardwise.training.step.module_step import on_host

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from shardwise.data.feed import StepBatch
    from shardwise.dist import World
    from shardwise.layout import Layout
    from shardwise.plans import Plan
    from shardwise.runs import EventLog
    from shardwise.runs.drift import ReplicaSpec
    from shardwise.training.step.step import Step


Axes = tuple[str, ...]


class Replicas:
    """Compares replicas before the first step, after it, and whenever it is time; on every rank alike."""

    def __init__(self, spec: ReplicaSpec, plan: Plan, world: World, events: EventLog) -> None:
        self.tap = GradientTap()
        """Belongs between backward and update of the step that is to be watched."""
        self._spec, self._plan, self._world, self._events = spec, plan, world, events
        self._is_on = spec.every > 0 and world.size > 1 and world.backend != "fake"
        self._first = 0
        self._last_equal: int | None = None

    def start(self, step: Step) -> None:
        """Compare before the first update; communicates over the world, on every rank."""
        self._first = step.number
        if self._is_on:
            self._check(step, None)

    def after(self, step: Step, batch: StepBatch, *, is_due: bool) -> None:
        """Compare after a step if it is due or time to; then communicates over the world, on every rank."""
        length, number = step.length, step.number
        if not self._is_on or not length.syncs_after(number):
            return
        if is_due or self._last_equal == self._first or length.is_due(number, self._spec.every):
            step.mark("publish", step.number)
            self._check(step, batch)
            step.mark("data", step.number)

    def _check(self, step: Step, batch: StepBatch | None) -> None:
        drift = find_drift(
            step.number, self._last_equal, self._prints(step), lambda copies: self._investigate(step, batch, copies)
        )
        if drift is None:
            self._last_equal = step.number
            return
        self._is_on = False  # replicas that differ stay different
        if self._spec.stops:
            raise TrainingError(str(drift), code="train.replicas-drifted")
        if self._world.is_main:
            self._events.write("verdict", text=str(drift))

    def _prints(self, step: Step) -> dict[int, dict[tuple[str, tuple[int, ...]], int]]:
        """Return the fingerprints of all ranks by tensor, none if all are equal; communicates over the world."""
        named = list(_replicated(step, self._plan))
        prints = fingerprints([tensor for _, _, tensor in named])
        by_axes: dict[Axes, dict[str, int]] = {}
        for (name, axes, _), value in zip(named, prints, strict=True):
            by_axes.setdefault(axes, {})[name] = value
        # One number for all tensors first: with thousands of ranks, one of each would be megabytes.
        totals = self._gather({axes: combined(list(values.values())) for axes, values in by_axes.items()})
        layout = self._plan.layout.folded
        groups = {axes: layout.groups(*axes) for total in totals for axes in total}
        if _are_equal(totals, groups):
            return {}
        found: dict[int, dict[tuple[str, tuple[int, ...]], int]] = {}
        for rank, here in enumerate(self._gather(by_axes)):
            replicas = found[rank] = {}
            for axes, values in here.items():
                ranks = next(ranks for ranks in groups[axes] if rank in ranks)
                for name, value in values.items():
                    replicas[name, ranks] = value
        return found

    def _investigate(self, step: Step, batch: StepBatch | None, copies: Copies) -> DriftEvidence:
        """Repeat the step and compare what went into it; communicates over the world, on every rank."""
        if batch is None:
            return DriftEvidence(at_start=True)
        if step.length.sync_every > 1:
            return DriftEvidence(same_samples=True)  # gradients of a replica's own are unequal, and prove nothing
        samples = combined(fingerprints([each for micro in batch.micro_batches for each in tensors(micro.batch)]))
        repeated = repeat_step(step, batch, self.tap, copies.name)
        everyone = self._gather((repeated, samples, settings_print(step.optimized.param_groups)))
        there = {rank: everyone[rank] for rank in copies.prints}
        gradients = {rank: run.gradients for rank, (run, _, _) in there.items()}
        has_gradient = any(pair is not None for pair in gradients.values())
        found = {rank: pair and pair[0] for rank, pair in gradients.items()} if has_gradient else copies.prints
        return DriftEvidence(
            gradients_equal=len(set(found.values())) == 1 if has_gradient else None,
            same_samples=len({(each, found[rank]) for rank, (_, each, _) in there.items()})
            > len({each for _, each, _ in there.values()}),
            settings_equal=len({each for _, _, each in there.values()}) == 1,
            unsteady_gradient=frozenset(rank for rank, pair in gradients.items() if pair and pair[0] != pair[1]),
            unsteady_update=frozenset(rank for rank, (run, _, _) in there.items() if run.values[0] != run.values[1]),
            is_step_cleared=True,
        )

    def _gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self._world.size
        dist.all_gather_object(values, value, group=self._world.host_group)
        return values


def _replicated(step: Step, plan: Plan) -> Iterator[tuple[str, Axes, Tensor]]:
    """Yield what this rank holds that others hold alike, with the axes along which they do."""
    for name, parameter in step.named_parameters():
        if axes := replica_axes(parameter, plan.layout.folded):
            yield name, axes, local(parameter.detach())
    broadcast = plan.communication.broadcast_buffers and uses_ddp(plan)
    for name, buffer in step.common_buffers(broadcast=broadcast).items():
        if axes := replica_axes(buffer, plan.layout.folded):
            yield name, axes, local(buffer.detach())


def replica_axes(tensor: Tensor, layout: Layout) -> Axes:
    """Return the axes along which ranks hold this tensor alike: those that do not cut it, and no stages."""
    cut = {"pp"}
    if isinstance(tensor, DTensor):
        names = tensor.device_mesh.mesh_dim_names or ()
        cut |= {name for name, place in zip(names, tensor.placements, strict=True) if not place.is_replicate()}
    return tuple(axis for axis in AXES if axis not in cut and getattr(layout, axis) > 1)


def _are_equal(totals: Sequence[Mapping[Axes, int]], groups: Mapping[Axes, Sequence[Sequence[int]]]) -> bool:
    """Return whether the ranks of every group have the same combined fingerprint."""
    for axes, by_group in groups.items():
        for ranks in by_group:
            if len({totals[rank].get(axes) for rank in ranks}) > 1:
                return False
    return True


# Running one step again from the same state, to see whether it comes to the same; training is as before after it.


@dataclass(frozen=True, kw_only=True)
class Repeated:
    """One tensor in two runs of the same step: the second took the gradients of the first for its update."""

    gradients: tuple[int, int] | None
    """Fingerprints of its summed gradient on this rank; None for a buffer, or where it got none."""
    values: tuple[int, int]
    """Fingerprints of what the step made of it."""


class GradientTap:
    """Stands between backward and update of every step, and does nothing there but while a step is repeated."""

    def __init__(self) -> None:
        self.look: Callable[[], None] | None = None

    def __call__(self) -> None:
        """Let the one who repeats a step look at the summed gradients; on every rank."""
        if self.look is not None:
            self.look()


def repeat_step(step: Step, batch: StepBatch, tap: GradientTap, name: str) -> Repeated:
    """Run the step of `batch` twice more and say what came of the tensor `name`; communicates, on every rank.

    A rank that does not hold the tensor takes part. Costs two steps, and their state and gradients on the host.
    """
    kept: dict[str, Tensor] = {}
    gradients: list[int] = []
    values: list[int] = []

    def look() -> None:
        found = step.own_gradients()
        if name in found:
            gradients.extend(fingerprints([found[name]]))
        if not kept:
            kept.update({each: on_host(gradient) for each, gradient in found.items()})
        else:
            step.put_gradients(kept)

    tap.look = look
    try:
        with _set_back(step) as restore:
            for _ in range(2):
                step(batch)
                values += _value_prints(step, name)
                restore()
    finally:
        tap.look = None
    pair = (gradients[0], gradients[1]) if gradients else None
    return Repeated(gradients=pair, values=(values[0], values[1]))


@contextmanager
def _set_back(step: Step) -> Iterator[Callable[[], None]]:
    """Set a step back by one and yield what brings back its state of now; afterwards all is as it was."""
    put_back = step.snapshot()
    number = step.number

    def restore() -> None:
        put_back()
        step.number = number - 1

    step.number = number - 1
    try:
        yield restore
    finally:
        restore()
        step.number = number


def _value_prints(step: Step, name: str) -> list[int]:
    """Return the fingerprint of this rank's part of a tensor, 0 where it holds none."""
    value = {**step.buffers(), **dict(step.named_parameters())}.get(name)
    return fingerprints([local(value.detach())]) if value is not None else [0]
