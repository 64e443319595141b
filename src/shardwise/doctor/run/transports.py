"""How the ranks of a run talked to each other, from what NCCL wrote: the transport of each pair, TCP flagged; pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.doctor.check import Verdict, ok, warn
from shardwise.errors import some_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardwise.doctor.run.nccl_log import NcclLog

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
    """Say by which transport pairs talked, and which fell back to TCP or go round through the network.

    `hosts` is where each rank ran. Pairs count ranks as their communicator does: the first one as the world does.
    """
    if not log.pairs:
        return []
    by_kind: dict[str, list[str]] = {}
    for pair, transport in log.pairs.items():
        by_kind.setdefault(kind_of(transport), []).append(pair)
    told = [
        f"{kind}{f' ({_KINDS[kind]})' if kind in _KINDS else ''} for {_pairs(pairs)}" for kind, pairs in by_kind.items()
    ]
    round_about = [pair for pair, way in log.pairs.items() if way.startswith("NET/") and _is_local(pair, hosts)]
    found = [ok("transport", "; ".join(told))]
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
    """Return pairs of ranks in words: few by name, many by number."""
    shown = some_of((pair.replace(" -> ", "->") for pair in pairs), most=_MOST)
    return f"{'pair' if len(pairs) == 1 else 'pairs'} {shown}"
