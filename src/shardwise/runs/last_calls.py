"""The last collectives of ranks that have ended, compared: which of them did not match.

gloo aborts the process that receives more bytes than its buffer holds, so the rank that fails first is not the rank
that made the wrong call. The records outlive the processes: where one rank is inside a collective that a member of its
group never issued, or issued with other arguments, that pair of calls is the cause. Collectives that C++ issues by
itself, as DDP does in backward, are not among the recorded calls; the Python stack at the abort or in the traceback
names their line, and torch's flight recorder their size if the rank still had the time to copy it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.runs.call_reader import Call, CallReader
from shardwise.runs.call_text import call_words, describe_difference, differ
from shardwise.runs.calls import MAIN_THREAD
from shardwise.runs.places import short
from shardwise.runs.rank_words import name_ranks
from shardwise.runs.stack_text import Stack, parse_fatal_stack, parse_traceback, user_frame

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardwise.runs import RunDirectory

_STACK_BYTES = 1 << 16
_MOST_CALLS = 16
"""Calls of one kind that are kept of each rank: they travel between nodes."""
_BACKWARD = "_engine_run_backward"


@dataclass(frozen=True, kw_only=True)
class LastCalls:
    """Where one rank was when it ended."""

    inside: tuple[Call, ...] = ()
    """Issued and not done, those that somebody waited for first."""
    last: tuple[Call, ...] = ()
    """The newest of each channel."""
    issued: tuple[Call, ...] = ()
    """The last collective of each group that C++ issued, as far as torch's flight recorder could be read."""
    line: str = ""
    """FILE:LINE of the user's innermost frame, from the traceback or the stack at the abort; empty if unknown."""
    in_backward: bool = False
    """That frame was inside autograd's backward."""

    def find(self, call: Call) -> Call | None:
        """Return this rank's call of the same number in the same channel."""
        same = [mine for mine in (*self.inside, *self.last) if mine.channel == call.channel]
        return next((mine for mine in same if mine.sequence == call.sequence), None)

    def has_issued(self, call: Call) -> bool:
        """Whether this rank has made that call, or a later one of its channel."""
        return any(mine.channel == call.channel and mine.sequence >= call.sequence for mine in self.last)


def read_last_calls(run: RunDirectory, rank: int, traceback: str | None) -> LastCalls | None:
    """Return what the record of a rank that has ended holds; None without a record.

    `traceback` is that of its exception, None for a rank that a fatal signal ended.
    """
    reader = CallReader(run.calls(rank))
    reader.refresh()
    if not reader.is_there:
        return None
    stack = _fatal_stack(run, rank, reader.header(MAIN_THREAD)) if traceback is None else parse_traceback(traceback)
    user = user_frame(stack)
    inside = [*reader.waits, *(call for call in reader.pending if call not in reader.waits)]
    last = sorted(reader.last.values(), key=lambda call: -call.entered)
    issued = [flight.pending for flight in reader.flights() if flight.pending is not None]
    return LastCalls(
        inside=tuple(inside[:_MOST_CALLS]),
        last=tuple(last[:_MOST_CALLS]),
        issued=tuple(issued),
        line=f"{user.file}:{user.line}" if user is not None else "",
        in_backward=any(frame.function == _BACKWARD for frame in stack),
    )


def _fatal_stack(run: RunDirectory, rank: int, thread: int) -> Stack:
    try:
        text = run.stack_samples(rank).read_bytes()[-_STACK_BYTES:].decode(errors="replace")
    except OSError:
        return ()
    return parse_fatal_stack(text, thread)


def describe_mismatch(ends: Mapping[int, LastCalls]) -> str:
    """Name the calls that did not match, with ranks and lines; empty where the records show none."""
    inside = [call for calls in ends.values() for call in calls.inside]
    for call in sorted(inside, key=lambda call: call.entered):
        found = _describe_other_arguments(ends, call) or _describe_missing(ends, call)
        if found:
            return found
    return ""


def _describe_other_arguments(ends: Mapping[int, LastCalls], call: Call) -> str:
    """Name the ranks that made the call of this number otherwise."""
    there = {rank: mine for rank, calls in ends.items() if (mine := calls.find(call)) is not None}
    return describe_difference(there) if any(differ(call, mine) for mine in there.values()) else ""


def _describe_missing(ends: Mapping[int, LastCalls], call: Call) -> str:
    """Name the members that never made this collective, and what they did instead."""
    if call.what.is_message:
        return ""
    members = [rank for rank in call.group.members if rank in ends]
    missing = [rank for rank in members if not ends[rank].has_issued(call)]
    if not missing:
        return ""
    made = [rank for rank in members if rank not in missing]
    places: dict[str, list[int]] = {}
    for rank in missing:
        places.setdefault(_place(ends[rank]), []).append(rank)
    instead = "; ".join(f"{name_ranks(ranks)} {_verb(place, ranks)}" for place, ranks in places.items())
    if len(missing) <= len(made):
        fact = f"{name_ranks(missing)} did not make {call_words(call)}, which {name_ranks(made)} made"
    else:
        fact = f"{name_ranks(made)} made {call_words(call)}, which {name_ranks(missing)} did not make"
    return f"{fact}: {instead}; every rank must make the same collectives in the same order"


def _verb(place: str, ranks: list[int]) -> str:
    return place.replace("was ", "were ", 1) if place.startswith("was ") and len(ranks) > 1 else place


def _place(calls: LastCalls) -> str:
    """Say where a rank was that did not make the call of its peers."""
    if calls.inside:
        return f"was in {call_words(calls.inside[0])}"
    newest = max(calls.last, key=lambda call: call.entered, default=None)
    since = newest.entered if newest is not None else 0.0
    issued = max(calls.issued, key=lambda call: call.entered, default=None)
    where = f" at {short(calls.line)}" if calls.line else ""
    if issued is not None and issued.entered > since:
        return f"was in {issued.what.name} ({issued.what.text}){where or f' at {short(issued.site)}'}"
    if calls.in_backward:
        return f"was in backward{where}, where gradients are reduced"
    if where:
        return f"was{where}"
    return f"had left {call_words(newest)}" if newest is not None else "had made no call"
