"""Peak memory of one rank under a plan, over forward, backward and update.

The idea: a peak can occur only at a few moments (the forward of a part, some moments of its backward, the update). The
allocations of each moment are summed by kind, and the largest sum is the peak. The model description gives activations
and the moments of backward for each part (`model/`, in closed form or traced); the plan determines shards, gathered
units, gradients and buckets. The invariant: the values of `at_peak` sum to `peak`. References: Rajbhandari et al. 2020
(ZeRO), Korthikanti et al. 2022 (activations), torch's FSDP2 for the order of gathers. tests/unit/planner compares the
prediction with allocated tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.planner.cost.stages import RankState, add_up, stages_of_plan
from shardwise.planner.model.shape import TRACED
from shardwise.units import GIB

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardwise.planner.cost.stages import Share, StageParts
    from shardwise.planner.model.shape import ModelShape, Moment, Part, Weight
    from shardwise.plans.plan import Plan

WORKSPACE = 2 * (32 << 20)
"""cuBLAS workspaces in torch's allocator on Hopper, one for the forward thread and one for the backward thread;
measured with torch 2.11 on an H200, smaller on older GPUs."""
CONTEXT = 0.55 * GIB
"""CUDA context, kernels and library handles of one process, outside of the allocator: assumed, not measured."""
PER_GROUP = 0.2 * GIB
"""NCCL's channels and buffers for one communicator of several ranks: assumed, not measured."""
FRAGMENTED = 1.06
"""Ratio of reserved to allocated memory at the peak, from rounding and fragmentation: assumed. 1.15 was observed once,
for 8.8 billion parameters sharded over 64 ranks (52.9 GiB allocated, 60.9 reserved on an H200)."""
BUCKET = 25 << 20
"""Bytes that ZeRO-1 gathers, and Muon exchanges, in one collective."""
NS_BYTES = 2
"""Bytes of an element in the Newton-Schulz iterations of Muon, which are in bf16."""


@dataclass(frozen=True, kw_only=True)
class OptimizerShape:
    """State of an optimizer per parameter element."""

    name: str = "adamw"
    states: float = 2.0
    """State elements, in the optimizer's dtype."""
    temporaries: float = 0.0
    """Temporary elements during the update; a fused kernel has none."""
    matrices: frozenset[str] = frozenset()
    """Names of the weights that Muon orthogonalizes; they have one state, the momentum, instead of `states`."""
    ns_steps: int = 0
    """Newton-Schulz iterations of these matrices."""

    def states_of(self, weight: Weight) -> float:
        """Return the state elements per element of a weight."""
        return 1.0 if weight.name in self.matrices else self.states


ADAMW = OptimizerShape()
SGD = OptimizerShape(name="sgd", states=0.0)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory of one rank in bytes; in a pipeline, of the rank whose stages need the most."""

    peak: float
    """Peak of allocated memory."""
    reserved: float
    """Memory that the allocator reserves on the device at this peak."""
    outside: float
    """Memory of context, libraries and communicators, which bypass the allocator."""
    phase: str
    """When the peak occurs: "forward", "backward" or "update"."""
    at_peak: Mapping[str, float]
    """Allocations at the peak, by kind."""
    host: float
    """Host memory of this rank."""
    stage: int
    """Pipeline rank."""

    @property
    def total(self) -> float:
        """Device memory that the rank needs."""
        return self.reserved + self.outside


def predict_memory(
    shape: ModelShape, plan: Plan, *, optimizer: OptimizerShape = ADAMW, context: float = CONTEXT
) -> Memory:
    """Return the memory of the rank that needs the most; `context` is a process's memory outside of the allocator."""
    stages: dict[int, list[StageParts]] = {}
    for stage in stages_of_plan(shape, plan):
        stages.setdefault(stage.rank, []).append(stage)
    distinct: dict[tuple[object, ...], list[StageParts]] = {}
    for rank in sorted(stages, reverse=True):
        # Of ranks with equal stages, keep the first, which has the most micro-batches in flight.
        distinct[tuple(stage.likeness for stage in stages[rank])] = stages[rank]
    memories = [_rank_memory(RankState(shape, plan, optimizer, own), context) for own in distinct.values()]
    return max(memories, key=lambda memory: memory.peak)


def _rank_memory(own: RankState, context: float) -> Memory:
    on_gpu = context > 0
    phase, at_peak = max(_moments(own, on_gpu=on_gpu), key=lambda moment: sum(moment[1].values()))
    at_peak["workspace"] = float(WORKSPACE) if on_gpu else 0.0
    at_peak = {name: amount for name, amount in at_peak.items() if amount > 0}
    peak = sum(at_peak.values())
    groups = sum(degree > 1 for degree in own.plan.layout.degrees)
    return Memory(
        peak=peak,
        reserved=peak * FRAGMENTED,
        outside=context + (groups * PER_GROUP if on_gpu else 0.0),
        phase=phase,
        at_peak=dict(sorted(at_peak.items(), key=lambda item: -item[1])),
        host=own.host(),
        stage=own.rank,
    )


def _moments(own: RankState, *, on_gpu: bool) -> list[tuple[str, dict[str, float]]]:
    """Return the candidates for peak memory: the phase of each, and its allocated bytes by kind."""
    rest = own.at_rest(on_gpu=on_gpu)
    found = [_update(own, rest)]
    if own.sharded:
        found.append(("backward", _reduced_root(own, rest)))
    for index, share in enumerate(own.shares):
        below = own.kept(index)
        before = below + own.saved[index] * (share.number - 1)
        found.append(("forward", _forward(own, rest, index, before, on_gpu=on_gpu)))
        found += _backward(own, rest, index, below, on_gpu=on_gpu)
    return found


def _forward(own: RankState, rest: Mapping[str, float], index: int, below: float, *, on_gpu: bool) -> dict[str, float]:
    share = own.shares[index]
    footprint = share.part.footprint(own.plan.recompute)
    now = dict(rest)
    _add(now, "gradients", _accumulated(own))
    now["activations"] = below
    _add(now, _activation_name(share.part), own.amount(footprint.forward_on_gpu if on_gpu else footprint.forward))
    if own.plan.compile == "none":  # autocast keeps its copies until forward ends
        now["casts"] = _casts(own, own.shares[:index], share, share.number)
    else:
        now["casts"] = _casts_of_backward(own, index, share.number)
    if own.sharded:
        now["gathered"] = _gathered_forward(own, index)
    return now


def _accumulated(own: RankState) -> float:
    """Return the bytes of the gradients of earlier micro-batches, without those in DDP's buckets."""
    if own.plan.accumulation == 1 or (own.uses_buckets and own.plan.gradient_sync == "every"):
        return 0.0
    if not own.sharded:
        return own.gradient_bytes * own.total("trained")
    if own.plan.gradient_sync == "last":
        return own.reduce_bytes * own.total("trained")
    return 0.0 if own.sheds_gradients else own.reduce_bytes * own.total("owned_trained")


def _casts(own: RankState, before: Sequence[Share], share: Share, count: int) -> float:
    """Return the bytes of autocast's copies of fp32 weights in the compute dtype, which backward needs."""
    if own.sharded or own.compute_bytes == own.parameter_bytes:
        return 0.0
    return own.compute_bytes * (add_up(before, "cast") + count * share.cast)


def _gathered_forward(own: RankState, index: int) -> float:
    """Return the bytes of gathered parameters in a part's forward.

    They are the root, the block twice (all-gather buffer and its copy), and the block before it, which is not yet
    freed. ZeRO-2 keeps all blocks that were gathered so far.
    """
    share = own.shares[index]
    blocks = [done for done in own.shares[:index] if done.part.kind == "block"]
    came = blocks[-1].unit if blocks else own.root
    if share.part.kind != "block":
        kept = add_up(blocks, "unit") if own.plan.zero == 2 else 0.0
        return own.root + kept + came
    if share.number > 1:
        came = share.unit
    kept = share.unit if own.plan.zero == 3 else add_up(blocks, "unit") + share.unit * share.number
    return own.root + kept + share.unit + came


def _backward(
    own: RankState, rest: Mapping[str, float], index: int, below: float, *, on_gpu: bool
) -> list[tuple[str, dict[str, float]]]:
    share = own.shares[index]
    found = []
    moments = [one for one in share.part.footprint(own.plan.recompute).backward if on_gpu or not one.on_gpu]
    # Of equal blocks, the last one runs with the most saved activations, the first one with the most gradients. The
    # blocks next to these two have a neighbour on either side, whose gathers and reductions are in flight.
    for position in {share.number, max(1, share.number - 1), min(2, share.number), 1}:
        at_position = {
            **rest,
            "activations": below + own.saved[index] * (position - 1),
            "casts": _casts_of_backward(own, index, position),
        }
        sharded = _Sharded(own, index, position) if own.sharded else None
        for moment in moments:
            now = dict(at_position)
            _add(now, _activation_name(share.part), own.amount(moment.resident))
            if sharded is not None:
                sharded.add(now, moment)
            elif own.uses_buckets:
                now["gradients"] += _outside_buckets(own, index, position)
            else:
                now["gradients"] = _plain_gradients(own, index, position, moment)
            # The traced backward of the embedding includes it already.
            if share.part.kind == "block" or (share.part.kind == "first" and own.shape.source != TRACED):
                now["tied gradient"] = own.tied * (own.compute_bytes if own.sharded else own.parameter_bytes)
            found.append(("backward", now))
    return found


def _casts_of_backward(own: RankState, index: int, position: int) -> float:
    """Return the bytes of the copies that backward needs of the first `position` instances of a part, and before it."""
    share, recompute = own.shares[index], own.plan.recompute
    kept = [before for before in own.shares[:index] if before.part.policy(recompute) == "none"]  # others cast again
    return _casts(own, kept, share, position if share.part.policy(recompute) == "none" else 1)


def _done(own: RankState, index: int, position: int, name: str, *, blocks: bool = True, root: bool = True) -> float:
    """Sum a field of the shares over the parts whose backward pass has ended."""
    share = own.shares[index]
    after = [done for done in own.shares[index + 1 :] if (blocks if done.part.kind == "block" else root)]
    mine = (share.number - position) * float(getattr(share, name)) if blocks else 0.0
    return add_up(after, name) + mine


def _plain_gradients(own: RankState, index: int, position: int, moment: Moment) -> float:
    if own.plan.accumulation > 1:
        return own.gradient_bytes * own.total("trained")
    return own.parameter_bytes * (_done(own, index, position, "trained") + _fresh(own, index, moment))


def _outside_buckets(own: RankState, index: int, position: int) -> float:
    """Return the bytes of accumulated gradients that are not yet in DDP's buckets in the last micro-batch."""
    if own.plan.accumulation == 1 or own.plan.gradient_sync == "every":
        return 0.0
    return own.parameter_bytes * (add_up(own.shares[:index], "trained") + position * own.shares[index].trained)


def _fresh(own: RankState, index: int, moment: Moment) -> float:
    """Return the elements of gradients that the current part has computed on one rank."""
    share = own.shares[index]
    return moment.gradients * share.whole / max(1, share.part.numel)


class _Sharded:
    """Gathered units, gradients before and after the reduce-scatter, and its input buffer, in backward of one instance.

    Its moments differ in the gradients that the part has computed, so the rest is computed once for all of them.
    """

    def __init__(self, own: RankState, index: int, position: int) -> None:
        self._own, self._index = own, index
        self._stays_whole = own.plan.accumulation > 1 and own.plan.gradient_sync == "last"
        if self._stays_whole:
            self._gradients = own.reduce_bytes * own.total("trained")
        else:
            shards = 0.0 if own.sheds_gradients else _done(own, index, position, "owned_trained", root=False)
            self._gradients = own.reduce_bytes * shards
            self._root_done = _done(own, index, position, "trained", blocks=False)
        self._gathered = _gathered_backward(own, index, position)
        self._reduced = own.reduce_bytes * _sent_last(own, index, position)

    def add(self, now: dict[str, float], moment: Moment) -> None:
        """Add the bytes at one moment to those of `now`."""
        own, share = self._own, self._own.shares[self._index]
        now["gradients"] = self._gradients
        if not self._stays_whole:
            now["gradients on their way"] = own.compute_bytes * (self._root_done + _fresh(own, self._index, moment))
        if own.plan.zero != 2 and share.part.kind == "last" and not moment.gradients:
            now["gathered"] = own.root if own.keeps_root else 0.0  # backward of the loss: the model's has not begun
        else:
            now["gathered"] = self._gathered
        now["reduce buffer"] = self._reduced


def _gathered_backward(own: RankState, index: int, position: int) -> float:
    """Return the bytes of gathered parameters in a part's backward."""
    share = own.shares[index]
    unit = share.unit if share.part.kind == "block" else 0.0
    if own.plan.zero == 2:
        below = add_up([block for block in own.shares[:index] if block.part.kind == "block"], "unit")
        return own.root + below + unit * position
    following = _gathered_next(own, index, position)
    if share.part.kind == "last":
        # The all-gather buffer and its copy, unless the root stayed gathered; then the prefetch of the last block.
        return own.root + (following if own.keeps_root else max(own.root, following))
    return own.root + unit + following


def _reduced_root(own: RankState, rest: Mapping[str, float]) -> dict[str, float]:
    """Return the bytes at the end of backward, when FSDP copies the gradients of the root to reduce them."""
    now = dict(rest)
    root = [share for share in own.shares if share.part.kind != "block"]
    if own.plan.accumulation > 1 and own.plan.gradient_sync == "last":
        now["gradients"] = own.reduce_bytes * (add_up(root, "trained") + _owned_by_blocks(own))
    else:
        now["gradients"] = own.reduce_bytes * _owned_by_blocks(own)
        now["gradients on their way"] = own.compute_bytes * add_up(root, "trained")
    now["reduce buffer"] = own.reduce_bytes * add_up(root, "unit_trained")
    return now


def _owned_by_blocks(own: RankState) -> float:
    """Return the elements of this rank's shards of the blocks' gradients, 0 if they are on the host."""
    blocks = [share for share in own.shares if share.part.kind == "block"]
    return 0.0 if own.sheds_gradients else add_up(blocks, "owned_trained")


def _gathered_next(own: RankState, index: int, position: int) -> float:
    """Return the bytes of the block that backward reaches next, which is prefetched."""
    share = own.shares[index]
    if share.part.kind == "block" and position > 1:
        return share.unit
    below = [block for block in own.shares[:index] if block.part.kind == "block"]
    return below[-1].unit if below else 0.0


def _sent_last(own: RankState, index: int, position: int) -> float:
    """Return the elements of the block after this part, whose reduce-scatter may still be in flight."""
    share = own.shares[index]
    if share.part.kind == "block" and position < share.number:
        return share.unit_trained
    return next((block.unit_trained for block in own.shares[index + 1 :] if block.part.kind == "block"), 0.0)


def _update(own: RankState, rest: Mapping[str, float]) -> tuple[str, dict[str, float]]:
    now = dict(rest)
    if not own.uses_buckets and not own.sheds_gradients:
        if own.sharded:
            now["gradients"] = own.parameter_bytes * own.total("owned_trained")
        else:
            now["gradients"] = own.gradient_bytes * own.total("trained")
    owned = own.total("owned_trained" if own.plan.zero else "trained")
    now["temporaries"] = own.parameter_bytes * own.optimizer.temporaries * owned + _orthogonalization(own)
    if own.plan.zero == 1:
        now["gather buffers"] = _gather_buffers(own)
    return "update", now


def _orthogonalization(own: RankState) -> float:
    """Return the bytes of Muon's largest update: four copies of the matrix, two of its Gram matrix, four buffers."""
    largest = copies = 0
    for share in own.shares:
        for weight in share.part.weights:
            if weight.name in own.optimizer.matrices:
                short = min(weight.rows, weight.numel // weight.rows)
                largest = max(largest, NS_BYTES * weight.numel)
                copies = max(copies, NS_BYTES * (4 * weight.numel + 2 * short**2))
    shard = own.plan.layout.folded.shard
    if not own.plan.zero or shard == 1 or not largest:
        return float(copies)
    # The shards of a batch, sent, received and gathered, and its results.
    return copies + 4 * max(largest, min(float(BUCKET), NS_BYTES * own.total("trained") / shard))


def _gather_buffers(own: RankState) -> float:
    """Return the bytes of ZeRO-1's bucketed all-gather: this rank's rows twice, all ranks' rows, a reordered weight."""
    weights = [weight for share in own.shares for weight in share.part.weights]
    largest = own.parameter_bytes * max((weight.numel for weight in weights if weight.trained), default=0)
    bucket = max(largest, min(float(BUCKET), own.parameter_bytes * own.total("trained")))
    return bucket * (1 + 2 / own.plan.layout.folded.shard) + largest


def _add(now: dict[str, float], name: str, amount: float) -> None:
    now[name] = now.get(name, 0.0) + amount


def _activation_name(part: Part) -> str:
    return "logits and loss" if part.kind == "last" else "activations"
