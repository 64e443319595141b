"""The network of a cluster examined from one machine: a probe on every host, asked step by step; nothing is left."""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from shardwise.diagnosis.network.advice import diagnose, launch_lines
from shardwise.diagnosis.network.facts import (
    HostClock,
    HostFacts,
    LinkFacts,
    Lookups,
    NetFacts,
    PathFacts,
    PortFacts,
    Problem,
    ReachedHost,
    StorageFacts,
    choose_road,
    count_hosts,
    lost_pairs,
    open_pairs,
    turns,
)
from shardwise.diagnosis.network.link_checks import matrix, slow_links
from shardwise.diagnosis.network.probe import LOOKUP_S, REACH_S
from shardwise.diagnosis.network.session import ANSWER_S, Order, Probes, ProbeSession
from shardwise.diagnosis.verdicts import VerdictReport, table_lines, verdict_lines
from shardwise.launcher.ssh.checks import explain_end, find_here
from shardwise.launcher.ssh.run import HostSpec, read_hosts
from shardwise.runs.console import echo_error
from shardwise.spec import Spec, option, spec_function

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from shardwise.diagnosis.network.facts import Pair, Road


_MOST_COLUMNS = 8
"""Hosts whose matrix of links fits a terminal."""
_LOGIN_S = 20.0
_MARGIN_S = 3.0
_STREAM_S = 0.3
"""Of the one stream that a link's bandwidth is taken from."""
_CLOCK_ROUNDS = 5
_MORE_LOOKS = 2
"""How often links that look slow are measured again at most: what disturbs a link only ever adds time. Once is enough
when they all still do."""
_PACKETS = (8900, 4000, 1500, 1450, 1400, 1280, 576)
"""Sizes that are tried below the MTU of the interfaces: tunnels take 50 to 100 bytes."""


class NetSpec(Spec, frozen=True, kw_only=True):
    """What `shardwise doctor net` is asked."""

    hosts: Annotated[str, option(metavar="HOSTS")]
    """Hosts such as a,me@b:8, or a file of them."""
    folders: Annotated[tuple[Path, ...], option("--folder")] = ()
    """Of runs, data or checkpoints, to be the same storage everywhere (default: where you are)."""
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)] = 29500
    """Port of the rendezvous."""


class NetReport(VerdictReport, frozen=True, kw_only=True):
    """What `shardwise doctor net` answers."""

    facts: NetFacts
    launch: tuple[str, ...]
    """The launch line for the hosts that work, with comments; empty when no two of them do."""

    def to_text(self) -> str:
        """Return the verdicts, the matrix of links and the launch line."""
        lines = verdict_lines(self.verdicts)
        if len(self.facts.usable) > _MOST_COLUMNS:
            lines += ["", f"the links of {len(self.facts.usable)} hosts are too many for a terminal: add --json"]
        elif self.facts.links:
            lines += ["", *table_lines(matrix(self.facts.usable, self.facts.links))]
        return "\n".join([*lines, "", *(self.launch or ["no two of these hosts can run a job together"])])


@spec_function(NetSpec)
def doctor_net(spec: NetSpec) -> NetReport:
    """Check logins, versions, names, clocks, storage, ports and links of all hosts; end with the launch line."""
    hosts = read_hosts(spec.hosts)
    folders = [Path.cwd() / folder.expanduser() for folder in spec.folders] or [Path.cwd()]
    facts = examine(hosts, folders=folders, port=spec.port, note=lambda text: echo_error(f"shardwise: {text}"))
    typed = {label: _typed(host) for label, host in zip(label_hosts(hosts), hosts, strict=True)}
    return NetReport(facts=facts, verdicts=tuple(diagnose(facts)), launch=tuple(launch_lines(facts, typed)))


def _typed(host: HostSpec) -> str:
    """Return how --hosts names a host."""
    name = f"[{host.name}]" if ":" in host.name else host.name
    user = f"{host.user}@" if host.user else ""
    slots = f":{host.slots}" if host.slots else ""
    return user + name + slots


def examine(hosts: Sequence[HostSpec], *, folders: Sequence[Path], port: int, note: Callable[[str], None]) -> NetFacts:
    """Find out all that checks need, over ssh; `note` is called with progress messages. Nothing is left on any host.

    `folders` are absolute; `port` is that of the rendezvous, on the first host that answers.
    """
    labels = label_hosts(hosts)
    here = find_here(hosts)
    probes = [
        ProbeSession(host, label, is_here=is_here) for host, label, is_here in zip(hosts, labels, here, strict=True)
    ]
    with Probes(probes) as hub:
        note(f"asking {count_hosts(labels)}")
        return _Examination(hub, [str(folder) for folder in folders], port, note).run()


class _Examination:
    """The steps, each of which builds on what those before found out."""

    def __init__(self, hub: Probes, folders: list[str], port: int, note: Callable[[str], None]) -> None:
        self._hub = hub
        self._folders = folders
        self._port = port
        self._note = note
        self._word = secrets.token_hex(16)
        self._greetings = {probe.name: secrets.token_hex(16) for probe in hub.probes}
        self._doors: dict[tuple[str, str], tuple[int, int]] = {}
        """(host, address) -> its port, and that of datagrams."""
        self.facts: dict[str, HostFacts] = {}

    def run(self) -> NetFacts:
        """Ask everything that can be asked of the hosts that answer."""
        problems = self._look()
        found: dict[str, Any] = {}
        if self.facts:
            self._note("comparing names, clocks and folders")
            found |= {"lookups": self._look_up(), "clocks": self._clocks()}
            found["storage"] = store_all(self._hub, self.facts, self._folders)
        if len(self.facts) > 1:
            self._note("going from every host to every address of the others")
            self._open()
            found["reached"] = tuple(self._reach())
        road = found["road"] = choose_road(self.facts, found.get("reached", ()))
        if road is not None and len(self.facts) > 1:
            self._note(f"measuring the links of {road}")
            pairs = open_pairs(road, found["reached"])
            found |= {
                "port": self._try_port(road),
                "links": self._links(road, pairs),
                "paths": self._paths(road, pairs),
            }
        hosts = tuple(probe.name for probe in self._hub.probes)
        return NetFacts(hosts=hosts, problems=problems, facts=self.facts, **found)

    def _ask_all(self, order: Order, timeout_s: float) -> dict[str, Order]:
        return self._hub.question(dict.fromkeys(self.facts, order), timeout_s)

    def _look(self) -> dict[str, Problem]:
        order = {"type": "look", "folders": self._folders}
        replies = self._hub.question({probe.name: order for probe in self._hub.probes}, _LOGIN_S)
        problems = {}
        for probe in self._hub.probes:
            if probe.name in replies:
                self.facts[probe.name] = msgspec.convert(replies[probe.name], HostFacts)
            else:
                error = explain_end(probe)
                problems[probe.name] = Problem(error.fact, error.fix)
        return problems

    def _look_up(self) -> dict[str, Lookups]:
        names = sorted({its.hostname for its in self.facts.values()})
        addresses = sorted({address for its in self.facts.values() for address in its.addresses})
        replies = self._ask_all({"type": "lookup", "names": names, "addresses": addresses}, LOOKUP_S + _MARGIN_S)
        return {host: msgspec.convert(reply, Lookups) for host, reply in replies.items()}

    def _clocks(self) -> dict[str, HostClock]:
        best: dict[str, HostClock] = {}
        for _ in range(_CLOCK_ROUNDS):
            for host, reply in self._ask_all({"type": "clock"}, ANSWER_S).items():
                sent_at, heard_at = reply["sent_at"], reply["heard_at"]
                clock = HostClock(reply["at"] - (sent_at + heard_at) / 2, (heard_at - sent_at) / 2)
                best[host] = min(best.get(host, clock), clock, key=lambda one: one.error_s)
        return best

    def _open(self) -> None:
        orders = {
            host: self._open_order(host, [[address, 0] for address in its.addresses])
            for host, its in self.facts.items()
        }
        for host, reply in self._hub.question(orders, ANSWER_S).items():
            for door in reply["doors"]:
                self._doors[host, door["address"]] = (door["port"], door["datagrams"])

    def _open_order(self, host: str, doors: list[list[Any]]) -> Order:
        return {"type": "open", "word": self._word, "greeting": self._greetings[host], "doors": doors}

    def _reach(self) -> list[ReachedHost]:
        """Have every host go to every door of the others."""
        doors = [(host, address, port) for (host, address), (port, _) in self._doors.items() if port]
        goals = {}
        for source in self.facts:
            goals[source] = [door for door in doors if door[0] != source]
        orders = {source: self._reach_order(goals[source]) for source in goals}
        replies = self._hub.question(orders, 2 * REACH_S + _MARGIN_S)
        silent = {"own": "", "refusal": "its probe did not answer"}
        reached = []
        for source, theirs in goals.items():
            answers = replies.get(source, {}).get("reached", [silent] * len(theirs))
            for (target, address, _), found in zip(theirs, answers, strict=True):
                own, refusal = found["own"], found["refusal"]
                reached.append(ReachedHost(source=source, target=target, address=address, own=own, refusal=refusal))
        return reached

    def _reach_order(self, doors: Iterable[tuple[str, str, int]]) -> Order:
        targets = [[address, port, self._greetings[host]] for host, address, port in doors]
        return {"type": "reach", "targets": targets}

    def _try_port(self, road: Road) -> PortFacts:
        """Have the first host listen at the port of the rendezvous, and all others connect to it."""
        first, *others = road.addresses
        address = road.addresses[first]
        opened = self._hub.question({first: self._open_order(first, [[address, self._port]])}, ANSWER_S).get(first)
        door: Order = opened["doors"][0] if opened else {"port": 0, "refusal": "its probe did not answer"}
        if door["refusal"]:
            return PortFacts(host=first, address=address, port=self._port, refusal=door["refusal"])
        order = self._reach_order([(first, address, door["port"])])
        replies = self._hub.question(dict.fromkeys(others, order), 2 * REACH_S + _MARGIN_S)
        found = {host: replies[host]["reached"][0]["refusal"] if host in replies else "no answer" for host in others}
        refused = {host: why for host, why in found.items() if why}
        return PortFacts(host=first, address=address, port=door["port"], cut=refused)

    def _links(self, road: Road, pairs: set[Pair]) -> tuple[LinkFacts, ...]:
        """Measure the pairs, disjoint ones at the same time, and those that look slow again."""
        best: dict[Pair, LinkFacts] = {}
        todo = pairs
        for _ in range(1 + _MORE_LOOKS):
            for turn in _both_ways(road, todo):
                self._measure(road, turn, best)
            links = tuple(best[pair] for pair in sorted(best))
            slow = {pair for one in slow_links(tuple(road.addresses), links) for pair in one.pairs}
            if not slow or slow == todo:
                break
            todo = slow
        return links

    def _measure(self, road: Road, turn: Sequence[Pair], best: dict[Pair, LinkFacts]) -> None:
        orders = {
            source: {"type": "measure", **self._door(road, target, datagrams=False), "seconds": _STREAM_S}
            for source, target in turn
        }
        replies = self._hub.question(orders, ANSWER_S)
        for source, target in turn:
            if source in replies:
                reply, before = replies[source], best.get((source, target))
                best[source, target] = LinkFacts(
                    source=source,
                    target=target,
                    latency_s=min([reply["latency_s"], *([before.latency_s] if before else [])]),
                    bytes_per_s=max([reply["bytes_per_s"], *([before.bytes_per_s] if before else [])]),
                )

    def _paths(self, road: Road, pairs: set[Pair]) -> tuple[PathFacts, ...]:
        """Find the largest packet that arrives, and again where some did not: datagrams may be lost on a good way too.

        Given up after a turn in which no datagram came anywhere.
        """
        best: dict[Pair, PathFacts] = {}
        todo = pairs
        for _ in range(2):
            for turn in _both_ways(road, todo):
                self._try_paths(road, turn, best)
                if not any(path.mtu for path in best.values()):
                    break
            todo = set(lost_pairs(best.values()))
        return tuple(best[pair] for pair in sorted(best))

    def _try_paths(self, road: Road, turn: Sequence[Pair], best: dict[Pair, PathFacts]) -> None:
        mtus = {host: its.addresses[road.addresses[host]].mtu for host, its in self.facts.items()}
        orders: dict[str, Order] = {}
        for source, target in turn:
            most = min(mtus[source], mtus[target])
            sizes = [most, *(size for size in _PACKETS if size < most)]
            orders[source] = {"type": "path", **self._door(road, target, datagrams=True), "sizes": sizes}
        replies = self._hub.question(orders, ANSWER_S)
        for source, target in turn:
            if source in replies:
                before = best[source, target].mtu if (source, target) in best else 0
                mtu = max(before, replies[source]["mtu"])
                ends = mtus[source], mtus[target]
                best[source, target] = PathFacts(source=source, target=target, mtu=mtu, ends=ends)

    def _door(self, road: Road, host: str, *, datagrams: bool) -> Order:
        address = road.addresses[host]
        return {"address": address, "port": self._doors[host, address][datagrams]}


def _both_ways(road: Road, pairs: set[Pair]) -> list[list[Pair]]:
    """Return the pairs in turns of disjoint ones, one way and then the other."""
    found = []
    for turn in turns(tuple(road.addresses)):
        back = [(target, source) for source, target in turn]
        for way in (turn, back):
            chosen = [pair for pair in way if pair in pairs]
            if chosen:
                found.append(chosen)
    return found


def label_hosts(hosts: Sequence[HostSpec]) -> list[str]:
    """Return the names of the hosts, with user and port where one name is there twice."""
    names = [host.name for host in hosts]
    return [
        host.name if names.count(host.name) == 1 else f"{host.user or 'you'}@{host.name}:{host.port or 22}"
        for host in hosts
    ]


# Whether a folder is the same storage on all hosts: one writes a secret, all read it.


_NAME = ".shardwise-doctor-"


def store_all(hub: Probes, facts: Mapping[str, HostFacts], folders: Sequence[str]) -> tuple[StorageFacts, ...]:
    """Have one host write into each folder and all read it; the file is removed whatever happens."""
    return tuple(_store(hub, facts, folder) for folder in folders)


def _store(hub: Probes, facts: Mapping[str, HostFacts], folder: str) -> StorageFacts:
    file, text = {"folder": folder, "name": _NAME + secrets.token_hex(8)}, secrets.token_hex(16)
    having = [host for host, its in facts.items() if folder in its.folders]
    missing = tuple(host for host in facts if host not in having)
    refusal = "no host has it"
    for writer in having:
        try:
            written = hub.question({writer: {"type": "write", **file, "text": text}}, ANSWER_S).get(writer)
            refusal = "no answer" if written is None else written["refusal"]
            if not refusal:
                readers = _readers(hub, having, file, text)
                return StorageFacts(folder=folder, writer=writer, readers=readers, missing=missing)
        finally:  # by all, since the writer may be gone
            hub.question({host: {"type": "remove", **file} for host in having}, ANSWER_S)
    return StorageFacts(folder=folder, missing=missing, refusal=refusal)


def _readers(hub: Probes, hosts: Sequence[str], file: Mapping[str, str], text: str) -> tuple[str, ...]:
    """Return who reads what was written; a file system of the network may show it a little late."""
    found: set[str] = set()
    for pause_s in (0.0, 0.5, 1.5):
        if set(hosts) - found:
            time.sleep(pause_s)
            asked = {host: {"type": "read", **file} for host in hosts if host not in found}
            replies = hub.question(asked, ANSWER_S)
            found |= {host for host, reply in replies.items() if reply["text"] == text}
    return tuple(host for host in hosts if host in found)
