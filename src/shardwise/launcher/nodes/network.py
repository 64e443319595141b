"""Which address of this machine others reach, and on which interface it is: asked of the kernel, not of host names."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.errors import LaunchError

if TYPE_CHECKING:
    from collections.abc import Mapping

_RESOLVE_S = 5.0
"""A cluster's own name service may learn of a fresh node a little late."""
_SIOCGIFADDR = 0x8915


def resolve(host: str, port: int, patience_s: float = _RESOLVE_S) -> tuple[str, ...]:
    """Return the addresses of a host name, in the resolver's order; refused when there is none for some seconds."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            if time.monotonic() < deadline:
                time.sleep(0.2)
                continue
            raise LaunchError(
                f"host {host!r} has no address that this machine can look up",
                code="rendezvous.host-not-resolved",
                fix="name the address of node 0 itself",
            ) from None
        return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))


def is_own(address: str) -> bool:
    """Return whether `address` belongs to this machine: whether one can listen there."""
    with socket.socket(_family(address), socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def own_addresses() -> Mapping[str, str]:
    """Return the IPv4 address of every interface of this machine that has one, by interface (Linux)."""
    found = {}
    if sys.platform.startswith("linux"):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            for _, name in socket.if_nameindex():
                with contextlib.suppress(OSError):
                    answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                    found[name] = socket.inet_ntoa(answer[20:24])
    return found


def interface_of(address: str) -> str:
    """Return the interface that has `address`, empty when that cannot be told."""
    named = {own: name for name, own in own_addresses().items()}
    if address in named:
        return named[address]
    with contextlib.suppress(OSError, ValueError):
        wanted = ipaddress.ip_address(address).packed.hex()
        rows = (line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines())
        return next((row[5] for row in rows if row[0] == wanted), "")
    return ""


def own_address(local_addr: str) -> str:
    """Return the address of this machine that the user named; refused when it is none."""
    address = next((address for address in resolve(local_addr, 0) if is_own(address)), None)
    if address is None:
        raise LaunchError(
            f"--local-addr {local_addr} is no address of this machine",
            code="launch.local-address-unknown",
            fix="see: ip addr",
        )
    return address


def listening_address(host: str, port: int, local_addr: str) -> str:
    """Return the one address on which node 0 listens: what `host` means here, but never a loopback that others miss.

    `local_addr` is what the user says it is, empty when they do not.
    """
    if local_addr:
        return own_address(local_addr)
    meant = resolve(host, port)
    own = [address for address in meant if is_own(address)]
    outward = [address for address in own if not is_loopback(address)]
    if outward:
        return outward[0]
    others = {name: address for name, address in own_addresses().items() if not is_loopback(address)}
    told = ", ".join(f"{address} on {name}" for name, address in others.items()) or "none but loopback"
    if not own:
        raise LaunchError(
            f"{host} is {meant[0]}, which is no address of this machine, node 0 (it has {told})",
            code="launch.master-address-foreign",
            fix="name an address of node 0, or say with --local-addr which of these others reach",
        )
    if host == own[0] or host == "localhost":
        return own[0]
    if len(others) == 1:  # Debian's installer writes 127.0.1.1 beside the host's own name
        return next(iter(others.values()))
    raise LaunchError(
        f"{host} is {own[0]} here, where other machines cannot come (it has {told})",
        code="launch.master-address-loopback",
        fix="name an address of node 0, or say with --local-addr which of these others reach",
    )


def listen(address: str, port: int, option: str = "--master-port") -> socket.socket:
    """Return a socket that listens at this address alone; port 0 takes a free one."""
    listener = socket.socket(_family(address))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
    except OSError as error:
        listener.close()
        raise LaunchError(
            f"port {port} of {address} is taken ({error.strerror})",
            code="launch.port-in-use",
            fix=f"end what listens there, or change {option}",
        ) from None
    listener.listen(2048)
    return listener


def is_loopback(address: str) -> bool:
    """Return whether only this machine reaches `address`."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
