"""The probe of `doctor net`: a program of its own that is sent to every host, answers questions there, and leaves.

It imports nothing of ours, since it has to report whether and which shardwise is there: its text travels by stdin. One
JSON object a line comes in, one goes out. It is gone, with its ports and files, when its stdin ends, when nobody was
heard for some seconds, or when a signal asks it to go.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import select
import signal
import socket
import statistics
import struct
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

MARK = b"shardwise-probe "
"""Begins every line of a probe, since shells may write something of their own before it starts."""
SILENCE_S = 8.0
"""The doctor sends something every second; after so long a silence it is gone."""
LOOKUP_S = 5.0
REACH_S = 3.0
GREETING_BYTES = WORD_BYTES = 32
_ROUNDS, _ROUNDS_S = 100, 0.5
"""Most round trips that latency is taken from, and the most time for them."""
_CHUNK = 1 << 18
_MOST_BYTES = 1 << 30
_STEP_S, _TRIES = 0.3, 3
"""For one datagram to come back, and how often it is sent."""
_ADDRESS, _FLAGS, _MASK, _MTU = 0x8915, 0x8913, 0x891B, 0x8921  # SIOCGIF*
_IS_UP = 1
_IP_HEADERS = 28  # of IPv4 and UDP
_MTU_DISCOVER, _NEVER_FRAGMENT = 10, 3  # IP_MTU_DISCOVER, IP_PMTUDISC_PROBE: not in Python's socket

T = TypeVar("T")


class Probe:
    """What one host holds open for the others, and how it answers."""

    def __init__(self) -> None:
        self.word = b""
        """Without it nobody is served."""
        self.greeting = b""
        """By which others know that it is this host which answers."""
        self._files: set[Path] = set()
        """Written here, to be removed."""
        self._turn = threading.Lock()
        self._has_left = False

    def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        """Execute an order and return its result."""
        doing: dict[str, Callable[..., dict[str, Any]]] = {
            "look": look,
            "lookup": look_up,
            "clock": lambda: {"at": time.time()},
            "open": self.open,
            "reach": self.reach,
            "path": self.path,
            "measure": self.measure,
            "write": self.write,
            "read": read,
            "remove": self.remove,
        }
        return doing[order.pop("type")](**order)

    def open(self, word: str, greeting: str, doors: list[list[Any]]) -> dict[str, Any]:
        """Listen for TCP on each (address, port), where port 0 selects a free one, and for UDP on a separate port."""
        self.word, self.greeting = word.encode(), greeting.encode()
        return {"doors": [self._open(address, port) for address, port in doors]}

    def _open(self, address: str, port: int) -> dict[str, Any]:
        listener, echo = socket.socket(), socket.socket(type=socket.SOCK_DGRAM)
        try:
            listener.bind((address, port))
            listener.listen(256)
            echo.bind((address, 0))
        except OSError as error:
            listener.close()
            echo.close()
            return {"address": address, "port": 0, "datagrams": 0, "refusal": error.strerror or "refused"}
        _in_background(self._serve, listener)
        _in_background(self._return_datagrams, echo)
        ports = {"port": listener.getsockname()[1], "datagrams": echo.getsockname()[1]}
        return {"address": address, **ports, "refusal": ""}

    def _serve(self, listener: socket.socket) -> None:
        while True:
            guest, _ = listener.accept()
            _in_background(self._receive, guest)

    def _receive(self, guest: socket.socket) -> None:
        """Serve one that knows the word: greet it, return its bytes, or count them."""
        with guest, contextlib.suppress(OSError):
            guest.settimeout(2 * REACH_S)
            guest.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if _exactly(guest, WORD_BYTES) != self.word:
                return
            wish = _exactly(guest, 1)
            if wish == b"g":
                guest.sendall(self.greeting)
            elif wish == b"e":
                while data := guest.recv(64):
                    guest.sendall(data)
            elif wish == b"c":
                count, buffer = 0, bytearray(_CHUNK)
                while received := guest.recv_into(buffer):
                    count += received
                guest.sendall(struct.pack("!Q", count))

    def _return_datagrams(self, echo: socket.socket) -> None:
        while True:
            data, sender = echo.recvfrom(1 << 16)
            if data[:WORD_BYTES] == self.word:  # only the head goes back: it is the way here that is tried
                with contextlib.suppress(OSError):
                    echo.sendto(data[: WORD_BYTES + 4], sender)

    def reach(self, targets: list[list[Any]]) -> dict[str, Any]:
        """Go to each (address, port, greeting) in parallel; return why it failed, and from which address of ours."""

        def go(address: str, port: int, greeting: str) -> dict[str, str]:
            own = ""
            try:
                with self._visit(address, port, b"g") as end:
                    own = end.getsockname()[0]
                    heard = _exactly(end, GREETING_BYTES)
            except OSError as error:
                return {"own": own, "refusal": error.strerror or "no answer"}
            return {"own": own, "refusal": "" if heard == greeting.encode() else "another machine answers there"}

        return {"reached": _together([(go, target) for target in targets], 2 * REACH_S, {"own": "", "refusal": "late"})}

    def _visit(self, address: str, port: int, wish: bytes) -> socket.socket:
        end = socket.create_connection((address, port), timeout=REACH_S)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.sendall(self.word + wish)
        return end

    def path(self, address: str, port: int, sizes: list[int]) -> dict[str, Any]:
        """Return the largest of `sizes` (bytes of a whole packet, falling) that arrives unfragmented; 0 if none."""
        with socket.socket(type=socket.SOCK_DGRAM) as end:
            end.setsockopt(socket.IPPROTO_IP, _MTU_DISCOVER, _NEVER_FRAGMENT)
            end.settimeout(_STEP_S)
            end.connect((address, port))
            return {"mtu": next((size for size in sizes if self._arrives(end, size)), 0)}

    def _arrives(self, end: socket.socket, size: int) -> bool:
        head = self.word + struct.pack("!I", size)
        for _ in range(_TRIES):
            try:
                end.send(head.ljust(size - _IP_HEADERS, b"."))
                while end.recv(64) != head:  # an answer to a smaller one that came late
                    pass
            except TimeoutError:
                continue
            except OSError:  # our own interface takes no such packet, or no process listens
                return False
            return True
        return False

    def measure(self, address: str, port: int, seconds: float) -> dict[str, Any]:
        """Return latency (half a round trip, at best) and the rate of one stream of about so many seconds."""
        with self._visit(address, port, b"e") as end:
            latencies: list[float] = []
            begun = time.perf_counter()
            while len(latencies) < _ROUNDS and (len(latencies) < 5 or time.perf_counter() < begun + _ROUNDS_S):
                at = time.perf_counter()
                end.sendall(b"12345678")
                _exactly(end, 8)
                latencies.append((time.perf_counter() - at) / 2)
        with self._visit(address, port, b"c") as end:
            chunk, sent, begun = bytes(_CHUNK), 0, time.perf_counter()
            while sent < _MOST_BYTES and time.perf_counter() < begun + seconds:
                end.sendall(chunk)
                sent += _CHUNK
            end.shutdown(socket.SHUT_WR)
            (count,) = struct.unpack("!Q", _exactly(end, 8))
            rate = count / (time.perf_counter() - begun)
        return {"latency_s": min(latencies), "usual_s": statistics.median(latencies), "bytes_per_s": rate}

    def write(self, folder: str, name: str, text: str) -> dict[str, Any]:
        """Write a small file that is removed at the latest when the probe leaves."""
        path = Path(folder) / name
        try:
            with self._turn:
                if self._has_left:
                    return {"refusal": "the probe is leaving"}
                with path.open("x") as file:
                    self._files.add(path)
                    file.write(text)
        except OSError as error:
            return {"refusal": error.strerror}
        return {"refusal": ""}

    def remove(self, folder: str, name: str) -> dict[str, Any]:
        """Remove the file of that name, whoever wrote it."""
        path = Path(folder) / name
        with self._turn, contextlib.suppress(OSError):
            self._files.discard(path)
            path.unlink()
        return {}

    def leave(self) -> None:
        """Remove what is still there, and write no more."""
        with self._turn:
            self._has_left = True
            for path in self._files:
                with contextlib.suppress(OSError):
                    path.unlink()


def look(folders: list[str]) -> dict[str, Any]:
    """Return what this host is: name, interfaces, versions, and which of the folders it has."""
    return {
        "hostname": socket.gethostname(),
        "executable": sys.executable,
        "versions": {"Python": platform.python_version(), **_installed()},
        "interfaces": _interfaces(),
        "folders": [folder for folder in folders if Path(folder).is_dir()],
    }


def look_up(names: list[str], addresses: list[str]) -> dict[str, Any]:
    """Return the addresses of names and the names of addresses, as this host's resolver answers; empty for neither."""

    def forward(name: str) -> list[str]:
        with contextlib.suppress(OSError, UnicodeError):
            found = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
            return list(dict.fromkeys(str(entry[4][0]) for entry in found))
        return []

    def reverse(address: str) -> list[str]:
        with contextlib.suppress(OSError):
            name, others, _ = socket.gethostbyaddr(address)
            return [name, *others]
        return []

    none: list[str] = []
    asked = [*((forward, [name]) for name in names), *((reverse, [address]) for address in addresses)]
    found = _together(asked, LOOKUP_S, none)
    return {
        "forward": dict(zip(names, found[: len(names)], strict=True)),
        "reverse": dict(zip(addresses, found[len(names) :], strict=True)),
    }


def read(folder: str, name: str) -> dict[str, Any]:
    """Return the text of a file, empty where there is none."""
    try:
        return {"text": (Path(folder) / name).read_text()}
    except OSError:
        return {"text": ""}


def _installed() -> dict[str, str]:
    """Return versions of what must be the same everywhere; empty for what is not there. Nothing is imported."""
    names = {"shardwise": ["shardwise"], "torch": ["torch"], "NCCL": [f"nvidia-nccl-cu{cuda}" for cuda in (13, 12, 11)]}
    found = dict.fromkeys(names, "")
    for what, packages in names.items():
        for package in packages:
            with contextlib.suppress(metadata.PackageNotFoundError):
                found[what] = found[what] or metadata.version(package)
    return found


def _interfaces() -> list[dict[str, Any]]:
    """Return every interface that is up and has an IPv4 address, loopback left out."""
    found = []
    with socket.socket(type=socket.SOCK_DGRAM) as asking:

        def ask(what: int, name: str) -> bytes:
            return fcntl.ioctl(asking, what, struct.pack("256s", name.encode()[:15]))[16:24]

        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                address, mask = (socket.inet_ntoa(ask(what, name)[4:8]) for what in (_ADDRESS, _MASK))
                (flags,) = struct.unpack("=H", ask(_FLAGS, name)[:2])
                (mtu,) = struct.unpack("=i", ask(_MTU, name)[:4])
                if flags & _IS_UP and not address.startswith("127."):
                    found.append({"name": name, "address": address, "mask": mask, "mtu": mtu})
    return found


def _together(calls: list[tuple[Callable[..., T], list[Any]]], limit_s: float, late: T) -> list[T]:
    """Make the calls at the same time and return what each returned; `late` for one that takes too long."""
    pool = ThreadPoolExecutor(max_workers=max(1, min(64, len(calls))))
    futures = [pool.submit(call, *arguments) for call, arguments in calls]
    deadline = time.monotonic() + limit_s

    def result(future: Future[T]) -> T:
        try:
            return future.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            return late

    found = [result(future) for future in futures]
    pool.shutdown(wait=False)
    return found


def _exactly(end: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = end.recv(count - len(data))
        if not more:
            raise ConnectionError(0, "the other end closed")
        data += more
    return data


def _in_background(work: Callable[..., None], *arguments: object) -> None:
    threading.Thread(target=work, args=arguments, daemon=True).start()


def main() -> None:
    """Answer orders until there are none to come."""
    probe = Probe()
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
        signal.signal(number, lambda *_: sys.exit(1))
    turn = threading.Lock()

    def obey(order: dict[str, Any]) -> None:
        number = order.pop("number")
        try:
            reply = {"number": number, **probe.answer(order)}
        except Exception as error:  # noqa: BLE001 - whatever went wrong here is for the doctor to report
            reply = {"number": number, "error": f"{type(error).__name__}: {error}"}
        with turn, contextlib.suppress(OSError):
            os.write(1, MARK + json.dumps(reply).encode() + b"\n")

    rest, heard_at = b"", time.monotonic()
    try:
        while time.monotonic() < heard_at + SILENCE_S:
            if not select.select([0], [], [], 0.5)[0]:
                continue
            data = os.read(0, 1 << 16)
            if not data:
                break
            heard_at = time.monotonic()
            *lines, rest = (rest + data).split(b"\n")
            for order in map(json.loads, lines):
                if order["type"] != "beat":
                    _in_background(obey, order)  # what takes long keeps nobody from seeing the end of stdin
    finally:
        probe.leave()
        os._exit(0)  # threads that wait for somebody are not waited for


if __name__ == "__main__":
    main()
