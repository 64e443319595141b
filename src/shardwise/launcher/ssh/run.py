"""A run on several hosts over OpenSSH: parse the hosts, check them, start one node on each, and stop them together."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.errors import LaunchError, nearest
from shardwise.launcher.local.supervise import caught_signals
from shardwise.launcher.ssh.checks import HostRendezvous, find_here, find_host_rendezvous, query_hosts
from shardwise.launcher.ssh.session import Session, Sessions, Start
from shardwise.runs.console import INTERRUPTED, JOB_FAILED, describe_exit

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shardwise.launcher.local.target import Target


_SSH_FAILED = 255
_TOGETHER_S = 10.0
"""Seconds from the time at which too few hosts remain until this process stops them; nodes detect a loss within 5 s."""
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
    """Run one node on every host and return the exit code of the run; stops all remote processes before it returns.

    `node_arguments` returns the arguments of `shardwise` on each host for a rendezvous. `variables`, which include the
    secret, are sent over stdin. `show` receives (0 for stdout or 1 for stderr, line prefixed by the host). The run
    ends when fewer than `least` hosts remain.
    """
    here = find_here(hosts)
    opened = [Session(host, is_here=is_here) for host, is_here in zip(hosts, here, strict=True)]
    with Sessions(opened) as sessions:
        facts = query_hosts(opened, sessions, target)
        rendezvous = find_host_rendezvous(opened, sessions, facts, master_addr, master_port)
        if len(hosts) > 1:
            note(f"shardwise: {len(hosts)} hosts checked; rendezvous at {rendezvous.address}:{rendezvous.port}")
        for session, arguments in zip(opened, node_arguments(rendezvous), strict=True):
            session.send(Start(list(arguments), dict(variables), grace_s + _MARGIN_S))
        _follow(sessions, least, grace_s, show, note)
        return _exit_code([session.process.poll() for session in opened], is_interrupted=sessions.is_interrupted)


def _follow(
    sessions: Sessions, least: int, grace_s: float, show: Callable[[int, bytes], None], note: Callable[[str], None]
) -> None:
    """Display the output of the nodes and forward signals until all nodes have exited."""
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
                return  # the caller's context kills the remaining sessions


def _exit_code(codes: Sequence[int | None], *, is_interrupted: bool) -> int:
    """Return the exit code of the run: 0 if node 0 succeeded, else the first known exit code of a failed node.

    A node that loses its launcher exits with INTERRUPTED, which is a failure unless the user interrupted the run.
    """
    if codes[0] == 0:
        return 0
    failed = INTERRUPTED if is_interrupted else JOB_FAILED
    for code in codes:
        if code and _is_known(code):
            return failed if code == INTERRUPTED else code
    return failed


def _is_known(code: int | None) -> bool:
    """Return whether this is the exit code of a node, not a failure or signal of ssh."""
    return code is not None and 0 <= code != _SSH_FAILED


# The hosts of --hosts: a list such as `a,me@b:8`, or a hostfile.


_ENTRY = re.compile(
    # A name cannot start with "-", which ssh would parse as an option.
    r"(?:(?P<user>[A-Za-z0-9_.][A-Za-z0-9_.+-]*)@)?"
    r"(?P<name>\[[0-9A-Fa-f:.]+(?:%\w+)?\]|[A-Za-z0-9_][A-Za-z0-9_.-]*)"
    r"(?::(?P<slots>[0-9]+))?"
)
_HOW = "write HOST, HOST:SLOTS or USER@HOST:SLOTS"


@dataclass(frozen=True, kw_only=True)
class HostSpec:
    """A host on which a node is started over ssh."""

    name: str
    """Host name, address, or an alias of ~/.ssh/config."""
    user: str = ""
    port: int | None = None
    """Port of the ssh server; None for ssh's default."""
    slots: int | None = None
    """Number of ranks on the host; None for --nproc-per-node."""


def read_hosts(text: str) -> tuple[HostSpec, ...]:
    """Parse --hosts, the path of a hostfile or a list of hosts; return the hosts in the order of node ranks."""
    path = Path(text)
    if path.is_file():
        lines = path.read_text(errors="replace").splitlines()
        numbered = [(f"line {number} of {text}", line.partition("#")[0]) for number, line in enumerate(lines, 1)]
        hosts = [_line(line.split(), where) for where, line in numbered if line.strip()]
    elif "/" in text:
        raise LaunchError(
            f"hostfile {text} does not exist",
            code="launch.hostfile-not-found",
            fix="pass a hostfile, or hosts such as a,b:8",
        )
    else:
        hosts = [_entry(entry.strip(), "--hosts") for entry in text.split(",")] if text.strip() else []
    if not hosts:
        raise LaunchError(
            f"--hosts {text!r} contains no hosts", code="launch.no-hosts", fix="pass hosts such as a,b:8, or a hostfile"
        )
    names = [(host.user, host.name, host.port) for host in hosts]
    for host, name in zip(hosts, names, strict=True):
        if names.count(name) > 1:
            raise LaunchError(
                f"host {host.name} is listed {names.count(name)} times",
                code="launch.host-repeated",
                fix=f"list {host.name} once, with its number of ranks: {host.name}:8",
            )
    return tuple(hosts)


def _line(fields: list[str], where: str) -> HostSpec:
    """Parse one line of a hostfile: an entry, then slots=, port= and user= in any order."""
    host = _entry(fields[0], where)
    found: dict[str, str] = {"user": host.user, "slots": "" if host.slots is None else str(host.slots), "port": ""}
    for field in fields[1:]:
        key, equals, value = field.partition("=")
        if not equals or not value:
            raise LaunchError(
                f"{where}: expected KEY=VALUE, got {field!r}",
                code="launch.hostfile-syntax",
                fix="write HOST slots=8 port=22 user=NAME",
            )
        if key not in found:
            raise LaunchError(
                f"{where}: {key!r} in {field!r} is not a key of hostfiles",
                code="launch.hostfile-unknown-key",
                fix=nearest(key, found),
            )
        if found[key]:
            raise LaunchError(f"{where}: {key} is repeated", code="launch.hostfile-key-repeated", fix=f"set {key} once")
        found[key] = value
    slots, port = (_number(found[key], f"{where}: {key}", most) for key, most in (("slots", 4096), ("port", 65535)))
    return HostSpec(name=host.name, user=found["user"], port=port, slots=slots)


def _entry(text: str, where: str) -> HostSpec:
    match = _ENTRY.fullmatch(text)
    if match is None:
        raise LaunchError(f"{where}: {text!r} is not a host", code="launch.host-invalid", fix=_HOW)
    slots = _number(match["slots"] or "", f"{where}: slots of {match['name']}", 4096)
    return HostSpec(name=match["name"].strip("[]"), user=match["user"] or "", slots=slots)


def _number(text: str, what: str, most: int) -> int | None:
    if not text:
        return None
    if not re.fullmatch(r"[0-9]+", text) or not 1 <= int(text) <= most:
        raise LaunchError(
            f"{what} must be from 1 to {most}, got {text!r}", code="launch.host-number-invalid", fix=f"set 1 to {most}"
        )
    return int(text)
