"""The input of the search: a model, a cluster, a batch size, and the fields of the plan that the user has set."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from shardwise.planner.cost.memory import ADAMW, predict_memory
from shardwise.planner.cost.time import TimeModel
from shardwise.plans.pipeline import SCHEDULES
from shardwise.plans.plan import Plan
from shardwise.plans.sections import Precision

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.hardware.calibration import Calibration
    from shardwise.hardware.machine import Cluster
    from shardwise.planner.cost.memory import Memory, OptimizerShape
    from shardwise.planner.model.forms import Model
    from shardwise.planner.search.choices import ChoiceGroup, PlanVariant

FILL = 0.95
"""Fraction of a device's memory that a plan may use; the rest is for other processes and fragmentation."""
HOST_FILL = 0.9
"""Fraction of a node's host memory that a plan may use; the system and data loaders need the rest."""
MANY_NODES = 8
"""Nodes beyond which HSDP wins over flat sharding within model error (Zhao et al. 2023, section 3.2.2)."""


@dataclass(frozen=True, kw_only=True)
class FixedFields:
    """Fields of a plan that the user has set, so that the search chooses the other fields for these values."""

    plan: Plan = field(default_factory=Plan)
    """Has the values of the fields."""
    names: frozenset[str] = frozenset()
    """The fields, and the dotted names of those in sections."""

    zero: int | None = None
    """The ZeRO stage, which `plan` does not have, since it belongs to a layout; None if it is searched."""

    def has(self, name: str) -> bool:
        """Return whether a field is fixed."""
        return name in self.names

    @property
    def searched(self) -> Plan:
        """The plan from which the search derives its candidates; compilation and capture are chosen later."""
        return dataclasses.replace(self.plan, compile="none", capture="none", sources={})

    def group(self, group: ChoiceGroup) -> ChoiceGroup | None:
        """Return a group with the fixed values; None if it is for another value."""
        for name in ("micro_batch", "accumulation", "recompute"):
            if self.has(name) and getattr(group, name) != getattr(self.plan, name):
                return None
        if self.has("pipeline.schedule") and group.pp > 1 and group.schedule != self.plan.pipeline.schedule:
            return None
        changes: dict[str, Any] = {}
        if self.has("recompute") or self.has("recompute_blocks"):  # recompute without a number is of all blocks
            if group.recompute_blocks:
                return None
            changes["recompute_blocks"] = self.plan.recompute_blocks if group.recompute != "none" else 0
        if self.has("sequence_parallel") and group.tp > 1:
            changes["sequence_parallel"] = self.plan.sequence_parallel
        if self.has("compile") and self.plan.compile != "none" and SCHEDULES[group.schedule].splits_backward:
            return None  # these schedules are not compiled
        return group._replace(**changes)

    def variant(self, variant: PlanVariant) -> PlanVariant:
        """Return a variant with the fixed values."""
        changes: dict[str, Any] = {name: getattr(self.plan, name) for name in _OF_VARIANTS if self.has(name)}
        if self.has("offload"):
            changes["offload"] = (self.plan.offload.parameters, self.plan.offload.optimizer)
        return variant._replace(**changes)


_OF_VARIANTS = ("gradient_sync", "fused_loss")


@dataclass(frozen=True, kw_only=True)
class Question:
    """The input of the search: a model, a cluster and a global batch size."""

    model: Model
    cluster: Cluster
    calibration: Calibration
    batch_size: int
    """Samples per optimizer step over all devices."""
    precision: Precision = field(default_factory=Precision)
    optimizer: OptimizerShape = ADAMW
    compile: Literal["none", "blocks"] = "none"
    """Compilation of the searched plans; those that do not support it stay eager."""
    fixed: FixedFields = field(default_factory=FixedFields)
    """Fields that the search does not choose."""
    memory_ratio: float = 1.0
    """Measured over predicted memory in earlier runs on this machine, at least 1."""
    accepts: Callable[[Plan], None] = field(default=lambda _: None, compare=False)
    """Raises InputError for plans that `train` would reject, by the same rules."""
    max_bytes: float = math.inf
    """Bytes that a plan may use on each device, if fewer than FILL of its memory."""

    @property
    def base(self) -> Plan:
        """The values of all fields that the search does not choose."""
        return dataclasses.replace(self.fixed.searched, precision=self.precision, compile=self.compile)

    @property
    def context(self) -> float:
        """Device memory of a process outside of the allocator, in bytes."""
        return self.calibration.context_bytes.value

    @property
    def capacity(self) -> float:
        """Bytes that a plan may use on each device."""
        return min(FILL * self.cluster.device.memory_bytes / self.memory_ratio, self.max_bytes)

    @property
    def widest(self) -> int:
        """Devices over which a model may be sharded before HSDP is preferred."""
        return MANY_NODES * self.cluster.devices_per_node

    @property
    def host_capacity(self) -> float:
        """Bytes of host memory that each rank may use."""
        return HOST_FILL * self.cluster.node.host_memory_bytes / self.cluster.devices_per_node

    def has_capacity(self, memory: Memory) -> bool:
        """Whether a plan that needs this memory fits on device and host."""
        return memory.total <= self.capacity and memory.host <= self.host_capacity

    def memory_of(self, plan: Plan) -> Memory:
        """Return the predicted memory of a plan."""
        return predict_memory(self.model.for_plan(plan), plan, optimizer=self.optimizer, context=self.context)

    def time_model(self) -> TimeModel:
        """Return the time model of the cluster and the optimizer."""
        return TimeModel(self.cluster, self.calibration, optimizer=self.optimizer)
