"""DeepSpeed in the planner: its ZeRO stages and offloads as plans, with the memory and time of each.

Memory follows the source of DeepSpeed 0.19 (runtime/zero/stage_1_and_2.py, stage3.py): the tensors that each stage
stores, copies and gathers. Time is that of the native plans whose forward and backward passes send the same bytes, with
DeepSpeed's own update and offload. A test compares the state between two steps with the tensors of CPU ranks.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

from shardwise.engines.deepspeed.config import DTYPES, deepspeed_stage
from shardwise.layout import Layout
from shardwise.planner.cost.memory import ADAMW, CONTEXT, FRAGMENTED, PER_GROUP, WORKSPACE, Memory
from shardwise.planner.cost.stage_costs import numel_of
from shardwise.planner.cost.stages import RankState, stages_of_plan
from shardwise.planner.search.capacity import over_the_host_limit, over_the_limit
from shardwise.planner.search.choices import divisors
from shardwise.planner.search.engine_forms import EngineForm
from shardwise.planner.search.search import TIE, Candidate, refused_by_rule
from shardwise.plans.plan import Plan
from shardwise.plans.sections import Offload
from shardwise.units import ELEMENT_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Literal

    from shardwise.planner.cost.memory import OptimizerShape
    from shardwise.planner.cost.time import Time, TimeModel
    from shardwise.planner.model.shape import ModelShape
    from shardwise.planner.search.question import Question


class _Spec(NamedTuple):
    stage: Literal[0, 1, 2, 3]
    parameters: Literal["none", "cpu"] = "none"
    optimizer: Literal["none", "cpu"] = "none"


_SPECS = {
    "deepspeed zero0": _Spec(0),
    "deepspeed zero1": _Spec(1),
    "deepspeed zero2": _Spec(2),
    "deepspeed zero3": _Spec(3),
    "deepspeed zero2 offload": _Spec(2, optimizer="cpu"),
    "deepspeed zero3 offload": _Spec(3, optimizer="cpu"),
    "deepspeed infinity": _Spec(3, parameters="cpu", optimizer="cpu"),
}
"""ZeRO stage and offload of each configuration (form) by its name, the simplest first."""


def deepspeed_forms(question: Question) -> tuple[EngineForm, ...]:
    """Return DeepSpeed's configurations for a search, the simplest first; each shards over all ranks or none."""
    times = question.time_model()
    return tuple(_form(question, times, name, spec) for name, spec in _SPECS.items())


def _form(question: Question, times: TimeModel, name: str, spec: _Spec) -> EngineForm:
    refusal = _refusal(question, spec)
    if refusal:
        return EngineForm(name=name, best=None, refusal=refusal)
    best: Candidate | None = None
    least: Memory | None = None
    for plan in _plans(question, spec):
        refusal = refused_by_rule(question, plan)
        if refusal:
            continue
        shape = question.model.for_plan(plan)
        memory = deepspeed_memory(shape, plan, optimizer=question.optimizer, context=question.context)
        if least is None or memory.total < least.total:
            least = memory
        if not question.has_capacity(memory):
            continue
        time = deepspeed_time(times, shape, plan)
        if best is None or time.seconds < best.time.seconds * (1 - TIE):
            best = Candidate(plan=plan, memory=memory, time=time)
    if best is not None:
        return EngineForm(name=name, best=best)
    if least is None:
        return EngineForm(name=name, best=None, refusal=refusal)
    exceeds = over_the_limit if least.total > question.capacity else over_the_host_limit
    return EngineForm(name=name, best=None, refusal=exceeds(least, question), memory=least)


def _refusal(question: Question, spec: _Spec) -> str:
    """Return the reason, other than memory, why a configuration cannot run on the cluster; empty if it can."""
    devices = question.cluster.num_devices
    if question.precision.compute not in DTYPES:
        return f"DeepSpeed does not compute in {question.precision.compute}"
    if devices == 1 and spec.stage and spec.optimizer == "none":
        return "sharding requires at least 2 devices, got 1"
    if devices == 1 and spec == (3, "none", "cpu"):
        return "equal to deepspeed zero2 offload on one device"
    if question.batch_size % devices:
        return f"batch size {question.batch_size} is not divisible by {devices} devices"
    return ""


def _plans(question: Question, spec: _Spec) -> Iterator[Plan]:
    """Yield the plans of a configuration by micro-batch and recompute, the simplest first."""
    devices = question.cluster.num_devices
    layout = Layout(shard=devices) if spec.stage and devices > 1 else Layout(replicate=devices)
    for recompute in ("none", "full"):
        for micro_batch in reversed(divisors(question.batch_size // devices)):
            yield dataclasses.replace(
                Plan(precision=question.precision),
                engine="deepspeed",
                layout=layout,
                zero=spec.stage if devices > 1 else 0,
                micro_batch=micro_batch,
                accumulation=question.batch_size // devices // micro_batch,
                recompute=recompute,
                offload=Offload(parameters=spec.parameters, optimizer=spec.optimizer),
            )


# Memory of one rank.


REUSE = 1e9
"""Stage 3 keeps a gathered parameter that is used again within this many elements (stage3_max_reuse_distance)."""
PERSISTENT = 1e5
"""Stage 3 keeps parameters up to this many elements unsharded (stage3_param_persistence_threshold)."""
MASTER = 4
"""Bytes per element of the fp32 master weights, which DeepSpeed also keeps in fp32 training."""


def deepspeed_memory(
    shape: ModelShape, plan: Plan, *, optimizer: OptimizerShape = ADAMW, context: float = CONTEXT
) -> Memory:
    """Return the peak memory of one rank; `context` is the device memory of a process outside of the allocator."""
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
    """Return the bytes that a rank keeps between two steps, by kind of state, device and host together."""
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
        """Return the bytes that stay on the device between steps, by kind of state."""
        rest: dict[str, float] = {}
        if self.plan.offload.parameters == "none":
            shards = self.plan.layout.dp if self.stage == 3 else 1
            rest["parameters"] = self.compute_bytes * self.whole / shards
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
        """Bytes of stage 3's flat buffer of this rank's gradients, in the dtype of gradient accumulation."""
        element_bytes = self.reduce_bytes if self.plan.accumulation > 1 else self.compute_bytes
        return element_bytes * self.mine

    def host(self) -> dict[str, float]:
        """Return the bytes that are offloaded to host memory or disk, by kind of state."""
        resident: dict[str, float] = {}
        if self.on_host:
            resident["master weights"] = MASTER * self.mine
            resident["optimizer states"] = self.states
            resident["gradients"] = MASTER * self.mine
            if self.stage == 3:
                resident["gradients"] += self.gathered_gradients
            else:
                resident["parameters"] = self.compute_bytes * self.mine  # copied back to the device
                resident["bucket buffers"] = self.compute_bytes * self.largest
        if self.plan.offload.parameters != "none":
            resident["parameters"] = self.compute_bytes * self.whole / self.plan.layout.dp
        return resident

    def moments(self) -> list[tuple[str, dict[str, float]]]:
        """Return every moment that can be the peak: its phase, and the bytes allocated then by kind of state.

        Gradients grow while activations shrink, so the start and the end of backward suffice.
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
        """Return the bytes of gradients at the start and the end of backward, without stage 3's flat buffer."""
        whole = self.compute_bytes * self.trained
        if self.stage < 2:
            accumulated = whole if self.plan.accumulation > 1 else 0.0
            return accumulated, whole + self.reduce_bytes * self.mine
        if self.stage == 3 or self.on_host:
            return 0.0, 0.0
        return self.gathered_gradients, self.gathered_gradients

    def _buckets(self) -> float:
        """Return the bytes of the reduce buckets that exist only during backward.

        Stages 1 and 2 use two, so that one fills while the other is reduced; stage 3 allocates one in addition to its
        permanent one.
        """
        return {0: 0.0, 3: self.bucket}.get(self.stage, 2 * self.bucket)

    def _update_gradients(self) -> float:
        """Return the bytes of this rank's gradients at the update: the optimizer's fp32 copy and its source."""
        if self.on_host:
            return 0.0
        if not self.stage:
            return (self.compute_bytes + MASTER * self.has_copy) * self.trained
        source_bytes = 0 if self.stage == 3 else self.reduce_bytes
        return (MASTER + source_bytes) * self.mine

    def _activations(self) -> float:
        """Return the peak bytes of activations over all parts of the model."""
        own = self.state
        most = 0.0
        for index, share in enumerate(own.shares):
            below = own.kept(index) + own.saved[index] * (share.number - 1)
            footprint = share.part.footprint(self.plan.recompute)
            resident = [own.amount(footprint.forward), *(own.amount(moment.resident) for moment in footprint.backward)]
            most = max(most, below + max(resident))
        return most + own.amount(own.shape.input) * min(2, self.plan.accumulation)


def kept_numel(numel: float) -> float:
    """Return how many elements stage 3 keeps gathered from forward to backward.

    Between the two uses of a parameter, forward and backward each visit every parameter after it, hence the half.
    """
    return min(numel, REUSE / 2)


def deepspeed_time(times: TimeModel, shape: ModelShape, plan: Plan) -> Time:
    """Return the time of one optimizer step under DeepSpeed; `shape` describes the model under this plan."""
    found = [(share, times.predict(shape, native)) for share, native in _alike(shape, plan)]
    parts: dict[str, float] = {}
    for share, time in found:
        for name, seconds in time.parts.items():
            parts[name] = parts.get(name, 0.0) + share * seconds
    replaced = {"update", "collect"}
    if deepspeed_stage(plan) == 0:
        replaced |= {"reduce", "contention"}  # stage 0 reduces its buckets after backward, not during it
    for name in replaced:
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
    """Return the native plans whose forward and backward send the same bytes, each with its share of the model."""
    stage = deepspeed_stage(plan)
    offload = dataclasses.replace(plan.offload, optimizer="none")
    native = dataclasses.replace(plan, engine="torch", offload=offload)
    if plan.layout.world_size == 1 or stage == 0:
        return [(1.0, native)]
    if stage < 3:
        # Stages 1 and 2 all-reduce whole buckets (use_multi_rank_bucket_allreduce), 2 after every micro-batch.
        return [(1.0, dataclasses.replace(native, zero=1, gradient_sync="every" if stage == 2 else "last"))]
    # Stage 3 gathers in backward only the parameters that it freed after forward. The kept ones behave as under
    # zero 2, the others as under zero 3.
    kept = kept_numel(shape.numel) / max(1, shape.numel)
    mix = [(kept, dataclasses.replace(native, zero=2, gradient_sync="every"))]
    if kept < 1.0:
        mix.append((1.0 - kept, dataclasses.replace(native, zero=3, gradient_sync="every")))
    return mix


def _after(times: TimeModel, shape: ModelShape, plan: Plan) -> dict[str, float]:
    """Return seconds after the last backward: gradient norm, optimizer, cast to the compute dtype, all-gather."""
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
        # Every micro-batch copies its gradients to the host; from the second on, the sum so far is read back first.
        down, up = plan.accumulation, plan.accumulation - 1
        parts["offload"] = reduce * mine * (down / calibration.to_host.value + up / calibration.from_host.value)
        parts["offload"] += compute * mine / calibration.from_host.value
    if stage == 0 and layout.dp > 1:
        parts["sum"] = times.wires.in_buckets("all_reduce", reduce * trained, layout, "replicate")
        parts["sum"] += 4 * reduce * trained / bandwidth
    if stage in {1, 2}:
        parts["collect"] = times.wires.in_buckets("all_gather", compute * trained, layout, "shard")
    return parts
