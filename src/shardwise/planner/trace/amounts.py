"""From two passes over a model to amounts: what lives and what is done, as it grows with the micro-batch."""

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
    """What is resident of a segment at one time."""

    resident: Amount
    gradients: float
    backward: bool
    on_gpu: bool = False


def states_of(passes: Sequence[TracedPass], segment: int) -> list[State]:
    """Return the states of a segment with what it found there taken off, as amounts that grow with the samples."""
    few, many = (_entries_of(single, segment) for single in passes)
    made_before = next((entry.gradients for entry in many if entry.backward), 0)
    if len(few) == len(many):
        resident = [_amount(_above(one, few[0]), _above(two, many[0])) for one, two in zip(few, many, strict=True)]
    else:  # another batch takes another path: all that lives is taken to grow with the batch
        resident = [_per_sample(_above(entry, many[0])) for entry in many]
    return [
        State(amount, entry.gradients - made_before, entry.backward, entry.on_gpu)
        for amount, entry in zip(resident, many, strict=True)
    ]


def _entries_of(single: TracedPass, segment: int) -> list[LedgerEntry]:
    return [entry for entry in single.entries if entry.segment == segment]


def _above(entry: LedgerEntry, base: LedgerEntry) -> tuple[float, float, float]:
    return tuple(now - before for now, before in zip(entry.resident, base.resident, strict=True))  # type: ignore[return-value]


def _amount(few: Sequence[float], many: Sequence[float]) -> Amount:
    """Solve bytes = fixed + samples x slope for each kind of activation."""
    first, second = SAMPLES
    slopes = [(more - less) / (second - first) for less, more in zip(few, many, strict=True)]
    fixed = sum(less - slope * first for less, slope in zip(few, slopes, strict=True))
    return Amount(fixed=fixed, whole=slopes[0], stream=slopes[1], split=slopes[2])


def _per_sample(many: Sequence[float]) -> Amount:
    whole, stream, split = (amount / SAMPLES[1] for amount in many)
    return Amount(whole=whole, stream=stream, split=split)


def footprint_of(states: Sequence[State]) -> Footprint:
    """Return the footprint of a part, from its states in order."""
    everywhere = [state for state in states if not state.on_gpu]
    forward = [state.resident for state in everywhere if not state.backward]
    with_workspace = [state.resident for state in states if state.on_gpu and not state.backward]
    return Footprint(
        saved=forward[-1],
        forward=max(forward, key=_size),
        forward_on_gpu=max([*forward, *with_workspace], key=_size),
        backward=_highest([state for state in everywhere if state.backward])
        + _on_gpu([state for state in states if state.on_gpu and state.backward]),
    )


def _size(amount: Amount) -> float:
    return amount.at(max(SAMPLES))


def _highest(states: Sequence[State]) -> tuple[Moment, ...]:
    """Keep the states that no other exceeds both in resident bytes and in gradients made."""
    kept: list[Moment] = []
    first = next((index for index, state in enumerate(states) if state.gradients), 0)
    if first:
        # Between the loss and the first gradient the model's own backward begins: one element represents that.
        highest = max(range(first), key=lambda index: _size(states[index].resident))
        between = min(states[highest:first], key=lambda state: _size(state.resident))
        states = [*states, State(between.resident, 1.0, backward=True)]
    for state in sorted(states, key=lambda state: (-_size(state.resident), -state.gradients)):
        if not kept or state.gradients > kept[-1].gradients:
            kept.append(Moment(resident=state.resident, gradients=state.gradients))
    return tuple(kept) or (Moment(resident=Amount()),)


def _on_gpu(states: Sequence[State]) -> tuple[Moment, ...]:
    if not states:
        return ()
    return tuple(replace(moment, on_gpu=True) for moment in _highest(states))


def work_of(passes: Sequence[TracedPass], segment: int) -> Work:
    """Return what a device does in a segment."""
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
