"""`doctor net`: checks the network of a cluster from one machine, with a temporary probe on every host."""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from shardwise.diagnosis.network.advice import diagnose, launch_lines
from shardwise.diagnosis.network.facts import (
    ANSWER_S,
    HostClock,
    HostFacts,
    LinkFacts,
    Lookups,
    NetFacts,
    PathFacts,
    PortFacts,
    Probes,
    ProbeSession,
    Problem,
    ReachedHost,
    Request,
    StorageFacts,
    choose_route,
    count_hosts,
    lossy_pairs,
    open_pairs,
    tournament,
)
from shardwise.diagnosis.network.link_checks import matrix, slow_links
from shardwise.diagnosis.network.probe import LOOKUP_S, REACH_S
from shardwise.diagnosis.verdicts import VerdictReport, table_lines, verdict_lines
from shardwise.launcher.ssh.checks import explain_end, find_here
from shardwise.launcher.ssh.run import HostSpec, read_hosts
from shardwise.runs.console import echo_error
from shardwise.spec import Spec, option, spec_function

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from shardwise.diagnosis.network.facts import Pair, Route


_MAX_COLUMNS = 8
"""Maximum number of hosts for which the table of links fits into a terminal."""
_LOGIN_S = 20.0
_MARGIN_S = 3.0
_STREAM_S = 0.3
"""Duration of the TCP stream that measures the bandwidth of a link."""
_CLOCK_ROUNDS = 5
_MAX_REPEATS = 2
"""Maximum number of repeated measurements of links that appear slow, because disturbances only add time. Repetition
ends early if all repeated links are still slow."""
_PACKETS = (8900, 4000, 1500, 1450, 1400, 1280, 576)
"""Packet sizes that are tried below the MTU of the interfaces; tunnel headers take 50 to 100 bytes."""


class NetSpec(Spec, frozen=True, kw_only=True):
    """The request of `shardwise doctor net`."""

    hosts: Annotated[str, option(metavar="HOSTS")]
    """Hosts such as a,me@b:8, or a file of hosts."""
    folders: Annotated[tuple[Path, ...], option("--folder")] = ()
    """Directory of runs, data or checkpoints that all hosts must share (default: the current directory)."""
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)] = 29500
    """Rendezvous port."""


class NetReport(VerdictReport, frozen=True, kw_only=True):
    """The report of `shardwise doctor net`."""

    facts: NetFacts
    launch: tuple[str, ...]
    """The launch command for the hosts that pass, with comments; empty if no two hosts pass."""

    def to_text(self) -> str:
        """Return the verdicts, the table of links and the launch command."""
        lines = verdict_lines(self.verdicts)
        if len(self.facts.usable) > _MAX_COLUMNS:
            lines += ["", f"the links of {len(self.facts.usable)} hosts do not fit a terminal: add --json"]
        elif self.facts.links:
            lines += ["", *table_lines(matrix(self.facts.usable, self.facts.links))]
        lines += ["", *(self.launch or ["No two of these hosts can run a job together"])]
        return "\n".join(lines)


@spec_function(NetSpec)
def doctor_net(spec: NetSpec) -> NetReport:
    """Check logins, versions, names, clocks, storage, ports and links of all hosts; print the launch command."""
    hosts = read_hosts(spec.hosts)
    folders = [Path.cwd() / folder.expanduser() for folder in spec.folders] or [Path.cwd()]
    facts = examine(hosts, folders=folders, port=spec.port, note=lambda text: echo_error(f"shardwise: {text}"))
    typed = dict(zip(label_hosts(hosts), map(_typed, hosts), strict=True))
    return NetReport(facts=facts, verdicts=tuple(diagnose(facts)), launch=tuple(launch_lines(facts, typed)))


def _typed(host: HostSpec) -> str:
    """Return a host in the syntax of --hosts, such as user@name:8."""
    name = f"[{host.name}]" if ":" in host.name else host.name
    user = f"{host.user}@" if host.user else ""
    slots = f":{host.slots}" if host.slots else ""
    return user + name + slots


def examine(hosts: Sequence[HostSpec], *, folders: Sequence[Path], port: int, note: Callable[[str], None]) -> NetFacts:
    """Collect the facts that the network checks need from each host over ssh.

    `folders` are absolute paths; `port` is the rendezvous port on the first host that responds. `note` receives
    progress messages. The probes remove their temporary files.
    """
    labels = label_hosts(hosts)
    probes = []
    for host, label, is_here in zip(hosts, labels, find_here(hosts), strict=True):
        probes.append(ProbeSession(host, label, is_here=is_here))
    with Probes(probes) as hub:
        note(f"connecting to {count_hosts(labels)}")
        return _Examination(hub, list(map(str, folders)), port, note).run()


class _Examination:
    """Collects the facts of `doctor net` in the order of their dependencies."""

    def __init__(self, hub: Probes, folders: list[str], port: int, note: Callable[[str], None]) -> None:
        self._hub = hub
        self._folders = folders
        self._port = port
        self._note = note
        self._secret = secrets.token_hex(16)
        self._greetings = {probe.name: secrets.token_hex(16) for probe in hub.probes}
        self._endpoints: dict[tuple[str, str], tuple[int, int]] = {}
        """TCP and UDP port of each (host, address)."""
        self.facts: dict[str, HostFacts] = {}

    def run(self) -> NetFacts:
        """Collect all facts from the hosts that respond."""
        problems = self._read_facts()
        found: dict[str, Any] = {}
        if self.facts:
            self._note("comparing names, clocks and directories")
            found |= {"lookups": self._lookups(), "clocks": self._clocks()}
            found["storage"] = store_all(self._hub, self.facts, self._folders)
        if len(self.facts) > 1:
            self._note("connecting from every host to every address of the other hosts")
            self._listen()
            found["reached"] = tuple(self._reach())
        route = found["route"] = choose_route(self.facts, found.get("reached", ()))
        if route is not None and len(self.facts) > 1:
            self._note(f"measuring the links of {route}")
            pairs = open_pairs(route, found["reached"])
            found |= {
                "port": self._try_port(route),
                "links": self._links(route, pairs),
                "paths": self._paths(route, pairs),
            }
        hosts = tuple(probe.name for probe in self._hub.probes)
        return NetFacts(hosts=hosts, problems=problems, facts=self.facts, **found)

    def _query_all(self, request: Request, timeout_s: float) -> dict[str, Request]:
        return self._hub.question(dict.fromkeys(self.facts, request), timeout_s)

    def _read_facts(self) -> dict[str, Problem]:
        request = {"type": "look", "folders": self._folders}
        replies = self._hub.question(dict.fromkeys((probe.name for probe in self._hub.probes), request), _LOGIN_S)
        problems = {}
        for probe in self._hub.probes:
            if probe.name in replies:
                self.facts[probe.name] = msgspec.convert(replies[probe.name], HostFacts)
            else:
                error = explain_end(probe)
                problems[probe.name] = Problem(error.fact, error.fix)
        return problems

    def _lookups(self) -> dict[str, Lookups]:
        names: set[str] = set()
        addresses: set[str] = set()
        for facts in self.facts.values():
            names.add(facts.hostname)
            addresses.update(facts.addresses)
        request = {"type": "lookup", "names": sorted(names), "addresses": sorted(addresses)}
        replies = self._query_all(request, LOOKUP_S + _MARGIN_S)
        return {host: msgspec.convert(reply, Lookups) for host, reply in replies.items()}

    def _clocks(self) -> dict[str, HostClock]:
        best: dict[str, HostClock] = {}
        for _ in range(_CLOCK_ROUNDS):
            for host, reply in self._query_all({"type": "clock"}, ANSWER_S).items():
                sent_at, heard_at = reply["sent_at"], reply["heard_at"]
                clock = HostClock(reply["at"] - (sent_at + heard_at) / 2, (heard_at - sent_at) / 2)
                best[host] = min(best.get(host, clock), clock, key=lambda one: one.error_s)
        return best

    def _listen(self) -> None:
        """Make every host listen on all its addresses."""
        requests = {}
        for host, facts in self.facts.items():
            requests[host] = self._listen_request(host, [[address, 0] for address in facts.addresses])
        for host, reply in self._hub.question(requests, ANSWER_S).items():
            for endpoint in reply["doors"]:
                self._endpoints[host, endpoint["address"]] = (endpoint["port"], endpoint["datagrams"])

    def _listen_request(self, host: str, endpoints: list[list[Any]]) -> Request:
        return {"type": "open", "word": self._secret, "greeting": self._greetings[host], "doors": endpoints}

    def _reach(self) -> list[ReachedHost]:
        """Connect from every host to every address of the other hosts."""
        endpoints = []
        for (host, address), (port, _) in self._endpoints.items():
            if port:
                endpoints.append((host, address, port))
        targets_of, requests = {}, {}
        for source in self.facts:
            targets_of[source] = [endpoint for endpoint in endpoints if endpoint[0] != source]
            requests[source] = self._reach_request(targets_of[source])
        replies = self._hub.question(requests, 2 * REACH_S + _MARGIN_S)
        silent = {"own": "", "refusal": "its probe did not respond"}
        reached = []
        for source, targets in targets_of.items():
            results = replies.get(source, {}).get("reached", [silent] * len(targets))
            for (target, address, _), found in zip(targets, results, strict=True):
                own, refusal = found["own"], found["refusal"]
                reached.append(ReachedHost(source=source, target=target, address=address, own=own, refusal=refusal))
        return reached

    def _reach_request(self, endpoints: Iterable[tuple[str, str, int]]) -> Request:
        targets = [[address, port, self._greetings[host]] for host, address, port in endpoints]
        return {"type": "reach", "targets": targets}

    def _try_port(self, route: Route) -> PortFacts:
        """Make the first host listen on the rendezvous port, and all other hosts connect to it."""
        first, *others = route.addresses
        address = route.addresses[first]
        opened = self._hub.question({first: self._listen_request(first, [[address, self._port]])}, ANSWER_S).get(first)
        endpoint: Request = opened["doors"][0] if opened else {"port": 0, "refusal": "its probe did not respond"}
        if endpoint["refusal"]:
            return PortFacts(host=first, address=address, port=self._port, refusal=endpoint["refusal"])
        request = self._reach_request([(first, address, endpoint["port"])])
        replies = self._hub.question(dict.fromkeys(others, request), 2 * REACH_S + _MARGIN_S)
        blocked = {}
        for host in others:
            reason = "no answer"
            if host in replies:
                reason = replies[host]["reached"][0]["refusal"]
            if reason:
                blocked[host] = reason
        return PortFacts(host=first, address=address, port=endpoint["port"], cut=blocked)

    def _links(self, route: Route, pairs: set[Pair]) -> tuple[LinkFacts, ...]:
        """Measure the links of all pairs, disjoint pairs in parallel, and repeat the measurement of slow links."""
        best: dict[Pair, LinkFacts] = {}
        todo = pairs
        for _ in range(1 + _MAX_REPEATS):
            for turn in _both_directions(route, todo):
                self._measure(route, turn, best)
            links = tuple(best[pair] for pair in sorted(best))
            slow: set[Pair] = set()
            for one in slow_links(tuple(route.addresses), links):
                slow.update(one.pairs)
            if not slow or slow == todo:
                break
            todo = slow
        return links

    def _measure(self, route: Route, turn: Sequence[Pair], best: dict[Pair, LinkFacts]) -> None:
        """Measure disjoint pairs in parallel and store the best values of each link in `best`."""
        requests = {}
        for source, target in turn:
            endpoint = self._endpoint(route, target, datagrams=False)
            requests[source] = {"type": "measure", **endpoint, "seconds": _STREAM_S}
        replies = self._hub.question(requests, ANSWER_S)
        for source, target in turn:
            if source not in replies:
                continue
            latency_s, bytes_per_s = replies[source]["latency_s"], replies[source]["bytes_per_s"]
            before = best.get((source, target))
            if before is not None:
                latency_s = min(latency_s, before.latency_s)
                bytes_per_s = max(bytes_per_s, before.bytes_per_s)
            link = LinkFacts(source=source, target=target, latency_s=latency_s, bytes_per_s=bytes_per_s)
            best[source, target] = link

    def _paths(self, route: Route, pairs: set[Pair]) -> tuple[PathFacts, ...]:
        """Find the largest packet that arrives; repeat for pairs with losses, because datagrams may be lost by chance.

        Stops if no datagram arrived in the first round.
        """
        best: dict[Pair, PathFacts] = {}
        todo = pairs
        for _ in range(2):
            for turn in _both_directions(route, todo):
                self._try_paths(route, turn, best)
                if not any(path.mtu for path in best.values()):
                    break
            todo = set(lossy_pairs(best.values()))
        return tuple(best[pair] for pair in sorted(best))

    def _try_paths(self, route: Route, turn: Sequence[Pair], best: dict[Pair, PathFacts]) -> None:
        mtus = {host: facts.addresses[route.addresses[host]].mtu for host, facts in self.facts.items()}
        requests: dict[str, Request] = {}
        for source, target in turn:
            largest = min(mtus[source], mtus[target])
            sizes = [largest, *(size for size in _PACKETS if size < largest)]
            requests[source] = {"type": "path", **self._endpoint(route, target, datagrams=True), "sizes": sizes}
        replies = self._hub.question(requests, ANSWER_S)
        for source, target in turn:
            if source in replies:
                mtu = replies[source]["mtu"]
                if (source, target) in best:
                    mtu = max(mtu, best[source, target].mtu)
                ends = mtus[source], mtus[target]
                best[source, target] = PathFacts(source=source, target=target, mtu=mtu, ends=ends)

    def _endpoint(self, route: Route, host: str, *, datagrams: bool) -> Request:
        address = route.addresses[host]
        return {"address": address, "port": self._endpoints[host, address][datagrams]}


def _both_directions(route: Route, pairs: set[Pair]) -> list[list[Pair]]:
    """Return `pairs` in rounds of disjoint pairs, each round followed by the opposite direction."""
    found = []
    for forward in tournament(tuple(route.addresses)):
        backward = [(target, source) for source, target in forward]
        for direction in (forward, backward):
            chosen = [pair for pair in direction if pair in pairs]
            if chosen:
                found.append(chosen)
    return found


def label_hosts(hosts: Sequence[HostSpec]) -> list[str]:
    """Return the names of the hosts, with user and port if a name occurs twice."""
    names = [host.name for host in hosts]
    labels = []
    for host in hosts:
        is_unique = names.count(host.name) == 1
        labels.append(host.name if is_unique else f"{host.user or 'you'}@{host.name}:{host.port or 22}")
    return labels


# Shared storage: one host writes a random text to a directory, and all hosts read it.


_NAME = ".shardwise-doctor-"


def store_all(hub: Probes, facts: Mapping[str, HostFacts], folders: Sequence[str]) -> tuple[StorageFacts, ...]:
    """Check each directory with a file that one host writes and all hosts read; the file is always removed."""
    return tuple(_store(hub, facts, folder) for folder in folders)


def _store(hub: Probes, facts: Mapping[str, HostFacts], folder: str) -> StorageFacts:
    file, text = {"folder": folder, "name": _NAME + secrets.token_hex(8)}, secrets.token_hex(16)
    having: list[str] = []
    missing: list[str] = []
    for host, host_facts in facts.items():
        (having if folder in host_facts.folders else missing).append(host)
    refusal = "no host has it"
    for writer in having:
        try:
            written = hub.question({writer: {"type": "write", **file, "text": text}}, ANSWER_S).get(writer)
            refusal = "no answer" if written is None else written["refusal"]
            if not refusal:
                readers = _readers(hub, having, file, text)
                return StorageFacts(folder=folder, writer=writer, readers=readers, missing=tuple(missing))
        finally:  # on all hosts, because the writer may have ended
            hub.question({host: {"type": "remove", **file} for host in having}, ANSWER_S)
    return StorageFacts(folder=folder, missing=tuple(missing), refusal=refusal)


def _readers(hub: Probes, hosts: Sequence[str], file: Mapping[str, str], text: str) -> tuple[str, ...]:
    """Return the hosts that read the text; a network file system may show the file with a delay."""
    found: set[str] = set()
    for pause_s in (0.0, 0.5, 1.5):
        remaining = [host for host in hosts if host not in found]
        if remaining:
            time.sleep(pause_s)
            request = {"type": "read", **file}
            replies = hub.question(dict.fromkeys(remaining, request), ANSWER_S)
            found |= {host for host, reply in replies.items() if reply["text"] == text}
    return tuple(host for host in hosts if host in found)
