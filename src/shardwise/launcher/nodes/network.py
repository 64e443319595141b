"""Network addresses of this host: which address other nodes connect to, and a filter for a listening socket."""

from __future__ import annotations

import contextlib
import ctypes
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
    from collections.abc import Callable, Iterable, Iterator, Mapping


_RESOLVE_S = 5.0
"""Seconds to retry name resolution, because a cluster's DNS may register a new node late."""
_SIOCGIFADDR = 0x8915


def resolve(host: str, port: int, timeout_s: float = _RESOLVE_S) -> tuple[str, ...]:
    """Return addresses of a host name in resolver order; raise LaunchError if it does not resolve in `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            if time.monotonic() < deadline:
                time.sleep(0.2)
                continue
            raise LaunchError(
                f"host name {host!r} cannot be resolved",
                code="rendezvous.host-not-resolved",
                fix="pass the IP address of node 0",
            ) from None
        return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))


def is_own(address: str) -> bool:
    """Return whether `address` is an address of this host, tested by binding a socket to it."""
    with socket.socket(_family(address), socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def own_addresses() -> Mapping[str, str]:
    """Return the IPv4 addresses of this host by interface (Linux only)."""
    found = {}
    if sys.platform.startswith("linux"):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
            for _, name in socket.if_nameindex():
                with contextlib.suppress(OSError):
                    answer = fcntl.ioctl(query, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                    found[name] = socket.inet_ntoa(answer[20:24])
    return found


def interface_of(address: str) -> str:
    """Return the name of the interface with this address; empty if it is unknown."""
    named = {own: name for name, own in own_addresses().items()}
    if address in named:
        return named[address]
    with contextlib.suppress(OSError, ValueError):
        wanted = ipaddress.ip_address(address).packed.hex()
        rows = (line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines())
        return next((row[5] for row in rows if row[0] == wanted), "")
    return ""


def own_address(local_addr: str) -> str:
    """Return the address of --local-addr; raise LaunchError if it is not an address of this host."""
    address = next((address for address in resolve(local_addr, 0) if is_own(address)), None)
    if address is None:
        raise LaunchError(
            f"--local-addr {local_addr} is not an address of this host",
            code="launch.local-address-unknown",
            fix="pass an address that `ip addr` lists",
        )
    return address


def listening_address(host: str, port: int, local_addr: str) -> str:
    """Return the address on which node 0 listens: an address of `host` that other hosts can reach.

    `local_addr` is the value of --local-addr, or empty. Raises LaunchError if no address is suitable.
    """
    if local_addr:
        return own_address(local_addr)
    resolved = resolve(host, port)
    own = [address for address in resolved if is_own(address)]
    outward = [address for address in own if not is_loopback(address)]
    if outward:
        return outward[0]
    others = {name: address for name, address in own_addresses().items() if not is_loopback(address)}
    known = ", ".join(f"{address} on {name}" for name, address in others.items()) or "loopback only"
    if not own:
        raise LaunchError(
            f"{host} resolves to {resolved[0]}, which is not an address of this host, node 0 (it has {known})",
            code="launch.master-address-foreign",
            fix="pass an address of node 0, or --local-addr with the address that other nodes can reach",
        )
    if host == own[0] or host == "localhost":
        return own[0]
    if len(others) == 1:  # Debian's installer maps the host name to 127.0.1.1 in /etc/hosts
        return next(iter(others.values()))
    raise LaunchError(
        f"on node 0, {host} resolves to {own[0]}, which other hosts cannot reach (addresses of node 0: {known})",
        code="launch.master-address-loopback",
        fix="pass an address of node 0, or --local-addr with the address that other nodes can reach",
    )


def listen(address: str, port: int, option: str = "--master-port") -> socket.socket:
    """Return a socket that listens on this address only; port 0 selects a free port."""
    listener = socket.socket(_family(address))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
    except OSError as error:
        listener.close()
        raise LaunchError(
            f"port {port} of {address} is in use ({error.strerror})",
            code="launch.port-in-use",
            fix=f"stop the process that listens on this port, or pass a different {option}",
        ) from None
    listener.listen(2048)
    return listener


def is_loopback(address: str) -> bool:
    """Return whether `address` is a loopback address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


# A filter that limits which hosts can connect to a listening socket.
#
# torch's TCPStore does not authenticate clients: any client can read, change and delete keys. So node 0 attaches a
# socket filter (classic BPF, see socket(7) and the kernel's networking/filter.rst) to the listening socket before
# the store uses it. The kernel drops packets from all addresses except those of the run's nodes. Accepted connections
# inherit the filter. It requires no privileges, and Linux.
#
# The filter distinguishes hosts, not users: all users of an admitted host can connect.


UNFILTERED_STORE = (
    "shardwise: this kernel does not support socket filters, so every host that can connect to the store can change it"
)
_SO_ATTACH_FILTER = 26
_MAX_INSTRUCTIONS = 4096
_NETWORK_HEADER = 0xFFF00000
"""SKF_NET_OFF: makes an offset relative to the IP header; by default offsets are relative to the TCP header."""
_SOURCE_AT = {4: 12, 6: 8}
"""Offset of the source address in an IP header, by IP version."""
_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ACCEPT, _DROP = 0xFFFFFFFF, 0


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction)))


def admit_only(listener: socket.socket, addresses: Iterable[str]) -> bool:
    """Restrict `listener` to connections from these addresses and its own; replaces an earlier restriction.

    Returns False, without a change, if the kernel does not support filters or a filter cannot contain all addresses.
    """
    if not sys.platform.startswith("linux"):
        return False
    own = _parse(listener.getsockname()[0])
    admitted = {own, *(_parse(address) for address in addresses)}
    program = _program(sorted(address.packed for address in admitted if address.version == own.version), own.version)
    if len(program) > _MAX_INSTRUCTIONS:
        return False
    array = (_Instruction * len(program))(*program)
    try:
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, bytes(_Program(len(program), array)))
    except OSError:  # a kernel or sandbox without socket filters
        return False
    return True


class StoreFilter:
    """Restricts the store of a round to connections from nodes that have joined; updated as more nodes join."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None
        self._admitted: tuple[str, ...] = ()

    @contextlib.contextmanager
    def opened(self, listener: socket.socket, note: Callable[[str], None]) -> Iterator[socket.socket]:
        """Yield `listener`, restricted to nodes that have joined; until `close`, nodes that join later are added."""
        with listener:
            self._listener = listener
            if not admit_only(listener, self._admitted):
                note(UNFILTERED_STORE)
            yield listener

    def admit(self, addresses: tuple[str, ...]) -> None:
        """Set the addresses of all nodes and update the filter."""
        self._admitted = addresses
        if self._listener is not None:
            admit_only(self._listener, addresses)

    def close(self) -> None:
        """Close this process's copy of the socket, so that connections are refused after the store exits."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None


def _parse(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(address.partition("%")[0])


def _program(sources: list[bytes], version: int) -> list[_Instruction]:
    """Return a BPF program that accepts packets from `sources` and drops all others."""
    program = []
    for source in sources:
        quads = [source[at : at + 4] for at in range(0, len(source), 4)]
        for index, quad in enumerate(quads):
            remaining = len(quads) - 1 - index
            # On a mismatch, skip the remaining quads of this address (two instructions each) and its return.
            program.append(_Instruction(_LOAD_WORD, 0, 0, _NETWORK_HEADER + _SOURCE_AT[version] + 4 * index))
            program.append(_Instruction(_JUMP_IF_EQUAL, 0, 2 * remaining + 1, int.from_bytes(quad, "big")))
        program.append(_Instruction(_RETURN, 0, 0, _ACCEPT))
    program.append(_Instruction(_RETURN, 0, 0, _DROP))
    return program
