"""The launch line that works on the hosts that do, and what other launchers need to be told; pure."""

from __future__ import annotations

import shlex
from collections import Counter
from typing import TYPE_CHECKING

from shardwise.doctor.network.addresses import cut_pairs, lost_pairs
from shardwise.doctor.network.host_checks import check_clocks, check_login, check_storage, check_versions
from shardwise.doctor.network.link_checks import (
    check_exposure,
    check_links,
    check_mtu,
    check_port,
    check_reach,
    stuck_pairs,
)
from shardwise.doctor.network.names import check_names

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardwise.doctor.check import Verdict
    from shardwise.doctor.network.facts import NetFacts

CHECKS = (  # in the order in which one thing rests on another
    check_login,
    check_versions,
    check_names,
    check_clocks,
    check_storage,
    check_reach,
    check_port,
    check_exposure,
    check_mtu,
    check_links,
)


def diagnose(found: NetFacts) -> list[Verdict]:
    """Return what every check says; of hosts none of which can be asked, only that."""
    checks = CHECKS if found.usable else (check_login,)
    return [verdict for check in checks for verdict in check(found)]


def good_hosts(found: NetFacts) -> tuple[str, ...]:
    """Return hosts that answer, have what the most have, and all come to each other; the most cut off leave first."""
    kinds = {host: tuple(sorted(its.versions.items())) for host, its in found.facts.items()}
    usual = Counter(kinds.values()).most_common(1)[0][0] if kinds else ()
    without = {host for one in found.storage for host in one.missing}
    hosts = [host for host in found.usable if kinds[host] == usual and host not in without]
    cut = set(cut_pairs(found.road, found.reached)) if found.road is not None else set()
    cut |= stuck_pairs(found) | set(lost_pairs(found.paths))
    while between := [pair for pair in cut if set(pair) <= set(hosts)]:
        ends = Counter(host for pair in between for host in pair)
        hosts.remove(max(reversed(hosts), key=lambda host: ends[host]))
    return tuple(hosts)


def launch_lines(found: NetFacts, typed: Mapping[str, str]) -> list[str]:
    """Return what to type, then what launchers that do not look for themselves need; empty when no two hosts are good.

    `typed` is how to name each host to --hosts.
    """
    hosts = good_hosts(found)
    if found.road is None or len(hosts) < min(2, len(found.hosts)):
        return []
    left_out = [host for host in found.hosts if host not in hosts]
    named = ",".join(typed[host] for host in hosts)
    words = ["shardwise", "launch", "--hosts", named, "--master-addr", found.road.addresses[hosts[0]]]
    interfaces = {host: found.facts[host].addresses[found.road.addresses[host]].name for host in hosts}
    names = dict.fromkeys(interfaces.values())
    if len(names) == 1:
        name = next(iter(names))
        told = f"GLOO_SOCKET_IFNAME={name} NCCL_SOCKET_IFNAME={name}"
    else:
        told = "; ".join(
            f"on {host}: GLOO_SOCKET_IFNAME={name} NCCL_SOCKET_IFNAME={name}" for host, name in interfaces.items()
        )
    return [
        *([f"# without {', '.join(left_out)}"] if left_out else []),
        f"{shlex.join(words)} train.py",
        f"# shardwise names the interface by itself; torchrun needs: {told}",
    ]
