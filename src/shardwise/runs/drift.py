"""Replica drift: finds replicas of a tensor that differ between ranks, and the cause, from their fingerprints.

Ranks compute a fingerprint of the bits of every replicated tensor. Under `shardwise train` they exchange the
fingerprints; under `shardwise launch` the recorder writes them to files that the launcher reads. In both cases
`find_drift` compares them, chooses the cause that fits the evidence, and returns one report. Invariant: equal bits have
equal fingerprints, so equal replicas are never reported.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Literal

from shardwise.runs.console import counted, name_ranks
from shardwise.spec import NonNegativeInt, Spec, option

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    Replica = tuple[str, tuple[int, ...]]

CHECK_EVERY = 1000
"""Default number of steps between checks. A check reads the weights once, so it costs less than an optimizer step."""
_NO_RANKS: frozenset[int] = frozenset()


class ReplicaSpec(Spec, frozen=True, kw_only=True):
    """Interval at which replicated weights are compared across ranks, and the action if they differ."""

    every: Annotated[NonNegativeInt, option("--check-replicas", metavar="STEPS")] = 0
    """Compare replicated weights across ranks every STEPS steps; 0 disables the comparison."""
    on_drift: Literal["report", "stop"] = "report"
    """If replicas differ, report it and continue, or stop all ranks."""

    @property
    def stops(self) -> bool:
        """Whether replica drift stops the ranks."""
        return self.on_drift == "stop"


class Cause(Enum):
    """The cause of replica drift, as text with the fix."""

    START = (
        "unequal start: the replicas differed before the first update: initialize or load the weights identically on"
        " all ranks, and do not write them on single ranks afterwards"
    )
    BATCHES = (
        "unequal batches: each rank updated the tensor with the gradient of its own samples, which was not reduced over"
        " the ranks: check for a parameter outside of DDP, or a backward under no_sync before the optimizer step"
    )
    BUFFER = (
        "unequal batches: each rank computes this buffer from its own samples: reduce it over the ranks in forward,"
        " or set broadcast_buffers"
    )
    OPERATION = (
        "a non-deterministic operation: repeating the step on the same rank gave a different gradient: pass"
        " --deterministic to get an error that names the operation"
    )
    UPDATE = (
        "a non-deterministic operation in the optimizer: equal values and equal gradients gave unequal updates:"
        " pass --deterministic to get an error that names the operation if it is part of torch"
    )
    SETTINGS = (
        "unequal optimizers: settings such as the learning rate differ between ranks: set the same values on all ranks"
    )
    OUTSIDE = "not the training step: other code wrote the tensor on some ranks, or a device computes wrong results"
    UNKNOWN = "unknown, because it occurred between two checks: pass --check-replicas 1 to check every step"


@dataclass(frozen=True, kw_only=True)
class Copies:
    """The replicas of one tensor."""

    name: str
    prints: Mapping[int, int]
    """The fingerprint of the replica of each rank."""

    @property
    def are_equal(self) -> bool:
        """Whether all replicas have the same bits."""
        return len(set(self.prints.values())) < 2

    @property
    def odd_ranks(self) -> tuple[int, ...]:
        """The ranks that differ from the majority; without a majority, from the lowest rank."""
        counts = Counter(self.prints.values())
        expected, count = counts.most_common(1)[0]
        if 2 * count <= len(self.prints):
            expected = self.prints[min(self.prints)]
        return tuple(rank for rank, value in sorted(self.prints.items()) if value != expected)


@dataclass(frozen=True, kw_only=True)
class DriftEvidence:
    """Facts about the step after which the replicas of a tensor differed."""

    at_start: bool = False
    """Whether the check ran before the first optimizer step."""
    gradients_equal: bool | None = None
    """Whether the reduced gradients of the ranks are equal; None for a buffer, or if they were not compared."""
    same_samples: bool = False
    """Whether the ranks whose replicas differ read the same samples, as tensor-parallel ranks do."""
    settings_equal: bool = True
    """Whether the optimizers have the same learning rate and other settings."""
    unsteady_gradient: frozenset[int] = _NO_RANKS
    """Ranks on which repeating the step gave a different gradient."""
    unsteady_update: frozenset[int] = _NO_RANKS
    """Ranks on which the optimizer step gave a different value for equal inputs."""
    is_step_cleared: bool = False
    """Whether the step is ruled out as the cause if no field above shows a cause: the step was repeated, or
    the replicas were equal after the previous step and differed at the start of this one."""


def decide(evidence: DriftEvidence) -> Cause:
    """Return the first cause that matches the evidence."""
    has_gradient = evidence.gradients_equal is not None
    gradients_differ = evidence.gradients_equal is False
    rules = (
        (evidence.at_start, Cause.START),
        (not evidence.settings_equal, Cause.SETTINGS),
        (gradients_differ and not evidence.same_samples, Cause.BATCHES),
        (gradients_differ and bool(evidence.unsteady_gradient), Cause.OPERATION),
        (gradients_differ, Cause.OUTSIDE),
        (bool(evidence.unsteady_update), Cause.UPDATE if has_gradient else Cause.OPERATION),
        (not has_gradient and not evidence.same_samples, Cause.BUFFER),
        (evidence.is_step_cleared, Cause.OUTSIDE),
        (True, Cause.UNKNOWN),
    )
    return next(cause for matches, cause in rules if matches)


@dataclass(frozen=True, kw_only=True)
class Drift:
    """The result of a check that found a difference: the first tensor, in the order of the model, that differs."""

    step: int
    """Number of updates before the check."""
    last_equal: int | None
    """Number of updates before the last check that found all replicas equal; None if no check did."""
    copies: Copies
    others: int
    """Number of other tensors that differ."""
    cause: Cause

    def __str__(self) -> str:
        odd = self.copies.odd_ranks
        expected = [rank for rank in self.copies.prints if rank not in odd]
        when = f"after step {self.step}"
        if self.cause is Cause.START:
            when = "before the first step"
        elif self.last_equal is not None:
            when += f" (equal after step {self.last_equal})"
        more = f", and {counted(self.others, 'more tensor')}" if self.others else ""
        return (
            f"replicas differ {when}: {self.copies.name} of {name_ranks(odd)} differs from that of"
            f" {name_ranks(expected)}{more}; {self.cause.value}"
        )


def find_drift(
    step: int,
    last_equal: int | None,
    prints: Mapping[int, Mapping[Replica, int]],
    investigate: Callable[[Copies], DriftEvidence],
) -> Drift | None:
    """Return the difference between replicas after `step` with its cause; None if all replicas are equal.

    `prints` maps a rank to the fingerprint of each of its tensors, by the tensor's name and the ranks that replicate
    it; ranks without fingerprints are not compared. `investigate` gathers evidence about the first tensor that differs.
    """
    unequal = [copies for copies in copies_of(prints) if not copies.are_equal]
    if not unequal:
        return None
    first = unequal[0]
    others = len({copies.name for copies in unequal}) - 1
    return Drift(step=step, last_equal=last_equal, copies=first, others=others, cause=decide(investigate(first)))


def copies_of(prints: Mapping[int, Mapping[Replica, int]]) -> Iterator[Copies]:
    """Yield the replicas of each tensor, in model order, on the ranks that have fingerprints."""
    for rank, tensors in prints.items():
        for name, ranks in tensors:
            members = [member for member in ranks if (name, ranks) in prints.get(member, {})]
            if rank == members[0]:
                yield Copies(name=name, prints={member: prints[member][name, ranks] for member in members})
