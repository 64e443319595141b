"""What is asked of all hosts before anything starts there, and what is wrong with the answers."""

from __future__ import annotations

import contextlib
import getpass
import re
import secrets
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.errors import LaunchError
from shardwise.launcher.nodes.network import is_own, resolve
from shardwise.launcher.ssh.session import (
    NO_FOLDER,
    NO_PYTHON,
    Facts,
    HostAnswer,
    Listen,
    Look,
    Reach,
    Reply,
    ssh_argv,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardwise.launcher.local.target import Target
    from shardwise.launcher.ssh.run import HostSpec
    from shardwise.launcher.ssh.session import Session, Sessions

_LOOK_S = 20.0
"""For all hosts together, from ssh's first packet to the facts; ssh itself gives up connecting after 5 s."""
_REACH_S = 5.0
_DEFAULT_PORT = 22


@dataclass(frozen=True)
class HostRendezvous:
    """Where nodes will join: an address of node 0 that all others were seen to reach."""

    address: str
    port: int


def find_here(hosts: Sequence[HostSpec]) -> list[bool]:
    """Return which of the hosts are this very machine, as ssh's own configuration resolves them."""
    has_ssh = shutil.which("ssh") is not None
    here = [_is_here(_ssh_settings(host) if has_ssh else {}, host) for host in hosts]
    away = [host.name for host, is_here in zip(hosts, here, strict=True) if not is_here]
    if away and not has_ssh:
        raise LaunchError(
            f"host {away[0]} is reached by ssh, and this machine has no ssh",
            code="launch.ssh-not-found",
            fix="install the OpenSSH client",
        )
    return here


def look_at_all(sessions: Sequence[Session], hub: Sessions, target: Target) -> dict[Session, Facts]:
    """Ask all hosts what is there; refuse those that do not answer, differ, or cannot start the target."""
    replies = hub.ask([(session, Look(target)) for session in sessions], _LOOK_S)
    _refuse([explain_end(session) for session in sessions if session not in replies])
    facts = {session: reply for session, reply in replies.items() if isinstance(reply, Facts)}
    first = sessions[0]
    _refuse([_skew(first.name, facts[first], session.name, facts[session]) for session in sessions[1:]])
    _refuse(
        [
            LaunchError(f"on host {session.name}, {found.refusal}", code=found.code, fix=_copy(session, found.fix))
            for session in sessions
            if (found := facts[session]).refusal
        ]
    )
    _refuse_twins(sessions, facts)
    return facts


def find_host_rendezvous(
    sessions: Sequence[Session], hub: Sessions, facts: Mapping[Session, Facts], wanted: str, port: int
) -> HostRendezvous:
    """Return the first address of node 0 that all others reach, tried for real; `wanted` is the user's, or empty.

    Port 0 takes one that is free there.
    """
    first, others = sessions[0], sessions[1:]
    addresses = [_wanted(first, facts[first], wanted)] if wanted else _candidates(sessions, facts)
    refusals = []
    for address in addresses:
        found = _try(first, others, hub, address, port)
        if isinstance(found, HostRendezvous):
            return found
        refusals.append(found)
    if not refusals:
        raise LaunchError(
            f"host {first.name} has no address but loopback",
            code="launch.host-only-loopback",
            fix="connect it, or name --master-addr",
        )
    raise refusals[0]


def _try(
    first: Session, others: Sequence[Session], hub: Sessions, address: str, port: int
) -> HostRendezvous | LaunchError:
    """Have node 0 listen at an address and all others connect to it."""
    token = secrets.token_hex(8)
    answer = hub.ask([(first, Listen(address, port, token))], _REACH_S).get(first)
    if not isinstance(answer, HostAnswer) or answer.refusal:
        return LaunchError(
            f"host {first.name} cannot listen: {_refusal(answer)}",
            code="launch.host-cannot-listen",
            fix="change --master-port",
        )
    reached = hub.ask([(session, Reach(address, answer.port, token)) for session in others], _REACH_S)
    unreached = {session.name: why for session in others if (why := _refusal(reached.get(session)))}
    if not unreached:
        return HostRendezvous(address, answer.port)
    name, why = next(iter(unreached.items()))
    more = f" and {len(unreached) - 1} others" if len(unreached) > 1 else ""
    return LaunchError(
        f"host {name}{more} cannot reach {first.name} at {address}:{answer.port} ({why})",
        code="launch.master-unreachable",
        fix=f"open that port, or name with --master-addr an address of {first.name} that all hosts reach",
    )


def _refusal(reply: Reply | None) -> str:
    return reply.refusal if isinstance(reply, HostAnswer) else "no answer"


def explain_end(session: Session) -> LaunchError:
    """Return why a host gave no answer, from how its ssh ended and what that wrote."""
    name, status, output = session.name, session.process.poll(), " ".join(session.stderr_tail)
    last = session.stderr_tail[-1] if session.stderr_tail else "it wrote nothing"
    by_hand = f"see: ssh {name} true"
    if status is None:
        return LaunchError(
            f"host {name} did not answer within {_LOOK_S:.0f} s", code="launch.host-timeout", fix=by_hand
        )
    if status == NO_FOLDER:
        return LaunchError(
            f"host {name} has no folder {Path.cwd()}",
            code="launch.host-no-folder",
            fix="share it, copy it to the same path, or start elsewhere",
        )
    if status == NO_PYTHON:
        return LaunchError(
            f"host {name} has no {sys.executable}",
            code="launch.host-no-python",
            fix="install Python there, at the same path",
        )
    if "No module named" in output:
        return LaunchError(
            f"host {name} has no shardwise in {sys.executable} ({last})",
            code="launch.host-no-shardwise",
            fix=f"{sys.executable} -m pip install it there",
        )
    for pattern, fact, code, fix in _SSH_ERRORS:
        if re.search(pattern, output):
            return LaunchError(fact.format(name), code=code, fix=fix.format(name))
    return LaunchError(f"host {name} could not be used: {last}", code="launch.host-failed", fix=by_hand)


_SSH_ERRORS = (
    (
        "Could not resolve hostname",
        "host {} has no address",
        "launch.host-not-resolved",
        "correct the name, or describe it in ~/.ssh/config",
    ),
    (
        "IDENTIFICATION HAS CHANGED",
        "host {} shows another key than before",
        "launch.host-key-changed",
        "see why, then: ssh-keygen -R {}",
    ),
    (
        "Host key verification failed",
        "host {} is not known to ssh yet",
        "launch.host-key-unknown",
        "check its key once by hand: ssh {}",
    ),
    (
        "Permission denied|Too many authentication",
        "host {} refused your key",
        "launch.host-login-refused",
        "ssh-copy-id {}",
    ),
    (
        "Connection refused",
        "host {} has no ssh server at that port",
        "launch.host-no-sshd",
        "start sshd there, or correct the port",
    ),
    (
        "timed out|No route|unreachable",
        "host {} cannot be reached",
        "launch.host-unreachable",
        "see whether it is up: ping {}",
    ),
)
"""What OpenSSH writes, what it means, its code, and what to do."""


def _ssh_settings(host: HostSpec) -> dict[str, str]:
    """Return what ssh would do for this host, asked of ssh itself; nothing is connected."""
    program, *arguments = ssh_argv(host)
    try:
        command = [program, "-G", *arguments]
        asked = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_LOOK_S)
    except subprocess.TimeoutExpired:  # a command that the user's file runs to decide
        raise LaunchError(
            f"ssh does not report how to reach host {host.name}",
            code="launch.ssh-config-timeout",
            fix=f"see: ssh -G {host.name}",
        ) from None
    return dict(line.split(" ", 1) for line in asked.stdout.splitlines() if " " in line)


def _is_here(settings: Mapping[str, str], host: HostSpec) -> bool:
    """Return whether a host is this machine and account: another port may be a container, a proxy leads elsewhere."""
    name = settings.get("hostname", host.name)
    port = int(settings.get("port", host.port or _DEFAULT_PORT))
    user = settings.get("user", host.user or getpass.getuser())
    if port != _DEFAULT_PORT or user != getpass.getuser() or {"proxyjump", "proxycommand"} & set(settings):
        return False
    with contextlib.suppress(LaunchError):
        return any(is_own(address) for address in resolve(name, port, timeout_s=0))
    return False


def _skew(first: str, its: Facts, other: str, theirs: Facts) -> LaunchError | None:
    different = [name for name, version in its.versions.items() if theirs.versions.get(name) != version]
    if not different:
        return None
    name = different[0]
    return LaunchError(
        f"host {other} has {name} {theirs.versions.get(name)}, {first} has {its.versions[name]}",
        code="launch.host-version-mismatch",
        fix=f"install the same {name} on both",
    )


def _copy(session: Session, fix: str) -> str:
    return fix if session.is_here else f"copy it to {Path.cwd()} there, or share the folder"


def _refuse_twins(sessions: Sequence[Session], facts: Mapping[Session, Facts]) -> None:
    """Refuse two names of one machine."""
    seen: dict[frozenset[str], str] = {}
    for session in sessions:
        addresses = frozenset(facts[session].addresses.values())
        if addresses and addresses in seen:
            known = ", ".join(sorted(addresses))
            raise LaunchError(
                f"hosts {seen[addresses]} and {session.name} are one machine, which has {known}",
                code="launch.host-same-machine",
                fix="name it once, or correct what one of the names resolves to",
            )
        seen[addresses] = session.name


def _wanted(first: Session, facts: Facts, wanted: str) -> str:
    """Return the address that the user's --master-addr means, which must be node 0's."""
    meant = resolve(wanted, 0)
    own = {*facts.addresses.values(), facts.own}
    for address in meant:
        if address in own:
            return address
    known = ", ".join(f"{address} on {name}" for name, address in facts.addresses.items())
    raise LaunchError(
        f"--master-addr {wanted} is {meant[0]}, which is not an address of host {first.name} (it has {known})",
        code="launch.master-address-foreign",
        fix="name one of these, or leave it out",
    )


def _candidates(sessions: Sequence[Session], facts: Mapping[Session, Facts]) -> list[str]:
    """Return addresses of node 0, first those that were seen to work: where ssh came in, or where it came from."""
    first = sessions[0]
    seen = [facts[session].launcher for session in sessions[1:]] if first.is_here else [facts[first].own]
    if len(sessions) == 1:
        seen.append("127.0.0.1")  # no other host has to connect
    return [address for address in dict.fromkeys([*seen, *facts[first].addresses.values()]) if address]


def _refuse(errors: Sequence[LaunchError | None]) -> None:
    """Refuse all at once, in one sentence."""
    real = [error for error in errors if error is not None]
    if real:
        raise LaunchError("; ".join(error.fact for error in real), code=real[0].code, fix=real[0].fix)
