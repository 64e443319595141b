"""Looking at the network of this machine: interfaces, RDMA devices, NCCL's plugins, names both ways."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from shardwise.doctor.machine.facts import Interface, Network, RdmaDevice
from shardwise.environment import variables
from shardwise.launcher.nodes.network import own_addresses

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")

_UP, _LOOPBACK = 0x1, 0x8
"""Flags of an interface (net/if.h)."""
_LOOKUP_S = 5.0
"""A name server that does not answer is no answer."""
_PLUGIN_FOLDERS = ("/opt/amazon/ofi-nccl/lib", "/opt/amazon/ofi-nccl/lib64", "/opt/aws-ofi-nccl/lib", "/usr/lib")


def observe_network() -> Network:
    """Return the interfaces of this machine and what its name means; asks the resolver."""
    name = socket.gethostname()
    nothing: tuple[str, ...] = ()
    addresses = _within(lambda: _addresses_of(name), nothing)
    back = _within(lambda: socket.gethostbyaddr(addresses[0])[0] if addresses else "", "")
    return Network(
        interfaces=observe_interfaces(),
        rdma=tuple(observe_rdma()),
        net_plugins=tuple(_plugins()),
        hostname=name,
        addresses=addresses,
        back_name=back,
    )


def observe_interfaces(root: Path = Path("/sys/class/net")) -> tuple[Interface, ...]:
    """Return every interface with its state and addresses."""
    found, known = own_addresses(), _ipv6()
    interfaces = []
    for _, name in socket.if_nameindex():
        flags = int(_read(root / name / "flags") or "0", 16)
        own = (*([found[name]] if name in found else []), *known.get(name, ()))
        mtu = int(_read(root / name / "mtu") or "0")
        interfaces.append(
            Interface(name=name, up=bool(flags & _UP), loopback=bool(flags & _LOOPBACK), mtu=mtu, addresses=own)
        )
    return tuple(interfaces)


def observe_rdma(root: Path = Path("/sys/class/infiniband")) -> Iterator[RdmaDevice]:
    """Yield every RDMA device: InfiniBand and RoCE cards, and AWS's EFA."""
    for device in sorted(root.iterdir()) if root.is_dir() else ():
        states = [_read(path) for path in device.glob("ports/*/state")]
        driver = device / "device" / "driver"
        yield RdmaDevice(
            name=device.name,
            driver=driver.resolve().name if driver.exists() else "",
            active=any("ACTIVE" in state for state in states),
        )


def _plugins() -> Iterator[str]:
    """Yield the network plugins that NCCL would find: in LD_LIBRARY_PATH and where AWS puts them."""
    named = variables("LD_LIBRARY_PATH").get("LD_LIBRARY_PATH", "").split(":")
    for folder in dict.fromkeys([*filter(None, named), *_PLUGIN_FOLDERS]):
        with contextlib.suppress(OSError):
            yield from (str(path) for path in sorted(Path(folder).glob("libnccl-net*.so")))


def _ipv6() -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for line in _read(Path("/proc/net/if_inet6")).splitlines():
        digits, *_, name = line.split()
        address = ipaddress.IPv6Address(int(digits, 16))
        if not address.is_link_local:
            found[name] = (*found.get(name, ()), str(address))
    return found


def _addresses_of(name: str) -> tuple[str, ...]:
    entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in entries))


def _within(ask: Callable[[], T], otherwise: T) -> T:
    """Return what the resolver says, `otherwise` where it does not know or does not answer in time."""
    answers: list[T] = []

    def look_up() -> None:
        with contextlib.suppress(OSError, UnicodeError):
            answers.append(ask())

    thread = threading.Thread(target=look_up, daemon=True)  # one that never returns must not keep us
    thread.start()
    thread.join(_LOOKUP_S)
    return answers[0] if answers else otherwise


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
