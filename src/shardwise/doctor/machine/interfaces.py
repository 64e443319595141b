"""Which interfaces gloo and NCCL take, by their own rules; pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardwise.doctor.machine.facts import Interface, Network

_NCCL_ORDER = ("ib", "^docker,lo,virbr", "docker", "lo", "virbr")
"""What NCCL tries in turn when nobody names an interface (src/misc/socket.cc)."""


def nccl_matches(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the interfaces that NCCL_SOCKET_IFNAME means: prefixes, = for exact names, ^ for all others."""
    excluded = pattern.startswith("^")
    rest = pattern.removeprefix("^")
    exact = rest.startswith("=")
    wanted = [word for word in rest.removeprefix("=").split(",") if word]
    found = []
    for name in names:
        hit = any(name == word if exact else name.startswith(word) for word in wanted)
        if hit != excluded:
            found.append(name)
    return found


def nccl_choice(interfaces: Iterable[Interface]) -> list[str]:
    """Return the interfaces that NCCL takes by itself."""
    names = [one.name for one in interfaces if one.up and one.addresses]
    return next((found for pattern in _NCCL_ORDER if (found := nccl_matches(pattern, names))), [])


def gloo_choice(network: Network) -> str:
    """Return the interface that gloo takes by itself: that of the host name's address, else loopback."""
    for address in network.addresses:
        for interface in network.interfaces:
            if address in interface.addresses:
                return interface.name
    return next((interface.name for interface in network.interfaces if interface.loopback), "")
