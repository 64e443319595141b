"""Replica drift of any script: fingerprints that ranks wrote around their optimizer steps, compared from outside."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwise.runs import EventLog, Tail
from shardwise.runs.drift import Copies, Drift, Evidence, decide, first_unequal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from shardwise.runs import RunDirectory

_LOOK_S = 0.5
_MOST_OPEN = 64
"""Checks that wait for ranks which are behind, or have ended; older ones are given up."""

Check = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ReplicaLimits:
    """How often replicas are compared, and what follows when they differ."""

    every: int
    """Optimizer steps."""
    stop: bool = False
    """Whether drift stops the ranks."""


class ReplicaWatch:
    """An observer of the launcher: compares the ranks of this machine, and gives one verdict."""

    def __init__(self, run: RunDirectory, limits: ReplicaLimits, say: Callable[[str], None], node: int = 0) -> None:
        """Watch ranks that are named by `follow`; what is found is said and written to the events of this node."""
        self._run, self._limits, self._say = run, limits, say
        self._log_path = run.launcher_events(node)
        self._next_look = 0.0
        self.follow(range(0))

    def follow(self, ranks: range) -> None:
        """Watch these ranks from now on."""
        self.verdict = ""
        """Empty while replicas are equal."""
        self._unsaid = ""
        """The verdict, until the launcher has heard it: ranks that are started again are not stopped for it."""
        self._tails = {rank: Tail(self._run.replicas(rank)) for rank in ranks}
        self._tensors: dict[tuple[int, int], Check] = {}
        self._open: dict[tuple[int, int], dict[int, Check]] = {}
        self._last_equal: dict[int, int] = {}

    def tick(self) -> str:
        """Look now, if it is time to; returns the verdict if it is to stop the ranks, once, else nothing."""
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + _LOOK_S
            with contextlib.suppress(OSError):  # a full disk or a folder that was removed must not end a launch
                self._look()
        words, self._unsaid = self._unsaid, ""
        return words if self._limits.stop else ""

    def places(self) -> str:
        """There is nothing to say of where ranks were."""
        return ""

    def _look(self) -> None:
        for rank, tail in self._tails.items():
            for event in tail.events():
                key = event["optimizer"], event.get("step", 0)
                if event["kind"] == "tensors":  # once by process: what an earlier one wrote counts no more
                    self.verdict = "" if (rank, key[0]) in self._tensors else self.verdict
                    self._tensors[rank, key[0]] = event
                    for checks in self._open.values():
                        checks.pop(rank, None)
                else:
                    self._open.setdefault(key, {})[rank] = event
        for key in sorted(self._open):
            if len(self._open[key]) == len(self._tails):
                self._compare(key, self._open.pop(key))
        while len(self._open) > _MOST_OPEN:
            del self._open[min(self._open, key=lambda key: key[1])]

    def _compare(self, key: tuple[int, int], checks: Mapping[int, Check]) -> None:
        number, step = key
        if self.verdict:
            return
        tensors = {rank: self._tensors[rank, number] for rank in checks}
        found = judge(step, checks, tensors, self._last_equal.get(number))
        if found is None:
            self._last_equal[number] = step
            return
        self.verdict = self._unsaid = str(found)
        self._say(f"shardwise: {self.verdict}")
        log = EventLog(self._log_path)
        log.write("verdict", text=self.verdict)
        log.close()


def judge(step: int, checks: Mapping[int, Check], tensors: Mapping[int, Check], last_equal: int | None) -> Drift | None:
    """Return what the checks of one step by rank say, with the tensors that each rank has; None where all are equal."""
    if step == 1 and (start := first_unequal(list(_copies(checks, tensors, "before")))) is not None:
        evidence = Evidence(at_start=True)
        return Drift(step=0, last_equal=None, copies=start[0], others=start[1], cause=decide(evidence))
    found = first_unequal(list(_copies(checks, tensors, "after")))
    if found is None:
        return None
    copies, others = found

    def equal(what: str) -> bool:
        return len({str(checks[rank][what]) for rank in copies.prints}) == 1

    evidence = Evidence(
        gradients_equal=equal("gradients"),
        settings_equal=equal("settings"),
        unsteady_update=frozenset(copies.odd_ranks if equal("before") and equal("gradients") else ()),
        is_step_cleared=last_equal == step - 1 and not equal("before"),
    )
    return Drift(step=step, last_equal=last_equal, copies=copies, others=others, cause=decide(evidence))


def _copies(checks: Mapping[int, Check], tensors: Mapping[int, Check], what: str) -> Iterator[Copies]:
    """Yield every tensor on the ranks of this machine that hold it alike."""
    values = {rank: dict(zip(_names(tensors[rank]), checks[rank][what], strict=True)) for rank in checks}
    for rank, here in values.items():
        for name, ranks in here:
            members = [each for each in ranks if each in values and (name, ranks) in values[each]]
            if rank == members[0]:
                yield Copies(name=name, prints={each: values[each][name, ranks] for each in members})


def _names(tensors: Check) -> list[tuple[str, Sequence[int]]]:
    groups = [tuple(ranks) for ranks in tensors["groups"]]
    return [(name, groups[index]) for name, index in tensors["tensors"]]
