"""Pipeline stages of a plan, and the parameters, gradients and optimizer states of one rank."""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, NamedTuple

from shardwise.planner.cost.compute import float8_weights
from shardwise.plans.pipeline import SCHEDULES, even_bounds, rank_of_stage, stages_per_rank
from shardwise.plans.rules import accumulates_in_fp32, compiles_head, gathers_float8, uses_ddp
from shardwise.units import ELEMENT_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.planner.cost.memory import OptimizerShape
    from shardwise.planner.model.shape import Amount, Matmul, ModelShape, Part, Weight
    from shardwise.plans.plan import Plan


class StageParts(NamedTuple):
    """One pipeline stage: its parts in order with the number of each, and the rank along pp that runs them."""

    parts: tuple[tuple[Part, int], ...]
    rank: int

    @property
    def likeness(self) -> tuple[tuple[int, int], ...]:
        """Key that is equal for stages of one model with equal parts, and therefore equal cost."""
        return tuple((id(part), count) for part, count in self.parts)


def stages_of_plan(shape: ModelShape, plan: Plan) -> tuple[StageParts, ...]:
    """Return the stages of a plan as training builds them: by the plan's split, else evenly.

    The remainder of an even split goes to the second and following stages, then to the first.
    """
    pp, split, schedule = plan.layout.pp, plan.pipeline.split, plan.pipeline.schedule
    bounds = (0, *split, shape.num_blocks)
    if not split:
        bounds = even_bounds(shape.num_blocks, pp * stages_per_rank(schedule, pp))
    stages = stages_between(shape, bounds, pp, schedule)
    if plan.recompute == "none" or not plan.recompute_blocks:
        return stages
    return tuple(_partly(stage, plan.recompute_blocks) for stage in stages)


def _partly(stage: StageParts, number: int) -> StageParts:
    """Return a stage of which the first `number` blocks are recomputed and the others keep their activations."""
    parts: list[tuple[Part, int]] = []
    for part, count in stage.parts:
        again = count
        if part.kind == "block":
            again = min(number, count)
            number -= again
        if again:
            parts.append((part, again))
        if count > again:
            parts.append((part.kept, count - again))
    return stage._replace(parts=tuple(parts))


def stages_between(shape: ModelShape, bounds: tuple[int, ...], pp: int, schedule: str) -> tuple[StageParts, ...]:
    """Return the stages whose first blocks are `bounds`, which end with the number of blocks."""
    stages, last = [], len(bounds) - 2
    for stage in range(last + 1):
        parts = _blocks(shape, bounds[stage], bounds[stage + 1])
        if stage == 0:
            parts = [(part, part.count) for part in shape.parts if part.kind == "first"] + parts
        if stage == last:
            parts += [(part, part.count) for part in shape.parts if part.kind == "last"]
        stages.append(StageParts(tuple(parts), rank_of_stage(schedule, stage, pp)))
    return tuple(stages)


def _blocks(shape: ModelShape, first: int, end: int) -> list[tuple[Part, int]]:
    """Return the blocks in [first, end), numbered over all kinds of blocks in order."""
    found, index = [], 0
    for part in shape.parts:
        if part.kind != "block":
            continue
        number = min(end, index + part.count) - max(first, index)
        if number > 0:
            found.append((part, number))
        index += part.count
    return found


class PipelineShape(NamedTuple):
    """A pipeline schedule over ranks and micro-batches; each rank has `chunks` stages."""

    pp: int
    schedule: str
    micro_batches: int
    chunks: int

    def in_flight(self, rank: int, chunk: int) -> int:
        """Return the maximum number of micro-batches between their forward and their backward on a stage."""
        if self.pp == 1:
            return 1
        schedule = SCHEDULES[self.schedule]
        if schedule.all_forward_first:
            return self.micro_batches
        if schedule.placement == "one":
            return min(self.micro_batches, self.pp - rank)
        if schedule.placement == "v":  # stages go down the ranks and up again, two on each
            return min(self.micro_batches, rank + 1 if chunk else 2 * self.pp - rank - 1)
        # Interleaved: a rank runs this many forwards before its first backward, a round of each stage in turn.
        size = self.micro_batches // max(1, self.micro_batches // self.pp)
        forward = (self.chunks - 1) * size + 2 * (self.pp - 1 - rank) + 1
        rounds, rest = divmod(forward, self.chunks * size)
        return min(self.micro_batches, rounds * size + max(0, min(size, rest - chunk * size)))


# The state of one rank under a plan: its parts, the elements of their parameters, and its constant allocations.


TRANSPOSED = 0.5
"""Share of the weights that FSDP gathers in float8 of which a compiled block keeps a transposed copy for backward.

The partitioner of AOTAutograd takes gathered weights for parameters that stay. It keeps either a weight or its copy,
which has the same size; of the five weights of a Llama block on an H200, it kept the copies of two, half of the bytes.
"""
STATE_BYTES = {**ELEMENT_BYTES, "int8": 1 + 4 / 256}
"""dtype of optimizer states -> bytes per element; an 8-bit moment has one fp32 scale for every 256 elements."""


class Share(NamedTuple):
    """A part on one rank: the number of its instances, and the parameter elements of one instance."""

    part: Part
    number: int
    whole: float
    """Number of parameters after tensor parallelism, before sharding."""
    trained: float
    """Number of trained parameters among `whole`."""
    owned: float
    """Number of parameters in this rank's shard, padded to equal rows."""
    owned_trained: float
    """Number of trained parameters among `owned`."""
    cast: float
    """Number of parameters that autocast copies to the compute dtype."""
    unit: float
    """Bytes in the output of an all-gather over the shard axis."""
    unit_trained: float
    """Number of elements in the input of a reduce-scatter over the shard axis."""
    narrow: float
    """Number of parameters stored in the compute dtype; under sharding, only those in this rank's shard."""
    states: float
    """Number of elements of optimizer states; under sharding, only those in this rank's shard."""


def _share(part: Part, count: int, plan: Plan, optimizer: OptimizerShape) -> Share:
    layout, width = plan.layout.folded, ELEMENT_BYTES[plan.precision.activations]
    whole = trained = owned = owned_trained = cast = narrow = states = gathered = 0.0
    quantized = float8_weights(part, plan)
    for weight in part.weights:
        if weight.tied and plan.layout.pp == 1:
            continue
        numel, own = _numels(weight, layout.tp, layout.shard)
        whole += numel
        owned += own
        gathered += own * (1 if gathers_float8(plan) and weight.name in quantized else width)
        if weight.trained:
            trained += numel
            owned_trained += own
            states += optimizer.states_of(weight) * (own if plan.zero else numel)
        if weight.cast and weight.name not in quantized:  # these layers cast in forward and in backward
            cast += numel
        if weight.narrow:
            narrow += own if plan.zero >= 2 else numel
    return Share(
        part=part,
        number=count,
        whole=whole,
        trained=trained,
        owned=owned,
        owned_trained=owned_trained,
        cast=cast,
        unit=gathered * layout.shard,
        unit_trained=owned_trained * layout.shard,
        narrow=narrow,
        states=states,
    )


def _tied(shares: Sequence[Share], plan: Plan) -> float:
    """Return the trained elements of one rank's heads that are the embeddings of the same rank."""
    if plan.layout.pp > 1:
        return 0.0
    numels: dict[str, float] = {}
    for share in shares:
        for weight in share.part.weights:
            if weight.tied and weight.trained:
                numels[weight.name] = _numels(weight, plan.layout.tp, 1)[0]
    return sum(numels.values())


def _numels(weight: Weight, tp: int, shard: int) -> tuple[float, float]:
    """Return the elements of a parameter on a tensor-parallel rank, and in one shard of its rows."""
    numel, rows = float(weight.numel), weight.rows
    if weight.split:
        numel, rows = numel / tp, math.ceil(rows / tp)
    return numel, numel * math.ceil(rows / shard) / rows


class RankState:
    """Parameters, gradients and optimizer states of one rank along pp; `stages` are the rank's own, in order."""

    def __init__(self, shape: ModelShape, plan: Plan, optimizer: OptimizerShape, stages: Sequence[StageParts]) -> None:
        self.shape = shape
        self.plan = plan
        self.optimizer = optimizer
        self.rank = stages[0].rank
        self.shares = [_share(part, count, plan, optimizer) for stage in stages for part, count in stage.parts]
        self._totals: dict[str, float] = {}
        self.chunks = [chunk for chunk, stage in enumerate(stages) for _ in stage.parts]
        """Index of each share's stage among the stages of the rank."""
        actions = PipelineShape(plan.layout.pp, plan.pipeline.schedule, plan.accumulation, len(stages))
        self.in_flight = [actions.in_flight(self.rank, chunk) for chunk in self.chunks]
        """Maximum number of micro-batches whose activations each share keeps."""
        self.sharded = plan.zero >= 2
        self.compute_bytes = ELEMENT_BYTES[plan.precision.activations]
        self.parameter_bytes = ELEMENT_BYTES[plan.precision.parameter]
        self.reduce_bytes = ELEMENT_BYTES[plan.precision.reduce]
        self.gradient_bytes = ELEMENT_BYTES["fp32"] if accumulates_in_fp32(plan) else self.parameter_bytes
        """Bytes of an element of the gradients that replicated parameters accumulate."""
        self.sheds_gradients = self.sharded and plan.offload.parameters != "none"
        """Whether gradient shards are on the host: FSDP2 copies each there as soon as it is reduced."""
        self.root = sum(share.unit for share in self.shares if share.part.kind != "block")
        """Bytes of the parameters outside the blocks, which FSDP gathers as one unit."""
        self.keeps_root = plan.fused_loss or (compiles_head(plan) and shape.head is not None)
        """Whether FSDP keeps this unit gathered while the loss runs, which reads the head's weight."""
        self.saved = [self._saved(share.part) for share in self.shares]
        self.tied = _tied(self.shares, plan)
        """Gradient elements of tied heads, which backward keeps until it reaches the embedding."""
        self.uses_buckets = uses_ddp(plan)
        """Whether DDP stores all gradients in its own buckets."""

    def _saved(self, part: Part) -> float:
        """Return the bytes that one instance of a part saves for backward."""
        saved = self.amount(part.footprint(self.plan.recompute).saved)
        if part.kind != "block" or part.policy(self.plan.recompute) != "none" or self.plan.compile == "none":
            return saved
        names = float8_weights(part, self.plan)
        quantized = [weight.numel for weight in part.weights if weight.name in names]
        share = 0.0
        if self.plan.float8.recipe == "tensorwise":
            share = min(1.0, sum(quantized) / max(1, sum(weight.numel for weight in part.weights if weight.cast)))
        elements = self.plan.micro_batch * compiled_saves(part, self.plan.layout.tp, quantized=share)
        compiled = self.amount(part.footprints["selective"].saved) + self.compute_bytes * elements
        if gathers_float8(self.plan):
            compiled += TRANSPOSED * sum(quantized)
        if self.plan.compile == "model" and self.plan.layout.world_size == 1:
            compiled += self.plan.micro_batch * _wide_residual(part, self.compute_bytes)
        return min(saved, compiled)

    def kept(self, index: int) -> float:
        """Return the bytes saved for backward by all parts while the part at `index` runs its newest micro-batch."""
        kept = 0.0
        for position, share in enumerate(self.shares):
            is_ahead = position >= index and self.chunks[position] == self.chunks[index]
            kept += self.saved[position] * share.number * (self.in_flight[position] - is_ahead)
        return kept

    def amount(self, amount: Amount) -> float:
        """Return the bytes of an amount on one rank, for the plan's micro-batch."""
        return amount.at(self.plan.micro_batch, tp=self.plan.layout.tp, sequence_parallel=self.plan.sequence_parallel)

    def total(self, name: str) -> float:
        """Sum a field of the shares over the rank."""
        if name not in self._totals:  # predictions of backward read a few totals hundreds of times
            self._totals[name] = add_up(self.shares, name)
        return self._totals[name]

    def at_rest(self, *, on_gpu: bool) -> dict[str, float]:
        """Return the bytes that are allocated on the device throughout a step, by kind."""
        plan = self.plan
        # The feed loads all micro-batches of a step to the device during the step before it.
        batches = 2 * plan.accumulation
        batches += plan.accumulation if on_gpu and plan.is_captured else 0  # a CUDA graph reads its own copies
        rest = {"input": self.amount(self.shape.input) * batches}
        if plan.offload.parameters == "none":
            rest["parameters"] = self.parameters()
        if plan.offload.optimizer == "none":
            rest["optimizer states"] = STATE_BYTES[plan.precision.optimizer] * self.total("states")
        if plan.precision.has_masters:
            owned = self.total("owned_trained" if plan.zero else "trained")
            rest["master weights"] = ELEMENT_BYTES[plan.precision.master] * owned
        if self.uses_buckets:
            rest["gradients"] = self.parameter_bytes * self.total("trained")
        if plan.communication.sync_every > 1:
            copies = 1 + (plan.communication.outer_momentum > 0)
            rest["anchor and momentum"] = copies * self.trained_bytes()
        return rest

    def trained_bytes(self) -> float:
        """Return the bytes of the trained parameters of the rank."""
        return self.parameter_bytes * self.total("owned_trained" if self.sharded else "trained")

    def parameters(self) -> float:
        """Return the bytes of this rank's parameters."""
        whole = self.parameter_bytes * self.total("owned" if self.sharded else "whole")
        return whole - (self.parameter_bytes - self.compute_bytes) * self.total("narrow")

    def host(self) -> float:
        """Return the bytes that offload stores on the host: parameters, their gradients and optimizer states."""
        if self.plan.offload.optimizer == "none":
            return 0.0
        trained = 2 * self.parameter_bytes * self.total("owned_trained" if self.plan.zero else "trained")
        trained += STATE_BYTES[self.plan.precision.optimizer] * self.total("states")
        if self.plan.offload.parameters == "none":
            return trained
        return trained + self.parameters() - self.trained_bytes()


def compiled_saves(part: Part, tp: int, *, quantized: float) -> float:
    """Return the elements per sample that a compiled block saves beside the results of its products and attentions.

    Inductor recomputes pointwise operators in its backward kernels, but its min-cut partitioner saves what other
    kernels read there: the queries and keys of attention after their rotary embedding, and the inputs of matrix
    products. Of the latter, the share `quantized` is not saved: the kernels that recompute them round them to float8
    again. The result of the last product, which selective recompute saves, is not needed.
    """
    matmuls = [matmul for matmul in part.work.matmuls for _ in range(matmul.count)]
    copied = sum(attention.copied * attention.count for attention in part.work.attentions) / tp
    lasts = sorted((each for each in matmuls if each.split == "inner"), key=lambda each: each.inner)
    unneeded = lasts[-1].rows * lasts[-1].columns if lasts and tp == 1 else 0
    return copied - unneeded + (1 - quantized) * _product_inputs(part, matmuls, lasts, tp)


def _product_inputs(part: Part, matmuls: Sequence[Matmul], lasts: Sequence[Matmul], tp: int) -> float:
    """Return the elements per sample of the inputs of matrix products, without those that attention wrote.

    They are one norm for each layer that ends in a row-parallel product (`lasts`, by their width), and the input of
    that product. Without such layers, the inputs of all products are counted.
    """
    firsts = [each.rows * each.inner for each in matmuls if each.split == "columns"]
    if not lasts or not firsts:
        return float(sum(each.rows * each.inner for each in matmuls))
    attended = sum(attention.count for attention in part.work.attentions)
    activated = sum(each.rows * each.inner for each in lasts[attended:])
    return len(lasts) * min(firsts) + activated / tp


def _wide_residual(part: Part, compute_bytes: int) -> float:
    """Return the bytes per sample that one graph of all blocks saves in addition, where the residual is in fp32.

    A graph of one block saves the result of its attention layer in the compute dtype and recomputes the sum with its
    input. In a graph of all blocks the partitioner does not recompute chains of sums, and saves the fp32 sum instead.
    """
    elements = [each.rows * each.inner for each in part.work.matmuls if each.split == "columns"]
    if not elements:
        return 0.0
    return max(0.0, part.output.at(1) - compute_bytes * min(elements))


def add_up(shares: Sequence[Share], name: str) -> float:
    """Sum a field of shares, each times its number of instances."""
    value = operator.attrgetter(name)
    return float(sum([value(share) * share.number for share in shares]))  # a list: half the time of a generator
