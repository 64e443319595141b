"""Replica checks: periodically compare the weights and buffers that must be equal over ranks, and diagnose drift."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardwise.data.rows import tensors
from shardwise.errors import TrainingError
from shardwise.layout import AXES
from shardwise.parallel.gradsync import local
from shardwise.plans.rules import uses_ddp
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
    """Compares replicas before and after the first step and then periodically; used identically on every rank."""

    def __init__(self, spec: ReplicaSpec, plan: Plan, world: World, events: EventLog) -> None:
        self.tap = GradientTap()
        """Pass this as `before_update` of the checked step."""
        self._spec, self._plan, self._world, self._events = spec, plan, world, events
        self._is_on = spec.every > 0 and world.size > 1 and world.backend != "fake"
        self._first = 0
        self._last_equal: int | None = None

    def start(self, step: Step) -> None:
        """Compare replicas before the first update. Communicates over the world; call on every rank."""
        self._first = step.number
        if self._is_on:
            self._check(step, None)

    def after(self, step: Step, batch: StepBatch, *, is_due: bool) -> None:
        """Compare replicas after a step if `is_due` or the interval ends. Communicates; call on every rank."""
        length, number = step.length, step.number
        if not self._is_on or not length.syncs_after(number):
            return
        if is_due or self._last_equal == self._first or length.is_due(number, self._spec.every):
            step.mark("publish", step.number)
            self._check(step, batch)
            step.mark("data", step.number)

    def _check(self, step: Step, batch: StepBatch | None) -> None:
        drift = find_drift(
            step.number,
            self._last_equal,
            self._fingerprints(step),
            lambda copies: self._investigate(step, batch, copies),
        )
        if drift is None:
            self._last_equal = step.number
            return
        self._is_on = False  # replicas that have diverged stay different
        if self._spec.stops:
            raise TrainingError(str(drift), code="train.replicas-drifted")
        if self._world.is_main:
            self._events.write("verdict", text=str(drift))

    def _fingerprints(self, step: Step) -> dict[int, dict[tuple[str, tuple[int, ...]], int]]:
        """Return the fingerprints of all ranks by tensor, or {} if replicas are equal. Communicates over the world."""
        replicated = list(_replicated(step, self._plan))
        values = fingerprints([tensor for _, _, tensor in replicated])
        by_axes: dict[Axes, dict[str, int]] = {}
        for (name, axes, _), value in zip(replicated, values, strict=True):
            by_axes.setdefault(axes, {})[name] = value
        # One combined value first: with thousands of ranks, one value per tensor would be megabytes.
        totals = self._gather({axes: combined(list(named.values())) for axes, named in by_axes.items()})
        layout = self._plan.layout.folded
        groups: dict[Axes, Sequence[Sequence[int]]] = {}
        for total in totals:
            for axes in total:
                groups[axes] = layout.groups(*axes)
        if _are_equal(totals, groups):
            return {}
        found: dict[int, dict[tuple[str, tuple[int, ...]], int]] = {}
        for rank, gathered in enumerate(self._gather(by_axes)):
            replicas = found[rank] = {}
            for axes, named in gathered.items():
                ranks = next(ranks for ranks in groups[axes] if rank in ranks)
                for name, value in named.items():
                    replicas[name, tuple(ranks)] = value
        return found

    def _investigate(self, step: Step, batch: StepBatch | None, copies: Copies) -> DriftEvidence:
        """Repeat the step and compare its inputs over ranks. Communicates over the world; call on every rank."""
        if batch is None:
            return DriftEvidence(at_start=True)
        if step.length.sync_every > 1:
            # Between synchronizations, replicas have different gradients by design.
            return DriftEvidence(same_samples=True)
        batch_tensors: list[Tensor] = []
        for micro_batch in batch.micro_batches:
            batch_tensors += tensors(micro_batch.batch)
        samples = combined(fingerprints(batch_tensors))
        repeated = repeat_step(step, batch, self.tap, copies.name)
        gathered = self._gather((repeated, samples, settings_print(step.optimized.param_groups)))
        return _evidence({rank: gathered[rank] for rank in copies.prints}, copies)

    def _gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self._world.size
        dist.all_gather_object(values, value, group=self._world.host_group)
        return values


def _evidence(by_rank: Mapping[int, tuple[Repeated, int, int]], copies: Copies) -> DriftEvidence:
    """Compare the repeated step over ranks; a rank's value is (runs, batch fingerprint, settings fingerprint)."""
    gradients: dict[int, int | None] = {}
    samples: set[int] = set()
    settings: set[int] = set()
    unsteady_gradient: set[int] = set()
    unsteady_update: set[int] = set()
    for rank, (run, batch, options) in by_rank.items():
        gradients[rank] = None
        if run.gradients is not None:
            gradients[rank] = run.gradients[0]
            if run.gradients[0] != run.gradients[1]:
                unsteady_gradient.add(rank)
        if run.values[0] != run.values[1]:
            unsteady_update.add(rank)
        samples.add(batch)
        settings.add(options)
    has_gradient = any(gradient is not None for gradient in gradients.values())
    results: Mapping[int, int | None] = gradients if has_gradient else copies.prints
    by_samples = {(batch, results[rank]) for rank, (_, batch, _) in by_rank.items()}
    return DriftEvidence(
        gradients_equal=len(set(results.values())) == 1 if has_gradient else None,
        same_samples=len(by_samples) > len(samples),
        settings_equal=len(settings) == 1,
        unsteady_gradient=frozenset(unsteady_gradient),
        unsteady_update=frozenset(unsteady_update),
        is_step_cleared=True,
    )


def _replicated(step: Step, plan: Plan) -> Iterator[tuple[str, Axes, Tensor]]:
    """Yield the name, the replicated axes and the local tensor of each parameter and buffer that ranks replicate."""
    for name, parameter in step.named_parameters():
        if axes := replica_axes(parameter, plan.layout.folded):
            yield name, axes, local(parameter.detach())
    broadcast = plan.communication.broadcast_buffers and uses_ddp(plan)
    for name, buffer in step.common_buffers(broadcast=broadcast).items():
        if axes := replica_axes(buffer, plan.layout.folded):
            yield name, axes, local(buffer.detach())


def replica_axes(tensor: Tensor, layout: Layout) -> Axes:
    """Return the mesh axes along which this tensor is replicated; never pp, because stages have different layers."""
    sharded = {"pp"}
    if isinstance(tensor, DTensor):
        names = tensor.device_mesh.mesh_dim_names or ()
        for name, placement in zip(names, tensor.placements, strict=True):
            if not placement.is_replicate():
                sharded.add(name)
    return tuple(axis for axis in AXES if axis not in sharded and getattr(layout, axis) > 1)


def _are_equal(totals: Sequence[Mapping[Axes, int]], groups: Mapping[Axes, Sequence[Sequence[int]]]) -> bool:
    """Return whether the ranks of every group have the same combined fingerprint."""
    for axes, by_group in groups.items():
        for ranks in by_group:
            if len({totals[rank].get(axes) for rank in ranks}) > 1:
                return False
    return True


# Repeating one step from the same state to test whether it is deterministic; the training state is restored afterwards.


@dataclass(frozen=True, kw_only=True)
class Repeated:
    """Fingerprints of one tensor in two runs of the same step; the second run uses the gradients of the first."""

    gradients: tuple[int, int] | None
    """Fingerprints of the tensor's reduced gradient on this rank; None for a buffer or without a gradient."""
    values: tuple[int, int]
    """Fingerprints of the tensor's value after the step."""


class GradientTap:
    """A `before_update` hook that calls `callback` while a step is repeated, and does nothing otherwise."""

    def __init__(self) -> None:
        self.callback: Callable[[], None] | None = None

    def __call__(self) -> None:
        """Call the callback, if it is set, between backward and update."""
        if self.callback is not None:
            self.callback()


def repeat_step(step: Step, batch: StepBatch, tap: GradientTap, name: str) -> Repeated:
    """Repeat the step of `batch` twice and return the fingerprints of the tensor `name`; call on every rank.

    Ranks that do not own the tensor must participate. Costs two steps and a host copy of the state and gradients.
    """
    kept: dict[str, Tensor] = {}
    gradients: list[int] = []
    values: list[int] = []

    def inspect_gradients() -> None:
        found = step.local_gradients()
        if name in found:
            gradients.extend(fingerprints([found[name]]))
        if not kept:
            for gradient_name, gradient in found.items():
                kept[gradient_name] = on_host(gradient)
        else:
            step.set_gradients(kept)

    tap.callback = inspect_gradients
    try:
        with _rewound(step) as restore:
            for _ in range(2):
                step(batch)
                values += _value_fingerprint(step, name)
                restore()
    finally:
        tap.callback = None
    pair = (gradients[0], gradients[1]) if gradients else None
    return Repeated(gradients=pair, values=(values[0], values[1]))


@contextmanager
def _rewound(step: Step) -> Iterator[Callable[[], None]]:
    """Decrement the step number and yield a function that restores the current state; restore both at exit."""
    restore_state = step.snapshot()
    number = step.number

    def restore() -> None:
        restore_state()
        step.number = number - 1

    step.number = number - 1
    try:
        yield restore
    finally:
        restore()
        step.number = number


def _value_fingerprint(step: Step, name: str) -> list[int]:
    """Return a list with the fingerprint of this rank's shard of a tensor, or [0] if this rank does not own it."""
    value = {**step.buffers(), **dict(step.named_parameters())}.get(name)
    return fingerprints([local(value.detach())]) if value is not None else [0]
