"""The status of a run and of its ranks at one time, as frozen values for terminal, web page and JSON output."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from shardwise.runs.recorder import PHASES, last_mark, read_recorder

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from shardwise.runs.directory import RunDirectory
    from shardwise.runs.recorder import Mark


@dataclass(frozen=True)
class RankEnd:
    """How a rank ended in the last attempt."""

    state: str
    """"done", "failed" or "stopped"."""
    message: str
    """The error or exit code as text; empty for "done"."""
    code: int = 0
    """Exit code; negative if a signal ended the rank."""
    stopped: bool = False
    """Whether the launcher stopped the rank."""
    at: float = 0.0
    """Time at which the launcher detected the exit, in seconds since the epoch."""


class RankTable:
    """The latest phase, memory and step of every rank."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._reported: dict[int, tuple[int, float | None]] = {}
        """By rank: completed steps and memory, from its last `steps` event."""
        self._marks: dict[int, Mark] = {}
        self._leader: Sequence[Mark] = ()
        """The last phase marks of the rank that is furthest ahead."""

    @property
    def newest(self) -> float:
        """Time of the last mark of any rank; 0.0 without a mark."""
        return max((mark.at for mark in self._marks.values()), default=0.0)

    def refresh(self, ranks: Collection[int]) -> None:
        """Read the most recent phase mark of each rank in `ranks`."""
        self._marks = {}
        for rank in ranks:
            mark = last_mark(self._run.recorder(rank))
            if mark is not None:
                self._marks[rank] = mark
        self._leader = self._read_leader()

    def take(self, event: Mapping[str, Any], rank: int) -> None:
        """Update the steps and memory of a rank from one of its events."""
        if event["kind"] == "steps" and isinstance(event.get("losses"), list) and isinstance(event.get("first"), int):
            self._reported[rank] = (event["first"] + len(event["losses"]), event.get("memory_bytes"))

    def highest_memory(self) -> tuple[int, float] | None:
        """Return the rank with the highest memory so far, and its bytes; None if no rank reported memory."""
        highest = None
        for rank, (_, memory) in sorted(self._reported.items()):
            if memory is not None and (highest is None or memory > highest[1]):
                highest = (rank, memory)
        return highest

    def status(self, rank: int, facts: Mapping[str, Any], end: RankEnd | None, *, now: float, state: str) -> RankRow:
        """Return the row of one rank.

        `facts` contains the host, device and pid of the rank. `state` is the state of a rank that has not exited.
        """
        reported_step, memory = self._reported.get(rank, (None, None))
        row = RankRow(
            rank=rank,
            host=str(facts.get("host", "")),
            device=str(facts.get("device", "")),
            pid=facts.get("pid"),
            step=reported_step,
            memory_bytes=memory,
            state=state,
        )
        if end is not None:
            row = msgspec.structs.replace(row, state=end.state, message=end.message)
        mark = self._marks.get(rank)
        if mark is None:
            return row
        is_running = end is None and state == "running"
        return msgspec.structs.replace(
            row,
            phase=mark.phase,
            since=mark.at,
            step=mark.step,
            lag_s=lag_s(mark, self._leader, now) if is_running else None,
            lag_steps=max(0, self._leader[-1].step - mark.step) if self._leader else None,
        )

    def _read_leader(self) -> Sequence[Mark]:
        """Read the marks of the rank that is furthest ahead; among equal ranks, of the first to reach that position."""
        if not self._marks:
            return ()
        leader = max(self._marks, key=lambda rank: (_position(self._marks[rank]), -self._marks[rank].at))
        if all(_position(mark) == _position(self._marks[leader]) for mark in self._marks.values()):
            return (self._marks[leader],)
        found = read_recorder(self._run.recorder(leader))
        return found.marks if found is not None and found.marks else (self._marks[leader],)


def lag_s(mark: Mark, leader: Sequence[Mark], now: float) -> float:
    """Return the seconds for which the leader has been ahead of `mark`; a lower bound if older marks are lost."""
    position = _position(mark)
    ahead = None
    for leader_mark in reversed(leader):
        if _position(leader_mark) <= position:
            break
        ahead = leader_mark
    return 0.0 if ahead is None else max(0.0, now - ahead.at)


def _position(mark: Mark) -> tuple[int, int]:
    return mark.step, PHASES.index(mark.phase)


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a run's history."""

    number: int
    """Position of the entry in the history."""
    at: float
    """Seconds since the epoch."""
    kind: str
    text: str
    mood: str = "plain"
    """"plain", "good", "warn" or "bad"."""
    rank: int | None = None


class RankRow(msgspec.Struct, frozen=True, kw_only=True):
    """The status of one rank, from its last records."""

    rank: int
    host: str = ""
    device: str = ""
    pid: int | None = None
    phase: str = ""
    since: float | None = None
    """Start of the phase in seconds since the epoch."""
    step: int | None = None
    lag_s: float | None = None
    """Seconds for which the leading rank has been ahead of this rank."""
    lag_steps: int | None = None
    memory_bytes: float | None = None
    """Peak so far: allocated memory of its GPU, or resident memory of the process on a CPU."""
    state: str = "running"
    """"running", "done", "failed", "stopped" or "gone"."""
    message: str = msgspec.field(default="", name="words")
    """The error or exit code of a rank that failed; the key is `words` in JSON."""


class CheckpointStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that a run started to write, and its size once it is complete."""

    step: int
    at: float
    num_bytes: int | None = None
    """Bytes on disk of all ranks; None for a checkpoint that is incomplete or was deleted."""


class CheckpointTable:
    """Sizes of the checkpoints of a run; each is read once."""

    def __init__(self, run: RunDirectory) -> None:
        self._folder = run.checkpoints
        self._sizes: dict[str, int] = {}

    def statuses(self, saves: Iterable[CheckpointStatus]) -> Iterator[CheckpointStatus]:
        """Yield the checkpoints, newest first; complete checkpoints that still exist have a size."""
        existing: dict[int, int] = {}
        with contextlib.suppress(OSError):
            for folder in self._folder.iterdir():
                step = folder.name.removeprefix("step-").partition("~")[0]
                if step.isdigit() and (folder / "manifest.json").exists():
                    existing[int(step)] = self._size(folder)
        for save in sorted(saves, key=lambda save: -save.step):
            yield CheckpointStatus(step=save.step, at=save.at, num_bytes=existing.get(save.step))

    def _size(self, folder: Path) -> int:
        if folder.name not in self._sizes:  # a checkpoint is published atomically, so it never changes
            self._sizes[folder.name] = sum(file.stat().st_size for file in folder.iterdir())
        return self._sizes[folder.name]


class RestartMark(msgspec.Struct, frozen=True, kw_only=True):
    """A restart of all ranks, and the step from which they resumed."""

    step: int
    at: float


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The status of a run at one time."""

    name: str
    path: str
    job: str
    plan: str
    state: str
    """"running", "finished", "failed", "stopped", "lost" (its launcher has exited) or "silent" (no recent record)."""
    verdict: str
    """The cause of a failure, in one sentence."""
    now: float
    """Seconds since the epoch; the time of the last record if the run has ended."""
    began_at: float | None
    step: int
    num_steps: int | None
    epoch: int | None
    loss: float | None
    samples_per_s: float | None
    lr: float | None
    eta_s: float | None
    memory_bytes: float | None
    """Highest peak memory of any rank so far, in bytes."""
    memory_rank: int | None
    is_resident: bool
    """Whether memory is the resident memory of a process, libraries included; otherwise the allocated GPU memory."""
    predicted_bytes: float | None
    """Highest predicted peak memory of tensors of any rank, in bytes."""
    prediction: str
    """Reason why no prediction exists; empty if a prediction exists."""
    parameters: int | None
    restarts: int
    restart_marks: tuple[RestartMark, ...]
    evaluation: dict[str, float | None]
    """Values of the last evaluation by name."""
    checkpoints: tuple[CheckpointStatus, ...]
    ranks: tuple[RankRow, ...]
    reading: float
    """Fraction of the events that was read; 1.0 once all files were read to the end."""


# The memory that the planner predicts for a run: `monitor/watch.py` computes it and writes predicted.json.


class Predicted(msgspec.Struct, frozen=True, kw_only=True):
    """Content of predicted.json: the predicted bytes, or the reason why no prediction exists."""

    peak_bytes: float | None = None
    why_not: str = ""


def read_predicted(run: RunDirectory) -> Predicted:
    """Return the predicted peak memory of a rank's tensors; both fields are empty if it was not computed."""
    try:
        return msgspec.json.decode(run.predicted.read_bytes(), type=Predicted)
    except (OSError, ValueError):
        return Predicted()
