"""Parsing of launchers' environment variables: integers, rank and world size, and SLURM's node lists."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from shardwise.errors import EnvironmentVariablesError

if TYPE_CHECKING:
    from collections.abc import Mapping


def number(environ: Mapping[str, str], name: str) -> int | None:
    """Return the non-negative integer in a variable, or None if it is unset or empty."""
    text = environ.get(name)
    if text is None or text == "":
        return None
    if not re.fullmatch(r"[0-9]+", text.strip()):
        raise EnvironmentVariablesError(
            f"{name}={text!r} is not a non-negative integer",
            code="env.not-whole-number",
            fix=f"export a valid {name}, or unset it",
        )
    return int(text)


def required_number(environ: Mapping[str, str], name: str) -> int:
    """Return the integer in a variable that a launcher always sets; raises EnvironmentVariablesError if it is unset."""
    found = number(environ, name)
    if found is None:
        raise EnvironmentVariablesError(
            f"{name} is not set, although the launcher set other variables of this rank",
            code="env.variable-missing",
            fix="export RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
        )
    return found


def rank_and_size(environ: Mapping[str, str], rank_name: str, size_name: str) -> tuple[int | None, int | None]:
    """Return the rank and the world size, or (None, None) if neither is set; raises if only one is set."""
    rank, size = number(environ, rank_name), number(environ, size_name)
    if rank is None and size is None:
        return None, None
    if rank is None or size is None:
        present, absent = (size_name, rank_name) if rank is None else (rank_name, size_name)
        raise EnvironmentVariablesError(
            f"{present}={environ[present]} is set but {absent} is not",
            code="env.rank-missing" if rank is None else "env.world-size-missing",
            fix=f"export {absent}, or unset {present}",
        )
    if size == 0:
        raise EnvironmentVariablesError(
            f"{size_name}=0 is not positive", code="env.world-size-zero", fix=f"set {size_name} to 1 or more"
        )
    if rank >= size:
        raise EnvironmentVariablesError(
            f"{rank_name}={rank} must be below {size_name}={size}",
            code="env.rank-too-large",
            fix=f"set {rank_name} to a value from 0 to {size - 1}",
        )
    return rank, size


# Host names of SLURM's node lists, such as "n[0-2,07],x".


def expand_hosts(text: str) -> tuple[str, ...]:
    """Return the hosts of a SLURM node list such as "n[0-2,07],x", in its order."""
    hosts = [host for entry in _entries(text) for host in _expand(entry, text)]
    if not hosts:
        raise EnvironmentVariablesError(
            f"SLURM's node list {text!r} has no hosts", code="env.slurm-nodelist-empty", fix="export MASTER_ADDR"
        )
    return tuple(hosts)


def _entries(text: str) -> list[str]:
    """Split a SLURM node list at the commas outside brackets."""
    return [entry for entry in re.split(r",(?![^\[]*\])", text.strip()) if entry]


def _expand(entry: str, text: str) -> list[str]:
    match = re.fullmatch(r"([^\[\]]*)\[([0-9,-]+)\](.*)", entry)
    if match is None:
        if re.search(r"[\[\]\s]", entry):
            raise EnvironmentVariablesError(
                f"SLURM's node list {text!r} has an invalid entry {entry!r}",
                code="env.slurm-nodelist-syntax",
                fix="export MASTER_ADDR",
            )
        return [entry]
    head, ranges, tail = match.groups()
    numbers = [number for part in ranges.split(",") for number in _numbers(part, text)]
    return [f"{head}{number}{rest}" for number in numbers for rest in (_expand(tail, text) if tail else [""])]


def _numbers(part: str, text: str) -> list[str]:
    """Return the numbers of a range, padded to the width of the first: "07", "08", "09" for "07-09"."""
    match = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", part)
    if match is None:
        raise EnvironmentVariablesError(
            f"SLURM's node list {text!r} has an invalid range {part!r}",
            code="env.slurm-nodelist-syntax",
            fix="export MASTER_ADDR",
        )
    first, last = match[1], match[2] or match[1]
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
