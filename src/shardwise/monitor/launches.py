"""The launchers of a run, folded from their events: which ranks they started, how those ended, and the verdict."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class RankEnd:
    """How a rank ended in the last attempt."""

    state: str
    """"done", "failed" or "stopped"."""
    words: str


@dataclass
class Launch:
    """What one node's launcher told of its last attempt."""

    attempts: int = 0
    """How many times its ranks were started."""
    host: str = ""
    pid: int | None = None
    target: str = ""
    world_size: int = 0
    pids: dict[int, int] = field(default_factory=dict)
    ends: dict[int, RankEnd] = field(default_factory=dict)
    verdict: str = ""
    finished: str = ""
    """"finished", "failed" or "stopped"; empty while it goes on."""

    def fold(self, event: Mapping[str, Any]) -> None:
        """Take one event; what is malformed is passed over."""
        try:
            self._fold(event)
        except (KeyError, TypeError, ValueError, AttributeError):
            return  # written by another version

    def _fold(self, event: Mapping[str, Any]) -> None:
        match event["kind"]:
            case "attempt":
                self.attempts += 1
                self.pids = {int(rank): int(pid) for rank, pid in event["ranks"].items()}
                self.world_size = int(event.get("world_size", len(self.pids)))
                self.host, self.target = str(event.get("host", "")), str(event.get("target", ""))
                self.pid = event.get("launcher")
                self.ends, self.verdict, self.finished = {}, "", ""
            case "exit":
                state = "done" if event["code"] == 0 else "stopped" if event["stopped"] else "failed"
                self.ends[int(event["rank"])] = RankEnd(state, "" if state == "done" else str(event["words"]))
            case "verdict":
                self.verdict = str(event["text"])
            case "finish":
                self.finished = str(event["state"])

    @property
    def restarts(self) -> int:
        """How many attempts came after the first."""
        return max(0, self.attempts - 1)

    @property
    def is_gone(self) -> bool:
        """Whether its process is known to be gone: only a launcher on this machine can be asked."""
        if self.pid is None or self.host != socket.gethostname() or not Path("/proc/self").exists():
            return False
        return not Path(f"/proc/{self.pid}").exists()
