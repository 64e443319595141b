"""Replica drift: which copies of a tensor differ, and why; pure, from fingerprints that ranks have taken.

Ranks fingerprint the bits of every tensor that they should hold alike: under `shardwise train` they exchange the
fingerprints themselves, under `shardwise launch` the recorder writes them down and the launcher reads them. Either way
`find_drift` compares, chooses the cause that the evidence leaves, and returns the one report. The invariant: equal
bits have equal fingerprints, so sound replicas are never reported.
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
"""Steps between checks, by default. One check reads the weights once, less than an update does."""
_NOBODY: frozenset[int] = frozenset()


class ReplicaSpec(Spec, frozen=True, kw_only=True):
    """How often weights that should be equal over ranks are compared, and what follows when they differ."""

    every: Annotated[NonNegativeInt, option("--check-replicas", metavar="STEPS")] = 0
    """Compare weights that should be equal over ranks every so many steps; 0 does not."""
    on_drift: Literal["report", "stop"] = "report"
    """After a difference: continue, or stop all ranks."""

    @property
    def stops(self) -> bool:
        """Whether a difference stops the ranks."""
        return self.on_drift == "stop"


class Cause(Enum):
    """Why copies that should be equal are not, as text, with what to do."""

    START = (
        "unequal start: they differed before the first update: make or load the weights alike on all ranks, after which"
        " nothing may write them on some only"
    )
    BATCHES = (
        "unequal batches: each rank moved it by a gradient of its own samples, which nobody summed over the ranks: look"
        " for a parameter outside of DDP, or a backward under no_sync before the optimizer"
    )
    BUFFER = (
        "unequal batches: it is a buffer that each rank makes from its own samples: sum it over the ranks in forward,"
        " or set broadcast_buffers"
    )
    OPERATION = (
        "a non-deterministic operation: the same step on the same rank gave another gradient: --deterministic refuses"
        " it by name"
    )
    UPDATE = (
        "a non-deterministic operation in the optimizer: equal values and equal gradients became unequal values:"
        " --deterministic refuses it by name, if it is torch's"
    )
    SETTINGS = "unequal optimizers: their settings differ, such as the learning rate: set them alike on all ranks"
    OUTSIDE = "not the step: something else has written it on some ranks, or a device computes wrongly"
    UNKNOWN = "it came between two checks: --check-replicas 1 sees the step itself"


@dataclass(frozen=True, kw_only=True)
class Copies:
    """One tensor on the ranks that should hold it alike."""

    name: str
    prints: Mapping[int, int]
    """Rank -> fingerprint."""

    @property
    def are_equal(self) -> bool:
        """Whether all have the same bits."""
        return len(set(self.prints.values())) < 2

    @property
    def odd_ranks(self) -> tuple[int, ...]:
        """The ranks that differ from most; where no value has a majority, from the lowest rank."""
        counts = Counter(self.prints.values())
        usual, most = counts.most_common(1)[0]
        if 2 * most <= len(self.prints):
            usual = self.prints[min(self.prints)]
        return tuple(rank for rank, value in sorted(self.prints.items()) if value != usual)


@dataclass(frozen=True, kw_only=True)
class DriftEvidence:
    """What is known of the step at which copies of a tensor were seen to differ."""

    at_start: bool = False
    """No update was made yet."""
    gradients_equal: bool | None = None
    """Summed gradients of the step, over the copies; None for a buffer, or where nobody looked."""
    same_samples: bool = False
    """Whether ranks differ that read the same samples, as those do that share a matrix."""
    settings_equal: bool = True
    """Whether optimizers have the same learning rate and so on."""
    unsteady_gradient: frozenset[int] = _NOBODY
    """Ranks on which the same step gave another gradient."""
    unsteady_update: frozenset[int] = _NOBODY
    """Ranks on which the same gradient gave another value."""
    is_step_cleared: bool = False
    """Whether it is known to be none of the step's doing, if nothing above is: the step was run again, or the copies
    were equal after the one before and differed when it began."""


def decide(evidence: DriftEvidence) -> Cause:
    """Return the cause that the evidence leaves: the first that fits."""
    has_gradient, gradients_differ = evidence.gradients_equal is not None, evidence.gradients_equal is False
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
    return next(cause for fits, cause in rules if fits)


@dataclass(frozen=True, kw_only=True)
class Drift:
    """What one check found: the first tensor in the order of the model whose copies differ."""

    step: int
    """Updates that were made when it was seen."""
    last_equal: int | None
    """Updates after which all were equal; None if that was never seen."""
    copies: Copies
    others: int
    """How many more tensors differ."""
    cause: Cause

    def __str__(self) -> str:
        odd = self.copies.odd_ranks
        usual = [rank for rank in self.copies.prints if rank not in odd]
        when = "before the first step" if self.cause is Cause.START else f"after step {self.step}"
        since = "" if self.last_equal is None or self.cause is Cause.START else f" (equal after step {self.last_equal})"
        verb = "holds" if len(odd) == 1 else "hold"
        more = f", and {counted(self.others, 'more tensor')}" if self.others else ""
        return (
            f"replicas differ {when}{since}: {name_ranks(odd)} {verb} another {self.copies.name} than"
            f" {name_ranks(usual)}{more}; {self.cause.value}"
        )


def find_drift(
    step: int,
    last_equal: int | None,
    prints: Mapping[int, Mapping[Replica, int]],
    investigate: Callable[[Copies], DriftEvidence],
) -> Drift | None:
    """Return how replicas differ after `step`, and why; None where all are equal.

    `prints` maps a rank to the fingerprint of each of its tensors, by its name and the ranks that should hold it
    alike; ranks without fingerprints are not compared. `investigate` gathers evidence on the first tensor that differs.
    """
    unequal = [copies for copies in copies_of(prints) if not copies.are_equal]
    if not unequal:
        return None
    first, others = unequal[0], len({copies.name for copies in unequal}) - 1
    return Drift(step=step, last_equal=last_equal, copies=first, others=others, cause=decide(investigate(first)))


def copies_of(prints: Mapping[int, Mapping[Replica, int]]) -> Iterator[Copies]:
    """Yield every tensor once, in the order of the model, on the ranks that were fingerprinted."""
    for rank, here in prints.items():
        for name, ranks in here:
            members = [each for each in ranks if (name, ranks) in prints.get(each, {})]
            if rank == members[0]:
                yield Copies(name=name, prints={each: prints[each][name, ranks] for each in members})
