"""Recorded calls in words, and what differs between calls that ranks made together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.runs.calls import MEETINGS, GroupKey
from shardwise.runs.places import short
from shardwise.runs.rank_words import name_ranks

if TYPE_CHECKING:
    from shardwise.runs.call_reader import Call


def call_words(call: Call) -> str:
    """Return an operation with its number, arguments and place."""
    arguments = f" ({call.what.text})" if call.what.text else ""
    group = "" if len(call.group.members) == 0 or call.group.name in {"0", MEETINGS} else _group(call.group)
    where = f" at {short(call.site)}" if call.site else ""
    return f"{call.what.name} #{call.sequence}{arguments}{group}{where}"


def _group(group: GroupKey) -> str:
    return f" of {name_ranks(list(group.members))}"


def differ(one: Call, other: Call) -> bool:
    """Whether two calls of the same number do not fit; a send fits a receive."""
    is_message = one.what.is_message
    return one.what.match != other.what.match or (one.what.name != other.what.name and not is_message)


def describe_difference(there: dict[int, Call]) -> str:
    """Say who differs from whom, the many before the few."""
    kinds: dict[tuple[str, str], list[int]] = {}
    for rank, call in sorted(there.items()):
        kinds.setdefault((call.what.name, call.what.match), []).append(rank)
    order = sorted(kinds.values(), key=lambda ranks: -len(ranks))
    parts = [f"{name_ranks(ranks)}: {call_words(there[ranks[0]])}" for ranks in order]
    what = _aspects([there[ranks[0]] for ranks in order])
    return f"ranks differ in {what} at the same call: {'; '.join(parts)}"


def _aspects(calls: list[Call]) -> str:
    """Name what differs."""
    names = {call.what.name for call in calls}
    if len(names) > 1 and not calls[0].what.is_message:
        return "the operation"
    words = [call.what.match.split() for call in calls]
    heads = {tuple(word for word in match if "*" not in word) for match in words}
    tails = [[word.partition("*") for word in match if "*" in word] for match in words]
    found = []
    if len(heads) > 1:
        is_root = any("root" in head for head in heads) and len({head[:1] for head in heads}) == 1
        found.append(
            "the root"
            if is_root
            else "the dtype"
            if calls[0].what.name.startswith("all_to_all")
            else "the reduce operation"
        )
    if len({tuple(dtype for dtype, _, _ in tail) for tail in tails}) > 1:
        found.append("the dtype")
    if len({tuple(count for _, _, count in tail) for tail in tails}) > 1:
        found.append("the shape")
    return " and ".join(found) or "the arguments"
