"""Time of one pipeline stage on one rank: compute of a micro-batch, and the collectives around it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from shardwise.layout import Layout
from shardwise.planner.cost.compute import PartCost, Seconds, float8_weights
from shardwise.planner.cost.events import WorkUnit, bucket_reduces
from shardwise.planner.cost.traffic import bus_bandwidth, collective, placement_of
from shardwise.plans.rules import gathers_float8, uses_ddp
from shardwise.units import ELEMENT_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardwise.hardware.calibration import Calibration
    from shardwise.hardware.machine import Cluster
    from shardwise.planner.cost.compute import ComputeModel
    from shardwise.planner.cost.stages import StageParts
    from shardwise.planner.cost.traffic import Collective, Placement, Transfer
    from shardwise.planner.model.shape import ModelShape, Part
    from shardwise.plans.plan import Plan

BUCKET_BYTES = 25 * 2**20
"""Bytes of one reduction or gather outside of DDP."""


class Wires:
    """Times of collectives on one cluster; each result is cached."""

    def __init__(self, cluster: Cluster, calibration: Calibration) -> None:
        self.cluster = cluster
        self.calibration = calibration
        self._known: dict[tuple[str, float, Placement], Transfer] = {}

    def transfer(self, name: Collective, num_bytes: float, layout: Layout, *axes: str) -> Transfer:
        """Return the time of a collective along some axes of a layout."""
        key = (name, num_bytes, placement_of(layout, axes, self.cluster))
        if key not in self._known:
            self._known[key] = collective(name, num_bytes, key[2], self.cluster, self.calibration)
        return self._known[key]

    def seconds(self, name: Collective, num_bytes: float, layout: Layout, *axes: str) -> float:
        """Return the seconds of a collective; 0 along axes of degree 1."""
        if num_bytes <= 0 or all(getattr(layout, axis) == 1 for axis in axes):
            return 0.0
        return self.transfer(name, num_bytes, layout, *axes).seconds

    def in_buckets(self, name: Collective, num_bytes: float, layout: Layout, *axes: str) -> float:
        """Return the seconds of a collective that is split into buckets of BUCKET_BYTES."""
        full, rest = divmod(num_bytes, BUCKET_BYTES)
        return full * self.seconds(name, BUCKET_BYTES, layout, *axes) + self.seconds(name, rest, layout, *axes)

    def bus(self, layout: Layout, *axes: str) -> float:
        """Return the bytes per second that each rank of a group along some axes receives in a large collective."""
        return bus_bandwidth(placement_of(layout, axes, self.cluster), self.cluster)

    def figure(self, layout: Layout) -> tuple[float, str]:
        """Return uncertainty and origin of collective times along the first of dp, cp, tp, pp with a degree above 1."""
        degrees = {("replicate", "shard"): layout.replicate * layout.shard, ("cp",): layout.cp}
        degrees |= {("tp",): layout.tp, ("pp",): layout.pp}
        axes = next((axes for axes, degree in degrees.items() if degree > 1), ("tp",))
        transfer = self.transfer("all_reduce", BUCKET_BYTES, layout, *axes)
        return transfer.uncertainty, transfer.origin


class ActivationExchange(NamedTuple):
    """Seconds of exposed communication inside a pass: tensor parallelism, batch norm, context parallelism."""

    tensor: float = 0.0
    batch_norm: float = 0.0
    context: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of all three kinds of communication."""
        return self.tensor + self.batch_norm + self.context


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """Time of one micro-batch on one stage."""

    units: tuple[WorkUnit, ...]
    forward: Seconds
    backward: Seconds
    again: Seconds
    """Time that recompute adds to backward."""
    exchange: ActivationExchange
    """Forward and backward together."""
    trained: float
    """Trained parameters on this rank, before they are sharded."""

    @property
    def busy(self) -> float:
        """Seconds of a micro-batch if all gathers and reductions are hidden."""
        return self.forward.total + self.backward.total + self.again.total + self.exchange.total


def stage_cost(stage: StageParts, shape: ModelShape, plan: Plan, compute: ComputeModel, wires: Wires) -> StageCost:
    """Return the time of one micro-batch on a stage."""
    forward = backward = again = Seconds()
    exchanged = ActivationExchange()
    units: list[WorkUnit] = []
    gradients: list[float] = []
    for part, count in stage.parts:
        cost, extra = _part_cost(part, plan, compute)
        once = _exchange(part, shape, plan, wires)
        given = compute.assumptions
        exposed = given.tensor_exchanges * (1.0 - given.overlapped_tensor * (1.0 - given.contention))
        once = once._replace(tensor=once.tensor * exposed)
        repeats = 2 + (part.policy(plan.recompute) != "none")
        unit = WorkUnit(
            name=part.name,
            forward=cost.forward.total + once.total,
            backward=cost.backward.total + extra.total + (repeats - 1) * once.total,
        )
        units += [unit] * count
        gradients += [numel_of(part, plan.layout, trained=True)] * count
        forward, backward = forward.plus(cost.forward, count), backward.plus(cost.backward, count)
        again = again.plus(extra, count)
        exchanged = ActivationExchange(*(a + repeats * count * b for a, b in zip(exchanged, once, strict=True)))
    if plan.zero >= 2:
        units = _sharded(stage, units, plan, wires, compute)
    elif uses_ddp(plan):
        units = _replicated(units, gradients, plan, wires)
    return StageCost(
        units=tuple(units), forward=forward, backward=backward, again=again, exchange=exchanged, trained=sum(gradients)
    )


def _part_cost(part: Part, plan: Plan, compute: ComputeModel) -> tuple[PartCost, Seconds]:
    """Return the compute time of one micro-batch on one instance of a part, and the time that recompute adds."""
    compiled = plan.compile == "model" or (plan.compile == "blocks" and part.kind == "block")
    cost = compute.cost(
        part, plan.micro_batch, tp=plan.layout.tp, sequence_parallel=plan.sequence_parallel, compiled=compiled
    )
    if plan.is_captured and not compute.on_host:  # one launch for all operators of a step
        cost = PartCost(*(seconds._replace(launch=0.0, host=0.0) for seconds in cost))
    again = cost.again(part.policy(plan.recompute))
    tp = 1 if plan.is_captured else plan.layout.tp
    return with_host_operators(cost, part, compute, tp=tp, is_sharded=plan.zero >= 2, compiled=compiled), again


def with_host_operators(
    cost: PartCost, part: Part, compute: ComputeModel, *, tp: int, is_sharded: bool, compiled: bool
) -> PartCost:
    """Add the operators that sharding and tensor parallelism launch around forward and backward of a part."""
    given = compute.assumptions
    ahead, back = given.shard_operators if is_sharded else (0.0, 0.0)
    if tp > 1:
        exchanges = 2 * part.num_exchanges * given.exchange_operators * (given.compiled_operators if compiled else 1.0)
        ahead, back = ahead + exchanges, back + exchanges
    if not ahead and not back:
        return cost
    return cost._replace(forward=compute.hooked(cost.forward, ahead), backward=compute.hooked(cost.backward, back))


def tensor_exchange(
    part: Part, samples: int, tp: int, wires: Wires, *, sequence_parallel: bool, fused: bool = False
) -> float:
    """Return the seconds of a part's tensor-parallel collectives in one forward pass; backward takes as long."""
    if tp == 1 or not part.num_exchanges:
        return 0.0
    size = part.tp_exchanged.at(samples) / part.num_exchanges
    names: tuple[Collective, ...] = ("reduce_scatter", "all_gather") if sequence_parallel else ("all_reduce",)
    if part.kind == "last":
        # The logits of all ranks are gathered; a fused loss reduces the gradient of the head's input instead.
        names = ("all_reduce",) if fused else ("all_gather",)
    # tp is the innermost axis, so the placement of its groups does not depend on other axes.
    seconds = sum(wires.seconds(name, size, Layout(tp=tp), "tp") for name in names)
    if samples > 1 and "all_reduce" not in names:
        # Collectives concatenate along the first dimension; other dimensions are reordered before or after.
        seconds += len(names) * 2 * size / wires.calibration.memory_bandwidth.value
    return part.num_exchanges * seconds


def context_exchange(part: Part, samples: int, layout: Layout, wires: Wires) -> float:
    """Return the seconds of a part's context-parallel all-to-alls in one forward pass; backward takes as long."""
    if not part.num_cp_exchanges:
        return 0.0
    size = part.cp_exchanged.at(samples, tp=layout.tp) / part.num_cp_exchanges
    # cp and tp are the innermost axes, so the placement of their groups does not depend on other axes.
    inner = Layout(cp=layout.cp, tp=layout.tp)
    return part.num_cp_exchanges * wires.seconds("all_to_all", size, inner, "cp")


def _exchange(part: Part, shape: ModelShape, plan: Plan, wires: Wires) -> ActivationExchange:
    """Return the exposed communication inside one forward pass of a part."""
    layout = plan.layout
    tensor = tensor_exchange(
        part,
        plan.micro_batch,
        layout.tp,
        wires,
        sequence_parallel=plan.sequence_parallel,
        fused=plan.fused_loss and shape.head is not None,
    )
    if layout.cp > 1:
        return ActivationExchange(tensor, context=context_exchange(part, plan.micro_batch, layout, wires))
    if not shape.ties_samples or plan.batch_norm == "local":
        return ActivationExchange(tensor)
    return ActivationExchange(tensor, batch_norm_exchange(part, layout, wires))


def batch_norm_exchange(part: Part, layout: Layout, wires: Wires) -> float:
    """Return the seconds of a part's synchronized batch norms in one forward pass; backward takes as long.

    One follows every convolution, and all-reduces sum, square sum and count of some hundred channels.
    """
    number = sum(matmul.count for matmul in part.work.matmuls)
    return number * wires.seconds("all_reduce", 4096.0, layout, "replicate", "shard")


def numel_of(part: Part, layout: Layout, *, trained: bool = False) -> float:
    """Return the number of a rank's parameters in one instance of a part; tied parameters of one rank count once."""
    numel = 0.0
    for weight in part.weights:
        if (trained and not weight.trained) or (weight.tied and layout.pp == 1):
            continue
        numel += weight.numel / layout.tp if weight.split else weight.numel
    return numel


def _replicated(units: list[WorkUnit], gradients: list[float], plan: Plan, wires: Wires) -> list[WorkUnit]:
    """Return units with the all-reduces of DDP's buckets, which ZeRO-1 uses as well."""
    width = ELEMENT_BYTES.get(plan.communication.compression) or ELEMENT_BYTES[plan.precision.reduce]

    def seconds_of(num_bytes: float) -> float:
        return wires.seconds("all_reduce", num_bytes, plan.layout.folded, "replicate", "shard")

    bucket = plan.communication.bucket_mb * 2**20
    reduces = bucket_reduces([width * numel for numel in gradients], bucket, seconds_of)
    return [unit._replace(reduce=seconds) for unit, seconds in zip(units, reduces, strict=True)]


def _sharded(
    stage: StageParts, units: list[WorkUnit], plan: Plan, wires: Wires, compute: ComputeModel
) -> list[WorkUnit]:
    """Return units with the gathers and reductions of FSDP: one each per block, and one for all other modules."""
    sharded, index = list(units), 0
    rest = rest_trained = 0.0
    for part, count in stage.parts:
        numel, trained = gathered_numel(part, plan), numel_of(part, plan.layout, trained=True)
        if part.kind == "block":
            own = _shard_times(numel, trained, plan, wires, compute)
            sharded[index : index + count] = [_with(unit, own) for unit in units[index : index + count]]
        else:
            rest, rest_trained = rest + count * numel, rest_trained + count * trained
        index += count
    root = _shard_times(rest, rest_trained, plan, wires, compute)
    sharded[0] = _with(sharded[0], root | {"gather_again": 0.0})
    sharded[-1] = _with(sharded[-1], {"gather_again": root["gather_again"]})
    return sharded


def gathered_numel(part: Part, plan: Plan) -> float:
    """Return the parameters that FSDP gathers for one instance of a part; one in float8 counts as half of bf16's."""
    if not gathers_float8(plan):
        return numel_of(part, plan.layout)
    quantized = float8_weights(part, plan)
    halves = sum(weight.numel for weight in part.weights if weight.name in quantized)
    return numel_of(part, plan.layout) - halves / 2


def _with(unit: WorkUnit, times: Mapping[str, float]) -> WorkUnit:
    return unit._replace(**{name: getattr(unit, name) + seconds for name, seconds in times.items()})


def _shard_times(numel: float, trained: float, plan: Plan, wires: Wires, compute: ComputeModel) -> dict[str, float]:
    """Return the seconds of the gather and the reduction of one sharded unit, and of the copies around them."""
    layout, precision, calibration = plan.layout.folded, plan.precision, compute.calibration
    used = ELEMENT_BYTES[precision.activations if precision.activations in {"bf16", "fp16"} else precision.parameter]
    sent = compute.assumptions.gather_bytes or used
    gather = wires.seconds("all_gather", sent * numel, layout, "shard")
    width = ELEMENT_BYTES[precision.reduce]
    reduce = wires.seconds("reduce_scatter", width * trained, layout, "shard")
    if plan.communication.sync_every == 1:
        reduce += wires.seconds("all_reduce", width * trained / layout.shard, layout, "replicate")
    if plan.offload.parameters == "cpu":
        gather += ELEMENT_BYTES[precision.parameter] * numel / layout.shard / calibration.from_host.value
        reduce += ELEMENT_BYTES[precision.parameter] * trained / layout.shard / calibration.to_host.value
    bandwidth = calibration.memory_bandwidth.value
    return {
        "gather": gather,
        "gather_again": gather if plan.zero == 3 else 0.0,
        "reduce": reduce,
        "gather_copy": 2 * sent * numel / bandwidth,
        "reduce_copy": (used + width) * trained / bandwidth,
    }
