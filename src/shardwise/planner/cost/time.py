"""Time of one optimizer step under a plan, by part: compute, exposed communication, bubbles, update, input.

The idea: each stage's compute and collectives (`stage_costs.py`) are replayed on streams and pipeline schedules
(`events.py`), so that communication counts only where compute waits for it. The invariant: the values of `Time.parts`
sum to `Time.seconds`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from shardwise.planner.cost.compute import Assumptions, ComputeModel, float8_least_width
from shardwise.planner.cost.events import (
    COMPUTE,
    WIRE,
    Span,
    backward_tasks,
    forward_tasks,
    pipeline_span,
    pipeline_spans,
    run_pass,
    run_streams,
)
from shardwise.planner.cost.memory import ADAMW
from shardwise.planner.cost.stage_costs import Wires, stage_cost
from shardwise.planner.cost.stages import stages_of_plan
from shardwise.planner.cost.update import after_backward, orthogonalization

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardwise.hardware.calibration import Calibration
    from shardwise.hardware.machine import Cluster
    from shardwise.planner.cost.events import Pass
    from shardwise.planner.cost.memory import OptimizerShape
    from shardwise.planner.cost.stage_costs import StageCost
    from shardwise.planner.cost.stages import StageParts
    from shardwise.planner.model.shape import ModelShape, Part
    from shardwise.plans.plan import Plan


WAITING = ("tensor", "context", "batch norm", "gather", "reduce", "sum", "collect", "meet", "jitter")
"""Parts of a step in which compute waits for other ranks."""
KNOWN = 0.08
"""Interval around a step of this engine on a measured machine: ten steps on an H200 were within 6.8 %."""
RUNS = (0.84, 1.26)
"""Seconds of published runs as multiples of those predicted from the catalogue, at the quantiles 0.05 and 0.95 over ten
frameworks and papers (benchmarks/plan_published.py): a cluster that was not measured is more often slower."""
HOST_RUNS = (0.5, 2.0)
"""Assumed interval of a step on a CPU that was not measured: published runs are of GPUs only. Three runs of
examples/text.py on two cores took 0.62 to 0.75 of the predicted time."""
RUNS_DOUBT = 0.2
"""Uncertainty of a catalogue's rates to which RUNS applies; rates of an assumed device are less certain."""

ORIGINS = {
    "measured": "from steps of this engine on a measured H200",
    "published": "from published runs of others",
    "assumed": "assumed for a CPU without --calibrate",
    "own_runs": "from the spread of own runs on this machine",
}
"""Text of each value of `Time.interval_from`."""


@dataclass(frozen=True, kw_only=True)
class Time:
    """Predicted time of one optimizer step, on the busiest rank."""

    seconds: float
    parts: Mapping[str, float]
    """Seconds by part of the step; they sum to `seconds`. Communication counts only where compute waits for it."""
    uncertainty: float
    """Half of the interval as a fraction of `seconds`."""
    interval: tuple[float, float]
    """Interval of the seconds, as multiples of `seconds`."""
    interval_from: Literal["measured", "published", "assumed", "own_runs"]
    """Origin of the interval: this engine on a machine whose rates were measured, published runs of others on GPUs of
    the catalogue, assumed for a CPU, of which no runs are published, or own runs on the same machine."""
    samples_per_second: float
    """Samples per second over all ranks."""
    tokens_per_second_per_device: float | None
    """None where samples are not sequences."""
    mfu: float
    """Model FLOPs utilization: fraction of the device's peak in the compute dtype, without recompute."""
    basis: Mapping[str, str]
    """Origin of the rates of compute, memory and communication: "measured" or "catalogue"."""

    @property
    def low_s(self) -> float:
        """Seconds of a step at the lower end of the interval."""
        return self.seconds * self.interval[0]

    @property
    def high_s(self) -> float:
        """Seconds of a step at the upper end of the interval."""
        return self.seconds * self.interval[1]

    def interval_text(self) -> str:
        """Return the interval around the prediction in percent, with its origin."""
        low, high = (each - 1 for each in self.interval)
        return f"{low:+.0%} to {high:+.0%}, {ORIGINS[self.interval_from]}"


def predict_time(
    shape: ModelShape,
    plan: Plan,
    cluster: Cluster,
    calibration: Calibration,
    *,
    optimizer: OptimizerShape = ADAMW,
    assumptions: Assumptions | None = None,
) -> Time:
    """Return the time of one optimizer step; `shape` is the model's form for this plan."""
    return TimeModel(cluster, calibration, optimizer=optimizer, assumptions=assumptions).predict(shape, plan)


class TimeModel:
    """Predicts times of plans on one cluster; costs that plans share are cached."""

    def __init__(
        self,
        cluster: Cluster,
        calibration: Calibration,
        *,
        optimizer: OptimizerShape = ADAMW,
        assumptions: Assumptions | None = None,
    ) -> None:
        self.cluster = cluster
        self.calibration = calibration
        self.assumptions = assumptions or Assumptions()
        self.wires = Wires(cluster, calibration)
        self.optimizer = optimizer
        self._compute: dict[tuple[str, str], ComputeModel] = {}

    def contention(self, plan: Plan) -> float:
        """Return the fraction of its speed that compute loses while weights are gathered and gradients reduced."""
        given = self.assumptions
        if self.cluster.device.kind == "cpu":
            return given.host_contention
        received = self.wires.bus(plan.layout.folded, "replicate", "shard")
        return given.contention + given.contention_moved * received / self.calibration.memory_bandwidth.value

    def jitter(self, world_size: int) -> float:
        """Return the fraction of a step that ranks on several nodes wait for the slowest of them."""
        return self.assumptions.jitter * math.log2(max(1.0, world_size / self.cluster.devices_per_node))

    def compute(self, dtype: str, *, recipe: str = "") -> ComputeModel:
        """Return the model of compute times in one dtype; with a recipe, large products of blocks are in float8."""
        key = (dtype, recipe)
        if key not in self._compute:
            assumptions = self.assumptions
            if recipe:
                assumptions = assumptions.in_float8(float8_least_width(self.calibration, recipe))
            self._compute[key] = ComputeModel(self.calibration, dtype, assumptions)
        return self._compute[key]

    def stages(self, shape: ModelShape, plan: Plan) -> list[StageCost]:
        """Return the time of a micro-batch on each stage."""
        return self._costs(stages_of_plan(shape, plan), shape, plan)

    def _costs(self, stages: Sequence[StageParts], shape: ModelShape, plan: Plan) -> list[StageCost]:
        known: dict[object, StageCost] = {}
        compute = self.compute(shape.compute, recipe=plan.float8.recipe if plan.precision.compute == "float8" else "")
        for stage in stages:
            if stage.likeness not in known:
                known[stage.likeness] = stage_cost(stage, shape, plan, compute, self.wires)
        return [known[stage.likeness] for stage in stages]

    def predict(self, shape: ModelShape, plan: Plan) -> Time:
        """Return the time of one optimizer step; `shape` is the model's form for this plan."""
        stages = stages_of_plan(shape, plan)
        costs, ranks = self._costs(stages, shape, plan), [stage.rank for stage in stages]
        by_rank: list[list[StageCost]] = [[] for _ in range(plan.layout.pp)]
        for cost, rank in zip(costs, ranks, strict=True):
            by_rank[rank].append(cost)
        busiest = max(by_rank, key=lambda costs: sum(cost.busy for cost in costs))
        parts = _compute_parts(busiest, plan.accumulation)
        if plan.layout.pp == 1:
            self._add_passes(parts, costs[0], plan)
        else:
            hop = self.hop(shape, plan)
            self._add_pipeline(parts, plan, costs=costs, ranks=ranks, busiest=busiest, hop=hop)
        trained = max(sum(cost.trained for cost in costs) for costs in by_rank)
        parts |= after_backward(trained, plan, self.calibration, self.wires, self.optimizer)
        for name, seconds in orthogonalization(self.optimizer, stages, plan, self.calibration, self.wires).items():
            parts[name] = parts.get(name, 0.0) + seconds
        parts["input"] = shape.input.at(plan.micro_batch) * plan.accumulation / self.calibration.from_host.value
        parts["jitter"] = self.jitter(plan.layout.world_size) * sum(parts.values())
        doubt = sum(cost.forward.doubt + cost.backward.doubt + cost.again.doubt for cost in busiest)
        return self._time(shape, plan, parts, plan.accumulation * doubt)

    def _add_passes(self, parts: dict[str, float], cost: StageCost, plan: Plan) -> None:
        """Add the exposed communication of a step's forward and backward passes, without a pipeline."""
        number, sync = plan.accumulation, plan.accumulation if plan.gradient_sync == "every" else 1
        ahead = plan.communication.prefetch
        forward = run_pass(forward_tasks(cost.units, prefetch=ahead, gathers=plan.zero >= 2))
        quiet = run_pass(backward_tasks(cost.units, prefetch=ahead, gathers=plan.zero == 3, reduces=False))
        summing = run_pass(backward_tasks(cost.units, prefetch=ahead, gathers=plan.zero == 3, reduces=True))
        slow = self.contention(plan)
        for times, run in ((number, forward), (number - sync, quiet), (sync, summing)):
            self._add_pass(parts, run, times, slow)
        parts["memory"] -= number * cost.busy

    def _add_pass(self, parts: dict[str, float], run: Pass, times: int, slow: float) -> None:
        """Add `times` runs of a pass with all compute in "memory"; the caller subtracts compute counted before."""
        sent = run.gathering + run.reducing
        for name, share in (("gather", run.gathering), ("reduce", run.reducing)):
            parts[name] += times * run.exposed * share / sent if sent else 0.0
        parts["contention"] += times * slow * run.hidden
        parts["memory"] += times * run.busy

    def _add_pipeline(
        self,
        parts: dict[str, float],
        plan: Plan,
        *,
        costs: Sequence[StageCost],
        ranks: Sequence[int],
        busiest: Sequence[StageCost],
        hop: float,
    ) -> None:
        """Add bubbles and exposed communication of a step on the busiest rank of a pipeline."""
        ahead, always, is_sharded = plan.communication.prefetch, plan.zero == 3, plan.zero >= 2
        runs: dict[int, tuple[Pass, Pass, Pass, Pass]] = {}
        for cost in {id(cost): cost for cost in costs}.values():
            # ZeRO-2 gathers in the first micro-batch and reshards after the last, which also reduces gradients.
            runs[id(cost)] = (
                run_pass(forward_tasks(cost.units, prefetch=ahead, gathers=always)),
                run_pass(backward_tasks(cost.units, prefetch=ahead, gathers=always, reduces=False)),
                run_pass(forward_tasks(cost.units, prefetch=ahead, gathers=is_sharded)),
                run_pass(backward_tasks(cost.units, prefetch=ahead, gathers=always, reduces=is_sharded)),
            )
        slow = self.contention(plan)
        span = pipeline_span(
            plan,
            [runs[id(cost)][0].seconds + slow * runs[id(cost)][0].hidden for cost in costs],
            [runs[id(cost)][1].seconds + slow * runs[id(cost)][1].hidden for cost in costs],
            ranks,
            hop,
        )
        for cost in busiest:
            for run in runs[id(cost)][:2]:
                self._add_pass(parts, run, plan.accumulation, slow)
            parts["memory"] -= plan.accumulation * cost.busy
        parts["bubble"] = max(0.0, span - sum(parts.values()))
        for cost in busiest:
            steady, back, first, last = runs[id(cost)]
            parts["gather"] += first.seconds - steady.seconds
            parts["reduce"] += last.seconds - back.seconds

    def hop(self, shape: ModelShape, plan: Plan) -> float:
        """Return the seconds to send activations from one stage to the next."""
        block = next(part for part in shape.parts if part.kind == "block")
        size = block.output.at(plan.micro_batch, tp=plan.layout.tp, sequence_parallel=plan.sequence_parallel)
        return self.wires.seconds("send", size, plan.layout, "pp")

    def _time(self, shape: ModelShape, plan: Plan, parts: dict[str, float], doubt: float) -> Time:
        seconds = sum(parts.values())
        wire, wire_origin = self.wires.figure(plan.layout)
        waiting = sum(parts.get(name, 0.0) for name in WAITING) + parts["contention"]
        update = parts["update"] * self.calibration.optimizer_bandwidth.uncertainty
        basis = {
            "compute": self.calibration.matmul(4096, 4096, 4096, shape.compute).origin,
            "memory": self.calibration.memory_bandwidth.origin,
            "communication": wire_origin,
        }
        is_alone = plan.layout.world_size == 1
        is_known = all(found == "measured" for what, found in basis.items() if what != "communication" or not is_alone)
        origin: Literal["measured", "published", "assumed"] = "published"
        if is_known:
            origin = "measured"
        elif self.cluster.device.kind == "cpu":
            origin = "assumed"
        interval = _interval(math.hypot(doubt, waiting * wire, update) / seconds, origin)
        world, samples, tokens = plan.layout.world_size, plan.batch_size / seconds, shape.tokens_per_sample
        flops = plan.layout.cp * sum(part.count * training_flops(part) for part in shape.parts)
        return Time(
            seconds=seconds,
            parts={name: value for name, value in parts.items() if value > 0},
            uncertainty=(interval[1] - interval[0]) / 2,
            interval=interval,
            interval_from=origin,
            samples_per_second=samples,
            tokens_per_second_per_device=samples * tokens / world if tokens else None,
            mfu=samples * flops / world / self.cluster.device.peak(shape.compute),
            basis=basis,
        )


def _interval(doubt: float, origin: str) -> tuple[float, float]:
    """Return the interval of a step as multiples of its seconds; `doubt` follows from the rates' uncertainties."""
    if origin == "measured":
        half = max(KNOWN, doubt)
        return 1 - half, 1 + half
    if origin == "assumed":
        return HOST_RUNS
    wider = max(1.0, doubt / RUNS_DOUBT)
    return 1 - wider * (1 - RUNS[0]), 1 + wider * (RUNS[1] - 1)


# FLOPs of the model, and seconds of a step by part.


def training_flops(part: Part) -> float:
    """Return the model FLOPs per sample of forward and backward, without recompute.

    As in model FLOPs utilization (PaLM, appendix B), backward counts as twice forward, for attention too, although a
    fused kernel recomputes its scores there. Frozen weights have no gradient.
    """
    products = sum((3.0 if item.trained else 2.0) * item.flops for item in part.work.matmuls)
    return products + 3.0 * sum(item.flops for item in part.work.attentions)


def _compute_parts(costs: Sequence[StageCost], micro_batches: int) -> dict[str, float]:
    """Return seconds of a step by part on the rank that runs these stages; parts that the caller adds start at 0."""
    parts = dict.fromkeys(
        ("matmul", "attention", "memory", "launch", "recompute", "tensor", "context", "batch norm"), 0.0
    )
    for cost in costs:
        for seconds in (cost.forward, cost.backward):
            for name in ("matmul", "attention", "memory", "launch"):
                parts[name] += micro_batches * getattr(seconds, name)
        parts["recompute"] += micro_batches * cost.again.total
        parts["tensor"] += micro_batches * cost.exchange.tensor
        parts["context"] += micro_batches * cost.exchange.context
        parts["batch norm"] += micro_batches * cost.exchange.batch_norm
    return parts | dict.fromkeys(("gather", "reduce", "contention", "bubble"), 0.0)


# One optimizer step as a timeline: the streams of one rank, or the stages of a pipeline.


SHOWN_ROUNDS = 2
"""Rounds of micro-batches that the timeline of a pipeline shows."""


def timeline(model: TimeModel, shape: ModelShape, plan: Plan) -> list[Span]:
    """Return start and end of all work in the plan's last micro-batch and its update, in seconds.

    For a pipeline, return the actions of all stages over the first SHOWN_ROUNDS rounds.
    """
    if plan.layout.pp > 1:
        return _stages(model, shape, plan)
    (cost,) = model.stages(shape, plan)
    ahead = plan.communication.prefetch
    spans = run_streams(forward_tasks(cost.units, prefetch=ahead, gathers=plan.zero >= 2))
    middle = max(span.end for span in spans)
    tasks = backward_tasks(cost.units, prefetch=ahead, gathers=plan.zero == 3, reduces=True)
    spans += [span._replace(start=span.start + middle, end=span.end + middle) for span in run_streams(tasks)]
    return spans + _after(model, shape, plan, max(span.end for span in spans))


def _after(model: TimeModel, shape: ModelShape, plan: Plan, start: float) -> list[Span]:
    """Return the spans after the last backward pass, one after the other."""
    spans = []
    parts = model.predict(shape, plan).parts
    for name, stream in (("sum", WIRE), ("update", COMPUTE), ("meet", WIRE), ("collect", WIRE)):
        if name in parts:
            spans.append(Span(stream, name, start, start + parts[name]))
            start += parts[name]
    return spans


def _stages(model: TimeModel, shape: ModelShape, plan: Plan) -> list[Span]:
    costs = model.stages(shape, plan)
    shown = min(plan.accumulation, SHOWN_ROUNDS * plan.layout.pp)
    ranks = pipeline_spans(
        plan,
        [sum(unit.forward for unit in cost.units) for cost in costs],
        [sum(unit.backward for unit in cost.units) for cost in costs],
        model.hop(shape, plan),
        micro_batches=shown,
    )
    return [span._replace(stream=f"pp rank {rank}") for rank, spans in enumerate(ranks) for span in spans]
