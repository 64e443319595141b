"""Hosts in words: few by name, many by number."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.errors import some_of

if TYPE_CHECKING:
    from collections.abc import Sequence

_MOST = 4


def name_hosts(names: Sequence[str]) -> str:
    """Return "host a", "hosts a, b" or "hosts a, b, c, d and 60 more"."""
    return f"host{'s' if len(names) > 1 else ''} {name_few(names)}"


def name_few(names: Sequence[str]) -> str:
    """Return "a", "a, b" or "a, b, c, d and 60 more"."""
    return some_of(names, most=_MOST)


def count_hosts(names: Sequence[str]) -> str:
    """Return "1 host" or "3 hosts"."""
    return f"{len(names)} host{'' if len(names) == 1 else 's'}"
