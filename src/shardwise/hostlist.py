"""SLURM's node lists, such as "n[0-2,07],x", expanded into host names."""

from __future__ import annotations

import re

from shardwise.errors import EnvironmentVariablesError


def expand_hosts(text: str) -> tuple[str, ...]:
    """Return the hosts of a SLURM node list such as "n[0-2,07],x", in its order."""
    hosts = [host for entry in _entries(text) for host in _expand(entry, text)]
    if not hosts:
        raise EnvironmentVariablesError(
            f"SLURM's node list {text!r} names no host", code="env.slurm-nodelist-empty", fix="export MASTER_ADDR"
        )
    return tuple(hosts)


def _entries(text: str) -> list[str]:
    """Split at the commas outside brackets."""
    return [entry for entry in re.split(r",(?![^\[]*\])", text.strip()) if entry]


def _expand(entry: str, text: str) -> list[str]:
    match = re.fullmatch(r"([^\[\]]*)\[([0-9,-]+)\](.*)", entry)
    if match is None:
        if re.search(r"[\[\]\s]", entry):
            raise EnvironmentVariablesError(
                f"SLURM's node list {text!r} has an entry {entry!r} that cannot be read",
                code="env.slurm-nodelist-syntax",
                fix="export MASTER_ADDR",
            )
        return [entry]
    head, ranges, tail = match.groups()
    numbers = [number for part in ranges.split(",") for number in _numbers(part, text)]
    return [f"{head}{number}{rest}" for number in numbers for rest in (_expand(tail, text) if tail else [""])]


def _numbers(part: str, text: str) -> list[str]:
    """Return "07", "08", "09" for "07-09": as wide as the first is written."""
    match = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", part)
    if match is None:
        raise EnvironmentVariablesError(
            f"SLURM's node list {text!r} has a range {part!r} that cannot be read",
            code="env.slurm-nodelist-syntax",
            fix="export MASTER_ADDR",
        )
    first, last = match[1], match[2] or match[1]
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
