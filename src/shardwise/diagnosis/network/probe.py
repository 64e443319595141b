"""The probe of `doctor net`: a stand-alone program that runs temporarily on every host and answers requests.

It imports nothing from shardwise, because it reports whether shardwise is installed: its source code is sent over
stdin. Requests and replies are JSON objects, one per line. The probe exits, closes its ports
and removes its files at the end of stdin, after some seconds without a request, or on a signal.
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
"""Prefix of every line of a probe; the login shell may print other lines before the probe starts."""
SILENCE_S = 8.0
"""Seconds without a message after which a probe exits; `doctor net` sends a message every second."""
LOOKUP_S = 5.0
REACH_S = 3.0
GREETING_BYTES = WORD_BYTES = 32
_ROUNDS, _ROUNDS_S = 100, 0.5
"""Maximum number and total seconds of the round trips that measure the latency."""
_CHUNK = 1 << 18
_MAX_BYTES = 1 << 30
_STEP_S, _TRIES = 0.3, 3
"""Timeout of the answer to one datagram, and the number of attempts."""
_ADDRESS, _FLAGS, _MASK, _MTU = 0x8915, 0x8913, 0x891B, 0x8921  # SIOCGIF*
_IS_UP = 1
_IP_HEADERS = 28  # of IPv4 and UDP
_MTU_DISCOVER, _NEVER_FRAGMENT = 10, 3  # IP_MTU_DISCOVER, IP_PMTUDISC_PROBE: not in Python's socket

T = TypeVar("T")


class Probe:
    """Executes requests on one host; owns the open sockets and files of the probe."""

    def __init__(self) -> None:
        self.word = b""
        """The secret that a client must send."""
        self.greeting = b""
        """The text by which clients identify this host."""
        self._files: set[Path] = set()
        """Files that this probe removes when it exits."""
        self._lock = threading.Lock()
        self._is_closed = False

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Execute a request and return its result."""
        handlers: dict[str, Callable[..., dict[str, Any]]] = {
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
        return handlers[request.pop("type")](**request)

    def open(self, word: str, greeting: str, doors: list[list[Any]]) -> dict[str, Any]:
        """Listen for TCP on each (address, port), where port 0 selects a free port, and for UDP on a separate port."""
        self.word, self.greeting = word.encode(), greeting.encode()
        return {"doors": [self._open(address, port) for address, port in doors]}

    def _open(self, address: str, port: int) -> dict[str, Any]:
        listener, echo = socket.socket(), socket.socket(type=socket.SOCK_DGRAM)
        # Without it, connections of this probe in TIME-WAIT would keep a launcher from the port for a minute.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
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
            client, _ = listener.accept()
            _in_background(self._receive, client)

    def _receive(self, client: socket.socket) -> None:
        """Serve a client that sends the secret: send the greeting, echo its bytes, or count them."""
        with client, contextlib.suppress(OSError):
            client.settimeout(2 * REACH_S)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if _exactly(client, WORD_BYTES) != self.word:
                return
            request = _exactly(client, 1)
            if request == b"g":
                client.sendall(self.greeting)
            elif request == b"e":
                while data := client.recv(64):
                    client.sendall(data)
            elif request == b"c":
                count, buffer = 0, bytearray(_CHUNK)
                while received := client.recv_into(buffer):
                    count += received
                client.sendall(struct.pack("!Q", count))

    def _return_datagrams(self, echo: socket.socket) -> None:
        while True:
            data, sender = echo.recvfrom(1 << 16)
            if data[:WORD_BYTES] == self.word:  # only the head is returned: the forward path is tested
                with contextlib.suppress(OSError):
                    echo.sendto(data[: WORD_BYTES + 4], sender)

    def reach(self, targets: list[list[Any]]) -> dict[str, Any]:
        """Connect to each (address, port, greeting) in parallel; return the errors and the source addresses."""

        def connect(address: str, port: int, greeting: str) -> dict[str, str]:
            own = ""
            try:
                with self._connect(address, port, b"g") as end:
                    own = end.getsockname()[0]
                    received = _exactly(end, GREETING_BYTES)
            except OSError as error:
                return {"own": own, "refusal": error.strerror or "no answer"}
            if received != greeting.encode():
                return {"own": own, "refusal": "a different machine answers there"}
            return {"own": own, "refusal": ""}

        calls = [(connect, target) for target in targets]
        return {"reached": _run_parallel(calls, 2 * REACH_S, {"own": "", "refusal": "timeout"})}

    def _connect(self, address: str, port: int, request: bytes) -> socket.socket:
        end = socket.create_connection((address, port), timeout=REACH_S)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.sendall(self.word + request)
        return end

    def path(self, address: str, port: int, sizes: list[int]) -> dict[str, Any]:
        """Return the largest of `sizes` (bytes per packet, descending) that arrives unfragmented; 0 if none does."""
        with socket.socket(type=socket.SOCK_DGRAM) as end:
            end.setsockopt(socket.IPPROTO_IP, _MTU_DISCOVER, _NEVER_FRAGMENT)
            end.settimeout(_STEP_S)
            end.connect((address, port))
            for size in sizes:
                if self._arrives(end, size):
                    return {"mtu": size}
        return {"mtu": 0}

    def _arrives(self, end: socket.socket, size: int) -> bool:
        head = self.word + struct.pack("!I", size)
        for _ in range(_TRIES):
            try:
                end.send(head.ljust(size - _IP_HEADERS, b"."))
                while end.recv(64) != head:  # a late answer to a smaller packet
                    pass
            except TimeoutError:
                continue
            except OSError:  # the local interface rejects packets of this size, or no process listens
                return False
            return True
        return False

    def measure(self, address: str, port: int, seconds: float) -> dict[str, Any]:
        """Return the latency (half of the shortest round trip) and the rate of one stream of about `seconds`."""
        with self._connect(address, port, b"e") as end:
            latencies: list[float] = []
            started = time.perf_counter()
            while len(latencies) < _ROUNDS and (len(latencies) < 5 or time.perf_counter() < started + _ROUNDS_S):
                at = time.perf_counter()
                end.sendall(b"12345678")
                _exactly(end, 8)
                latencies.append((time.perf_counter() - at) / 2)
        with self._connect(address, port, b"c") as end:
            chunk, sent, started = bytes(_CHUNK), 0, time.perf_counter()
            while sent < _MAX_BYTES and time.perf_counter() < started + seconds:
                end.sendall(chunk)
                sent += _CHUNK
            end.shutdown(socket.SHUT_WR)
            (count,) = struct.unpack("!Q", _exactly(end, 8))
            rate = count / (time.perf_counter() - started)
        return {"latency_s": min(latencies), "usual_s": statistics.median(latencies), "bytes_per_s": rate}

    def write(self, folder: str, name: str, text: str) -> dict[str, Any]:
        """Write a small file, which the probe removes at the latest when it exits."""
        path = Path(folder) / name
        try:
            with self._lock:
                if self._is_closed:
                    return {"refusal": "the probe is exiting"}
                with path.open("x") as file:
                    self._files.add(path)
                    file.write(text)
        except OSError as error:
            return {"refusal": error.strerror}
        return {"refusal": ""}

    def remove(self, folder: str, name: str) -> dict[str, Any]:
        """Remove a file, even if another host wrote it."""
        path = Path(folder) / name
        with self._lock, contextlib.suppress(OSError):
            self._files.discard(path)
            path.unlink()
        return {}

    def close(self) -> None:
        """Remove all remaining files and reject further writes."""
        with self._lock:
            self._is_closed = True
            for path in self._files:
                with contextlib.suppress(OSError):
                    path.unlink()


def look(folders: list[str]) -> dict[str, Any]:
    """Return the name, interfaces and versions of this host, and which of the directories exist."""
    return {
        "hostname": socket.gethostname(),
        "executable": sys.executable,
        "versions": {"Python": platform.python_version(), **_installed()},
        "interfaces": _interfaces(),
        "folders": [folder for folder in folders if Path(folder).is_dir()],
    }


def look_up(names: list[str], addresses: list[str]) -> dict[str, Any]:
    """Return the addresses of names and the names of addresses from this host's resolver; empty if unresolved."""

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

    unresolved: list[str] = []
    calls: list[tuple[Callable[[str], list[str]], list[str]]] = [(forward, [name]) for name in names]
    calls += [(reverse, [address]) for address in addresses]
    found = _run_parallel(calls, LOOKUP_S, unresolved)
    return {
        "forward": dict(zip(names, found[: len(names)], strict=True)),
        "reverse": dict(zip(addresses, found[len(names) :], strict=True)),
    }


def read(folder: str, name: str) -> dict[str, Any]:
    """Return the text of a file; empty if it does not exist."""
    try:
        return {"text": (Path(folder) / name).read_text()}
    except OSError:
        return {"text": ""}


def _installed() -> dict[str, str]:
    """Return the versions that must be equal on all hosts, without importing packages; empty if not installed."""
    nccl = [f"nvidia-nccl-cu{cuda}" for cuda in (13, 12, 11)]
    names = {"shardwise": ["shardwise"], "torch": ["torch"], "NCCL": nccl}
    found = dict.fromkeys(names, "")
    for what, packages in names.items():
        for package in packages:
            with contextlib.suppress(metadata.PackageNotFoundError):
                found[what] = found[what] or metadata.version(package)
    return found


def _interfaces() -> list[dict[str, Any]]:
    """Return all interfaces that are up and have an IPv4 address, except loopback."""
    found = []
    with socket.socket(type=socket.SOCK_DGRAM) as query_socket:

        def query(what: int, name: str) -> bytes:
            return fcntl.ioctl(query_socket, what, struct.pack("256s", name.encode()[:15]))[16:24]

        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                address = socket.inet_ntoa(query(_ADDRESS, name)[4:8])
                mask = socket.inet_ntoa(query(_MASK, name)[4:8])
                (flags,) = struct.unpack("=H", query(_FLAGS, name)[:2])
                (mtu,) = struct.unpack("=i", query(_MTU, name)[:4])
                if flags & _IS_UP and not address.startswith("127."):
                    found.append({"name": name, "address": address, "mask": mask, "mtu": mtu})
    return found


def _run_parallel(calls: list[tuple[Callable[..., T], list[Any]]], limit_s: float, late: T) -> list[T]:
    """Run the calls in parallel and return their results; `late` for calls that exceed the time limit."""
    pool = ThreadPoolExecutor(max_workers=max(1, min(64, len(calls))))
    futures = [pool.submit(call, *arguments) for call, arguments in calls]
    deadline = time.monotonic() + limit_s

    def result(future: Future[T]) -> T:
        try:
            return future.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            return late

    found = list(map(result, futures))
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
    """Execute requests from stdin until stdin ends or no message arrives for SILENCE_S seconds."""
    probe = Probe()
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
        signal.signal(number, lambda *_: sys.exit(1))
    output_lock = threading.Lock()

    def reply_to(request: dict[str, Any]) -> None:
        number = request.pop("number")
        try:
            reply = {"number": number, **probe.answer(request)}
        except Exception as error:  # noqa: BLE001 - the doctor reports every error
            reply = {"number": number, "error": f"{type(error).__name__}: {error}"}
        with output_lock, contextlib.suppress(OSError):
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
            for request in map(json.loads, lines):
                if request["type"] != "beat":
                    _in_background(reply_to, request)  # a long request must not delay the end of stdin
    finally:
        probe.close()
        os._exit(0)  # without waiting for threads


if __name__ == "__main__":
    main()
