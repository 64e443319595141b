"""The guard that `--hosts` starts on every host: replies to checks, runs the node, and stops it when stdin closes."""

from __future__ import annotations

import contextlib
import os
import platform
import select
import socket
import subprocess
import sys
import time
from functools import partial

from shardwise.environment import variables
from shardwise.errors import LaunchError
from shardwise.hardware.probe import package_version
from shardwise.launcher.local.processes import become_reaper, die_with_parent, kill_descendants
from shardwise.launcher.local.target import Target, check_target
from shardwise.launcher.nodes.network import is_own, listen, own_addresses
from shardwise.launcher.ssh.session import (
    MARK,
    SILENCE_S,
    Facts,
    HostAnswer,
    Listen,
    Look,
    Order,
    Reach,
    Reply,
    Signal,
    Start,
)
from shardwise.launcher.transport import MessageStream, encode_line
from shardwise.runs.console import JOB_FAILED

_POLL_S = 0.1
_REACH_S = 3.0


class _Launcher:
    """The connection over stdin to the launcher, which sends requests."""

    def __init__(self) -> None:
        self._stream: MessageStream[Order] = MessageStream(sys.stdin.buffer, Order)
        self.is_gone = False

    def orders(self, timeout_s: float, listener: socket.socket | None = None, token: str = "") -> list[Order]:
        """Return the requests that arrive within `timeout_s`; send `token` to clients that connect to `listener`."""
        watched: list[MessageStream[Order] | socket.socket] = [self._stream]
        if listener is not None:
            watched.append(listener)
        ready, _, _ = select.select(watched, [], [], timeout_s)
        if listener is not None and listener in ready:
            with contextlib.suppress(OSError):
                peer, _ = listener.accept()
                with peer:
                    peer.sendall(token.encode())
        found = self._stream.receive()
        self.is_gone = found is None or time.monotonic() - self._stream.heard_at > SILENCE_S
        return found or []


def main() -> int:
    """Execute the launcher's requests until it disconnects or the node exits; return the exit code of the node."""
    launcher = _Launcher()
    listener, token = None, ""
    while not launcher.is_gone:
        for order in launcher.orders(_POLL_S, listener, token):
            if listener is not None and isinstance(order, Listen | Start):
                listener.close()
                listener = None
            match order:
                case Look(target):
                    _reply(_facts(target))
                case Listen():
                    listener, token = _open(order), order.token
                case Reach():
                    _reply(HostAnswer(refusal=_reach(order)))
                case Start():
                    return _run(order, launcher)
    return JOB_FAILED


def _reply(reply: Reply) -> None:
    sys.stdout.buffer.write(MARK + encode_line(reply))
    sys.stdout.buffer.flush()


def _facts(target: Target) -> Facts:
    versions = {
        "shardwise": package_version("shardwise"),
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "torch": package_version("torch").partition("+")[0],
    }
    outward = {name: address for name, address in own_addresses().items() if not address.startswith("127.")}
    # sshd sets SSH_CONNECTION to: client address, client port, server address, server port.
    ssh = variables("SSH_CONNECTION").get("SSH_CONNECTION", "").split()
    launcher, own = (ssh[0], ssh[2]) if len(ssh) == 4 else ("", "")
    try:
        check_target(target)
    except LaunchError as error:
        return Facts(versions, outward, own, launcher, error.fact, error.fix, error.code)
    return Facts(versions, outward, own, launcher)


def _open(order: Listen) -> socket.socket | None:
    """Listen on an address and reply with the port or the error."""
    if not is_own(order.address):
        _reply(HostAnswer(refusal=f"{order.address} is not an address of this host"))
        return None
    try:
        listener = listen(order.address, order.port)
    except LaunchError as error:
        _reply(HostAnswer(refusal=error.fact))
        return None
    _reply(HostAnswer(port=int(listener.getsockname()[1])))
    return listener


def _reach(order: Reach) -> str:
    """Connect to an address and return why its token was not received; empty if it was received."""
    try:
        with socket.create_connection((order.address, order.port), timeout=_REACH_S) as end:
            received = end.recv(len(order.token))
    except OSError as error:
        return error.strerror or "no response"
    return "" if received.decode(errors="replace") == order.token else "a different process listens on this port"


def _run(order: Start, launcher: _Launcher) -> int:
    """Run the node and return its exit code; if the launcher disconnects, terminate the node and its descendants."""
    become_reaper()
    # -P: modules in the user's directory must not shadow those of shardwise.
    node = subprocess.Popen(
        [sys.executable, "-P", "-m", "shardwise", *order.arguments],
        stdin=subprocess.DEVNULL,
        env={**variables(""), **order.variables},
        process_group=0,
        preexec_fn=partial(die_with_parent, os.getpid()),  # noqa: PLW1509 - the guard has one thread
    )
    deadline = None
    while node.poll() is None and (deadline is None or time.monotonic() < deadline):
        if launcher.is_gone:  # select would return at once, because stdin is at end of file
            if deadline is None:
                node.terminate()
                deadline = time.monotonic() + order.grace_s
            time.sleep(_POLL_S)
            continue
        for received in launcher.orders(_POLL_S):
            if isinstance(received, Signal):
                node.send_signal(received.number)
    code = node.poll()
    kill_descendants()  # also the node, and processes outside of its process group
    code = node.wait() if code is None else code
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main())
