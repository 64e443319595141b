"""NCCL_DEBUG=INFO logs of a run: variables that NCCL read, its network, and the transport of each pair; pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from shardwise.diagnosis.verdicts import Verdict, fail, ok, warn
from shardwise.errors import some_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from shardwise.runs import RunDirectory


_MESSAGE = re.compile(r"NCCL (?:INFO|WARN) (.*)$")
_READ = re.compile(r"(NCCL_\w+) set by environment to (.*?)\.?$")
_VERSION = re.compile(r"NCCL version (\d[\w.+-]*)")
_NETWORK = re.compile(r"Using network (.+)$")
_INTERFACE = re.compile(r"(?:Bootstrap ?: ?Using|NET/Socket : Using \[\d+\]) ?([\w.@-]+):")
_PAIR = re.compile(
    r"(?:Channel|Ring) \S+ ?: (\d+)(?:\[\w+\])? -> (\d+)(?:\[\w+\])? (?:\[(?:send|receive)\] )?via (\S.*)$"
)
_OLD_LEVELS = {"0": "LOC", "1": "PIX", "2": "PXB", "3": "PHB", "4": "SYS", "5": "SYS"}
"""NCCL writes the level by name, whichever way it was set (src/graph/paths.cc)."""
_NEVER_TOLD = frozenset({"NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS", "NCCL_IB_HCA", "NCCL_NET"})
"""Read, or not, without a line of their own."""


class NcclLog(msgspec.Struct, frozen=True, kw_only=True):
    """What the logs of one run contain."""

    version: str = ""
    read: dict[str, str] = {}
    """Variables that NCCL reports to have read, and the value it made of each."""
    networks: tuple[str, ...] = ()
    """Such as IB, Socket or AWS Libfabric; several when ranks differ."""
    interfaces: tuple[str, ...] = ()
    pairs: dict[str, str] = {}
    """"0 -> 1": the transport, such as P2P/CUMEM, SHM or NET/IB/0."""
    warnings: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether NCCL logged nothing at all."""
        return self == NcclLog()

    @property
    def over_sockets(self) -> tuple[str, ...]:
        """Pairs whose data goes through TCP."""
        return tuple(pair for pair, way in self.pairs.items() if way.startswith("NET/Socket"))


def read_nccl_log(lines: Iterable[str]) -> NcclLog:
    """Read the lines of one or more logs, in any order."""
    version, read, pairs = "", dict[str, str](), dict[str, str]()
    networks, interfaces, warnings = dict[str, None](), dict[str, None](), dict[str, None]()
    for line in lines:
        if found := _VERSION.search(line):
            version = found[1]
        message = _MESSAGE.search(line.rstrip())
        if message is None:
            continue
        if " NCCL WARN " in f" {line}":
            warnings[message[1]] = None
        elif found := _READ.search(message[1]):
            read[found[1]] = found[2]
        elif found := _NETWORK.search(message[1]):
            networks[found[1]] = None
        elif found := _PAIR.search(message[1]):
            pairs[f"{found[1]} -> {found[2]}"] = found[3]
        if found := _INTERFACE.search(message[1]):
            interfaces[found[1]] = None
    return NcclLog(
        version=version,
        read=read,
        networks=tuple(networks),
        interfaces=tuple(interfaces),
        pairs=pairs,
        warnings=tuple(warnings),
    )


def effects(asked: Mapping[str, str], log: NcclLog) -> list[Verdict]:
    """Return for every NCCL variable of the ranks whether NCCL read it, and whether the network was the one meant."""
    named = {name: value for name, value in asked.items() if name.startswith("NCCL_") and name not in _NEVER_TOLD}
    if log.is_empty:
        if not named and "NCCL_DEBUG" not in asked:
            return []
        fix = "nothing, if ranks were meant to use gloo; else set NCCL_DEBUG=INFO and look at the backend"
        return [warn("NCCL", "it wrote no log: ranks did not use it, or NCCL_DEBUG is not INFO", fix)]
    verdicts = [_effect(name, value, log) for name, value in named.items()]
    if asked.get("NCCL_IB_DISABLE") == "0" and "Socket" in log.networks:
        fix = "see shardwise doctor: rdma, limits (locked memory); and NCCL_IB_HCA"
        verdicts.append(fail("network", "InfiniBand was asked for, and NCCL took sockets", fix))
    elif log.networks:
        verdicts.append(
            ok("network", f"{', '.join(log.networks)} on {', '.join(log.interfaces) or 'no interface named'}")
        )
    return verdicts


def _effect(name: str, value: str, log: NcclLog) -> Verdict:
    if name not in log.read:
        why = f" over {', '.join(log.networks)}" if log.networks else ""
        return warn(name, f"{value}: NCCL{why} never read it", "unset it: it changed nothing")
    given = log.read[name]
    meant = _OLD_LEVELS.get(value, value) if name.endswith("_LEVEL") else value
    if given.upper() != meant.upper():
        return warn(
            name, f"{value} was set, and NCCL read {given}", "look for another place that sets it: /etc/nccl.conf"
        )
    return ok(name, f"{value}: read by NCCL" + (f" as {given}" if given != value else ""))


# How the ranks of a run talked to each other, from what NCCL wrote: the transport of each pair, TCP flagged; pure.


_KINDS = {
    "P2P": "GPU to GPU, by NVLink or PCIe",
    "SHM": "through memory of the host",
    "NET/IB": "InfiniBand or RoCE",
    "NET/Socket": "TCP",
}
_MOST = 4


def kind_of(transport: str) -> str:
    """Return the kind of a transport as NCCL writes it: P2P, SHM, NET/IB, NET/Socket, or NET/ and its plugin."""
    first, _, rest = transport.partition("/")
    return f"NET/{rest.partition('/')[0]}" if first == "NET" else first


def check_transports(log: NcclLog, hosts: Mapping[int, str]) -> list[Verdict]:
    """Return by which transport pairs communicated, and which fell back to TCP or go round through the network.

    `hosts` is where each rank ran. Pairs count ranks as their communicator does: the first one as the world does.
    """
    if not log.pairs:
        return []
    by_kind: dict[str, list[str]] = {}
    for pair, transport in log.pairs.items():
        by_kind.setdefault(kind_of(transport), []).append(pair)
    counts = [
        f"{kind}{f' ({_KINDS[kind]})' if kind in _KINDS else ''} for {_pairs(pairs)}" for kind, pairs in by_kind.items()
    ]
    round_about = [pair for pair, way in log.pairs.items() if way.startswith("NET/") and _is_local(pair, hosts)]
    found = [ok("transport", "; ".join(counts))]
    if round_about:
        fact = f"{_pairs(round_about)} on one host talked through the network, not GPU to GPU or by shared memory"
        fix = "unset NCCL_P2P_DISABLE and NCCL_SHM_DISABLE; give containers --ipc=host; see nvidia-smi topo -m"
        found.append(warn("transport", fact, fix))
    elif log.over_sockets:
        fact = f"{_pairs(log.over_sockets)} fell back to TCP, several times slower than InfiniBand or EFA"
        fix = (
            "see NCCL_IB_DISABLE, NCCL_IB_HCA and the network's NCCL plugin: shardwise doctor env; fine without either"
        )
        found.append(warn("transport", fact, fix))
    found += [
        warn("NCCL", f"it warned: {text}", "see the logs of NCCL beside those of ranks")
        for text in log.warnings[:_MOST]
    ]
    return found


def _is_local(pair: str, hosts: Mapping[int, str]) -> bool:
    ranks = [int(rank) for rank in pair.split(" -> ")]
    places = [hosts.get(rank) for rank in ranks]
    return ranks[0] != ranks[1] and None not in places and places[0] == places[1]


def _pairs(pairs: Sequence[str]) -> str:
    """Return pairs of ranks as text: few by name, many by number."""
    shown = some_of((pair.replace(" -> ", "->") for pair in pairs), most=_MOST)
    return f"{'pair' if len(pairs) == 1 else 'pairs'} {shown}"


def run_effects(asked: Mapping[str, str], run: RunDirectory) -> list[Verdict]:
    """Return whether each NCCL variable took effect, from what NCCL wrote in a run directory."""
    lines: list[str] = []
    for path in run.nccl_logs():
        lines += path.read_text(errors="replace").splitlines()
    return effects(asked, read_nccl_log(lines))
