"""Which machines may connect to a listening socket: the kernel drops the packets of all others.

torch's TCPStore answers whoever connects: it reads, changes and deletes keys for anybody. So node 0 attaches a socket
filter (classic BPF, see socket(7) and the kernel's networking/filter.rst) to the listening socket before the store gets
it: packets of any address but the run's nodes are dropped before there is a connection, which a port without a listener
would refuse. Connections that the socket accepts inherit the filter. No privilege is needed; Linux only.

A filter knows machines, not users: other users of an admitted machine still pass.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import socket
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

OPEN_STORE = "shardwise: this kernel has no socket filters: every machine that reaches the store can read and change it"
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
    """Have `listener` hear these addresses and its own alone, in place of those admitted before.

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


class Door:
    """The port of a round's store, while nodes join the round and each is admitted."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None
        self._admitted: tuple[str, ...] = ()

    @contextlib.contextmanager
    def opened(self, listener: socket.socket, note: Callable[[str], None]) -> Iterator[socket.socket]:
        """Yield `listener`, which hears the nodes that have joined so far and, until `shut`, those that join later."""
        with listener:
            self._listener = listener
            if not admit_only(listener, self._admitted):
                note(OPEN_STORE)
            yield listener

    def admit(self, addresses: tuple[str, ...]) -> None:
        """Take note of the addresses of all nodes."""
        self._admitted = addresses
        if self._listener is not None:
            admit_only(self._listener, addresses)

    def shut(self) -> None:
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
        words = [source[at : at + 4] for at in range(0, len(source), 4)]
        for index, word in enumerate(words):
            left = len(words) - 1 - index
            # A word that differs leads past the other words of this address (two instructions each) and its return.
            program.append(_Instruction(_LOAD_WORD, 0, 0, _NETWORK_HEADER + _SOURCE_AT[version] + 4 * index))
            program.append(_Instruction(_JUMP_IF_EQUAL, 0, 2 * left + 1, int.from_bytes(word, "big")))
        program.append(_Instruction(_RETURN, 0, 0, _ACCEPT))
    program.append(_Instruction(_RETURN, 0, 0, _DROP))
    return program
