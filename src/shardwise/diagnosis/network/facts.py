"""Facts about hosts and the links between them, and the probe sessions that collect these facts."""

from __future__ import annotations

import ipaddress
import json
import shlex
import sys
import time
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from shardwise.diagnosis.network import probe as net_probe
from shardwise.errors import some_of
from shardwise.launcher.ssh.session import NO_PYTHON, STDERR, Session, Sessions
from shardwise.runs.console import counted

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from shardwise.launcher.ssh.run import HostSpec

Pair = tuple[str, str]
"""Source and target host, by the names that the user passed."""


class HostInterface(msgspec.Struct, frozen=True):
    """A network interface that is up and has an IPv4 address, except loopback."""

    name: str
    address: str
    mask: str
    mtu: int

    @property
    def network(self) -> str:
        """The network of the address, such as 10.0.0.0/24."""
        return str(ipaddress.ip_interface(f"{self.address}/{self.mask}").network)


class HostFacts(msgspec.Struct, frozen=True):
    """The name, versions, interfaces and directories of a host."""

    hostname: str
    executable: str
    versions: dict[str, str]
    """Versions of Python, shardwise, torch and NCCL; empty if not installed."""
    interfaces: tuple[HostInterface, ...]
    folders: tuple[str, ...] = ()
    """The requested directories that exist on the host."""

    @property
    def addresses(self) -> dict[str, HostInterface]:
        """The interface of each address."""
        return {interface.address: interface for interface in self.interfaces}


class Lookups(msgspec.Struct, frozen=True):
    """The results of a host's resolver; empty for a name or address that does not resolve."""

    forward: dict[str, tuple[str, ...]]
    reverse: dict[str, tuple[str, ...]]


class HostClock(msgspec.Struct, frozen=True):
    """The offset of a host's clock relative to this machine."""

    offset_s: float
    error_s: float
    """Maximum error: half of the round trip of the measurement."""


class ReachedHost(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt to connect from one host to an address of another."""

    source: str
    target: str
    address: str
    own: str = ""
    """Source address of the connection."""
    refusal: str = ""
    """Why the connection failed; empty if it succeeded."""


class PortFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The rendezvous port on the first host."""

    host: str
    address: str
    port: int
    refusal: str = ""
    """Why the host cannot listen on the port; empty if it can."""
    cut: dict[str, str] = {}
    """Hosts that cannot connect to the port, with the reason."""


class LinkFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The measured latency and bandwidth from one host to another."""

    source: str
    target: str
    latency_s: float
    """Half of the shortest round trip."""
    bytes_per_s: float
    """Highest rate of one TCP stream."""


class PathFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The largest packet that arrives from one host at another."""

    source: str
    target: str
    mtu: int
    """Bytes of the largest packet that arrived unfragmented; 0 if no datagram arrived."""
    ends: tuple[int, int]
    """MTU of the interfaces at both ends."""


class StorageFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The hosts that can read a file that one host wrote to a directory."""

    folder: str
    writer: str = ""
    """The host that wrote; empty if no host could write."""
    readers: tuple[str, ...] = ()
    """Hosts that read the file, including the writer."""
    missing: tuple[str, ...] = ()
    """Hosts on which the directory does not exist."""
    refusal: str = ""
    """Why no host could write."""


class Problem(msgspec.Struct, frozen=True):
    """Why a host did not respond, with a fix."""

    fact: str
    fix: str


class Route(msgspec.Struct, frozen=True):
    """A choice of one address per host over which the hosts communicate."""

    kind: Literal["network", "interface", "first addresses"]
    name: str
    addresses: dict[str, str]
    """Address of each host."""

    def __str__(self) -> str:
        return self.kind if self.kind == "first addresses" else f"{self.kind} {self.name}"


class NetFacts(msgspec.Struct, frozen=True, kw_only=True):
    """All facts about the hosts, keyed by the names that the user passed, in the same order."""

    hosts: tuple[str, ...]
    problems: dict[str, Problem] = {}
    """Hosts that did not respond."""
    facts: dict[str, HostFacts] = {}
    lookups: dict[str, Lookups] = {}
    clocks: dict[str, HostClock] = {}
    reached: tuple[ReachedHost, ...] = ()
    route: Route | None = msgspec.field(default=None, name="road")
    """The route over which links were measured."""
    port: PortFacts | None = None
    links: tuple[LinkFacts, ...] = ()
    paths: tuple[PathFacts, ...] = ()
    storage: tuple[StorageFacts, ...] = ()

    @property
    def usable(self) -> tuple[str, ...]:
        """Hosts that responded, in order."""
        return tuple(host for host in self.hosts if host in self.facts)


_MAX_NAMES = 4


def name_hosts(names: Sequence[str]) -> str:
    """Return "host a", "hosts a, b" or "hosts a, b, c, d and 60 more"."""
    prefix = "host" if len(names) == 1 else "hosts"
    return f"{prefix} {name_few(names)}"


def name_few(names: Sequence[str]) -> str:
    """Return "a", "a, b" or "a, b, c, d and 60 more"."""
    return some_of(names, most=_MAX_NAMES)


def count_hosts(names: Sequence[str]) -> str:
    """Return "1 host" or "3 hosts"."""
    return counted(len(names), "host")


# Routes between hosts, and the rounds in which pairs are measured.


def routes(facts: Mapping[str, HostFacts]) -> list[Route]:
    """Return all routes, by common network, by common interface name, and by the first address of each host."""
    found: dict[tuple[str, ...], Route] = {}

    def add(route: Route) -> None:
        if 0 < len(route.addresses) == len(facts):
            found.setdefault(tuple(route.addresses.values()), route)

    by_network: dict[str, dict[str, str]] = {}
    by_interface: dict[str, dict[str, str]] = {}
    first: dict[str, str] = {}
    for host, host_facts in facts.items():
        for interface in host_facts.interfaces:
            by_network.setdefault(interface.network, {}).setdefault(host, interface.address)
            by_interface.setdefault(interface.name, {}).setdefault(host, interface.address)
            first.setdefault(host, interface.address)
    for name, addresses in by_network.items():
        add(Route("network", name, addresses))
    for name, addresses in by_interface.items():
        add(Route("interface", name, addresses))
    add(Route("first addresses", "", first))
    return list(found.values())


def open_pairs(route: Route, reached: Iterable[ReachedHost]) -> set[Pair]:
    """Return the (source, target) pairs that can connect over this route."""
    pairs = set()
    for attempt in reached:
        if not attempt.refusal and _is_on(route, attempt):
            pairs.add((attempt.source, attempt.target))
    return pairs


def blocked_pairs(route: Route, reached: Iterable[ReachedHost]) -> dict[Pair, str]:
    """Return the (source, target) pairs that cannot connect over this route, with the reason."""
    attempts = {(one.source, one.target): one.refusal for one in reached if _is_on(route, one)}
    blocked = {}
    for pair in permutations(route.addresses, 2):
        reason = attempts.get(pair, "unknown reason")
        if reason:
            blocked[pair] = reason
    return blocked


def choose_route(facts: Mapping[str, HostFacts], reached: Sequence[ReachedHost]) -> Route | None:
    """Return the first route over which the most pairs can connect; None if a host has no address."""
    return max(routes(facts), key=lambda route: len(open_pairs(route, reached)), default=None)


def lossy_pairs(paths: Iterable[PathFacts]) -> dict[Pair, int]:
    """Return the pairs that lose packets within the MTU of both interfaces, with the largest size that arrives."""
    return {(path.source, path.target): path.mtu for path in paths if 0 < path.mtu < min(path.ends)}


def common_hosts(hosts: Sequence[str], bad: Collection[Pair]) -> list[tuple[str, ...]]:
    """Return the smallest groups of hosts that explain the bad pairs: hosts with only bad pairs, then single pairs."""
    rest, remaining, found = set(bad), list(hosts), list[tuple[str, ...]]()
    while len(remaining) > 2:
        partners = {host: _partners(host, rest) for host in remaining}
        worst = max(remaining, key=lambda host: len(partners[host]))
        if len(partners[worst]) < len(remaining) - 1:
            break
        found.append((worst,))
        remaining.remove(worst)
        rest = {pair for pair in rest if worst not in pair}
    unordered = {tuple(sorted(pair, key=hosts.index)) for pair in rest}
    return [*found, *sorted(unordered, key=lambda pair: (hosts.index(pair[0]), hosts.index(pair[1])))]


def _partners(host: str, pairs: Collection[Pair]) -> set[str]:
    """Return the hosts that form a pair with `host`."""
    partners: set[str] = set()
    for pair in pairs:
        if host in pair:
            partners.update(pair)
    return partners - {host}


def tournament(hosts: Sequence[str]) -> list[list[Pair]]:
    """Return rounds of disjoint pairs in which every pair occurs once, by the circle method."""
    seats: list[str | None] = list(hosts)
    if len(seats) % 2:
        seats.append(None)
    rounds = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = []
        for one, other in zip(seats[:half], reversed(seats[half:]), strict=True):
            if one is not None and other is not None:
                pairs.append((one, other))
        rounds.append(pairs)
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def _is_on(route: Route, one: ReachedHost) -> bool:
    return route.addresses.get(one.target) == one.address


Request = dict[str, Any]
ANSWER_S = 10.0
"""Time limit of a short request, sufficient for a busy host."""


def probe_command() -> str:
    """Return the shell command that runs the probe; it reads the probe's source code from the first line of stdin."""
    python = shlex.quote(sys.executable)
    boot = "import json; exec(json.loads(open(0, 'rb', buffering=0, closefd=False).readline()))"
    line = f"test -x {python} || exit {NO_PYTHON}; exec {python} -P -c {shlex.quote(boot)}"
    return f"exec /bin/sh -c {shlex.quote(line)}"


class ProbeSession(Session):
    """A session with a probe, which works on hosts without shardwise or with a different version of it."""

    def __init__(self, host: HostSpec, label: str, *, is_here: bool) -> None:
        """Start a probe on `host`, over ssh or directly on this machine; `label` is the name of the host."""
        super().__init__(host, is_here=is_here, command=probe_command())
        self.label = label
        self.send(Path(net_probe.__file__).read_text())

    @property
    def name(self) -> str:
        """The name of the host, as shown to the user."""
        return self.label


class Probes(Sessions):
    """The probes of all hosts, in the order of the hosts; leaving the context ends them."""

    def __init__(self, probes: Iterable[ProbeSession]) -> None:
        self.probes = tuple(probes)
        super().__init__(self.probes)
        self._number = 0

    def question(self, requests: Mapping[str, Request], timeout_s: float) -> dict[str, Request]:
        """Send a request to each host and return the successful replies that arrived in time.

        Each reply contains `sent_at` and `heard_at`, in seconds since the epoch by the local clock.
        """
        self._number += 1
        pending = {probe.name: probe for probe in self.probes if probe.name in requests}
        sent_at = {}
        for name, probe in pending.items():
            sent_at[name] = time.time()
            probe.send({**requests[name], "number": self._number})
        replies: dict[str, Request] = {}
        deadline = time.monotonic() + timeout_s
        while pending and time.monotonic() < deadline:
            for session, stream, line in self.receive(0.1):
                if stream == STDERR or not line.startswith(net_probe.MARK):
                    continue
                reply = json.loads(line.removeprefix(net_probe.MARK))
                if reply.pop("number") != self._number:  # a late reply to an earlier request
                    continue
                pending.pop(session.name, None)
                if "error" not in reply:
                    times = {"sent_at": sent_at[session.name], "heard_at": time.time()}
                    replies[session.name] = {**reply, **times}
            running = set(self.running)
            pending = {name: probe for name, probe in pending.items() if probe in running}
        return replies
