"""Hosts as users name them, `a,me@b:8` or a hostfile, read into settled values."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from shardwise.errors import LaunchError, nearest

_ENTRY = re.compile(
    # A name never begins with "-", which ssh would take for an option.
    r"(?:(?P<user>[A-Za-z0-9_.][A-Za-z0-9_.+-]*)@)?"
    r"(?P<name>\[[0-9A-Fa-f:.]+(?:%\w+)?\]|[A-Za-z0-9_][A-Za-z0-9_.-]*)"
    r"(?::(?P<slots>[0-9]+))?"
)
_HOW = "write HOST, HOST:SLOTS or USER@HOST:SLOTS"


@dataclass(frozen=True, kw_only=True)
class HostSpec:
    """One machine to start a node on, as ssh is told to reach it."""

    name: str
    """Host name, address, or a name of ~/.ssh/config."""
    user: str = ""
    port: int | None = None
    """Of its ssh server; None leaves it to ssh."""
    slots: int | None = None
    """Ranks there; None takes --nproc-per-node."""


def read_hosts(text: str) -> tuple[HostSpec, ...]:
    """Read --hosts: the file of that name if there is one, else a list; in order of node rank."""
    path = Path(text)
    if path.is_file():
        lines = path.read_text(errors="replace").splitlines()
        numbered = [(f"line {number} of {text}", line.partition("#")[0]) for number, line in enumerate(lines, 1)]
        hosts = [_line(line.split(), where) for where, line in numbered if line.strip()]
    elif "/" in text:
        raise LaunchError(
            f"hostfile {text} is not there",
            code="launch.hostfile-not-found",
            fix="name a file of hosts, or hosts such as a,b:8",
        )
    else:
        hosts = [_entry(entry.strip(), "--hosts") for entry in text.split(",")] if text.strip() else []
    if not hosts:
        raise LaunchError(
            f"--hosts {text!r} names no host", code="launch.no-hosts", fix="name hosts such as a,b:8, or a file of them"
        )
    names = [(host.user, host.name, host.port) for host in hosts]
    for host, name in zip(hosts, names, strict=True):
        if names.count(name) > 1:
            raise LaunchError(
                f"host {host.name} is named {names.count(name)} times",
                code="launch.host-repeated",
                fix=f"name it once, with slots: {host.name}:8",
            )
    return tuple(hosts)


def _line(words: list[str], where: str) -> HostSpec:
    """Read one line of a hostfile: an entry, then slots=, port= and user= in any order."""
    host = _entry(words[0], where)
    found: dict[str, str] = {"user": host.user, "slots": "" if host.slots is None else str(host.slots), "port": ""}
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if not equals or not value:
            raise LaunchError(
                f"{where} has {word!r} after its host",
                code="launch.hostfile-syntax",
                fix="write HOST slots=8 port=22 user=NAME",
            )
        if key not in found:
            raise LaunchError(
                f"{where} has {word!r}, and {key!r} is no word of hostfiles",
                code="launch.hostfile-unknown-key",
                fix=nearest(key, found),
            )
        if found[key]:
            raise LaunchError(f"{where} says {key} twice", code="launch.hostfile-key-repeated", fix="leave one out")
        found[key] = value
    slots, port = (_number(found[key], f"{where}: {key}", most) for key, most in (("slots", 4096), ("port", 65535)))
    return HostSpec(name=host.name, user=found["user"], port=port, slots=slots)


def _entry(text: str, where: str) -> HostSpec:
    match = _ENTRY.fullmatch(text)
    if match is None:
        raise LaunchError(f"{where} has {text!r}, which is no host", code="launch.host-invalid", fix=_HOW)
    slots = _number(match["slots"] or "", f"{where}: slots of {match['name']}", 4096)
    return HostSpec(name=match["name"].strip("[]"), user=match["user"] or "", slots=slots)


def _number(text: str, what: str, most: int) -> int | None:
    if not text:
        return None
    if not re.fullmatch(r"[0-9]+", text) or not 1 <= int(text) <= most:
        raise LaunchError(f"{what} is {text!r}", code="launch.host-number-invalid", fix=f"use 1 to {most}")
    return int(text)
