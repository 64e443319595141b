"""The status of a run and of its ranks at one moment: plain frozen values for a terminal, a page or a program."""

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
    words: str
    """What it ended with, as text; empty for "done"."""
    code: int = 0
    """Its exit code; negative: the signal that ended it."""
    stopped: bool = False
    """Whether the launcher had asked it to stop."""
    at: float = 0.0
    """When its launcher saw the end, in seconds since the epoch."""


class RankTable:
    """Marks, memory and steps of every rank, by its last records."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._reported: dict[int, tuple[int, float | None]] = {}
        """By rank: steps done and memory, by its last `steps` event."""
        self._marks: dict[int, Mark] = {}
        self._leader: Sequence[Mark] = ()
        """What the first rank did lately."""

    @property
    def newest(self) -> float:
        """When the last mark of any rank was made; 0.0 without one."""
        return max((mark.at for mark in self._marks.values()), default=0.0)

    def refresh(self, ranks: Collection[int]) -> None:
        """Read the last mark of each of these ranks."""
        self._marks = {}
        for rank in ranks:
            mark = last_mark(self._run.recorder(rank))
            if mark is not None:
                self._marks[rank] = mark
        self._leader = self._read_leader()

    def take(self, event: Mapping[str, Any], rank: int) -> None:
        """Take one event of a rank."""
        if event["kind"] == "steps" and isinstance(event.get("losses"), list) and isinstance(event.get("first"), int):
            self._reported[rank] = (event["first"] + len(event["losses"]), event.get("memory_bytes"))

    def highest_memory(self) -> tuple[int, float] | None:
        """Return the rank that needed most memory so far, and how much; None where no rank reported any."""
        highest = None
        for rank, (_, memory) in sorted(self._reported.items()):
            if memory is not None and (highest is None or memory > highest[1]):
                highest = (rank, memory)
        return highest

    def status(self, rank: int, facts: Mapping[str, Any], end: RankEnd | None, *, now: float, state: str) -> RankRow:
        """Return one rank's status; `facts` are its host, device and pid, `state` is for a rank that has not exited."""
        mark = self._marks.get(rank)
        reported_step, memory = self._reported.get(rank, (None, None))
        step = reported_step if mark is None else mark.step
        is_running = end is None and state == "running"
        return RankRow(
            rank=rank,
            host=str(facts.get("host", "")),
            device=str(facts.get("device", "")),
            pid=facts.get("pid"),
            phase=mark.phase if mark is not None else "",
            since=mark.at if mark is not None else None,
            step=step,
            lag_s=lag_s(mark, self._leader, now) if mark is not None and is_running else None,
            lag_steps=max(0, self._leader[-1].step - mark.step) if mark is not None and self._leader else None,
            memory_bytes=memory,
            state=end.state if end is not None else state,
            words=end.words if end is not None else "",
        )

    def _read_leader(self) -> Sequence[Mark]:
        """Read the marks of the rank that is furthest, of equal ones the first to get there."""
        if not self._marks:
            return ()
        leader = max(self._marks, key=lambda rank: (_place(self._marks[rank]), -self._marks[rank].at))
        if all(_place(mark) == _place(self._marks[leader]) for mark in self._marks.values()):
            return (self._marks[leader],)
        found = read_recorder(self._run.recorder(leader))
        return found.marks if found is not None and found.marks else (self._marks[leader],)


def lag_s(mark: Mark, leader: Sequence[Mark], now: float) -> float:
    """Return for how many seconds the leader has been further than `mark`; at least that, where it kept no record."""
    place = _place(mark)
    ahead = None
    for theirs in reversed(leader):
        if _place(theirs) <= place:
            break
        ahead = theirs
    return 0.0 if ahead is None else max(0.0, now - ahead.at)


def _place(mark: Mark) -> tuple[int, int]:
    return mark.step, PHASES.index(mark.phase)


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened in a run and is worth a line."""

    number: int
    """Counts the entries of a run."""
    at: float
    """Seconds since the epoch."""
    kind: str
    text: str
    mood: str = "plain"
    """"plain", "good", "warn" or "bad"."""
    rank: int | None = None


class RankRow(msgspec.Struct, frozen=True, kw_only=True):
    """One rank, by its last records."""

    rank: int
    host: str = ""
    device: str = ""
    pid: int | None = None
    phase: str = ""
    since: float | None = None
    """When that phase began, in seconds since the epoch."""
    step: int | None = None
    lag_s: float | None = None
    """For so long the first rank has been further than this one."""
    lag_steps: int | None = None
    memory_bytes: float | None = None
    """Highest so far: allocated on its GPU, else resident on the host."""
    state: str = "running"
    """"running", "done", "failed", "stopped" or "gone"."""
    words: str = ""
    """How it ended, if it did."""


class CheckpointStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that was begun, and whether it is there now."""

    step: int
    at: float
    num_bytes: int | None = None
    """On disk, all ranks together; None while it is not whole or gone."""


class CheckpointTable:
    """Sizes of the checkpoints of a run; each is read once."""

    def __init__(self, run: RunDirectory) -> None:
        self._folder = run.checkpoints
        self._sizes: dict[str, int] = {}

    def statuses(self, saves: Iterable[CheckpointStatus]) -> Iterator[CheckpointStatus]:
        """Yield the saves, newest first, with their size where they are whole and still exist."""
        existing: dict[int, int] = {}
        with contextlib.suppress(OSError):
            for folder in self._folder.iterdir():
                step = folder.name.removeprefix("step-").partition("~")[0]
                if step.isdigit() and (folder / "manifest.json").exists():
                    existing[int(step)] = self._size(folder)
        for save in sorted(saves, key=lambda save: -save.step):
            yield CheckpointStatus(step=save.step, at=save.at, num_bytes=existing.get(save.step))

    def _size(self, folder: Path) -> int:
        if folder.name not in self._sizes:  # a checkpoint is published whole, so it never changes
            self._sizes[folder.name] = sum(file.stat().st_size for file in folder.iterdir())
        return self._sizes[folder.name]


class RestartMark(msgspec.Struct, frozen=True, kw_only=True):
    """A restart of all ranks, and the step from which they went on."""

    step: int
    at: float


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A run at one moment."""

    name: str
    path: str
    job: str
    plan: str
    state: str
    """"running", "finished", "failed", "stopped", "lost" (its launcher is gone) or "silent" (no sign of life)."""
    verdict: str
    """Why it failed, in one sentence."""
    now: float
    """Seconds since the epoch; of the last sign of life when the run is over."""
    began_at: float | None
    step: int
    num_steps: int | None
    epoch: int | None
    loss: float | None
    samples_per_s: float | None
    lr: float | None
    eta_s: float | None
    memory_bytes: float | None
    """Of the rank that needed most so far."""
    memory_rank: int | None
    is_resident: bool
    """Whether memory is what a process holds on the host, libraries and all; else what it allocated on its GPU."""
    predicted_bytes: float | None
    """Of tensors, of the rank that needs most."""
    prediction: str
    """Why nothing is predicted, or empty."""
    parameters: int | None
    restarts: int
    restart_marks: tuple[RestartMark, ...]
    evaluation: dict[str, float | None]
    """Of the last evaluation, by name."""
    checkpoints: tuple[CheckpointStatus, ...]
    ranks: tuple[RankRow, ...]
    reading: float
    """Share of what was on disk at first that is folded in: 1.0 when the view has seen it all once."""


# The memory that planning predicts for a run: `monitor/watch.py` computes it and writes predicted.json.


class Predicted(msgspec.Struct, frozen=True, kw_only=True):
    """What predicted.json holds: bytes, or why there are none."""

    peak_bytes: float | None = None
    why_not: str = ""


def read_predicted(run: RunDirectory) -> Predicted:
    """Return the predicted peak of a rank's tensors; without a value where nobody has computed one."""
    try:
        return msgspec.json.decode(run.predicted.read_bytes(), type=Predicted)
    except (OSError, ValueError):
        return Predicted()
