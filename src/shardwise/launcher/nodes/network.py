"""The address and interface by which other nodes reach this one, and who may connect to a listening socket."""

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
"""A cluster's own name service may learn of a fresh node a little late."""
_SIOCGIFADDR = 0x8915


def resolve(host: str, port: int, timeout_s: float = _RESOLVE_S) -> tuple[str, ...]:
    """Return the addresses of a host name, in the resolver's order; refused when there is none for some seconds."""
    deadline = time.monotonic() + timeout_s
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
    """Return the interface that has `address`, empty when it is unknown."""
    named = {own: name for name, own in own_addresses().items()}
    if address in named:
        return named[address]
    with contextlib.suppress(OSError, ValueError):
        wanted = ipaddress.ip_address(address).packed.hex()
        rows = (line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines())
        return next((row[5] for row in rows if row[0] == wanted), "")
    return ""


def own_address(local_addr: str) -> str:
    """Return the address of this machine that the user named; refused when it is not one."""
    address = next((address for address in resolve(local_addr, 0) if is_own(address)), None)
    if address is None:
        raise LaunchError(
            f"--local-addr {local_addr} is not an address of this machine",
            code="launch.local-address-unknown",
            fix="see: ip addr",
        )
    return address


def listening_address(host: str, port: int, local_addr: str) -> str:
    """Return the one address on which node 0 listens: what `host` means here, but never a loopback that others miss.

    `local_addr` is the address that the user passed, empty when they did not.
    """
    if local_addr:
        return own_address(local_addr)
    meant = resolve(host, port)
    own = [address for address in meant if is_own(address)]
    outward = [address for address in own if not is_loopback(address)]
    if outward:
        return outward[0]
    others = {name: address for name, address in own_addresses().items() if not is_loopback(address)}
    known = ", ".join(f"{address} on {name}" for name, address in others.items()) or "none but loopback"
    if not own:
        raise LaunchError(
            f"{host} is {meant[0]}, which is not an address of this machine, node 0 (it has {known})",
            code="launch.master-address-foreign",
            fix="name an address of node 0, or pass with --local-addr which of these others reach",
        )
    if host == own[0] or host == "localhost":
        return own[0]
    if len(others) == 1:  # Debian's installer writes 127.0.1.1 beside the host's own name
        return next(iter(others.values()))
    raise LaunchError(
        f"{host} is {own[0]} here, which other machines cannot reach (it has {known})",
        code="launch.master-address-loopback",
        fix="name an address of node 0, or pass with --local-addr which of these others reach",
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


# Which machines may connect to a listening socket: the kernel drops the packets of all others.
#
# torch's TCPStore answers whoever connects: it reads, changes and deletes keys for anybody. So node 0 attaches a
# socket filter (classic BPF, see socket(7) and the kernel's networking/filter.rst) to the listening socket before
# the store gets it: packets of any address but the run's nodes are dropped before there is a connection, which a
# port without a listener would refuse. Connections that the socket accepts inherit the filter. No privilege is
# needed; Linux only.
#
# A filter knows machines, not users: other users of an admitted machine still pass.


UNFILTERED_STORE = (
    "shardwise: this kernel has no socket filters: every machine that reaches the store can read and change it"
)
_SO_ATTACH_FILTER = 26
_MOST_INSTRUCTIONS = 4096
_NETWORK_HEADER = 0xFFF00000
"""SKF_NET_OFF: offsets from here count from the IP header; the filter itself begins at the TCP header."""
_SOURCE_AT = {4: 12, 6: 8}
"""Where the source address begins in an IP header, by version."""
_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ACCEPT, _DROP = 0xFFFFFFFF, 0


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction)))


def admit_only(listener: socket.socket, addresses: Iterable[str]) -> bool:
    """Have `listener` accept these addresses and its own alone, in place of those admitted before.

    Returns False, with nothing changed, where the kernel cannot: not Linux, or more machines than a filter holds.
    """
    if not sys.platform.startswith("linux"):
        return False
    own = _parse(listener.getsockname()[0])
    admitted = {own, *(_parse(address) for address in addresses)}
    program = _program(sorted(address.packed for address in admitted if address.version == own.version), own.version)
    if len(program) > _MOST_INSTRUCTIONS:
        return False
    array = (_Instruction * len(program))(*program)
    try:
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, bytes(_Program(len(program), array)))
    except OSError:  # a kernel, or a sandbox, without filters
        return False
    return True


class StoreFilter:
    """The filter of a round's store, while nodes join the round and each is admitted."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None
        self._admitted: tuple[str, ...] = ()

    @contextlib.contextmanager
    def opened(self, listener: socket.socket, note: Callable[[str], None]) -> Iterator[socket.socket]:
        """Yield `listener`, which accepts the nodes that have joined and, until `close`, those that join later."""
        with listener:
            self._listener = listener
            if not admit_only(listener, self._admitted):
                note(UNFILTERED_STORE)
            yield listener

    def admit(self, addresses: tuple[str, ...]) -> None:
        """Take note of the addresses of all nodes."""
        self._admitted = addresses
        if self._listener is not None:
            admit_only(self._listener, addresses)

    def close(self) -> None:
        """Close this process's hold on the port: when the store ends, connections shall be refused."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None


def _parse(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(address.partition("%")[0])


def _program(sources: list[bytes], version: int) -> list[_Instruction]:
    """Return a filter that accepts packets from one of `sources`, and drops all others."""
    program = []
    for source in sources:
        quads = [source[at : at + 4] for at in range(0, len(source), 4)]
        for index, quad in enumerate(quads):
            left = len(quads) - 1 - index
            # Four bytes that differ lead past the others of this address (two instructions each) and its return.
            program.append(_Instruction(_LOAD_WORD, 0, 0, _NETWORK_HEADER + _SOURCE_AT[version] + 4 * index))
            program.append(_Instruction(_JUMP_IF_EQUAL, 0, 2 * left + 1, int.from_bytes(quad, "big")))
        program.append(_Instruction(_RETURN, 0, 0, _ACCEPT))
    program.append(_Instruction(_RETURN, 0, 0, _DROP))
    return program
