"""NCCL_DEBUG=INFO logs of a run: variables that NCCL read, its network, and the transport of each pair of ranks."""

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
"""NCCL logs the level by name, even if it was set by number (src/graph/paths.cc)."""
_NEVER_LOGGED = frozenset({"NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS", "NCCL_IB_HCA", "NCCL_NET"})
"""Variables that NCCL reads without logging them."""


class NcclLog(msgspec.Struct, frozen=True, kw_only=True):
    """The variables, networks, transports and warnings in the NCCL logs of one run."""

    version: str = ""
    read: dict[str, str] = {}
    """Variables that NCCL logged, with the values that it uses."""
    networks: tuple[str, ...] = ()
    """Such as IB, Socket or AWS Libfabric; several if ranks differ."""
    interfaces: tuple[str, ...] = ()
    pairs: dict[str, str] = {}
    """Transport of each pair "0 -> 1", such as P2P/CUMEM, SHM or NET/IB/0."""
    warnings: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether NCCL has not logged anything."""
        return self == NcclLog()

    @property
    def over_sockets(self) -> tuple[str, ...]:
        """Pairs that communicate over TCP."""
        return tuple(pair for pair, transport in self.pairs.items() if transport.startswith("NET/Socket"))


def read_nccl_log(lines: Iterable[str]) -> NcclLog:
    """Parse the lines of one or more logs, in any order."""
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


def effects(requested: Mapping[str, str], log: NcclLog) -> list[Verdict]:
    """Return whether NCCL read each NCCL variable of the ranks, and whether it used the requested network."""
    names = [name for name in requested if name.startswith("NCCL_") and name not in _NEVER_LOGGED]
    if log.is_empty:
        if not names and "NCCL_DEBUG" not in requested:
            return []
        fix = "set NCCL_DEBUG=INFO and check the backend, unless ranks use gloo intentionally"
        return [warn("NCCL", "no log: ranks did not use NCCL, or NCCL_DEBUG is not INFO", fix)]
    verdicts = [_effect(name, requested[name], log) for name in names]
    if requested.get("NCCL_IB_DISABLE") == "0" and "Socket" in log.networks:
        fix = "run shardwise doctor and check rdma and locked memory; check NCCL_IB_HCA"
        verdicts.append(fail("network", "InfiniBand was requested, but NCCL used sockets", fix))
    elif log.networks:
        interfaces = ", ".join(log.interfaces) or "an unknown interface"
        verdicts.append(ok("network", f"{', '.join(log.networks)} on {interfaces}"))
    return verdicts


def _effect(name: str, value: str, log: NcclLog) -> Verdict:
    if name not in log.read:
        over = f" over {', '.join(log.networks)}" if log.networks else ""
        return warn(name, f"{value}: NCCL{over} never read it", "unset it: it has no effect")
    used = log.read[name]
    expected = value
    if name.endswith("_LEVEL"):
        expected = _OLD_LEVELS.get(value, value)
    if used.upper() != expected.upper():
        return warn(name, f"{value} was set, but NCCL read {used}", "check other sources, such as /etc/nccl.conf")
    if used != value:
        return ok(name, f"{value}: read by NCCL as {used}")
    return ok(name, f"{value}: read by NCCL")


# The transport of each pair of ranks, as logged by NCCL.


_KINDS = {
    "P2P": "GPU to GPU, by NVLink or PCIe",
    "SHM": "shared host memory",
    "NET/IB": "InfiniBand or RoCE",
    "NET/Socket": "TCP",
}
_MAX_SHOWN = 4


def kind_of(transport: str) -> str:
    """Return the kind of a transport as NCCL writes it: P2P, SHM, NET/IB, NET/Socket, or NET/ and its plugin."""
    first, _, rest = transport.partition("/")
    return f"NET/{rest.partition('/')[0]}" if first == "NET" else first


def check_transports(log: NcclLog, hosts: Mapping[int, str]) -> list[Verdict]:
    """Return the transport of each pair of ranks, and warnings about pairs that use TCP, or a network within a host.

    `hosts` is the host of each rank. Ranks in pairs are those of the first communicator, which are the global ranks.
    """
    if not log.pairs:
        return []
    by_kind: dict[str, list[str]] = {}
    detours = []
    for pair, transport in log.pairs.items():
        by_kind.setdefault(kind_of(transport), []).append(pair)
        if transport.startswith("NET/") and _is_local(pair, hosts):
            detours.append(pair)
    counts = []
    for kind, pairs in by_kind.items():
        name = f"{kind} ({_KINDS[kind]})" if kind in _KINDS else kind
        counts.append(f"{name} for {_pairs(pairs)}")
    found = [ok("transport", "; ".join(counts))]
    if detours:
        fact = f"{_pairs(detours)} on one host communicated over the network instead of NVLink, PCIe or shared memory"
        fix = "unset NCCL_P2P_DISABLE and NCCL_SHM_DISABLE; start containers with --ipc=host; see nvidia-smi topo -m"
        found.append(warn("transport", fact, fix))
    elif log.over_sockets:
        fact = f"{_pairs(log.over_sockets)} fell back to TCP, several times slower than InfiniBand or EFA"
        fix = "check NCCL_IB_DISABLE, NCCL_IB_HCA and the NCCL plugin with shardwise doctor env; fine without either"
        found.append(warn("transport", fact, fix))
    for text in log.warnings[:_MAX_SHOWN]:
        fix = "read the NCCL logs next to the logs of the ranks"
        found.append(warn("NCCL", f"NCCL warned: {text}", fix))
    return found


def _is_local(pair: str, hosts: Mapping[int, str]) -> bool:
    """Return whether both ranks of a pair are known to run on the same host."""
    one, other = map(int, pair.split(" -> "))
    return one != other and one in hosts and hosts[one] == hosts.get(other)


def _pairs(pairs: Sequence[str]) -> str:
    """Return pairs of ranks as text, shortened if there are many."""
    shown = some_of((pair.replace(" -> ", "->") for pair in pairs), most=_MAX_SHOWN)
    return f"pair {shown}" if len(pairs) == 1 else f"pairs {shown}"


def run_effects(requested: Mapping[str, str], run: RunDirectory) -> list[Verdict]:
    """Return whether each NCCL variable took effect, from the NCCL logs of a run directory."""
    lines: list[str] = []
    for path in run.nccl_logs():
        lines += path.read_text(errors="replace").splitlines()
    return effects(requested, read_nccl_log(lines))
