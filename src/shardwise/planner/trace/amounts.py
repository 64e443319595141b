"""From two traced passes to a part's footprint and operators, as functions of the micro-batch.

The idea: two passes with different numbers of samples determine the fixed and per-sample bytes of every allocation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from shardwise.planner.model.shape import Amount, Footprint, Moment, Work
from shardwise.planner.trace.rehearsal import SAMPLES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.planner.trace.ledger import LedgerEntry
    from shardwise.planner.trace.rehearsal import TracedPass


@dataclass(frozen=True)
class State:
    """Allocations of a segment at one time."""

    resident: Amount
    gradients: float
    backward: bool
    on_gpu: bool = False


def states_of(passes: Sequence[TracedPass], segment: int) -> list[State]:
    """Return the states of a segment, without earlier allocations, as functions of the number of samples."""
    few, many = (_entries_of(single, segment) for single in passes)
    made_before = next((entry.gradients for entry in many if entry.backward), 0)
    if len(few) == len(many):
        resident = [_amount(_above(one, few[0]), _above(two, many[0])) for one, two in zip(few, many, strict=True)]
    else:  # the batches took different paths through the model: assume that all allocations grow with the batch
        resident = [_per_sample(_above(entry, many[0])) for entry in many]
    states = []
    for amount, entry in zip(resident, many, strict=True):
        states.append(State(amount, entry.gradients - made_before, entry.backward, entry.on_gpu))
    return states


def _entries_of(single: TracedPass, segment: int) -> list[LedgerEntry]:
    return [entry for entry in single.entries if entry.segment == segment]


def _above(entry: LedgerEntry, base: LedgerEntry) -> tuple[float, float, float]:
    return tuple(now - before for now, before in zip(entry.resident, base.resident, strict=True))  # type: ignore[return-value]


def _amount(few: Sequence[float], many: Sequence[float]) -> Amount:
    """Solve bytes = fixed + samples x slope for each kind of activation."""
    first, second = SAMPLES
    fixed, slopes = 0.0, []
    for less, more in zip(few, many, strict=True):
        slope = (more - less) / (second - first)
        slopes.append(slope)
        fixed += less - slope * first
    return Amount(fixed=fixed, whole=slopes[0], stream=slopes[1], split=slopes[2])


def _per_sample(many: Sequence[float]) -> Amount:
    whole, stream, split = (amount / SAMPLES[1] for amount in many)
    return Amount(whole=whole, stream=stream, split=split)


def footprint_of(states: Sequence[State]) -> Footprint:
    """Return the footprint of a part, from its states in order."""
    forward: dict[bool, list[Amount]] = {False: [], True: []}
    backward: dict[bool, list[State]] = {False: [], True: []}
    for state in states:
        if state.backward:
            backward[state.on_gpu].append(state)
        else:
            forward[state.on_gpu].append(state.resident)
    moments = _highest(backward[False])
    if backward[True]:
        moments += tuple(replace(moment, on_gpu=True) for moment in _highest(backward[True]))
    return Footprint(
        saved=forward[False][-1],
        forward=max(forward[False], key=_size),
        forward_on_gpu=max([*forward[False], *forward[True]], key=_size),
        backward=moments,
    )


def _size(amount: Amount) -> float:
    return amount.at(max(SAMPLES))


def _highest(states: Sequence[State]) -> tuple[Moment, ...]:
    """Return the states that no other exceeds both in allocated bytes and in gradients."""
    kept: list[Moment] = []
    first = next((index for index, state in enumerate(states) if state.gradients), 0)
    if first:
        # The model's own backward begins between the loss and the first gradient; a single element marks it.
        highest = max(range(first), key=lambda index: _size(states[index].resident))
        between = min(states[highest:first], key=lambda state: _size(state.resident))
        states = [*states, State(between.resident, 1.0, backward=True)]
    for state in sorted(states, key=lambda state: (-_size(state.resident), -state.gradients)):
        if not kept or state.gradients > kept[-1].gradients:
            kept.append(Moment(resident=state.resident, gradients=state.gradients))
    return tuple(kept) or (Moment(resident=Amount()),)


def work_of(passes: Sequence[TracedPass], segment: int) -> Work:
    """Return the operators of a segment."""
    few, many = (single.tallies[segment] for single in passes)
    return Work(
        matmuls=_merged(few.matmuls),
        attentions=_merged(few.attentions),
        moved=_amount(few.moved, many.moved),
        moved_backward=_amount(few.moved_backward, many.moved_backward),
        kernels=few.kernels,
        kernels_backward=few.kernels_backward,
    )


def _merged(items: Sequence[Any]) -> tuple[Any, ...]:
    counts: dict[Any, int] = {}
    for item in items:
        key = replace(item, count=1)
        counts[key] = counts.get(key, 0) + item.count
    return tuple(replace(item, count=count) for item, count in counts.items())
