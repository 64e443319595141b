"""One run on many machines over OpenSSH: hosts as users name them, checked first, ended together."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.errors import LaunchError, nearest
from shardwise.launcher.local.supervise import caught_signals
from shardwise.launcher.ssh.checks import HostRendezvous, find_here, find_host_rendezvous, look_at_all
from shardwise.launcher.ssh.session import Session, Sessions, Start
from shardwise.runs.console import INTERRUPTED, JOB_FAILED, describe_exit

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shardwise.launcher.local.target import Target


_SSH_FAILED = 255
_TOGETHER_S = 10.0
"""Nodes learn of each other's end in 5 s; those that still run after this are stopped from here."""
_MARGIN_S = 5.0


def launch_on_hosts(
    hosts: Sequence[HostSpec],
    target: Target,
    node_arguments: Callable[[HostRendezvous], Sequence[Sequence[str]]],
    *,
    variables: Mapping[str, str],
    least: int,
    master_addr: str = "",
    master_port: int = 0,
    grace_s: float,
    show: Callable[[int, bytes], None],
    note: Callable[[str], None],
) -> int:
    """Run one node on every host and return the exit code of the run; nothing is left on any host.

    `node_arguments` gives the arguments of `shardwise` on each host once the rendezvous is known; `variables`, the
    secret among them, travel by stdin. `show` gets (0 stdout or 1 stderr, line) with the host's name before it. The
    run is over when fewer than `least` hosts are left.
    """
    here = find_here(hosts)
    opened = [Session(host, is_here=is_here) for host, is_here in zip(hosts, here, strict=True)]
    with Sessions(opened) as sessions:
        facts = look_at_all(opened, sessions, target)
        rendezvous = find_host_rendezvous(opened, sessions, facts, master_addr, master_port)
        if len(hosts) > 1:
            note(f"shardwise: {len(hosts)} hosts checked; they join at {rendezvous.address}:{rendezvous.port}")
        for session, arguments in zip(opened, node_arguments(rendezvous), strict=True):
            session.send(Start(list(arguments), dict(variables), grace_s + _MARGIN_S))
        _follow(sessions, least, grace_s, show, note)
        return _exit_code([session.process.poll() for session in opened], was_asked=sessions.was_asked)


def _follow(
    sessions: Sessions, least: int, grace_s: float, show: Callable[[int, bytes], None], note: Callable[[str], None]
) -> None:
    """Show what nodes write and have signals passed on until all have ended."""
    ended: set[Session] = set()
    close_at = kill_at = float("inf")
    width = max(len(session.name) for session in sessions.all)
    with caught_signals(sessions.signals):
        while running := sessions.running:
            for session, stream, line in sessions.receive(0.2):
                show(stream, f"[{session.name:{width}}] ".encode() + line + b"\n")
            for session in set(sessions.all) - ended - set(running):
                ended.add(session)
                code = session.process.poll()
                if not _is_known(code):
                    note(f"shardwise: host {session.name} is lost: ssh ended with {describe_exit(code or 0)}")
            now = time.monotonic()
            if len(sessions.all) - sum(session.process.poll() != 0 for session in ended) < least:
                close_at = min(close_at, now + _TOGETHER_S)
            if now > close_at:
                for session in running:
                    session.close_stdin()
                close_at, kill_at = float("inf"), min(kill_at, now + grace_s + 2 * _MARGIN_S)
            if now > kill_at:
                return  # leaving the context kills what is left


def _exit_code(codes: Sequence[int | None], *, was_asked: bool) -> int:
    """Return the code that the nodes agree on: node 0's, unless only another knows it.

    A node whose launcher went away stops the run as if asked to; when nobody asked, that is a failure.
    """
    known = [code for code in codes if code is not None and _is_known(code)]
    if codes[0] == 0:
        return 0
    code = next((code for code in known if code), INTERRUPTED if was_asked else JOB_FAILED)
    return JOB_FAILED if code == INTERRUPTED and not was_asked else code


def _is_known(code: int | None) -> bool:
    """Return whether this is a node's exit code, not ssh's own failure or death."""
    return code is not None and 0 <= code != _SSH_FAILED


# Hosts as users name them, `a,me@b:8` or a hostfile, read into settled values.


_ENTRY = re.compile(
    # A name never begins with "-", which ssh would take for an option.
    r"(?:(?P<user>[A-Za-z0-9_.][A-Za-z0-9_.+-]*)@)?"
    r"(?P<name>\[[0-9A-Fa-f:.]+(?:%\w+)?\]|[A-Za-z0-9_][A-Za-z0-9_.-]*)"
    r"(?::(?P<slots>[0-9]+))?"
)
_HOW = "write HOST, HOST:SLOTS or USER@HOST:SLOTS"


@dataclass(frozen=True, kw_only=True)
class HostSpec:
    """One machine to start a node on, as ssh reaches it."""

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
            f"hostfile {text} does not exist",
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


def _line(fields: list[str], where: str) -> HostSpec:
    """Read one line of a hostfile: an entry, then slots=, port= and user= in any order."""
    host = _entry(fields[0], where)
    found: dict[str, str] = {"user": host.user, "slots": "" if host.slots is None else str(host.slots), "port": ""}
    for field in fields[1:]:
        key, equals, value = field.partition("=")
        if not equals or not value:
            raise LaunchError(
                f"{where} has {field!r} after its host",
                code="launch.hostfile-syntax",
                fix="write HOST slots=8 port=22 user=NAME",
            )
        if key not in found:
            raise LaunchError(
                f"{where} has {field!r}, and {key!r} is not a key of hostfiles",
                code="launch.hostfile-unknown-key",
                fix=nearest(key, found),
            )
        if found[key]:
            raise LaunchError(f"{where} has {key} twice", code="launch.hostfile-key-repeated", fix="leave one out")
        found[key] = value
    slots, port = (_number(found[key], f"{where}: {key}", most) for key, most in (("slots", 4096), ("port", 65535)))
    return HostSpec(name=host.name, user=found["user"], port=port, slots=slots)


def _entry(text: str, where: str) -> HostSpec:
    match = _ENTRY.fullmatch(text)
    if match is None:
        raise LaunchError(f"{where} has {text!r}, which is not a host", code="launch.host-invalid", fix=_HOW)
    slots = _number(match["slots"] or "", f"{where}: slots of {match['name']}", 4096)
    return HostSpec(name=match["name"].strip("[]"), user=match["user"] or "", slots=slots)


def _number(text: str, what: str, most: int) -> int | None:
    if not text:
        return None
    if not re.fullmatch(r"[0-9]+", text) or not 1 <= int(text) <= most:
        raise LaunchError(f"{what} is {text!r}", code="launch.host-number-invalid", fix=f"use 1 to {most}")
    return int(text)
