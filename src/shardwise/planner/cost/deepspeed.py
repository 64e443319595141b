"""Memory and time of one rank when DeepSpeed trains a plan: what its ZeRO stages keep, copy and send."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from shardwise.planner.cost.memory import ADAMW, CONTEXT, FRAGMENTED, PER_GROUP, WORKSPACE, Memory
from shardwise.planner.cost.stage_costs import numel_of
from shardwise.planner.cost.stages import RankState, stages_of_plan
from shardwise.units import ELEMENT_BYTES

if TYPE_CHECKING:
    from shardwise.planner.cost.memory import OptimizerShape
    from shardwise.planner.cost.time import Time, TimeModel
    from shardwise.planner.model.shape import ModelShape
    from shardwise.plans.plan import Plan

REUSE = 1e9
"""Numbers within whose use stage 3 keeps a gathered weight instead of freeing it (stage3_max_reuse_distance)."""
PERSISTENT = 1e5
"""Numbers up to which stage 3 keeps a weight unsharded beside its shard (stage3_param_persistence_threshold)."""
MASTER = 4
"""Bytes of a weight in the optimizer's own copy, which DeepSpeed makes in fp32 training, too."""


def deepspeed_memory(
    shape: ModelShape, plan: Plan, *, optimizer: OptimizerShape = ADAMW, context: float = CONTEXT
) -> Memory:
    """Return the memory of a rank; `context` is what a process takes outside of the allocator.

    From the source of DeepSpeed 0.19 (runtime/zero/stage_1_and_2.py, stage3.py); a test compares
    the state between steps with the tensors of CPU ranks.
    """
    own = _Engine(shape, plan, optimizer)
    phase, at_peak = max(own.moments(), key=lambda moment: sum(moment[1].values()))
    at_peak = {name: amount for name, amount in at_peak.items() if amount > 0}
    peak = sum(at_peak.values())
    groups = sum(degree > 1 for degree in plan.layout.degrees)
    return Memory(
        peak=peak,
        reserved=peak * FRAGMENTED + (WORKSPACE if context else 0.0),
        outside=context + (groups * PER_GROUP if context else 0.0),
        phase=phase,
        at_peak=dict(sorted(at_peak.items(), key=lambda item: -item[1])),
        host=sum(own.host().values()),
        stage=0,
    )


def deepspeed_at_rest(shape: ModelShape, plan: Plan, *, optimizer: OptimizerShape = ADAMW) -> dict[str, float]:
    """Return the resident state of a rank between two steps by name, in bytes, on device and host together."""
    own = _Engine(shape, plan, optimizer)
    rest = own.at_rest()
    for name, amount in own.host().items():
        rest[name] = rest.get(name, 0.0) + amount
    return {name: amount for name, amount in rest.items() if amount > 0}


class _Engine:
    """Parameters, gradients and optimizer states of one rank under DeepSpeed."""

    def __init__(self, shape: ModelShape, plan: Plan, optimizer: OptimizerShape) -> None:
        self.plan = plan
        self.stage = deepspeed_stage(plan)
        self.state = RankState(shape, plan, optimizer, stages_of_plan(shape, plan))
        self.whole, self.trained = self.state.total("whole"), self.state.total("trained")
        self.compute_bytes = ELEMENT_BYTES[plan.precision.compute]
        self.reduce_bytes = ELEMENT_BYTES[plan.precision.reduce]
        self.mine = self.trained / plan.layout.dp if self.stage else self.trained
        self.bucket = plan.communication.bucket_mb * 2**20
        self.has_copy = self.stage > 0 or plan.precision.compute != "fp32"
        self.states = optimizer.states * MASTER * self.mine
        self.temporaries = optimizer.temporaries * MASTER * self.mine
        self.on_host = plan.offload.optimizer != "none"
        numels = [(share.number, weight.numel) for share in self.state.shares for weight in share.part.weights]
        self.largest = max(numel for _, numel in numels)
        self.persistent = sum(number * numel for number, numel in numels if numel <= PERSISTENT)

    def at_rest(self) -> dict[str, float]:
        """Return what is on the device between steps."""
        shards = self.plan.layout.dp if self.stage == 3 else 1
        rest = {
            "parameters": self.compute_bytes * self.whole / shards if self.plan.offload.parameters == "none" else 0.0
        }
        if not self.on_host:
            rest["master weights"] = MASTER * self.mine * self.has_copy
            rest["optimizer states"] = self.states
        if self.stage == 3:
            rest["gathered"] = self.compute_bytes * self.persistent
            rest["gradients"] = 0.0 if self.on_host else self.gathered_gradients
            rest["bucket buffers"] = self.bucket
        elif self.on_host:
            rest["bucket buffers"] = self.compute_bytes * self.largest  # a gradient that is copied to the host
        return rest

    @property
    def gathered_gradients(self) -> float:
        """Return the flat buffer of this rank's gradients under stage 3, in the dtype in which they add up."""
        apart = self.plan.accumulation > 1
        return (self.reduce_bytes if apart else self.compute_bytes) * self.mine

    def host(self) -> dict[str, float]:
        """Return what is offloaded, to host memory or to disk."""
        resident: dict[str, float] = {}
        if self.on_host:
            resident["master weights"] = MASTER * self.mine
            resident["optimizer states"] = self.states
            resident["gradients"] = MASTER * self.mine + (self.gathered_gradients if self.stage == 3 else 0.0)
            if self.stage < 3:
                resident["parameters"] = self.compute_bytes * self.mine  # copied back to the device
                resident["bucket buffers"] = self.compute_bytes * self.largest
        if self.plan.offload.parameters != "none":
            resident["parameters"] = self.compute_bytes * self.whole / self.plan.layout.dp
        return resident

    def moments(self) -> list[tuple[str, dict[str, float]]]:
        """Return every moment that can be the highest: its phase, and what lives then by name.

        Gradients grow while activations shrink, so the ends of backward are enough.
        """
        before, after = self._gradients()
        found = []
        for phase, gradients, activations in (
            ("backward", before, self._activations()),
            ("backward", after, 0.0),
            ("update", self._update_gradients(), 0.0),
        ):
            now = self.at_rest()
            now["gradients"] = now.get("gradients", 0.0) + gradients
            now["activations"] = activations
            if phase == "update":
                now["temporaries"] = 0.0 if self.on_host else self.temporaries
            else:
                now["gathered"] = self.compute_bytes * kept_numel(self.whole) if self.stage == 3 else 0.0
                now["bucket buffers"] = now.get("bucket buffers", 0.0) + self._buckets()
            found.append((phase, now))
        return found

    def _gradients(self) -> tuple[float, float]:
        """Return the bytes of gradients when backward begins and when it ends, but for stage 3's own buffer."""
        whole = self.compute_bytes * self.trained
        if self.stage < 2:
            return (whole if self.plan.accumulation > 1 else 0.0), whole + self.reduce_bytes * self.mine
        if self.stage == 3 or self.on_host:
            return 0.0, 0.0
        return (mine := self.gathered_gradients), mine

    def _buckets(self) -> float:
        """Return the buffers that gradients are sent from, but for what is always there.

        Two, so that one fills while the other travels; stage 3 puts what it sends in order in the second.
        """
        return {0: 0.0, 3: self.bucket}.get(self.stage, 2 * self.bucket)

    def _update_gradients(self) -> float:
        """Return this rank's gradients in fp32, as the optimizer reads them, beside those they were made from."""
        if self.on_host:
            return 0.0
        if not self.stage:
            return (self.compute_bytes + MASTER * self.has_copy) * self.trained
        return MASTER * self.mine + (0.0 if self.stage == 3 else self.reduce_bytes * self.mine)

    def _activations(self) -> float:
        """Return the most that activations take, in whichever part that is."""
        own = self.state
        most = 0.0
        for index, share in enumerate(own.shares):
            below = own.kept(index) + own.saved[index] * (share.number - 1)
            footprint = share.part.footprints[self.plan.recompute]
            resident = [own.amount(footprint.forward), *(own.amount(moment.resident) for moment in footprint.backward)]
            most = max(most, below + max(resident))
        return most + own.amount(own.shape.input) * min(2, self.plan.accumulation)


def deepspeed_stage(plan: Plan) -> int:
    """Return DeepSpeed's stage: the plan's, and on one rank, where a stage shards nothing, the one that can offload."""
    if plan.layout.world_size > 1 or plan.offload == type(plan.offload)():
        return plan.zero
    return 3 if plan.offload.parameters != "none" else 1


def kept_numel(numel: float) -> float:
    """Return how many numbers stage 3 keeps gathered from forward to backward.

    Between the two uses of a weight lie twice the weights that come after it.
    """
    return min(numel, REUSE / 2)


def deepspeed_time(times: TimeModel, shape: ModelShape, plan: Plan) -> Time:
    """Return the time of one optimizer step; `shape` is the model's form for this plan.

    Passes are those of the native plan that sends the same; update and offload are DeepSpeed's own.
    """
    mix = _alike(shape, plan)
    found = [(share, times.predict(shape, twin)) for share, twin in mix]
    names = dict.fromkeys(name for _, time in found for name in time.parts)
    parts = {name: sum(share * time.parts.get(name, 0.0) for share, time in found) for name in names}
    parts = {name: seconds for name, seconds in parts.items() if name not in {"update", "collect"}}
    if deepspeed_stage(plan) == 0:
        # Its buckets are summed after backward, not during it.
        for name in ("reduce", "contention"):
            parts.pop(name, None)
    parts |= _after(times, shape, plan)
    seconds = sum(parts.values())
    native = found[-1][1]
    faster = native.seconds / seconds
    tokens = native.tokens_per_second_per_device
    return dataclasses.replace(
        native,
        seconds=seconds,
        parts={name: part for name, part in parts.items() if part > 0},
        samples_per_second=native.samples_per_second * faster,
        tokens_per_second_per_device=None if tokens is None else tokens * faster,
        mfu=native.mfu * faster,
    )


def _alike(shape: ModelShape, plan: Plan) -> list[tuple[float, Plan]]:
    """Return native plans whose passes send what DeepSpeed's do, and the share of each."""
    stage = deepspeed_stage(plan)
    offload = dataclasses.replace(plan.offload, optimizer="none")
    native = dataclasses.replace(plan, engine="torch", offload=offload)
    if plan.layout.world_size == 1 or stage == 0:
        return [(1.0, native)]
    if stage < 3:
        # Stages 1 and 2 all-reduce whole buckets (use_multi_rank_bucket_allreduce), 2 after every micro-batch.
        return [(1.0, dataclasses.replace(native, zero=1, gradient_sync="every" if stage == 2 else "last"))]
    # Stage 3 gathers a second time only what it has not kept: as zero 2 does for that part, and zero 3 for the rest.
    kept = kept_numel(shape.numel) / max(1, shape.numel)
    mix = [
        (kept, dataclasses.replace(native, zero=2, gradient_sync="every")),
        (1.0 - kept, dataclasses.replace(native, zero=3, gradient_sync="every")),
    ]
    return [(share, twin) for share, twin in mix if share > 0]


def _after(times: TimeModel, shape: ModelShape, plan: Plan) -> dict[str, float]:
    """Return what follows the last backward: norm, optimizer, weights back in the compute dtype, and gathered."""
    calibration, layout, stage = times.calibration, plan.layout, deepspeed_stage(plan)
    compute, reduce = ELEMENT_BYTES[plan.precision.compute], ELEMENT_BYTES[plan.precision.reduce]
    bandwidth = calibration.memory_bandwidth.value
    trained = sum(part.count * numel_of(part, layout, trained=True) for part in shape.parts)
    mine = trained / layout.dp if stage else trained
    touched = MASTER * (3 + 2 * times.optimizer.states) * mine
    on_host = plan.offload.optimizer != "none"
    rate = calibration.host_optimizer_bandwidth if on_host else calibration.optimizer_bandwidth
    parts = {"update": touched / rate.value + (2 * MASTER + compute) * mine / bandwidth}
    if on_host:
        # Gradients go down with every micro-batch, and from the second on what was there comes up to be added to.
        down, up = plan.accumulation, plan.accumulation - 1
        parts["offload"] = reduce * mine * (down / calibration.to_host.value + up / calibration.from_host.value)
        parts["offload"] += compute * mine / calibration.from_host.value
    if stage == 0 and layout.dp > 1:
        parts["sum"] = times.wires.in_buckets("all_reduce", reduce * trained, layout, "replicate")
        parts["sum"] += 4 * reduce * trained / bandwidth
    if stage in {1, 2}:
        parts["collect"] = times.wires.in_buckets("all_gather", compute * trained, layout, "shard")
    return parts
