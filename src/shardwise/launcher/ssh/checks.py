"""Checks of all hosts before a launch over ssh: reachability, versions, target, and an address of node 0."""

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

_FACTS_TIMEOUT_S = 20.0
"""Seconds for all hosts to connect over ssh and send their facts; ssh's connection timeout is 5 s."""
_REACH_S = 5.0
_DEFAULT_PORT = 22


@dataclass(frozen=True)
class HostRendezvous:
    """The rendezvous endpoint: an address and port of node 0 to which all other hosts could connect."""

    address: str
    port: int


def find_here(hosts: Sequence[HostSpec]) -> list[bool]:
    """Return for each host whether it is this machine, according to ssh's configuration."""
    has_ssh = shutil.which("ssh") is not None
    here = []
    for host in hosts:
        here.append(_is_here(_ssh_settings(host) if has_ssh else {}, host))
        if not here[-1] and not has_ssh:
            raise LaunchError(
                f"remote host {host.name} requires ssh, which is not on the PATH",
                code="launch.ssh-not-found",
                fix="install the OpenSSH client",
            )
    return here


def query_hosts(sessions: Sequence[Session], hub: Sessions, target: Target) -> dict[Session, Facts]:
    """Return the facts of all hosts; raise LaunchError if a host does not respond, has other versions or no target."""
    replies = hub.query([(session, Look(target)) for session in sessions], _FACTS_TIMEOUT_S)
    _raise_if_any([explain_end(session) for session in sessions if session not in replies])
    facts = {session: reply for session, reply in replies.items() if isinstance(reply, Facts)}
    first = sessions[0]
    _raise_if_any([_version_mismatch(first.name, facts[first], other.name, facts[other]) for other in sessions[1:]])
    errors = []
    for session in sessions:
        found = facts[session]
        if found.refusal:
            fact = f"on host {session.name}, {found.refusal}"
            errors.append(LaunchError(fact, code=found.code, fix=_copy_fix(session, found.fix)))
    _raise_if_any(errors)
    _check_distinct(sessions, facts)
    return facts


def find_host_rendezvous(
    sessions: Sequence[Session], hub: Sessions, facts: Mapping[Session, Facts], wanted: str, port: int
) -> HostRendezvous:
    """Return the first address of node 0 to which all other hosts can connect; `wanted` is --master-addr, or empty.

    Every candidate is tested with a connection. Port 0 selects a free port of node 0.
    """
    first, others = sessions[0], sessions[1:]
    addresses = [_resolve_wanted(first, facts[first], wanted)] if wanted else _candidates(sessions, facts)
    errors = []
    for address in addresses:
        found = _test_address(first, others, hub, address, port)
        if isinstance(found, HostRendezvous):
            return found
        errors.append(found)
    if not errors:
        raise LaunchError(
            f"host {first.name} has loopback addresses only",
            code="launch.host-only-loopback",
            fix=f"connect {first.name} to the network, or pass --master-addr",
        )
    raise errors[0]


def _test_address(
    first: Session, others: Sequence[Session], hub: Sessions, address: str, port: int
) -> HostRendezvous | LaunchError:
    """Let node 0 listen on an address and all other hosts connect to it; return the endpoint or the error."""
    token = secrets.token_hex(8)
    answer = hub.query([(first, Listen(address, port, token))], _REACH_S).get(first)
    if not isinstance(answer, HostAnswer) or answer.refusal:
        return LaunchError(
            f"host {first.name} cannot listen: {_refusal(answer)}",
            code="launch.host-cannot-listen",
            fix="pass a different --master-port",
        )
    reached = hub.query([(session, Reach(address, answer.port, token)) for session in others], _REACH_S)
    unreached = {session.name: why for session in others if (why := _refusal(reached.get(session)))}
    if not unreached:
        return HostRendezvous(address, answer.port)
    name, why = next(iter(unreached.items()))
    more = f" and {len(unreached) - 1} more" if len(unreached) > 1 else ""
    return LaunchError(
        f"host {name}{more} cannot connect to {first.name} at {address}:{answer.port} ({why})",
        code="launch.master-unreachable",
        fix=f"open port {answer.port}, or pass --master-addr with an address of {first.name} that all hosts can reach",
    )


def _refusal(reply: Reply | None) -> str:
    return reply.refusal if isinstance(reply, HostAnswer) else "no response"


def explain_end(session: Session) -> LaunchError:
    """Return the error for a host that did not respond, from ssh's exit code and standard error."""
    name, status, output = session.name, session.process.poll(), " ".join(session.stderr_tail)
    last = session.stderr_tail[-1] if session.stderr_tail else "no output"
    ssh_check = f"run ssh {name} true to see the error"
    if status is None:
        return LaunchError(
            f"host {name} did not respond within {_FACTS_TIMEOUT_S:.0f} s", code="launch.host-timeout", fix=ssh_check
        )
    if status == NO_FOLDER:
        return LaunchError(
            f"host {name} does not have the directory {Path.cwd()}",
            code="launch.host-no-folder",
            fix="share the directory, copy it to the same path, or start in a different directory",
        )
    if status == NO_PYTHON:
        return LaunchError(
            f"host {name} does not have {sys.executable}",
            code="launch.host-no-python",
            fix=f"install Python at the same path on {name}",
        )
    if "No module named" in output:
        return LaunchError(
            f"host {name} does not have shardwise in {sys.executable} ({last})",
            code="launch.host-no-shardwise",
            fix=f"run {sys.executable} -m pip install shardwise on {name}",
        )
    for pattern, fact, code, fix in _SSH_ERRORS:
        if re.search(pattern, output):
            return LaunchError(fact.format(name), code=code, fix=fix.format(name))
    return LaunchError(f"ssh to host {name} failed: {last}", code="launch.host-failed", fix=ssh_check)


_SSH_ERRORS = (
    (
        "Could not resolve hostname",
        "host name {} cannot be resolved",
        "launch.host-not-resolved",
        "correct the name, or add it to ~/.ssh/config",
    ),
    (
        "IDENTIFICATION HAS CHANGED",
        "the ssh key of host {} has changed",
        "launch.host-key-changed",
        "verify the new key, then run ssh-keygen -R {}",
    ),
    (
        "Host key verification failed",
        "the ssh key of host {} is not in known_hosts",
        "launch.host-key-unknown",
        "run ssh {} once and verify the key",
    ),
    (
        "Permission denied|Too many authentication",
        "host {} rejected your ssh key",
        "launch.host-login-refused",
        "run ssh-copy-id {}",
    ),
    (
        "Connection refused",
        "host {} refused the ssh connection",
        "launch.host-no-sshd",
        "start sshd on {}, or correct the port of the host",
    ),
    (
        "timed out|No route|unreachable",
        "host {} is unreachable",
        "launch.host-unreachable",
        "run ping {} to check that the host is up",
    ),
)
"""Errors of OpenSSH: pattern of its message, fact, error code and fix."""


def _ssh_settings(host: HostSpec) -> dict[str, str]:
    """Return ssh's configuration for this host as `ssh -G` prints it, without a connection."""
    program, *arguments = ssh_argv(host)
    try:
        command = [program, "-G", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_FACTS_TIMEOUT_S)
    except subprocess.TimeoutExpired:  # a `Match exec` command in the user's configuration
        raise LaunchError(
            f"`ssh -G {host.name}` did not finish within {_FACTS_TIMEOUT_S:.0f} s",
            code="launch.ssh-config-timeout",
            fix="check the Match exec commands in ~/.ssh/config, one of which may hang",
        ) from None
    return dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)


def _is_here(settings: Mapping[str, str], host: HostSpec) -> bool:
    """Return whether a host is this machine with this user; another port (a container) or a proxy means remote."""
    name = settings.get("hostname", host.name)
    port = int(settings.get("port", host.port or _DEFAULT_PORT))
    user = settings.get("user", host.user or getpass.getuser())
    if port != _DEFAULT_PORT or user != getpass.getuser() or {"proxyjump", "proxycommand"} & set(settings):
        return False
    with contextlib.suppress(LaunchError):
        return any(is_own(address) for address in resolve(name, port, timeout_s=0))
    return False


def _version_mismatch(first: str, its: Facts, other: str, theirs: Facts) -> LaunchError | None:
    different = [name for name, version in its.versions.items() if theirs.versions.get(name) != version]
    if not different:
        return None
    name = different[0]
    return LaunchError(
        f"host {other} has {name} {theirs.versions.get(name)}, but {first} has {its.versions[name]}",
        code="launch.host-version-mismatch",
        fix=f"install {name} {its.versions[name]} on {other}",
    )


def _copy_fix(session: Session, fix: str) -> str:
    return fix if session.is_here else f"copy it to {Path.cwd()} on {session.name}, or share the directory"


def _check_distinct(sessions: Sequence[Session], facts: Mapping[Session, Facts]) -> None:
    """Raise LaunchError if two host names are the same machine."""
    seen: dict[frozenset[str], str] = {}
    for session in sessions:
        addresses = frozenset(facts[session].addresses.values())
        if addresses and addresses in seen:
            known = ", ".join(sorted(addresses))
            raise LaunchError(
                f"hosts {seen[addresses]} and {session.name} are the same machine ({known})",
                code="launch.host-same-machine",
                fix="pass the machine once, or correct the address of one of the names",
            )
        seen[addresses] = session.name


def _resolve_wanted(first: Session, facts: Facts, wanted: str) -> str:
    """Return the address of --master-addr; raise LaunchError if node 0 does not have it."""
    resolved = resolve(wanted, 0)
    own = {*facts.addresses.values(), facts.own}
    for address in resolved:
        if address in own:
            return address
    known = ", ".join(f"{address} on {name}" for name, address in facts.addresses.items())
    raise LaunchError(
        f"--master-addr {wanted} resolves to {resolved[0]}, which is not an address of {first.name} (it has {known})",
        code="launch.master-address-foreign",
        fix="pass one of these addresses, or remove --master-addr",
    )


def _candidates(sessions: Sequence[Session], facts: Mapping[Session, Facts]) -> list[str]:
    """Return the addresses of node 0; addresses that an ssh connection already uses are first."""
    first = sessions[0]
    used = [facts[session].launcher for session in sessions[1:]] if first.is_here else [facts[first].own]
    if len(sessions) == 1:
        used.append("127.0.0.1")  # no other host connects
    return [address for address in dict.fromkeys([*used, *facts[first].addresses.values()]) if address]


def _raise_if_any(errors: Sequence[LaunchError | None]) -> None:
    """Raise one LaunchError with the facts of all errors; None entries are skipped."""
    real = [error for error in errors if error is not None]
    if real:
        raise LaunchError("; ".join(error.fact for error in real), code=real[0].code, fix=real[0].fix)
