"""Sessions with the probes of many machines: started over OpenSSH as launches are, asked all at once, never left."""

from __future__ import annotations

import json
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.diagnosis.network import probe as net_probe
from shardwise.launcher.ssh.session import NO_PYTHON, STDERR, Session, Sessions

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from shardwise.launcher.ssh.run import HostSpec

Order = dict[str, Any]
ANSWER_S = 10.0
"""For what takes a probe a moment, on a host that is busy."""


def probe_command() -> str:
    """Return the shell line that becomes the probe, whose text is the first line of its stdin."""
    python = shlex.quote(sys.executable)
    boot = "import json; exec(json.loads(open(0, 'rb', buffering=0, closefd=False).readline()))"
    line = f"test -x {python} || exit {NO_PYTHON}; exec {python} -P -c {shlex.quote(boot)}"
    return f"exec /bin/sh -c {shlex.quote(line)}"


class ProbeSession(Session):
    """A session whose other end is a probe in place of a guard: it has to work where no shardwise, or another, is."""

    def __init__(self, host: HostSpec, label: str, *, is_here: bool) -> None:
        """Start a probe on `host`, which `label` identifies: over ssh, or directly on this machine."""
        super().__init__(host, is_here=is_here, command=probe_command())
        self.label = label
        self.send(Path(net_probe.__file__).read_text())

    @property
    def name(self) -> str:
        """Name by which users know the host."""
        return self.label


class Probes(Sessions):
    """All probes of one examination, in the order of the hosts; leaving the context ends them."""

    def __init__(self, probes: Iterable[ProbeSession]) -> None:
        self.probes = tuple(probes)
        super().__init__(self.probes)
        self._number = 0

    def question(self, orders: Mapping[str, Order], timeout_s: float) -> dict[str, Order]:
        """Send orders by host and return the replies of those that gave one in time and could do it.

        Each has `sent_at` and `heard_at`, in seconds since the epoch by our clock.
        """
        self._number += 1
        asked = {probe.name: probe for probe in self.probes if probe.name in orders}
        sent_at = {}
        for name, probe in asked.items():
            sent_at[name] = time.time()
            probe.send({**orders[name], "number": self._number})
        replies: dict[str, Order] = {}
        deadline = time.monotonic() + timeout_s
        while set(asked) - set(replies) and time.monotonic() < deadline:
            for session, stream, line in self.receive(0.1):
                if stream != STDERR and line.startswith(net_probe.MARK):
                    reply = json.loads(line.removeprefix(net_probe.MARK))
                    if reply.pop("number") == self._number:  # else to a question of which nobody waits for the answer
                        times = {"sent_at": sent_at[session.name], "heard_at": time.time()}
                        replies[session.name] = {**reply, **times}
            alive = set(self.running)
            asked = {name: probe for name, probe in asked.items() if probe in alive or name in replies}
        return {name: reply for name, reply in replies.items() if "error" not in reply}
