"""The facts in a run directory: events, failures, phase marks, recorded calls, checkpoints and logs."""

from __future__ import annotations

import re
import socket
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from shardwise import checkpoint
from shardwise.diagnosis.guard.rank_view import RankView
from shardwise.diagnosis.run.nccl_log import NcclLog, read_nccl_log
from shardwise.errors import InputError
from shardwise.launcher.explain import gather_evidence
from shardwise.launcher.policy import RankExit
from shardwise.runs import RunDirectory
from shardwise.runs.failure import Failure, read_failure
from shardwise.runs.recorder import Mark, last_mark
from shardwise.runs.state import RunState, ranks_with_files

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from shardwise.diagnosis.guard.hang import RankStatus
    from shardwise.runs.state import LauncherState

T = TypeVar("T")

_LOG_BYTES = 1 << 14
_RANK = re.compile(r"rank(\d+)")


@dataclass(frozen=True)
class Event:
    """One line of an events file."""

    at: float
    kind: str
    rank: int | None
    """None for events of launchers and guards."""
    fields: Mapping[str, Any]
    node: int = 0
    """Node of the launcher or guard that wrote the event."""


@dataclass(frozen=True, kw_only=True)
class LauncherFacts:
    """The last attempt that the launcher of one node recorded."""

    node: int = 0
    nodes: int = 1
    host: str = ""
    pid: int = 0
    target: str = ""
    """The program that was started, without its arguments."""
    world_size: int = 0
    pids: Mapping[int, int] = field(default_factory=dict)
    exits: tuple[RankExit, ...] = ()
    verdict: str = ""
    finished: str = ""
    """"finished", "failed" or "stopped"; empty if the launcher never reported its end."""
    is_gone: bool = False
    """Whether the process of the launcher has ended."""


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """The facts about a run at one point in time."""

    path: Path
    now: float
    events: tuple[Event, ...] = ()
    """Events of all files, sorted by time."""
    launchers: tuple[LauncherFacts, ...] = ()
    failures: Mapping[int, Failure] = field(default_factory=dict)
    marks: Mapping[int, Mark] = field(default_factory=dict)
    """The newest phase mark of each rank."""
    ranks: Mapping[int, RankStatus] = field(default_factory=dict)
    """Status of each rank on this machine, from its recorded calls; process ids of other machines are meaningless."""
    job: Mapping[str, Any] | None = None
    """Contents of job.json; None for a script."""
    options: tuple[str, ...] = ()
    """Options of the `train` command, without the run directory; empty if they were not recorded."""
    saved: int | None = None
    """Step of the newest undamaged checkpoint."""
    damages: tuple[str, ...] = ()
    """Damage of newer checkpoints."""
    nccl: NcclLog = field(default_factory=NcclLog)
    variables: Mapping[str, str] = field(default_factory=dict)
    tails: Mapping[int, str] = field(default_factory=dict)
    """The end of each rank's standard error."""

    @property
    def hosts(self) -> dict[int, str]:
        """The host of each rank."""
        return {rank: launcher.host for launcher in self.launchers for rank in launcher.pids}

    @property
    def last_launchers(self) -> tuple[LauncherFacts, ...]:
        """The launchers in the last world that node 0 recorded: node 0 may have continued after it lost a node."""
        for hub in self.launchers:
            if hub.node == 0 and hub.world_size:
                world = (hub.nodes, hub.world_size)
                return tuple(each for each in self.launchers if (each.nodes, each.world_size) == world)
        return self.launchers

    @property
    def newest(self) -> float:
        """Timestamp of the latest event or phase mark of any rank."""
        records: list[Event | Mark] = [*self.events, *self.marks.values()]
        return max((record.at for record in records), default=0.0)


def read_run(path: Path) -> RunFacts:
    """Read a run directory; raise InputError if the path is not a run directory."""
    if not path.is_dir():
        raise InputError(
            f"{path} is not a directory", code="run.not-found", fix="pass a run directory from ls -d runs/*"
        )
    if not (path / "events").is_dir() and not (path / "logs").is_dir():
        raise InputError(
            f"{path} has neither events/ nor logs/", code="run.not-a-run", fix="pass a run directory from ls -d runs/*"
        )
    run, now = RunDirectory(path), time.time()
    events: list[Event] = []
    state = RunState(run, listener=lambda writer, fields: _collect(events, writer, fields), all_ranks=True)
    while state.refresh_events():
        pass
    launchers = tuple(_launcher_facts(launcher, run) for launcher in state.launchers if launcher.has_events)
    ranks = ranks_with_files(run, ("events", "errors", "recorder", "logs"))
    remote: set[int] = set()
    for launcher in launchers:
        ranks.update(launcher.pids)
        if launcher.host != socket.gethostname():
            remote.update(launcher.pids)
    saved, damages = _newest_checkpoint(run)
    return RunFacts(
        path=path,
        now=now,
        events=tuple(sorted(events, key=lambda event: event.at)),
        launchers=launchers,
        failures=_by_rank(ranks, lambda rank: read_failure(run.error(rank))),
        marks=_by_rank(ranks, lambda rank: last_mark(run.recorder(rank))),
        ranks=_by_rank(ranks - remote, lambda rank: _rank_status(run, rank, now)),
        job=_read_json(run.job),
        options=tuple(map(str, (_read_json(run.start) or {}).get("options", ()))),
        saved=saved,
        damages=damages,
        nccl=_read_nccl(run),
        variables={str(name): str(value) for name, value in (_read_json(run.environment) or {}).items()},
        tails=_by_rank(ranks, lambda rank: _tail(run.stderr(rank))),
    )


def _by_rank(ranks: set[int], read: Callable[[int], T | None]) -> dict[int, T]:
    """Return the result of `read` for each rank; ranks with an empty result are omitted."""
    found = {}
    for rank in sorted(ranks):
        value = read(rank)
        if value:
            found[rank] = value
    return found


def _collect(events: list[Event], writer: str, fields: Mapping[str, Any]) -> None:
    """Add an event that has a timestamp; `writer` is rankN or a launcher."""
    if isinstance(fields.get("at"), int | float):
        match = _RANK.fullmatch(writer)
        rank = int(match[1]) if match else None
        node = writer.removeprefix("launcher-")
        events.append(Event(float(fields["at"]), fields["kind"], rank, fields, int(node) if node.isdigit() else 0))


def _launcher_facts(launcher: LauncherState, run: RunDirectory) -> LauncherFacts:
    """Return the last attempt of a launcher, with the failures and logs of its ranks."""
    exits: list[RankExit] = []
    for rank, end in launcher.ends.items():
        exit_ = RankExit(
            rank=rank,
            returncode=end.code,
            failure=read_failure(run.error(rank)),
            stopped=end.stopped,
            at=end.at,
            node_name=launcher.host if launcher.nodes > 1 else "",
        )
        exits.append(exit_)
    return LauncherFacts(
        node=launcher.node,
        nodes=launcher.nodes,
        host=launcher.host,
        pid=launcher.pid or 0,
        target=launcher.target,
        world_size=launcher.world_size,
        pids=launcher.pids,
        exits=gather_evidence(exits, run),
        verdict=launcher.verdict,
        finished=launcher.finished,
        is_gone=launcher.is_gone,
    )


def _rank_status(run: RunDirectory, rank: int, now: float) -> RankStatus | None:
    """Return the status of a rank from its recorded calls, or None without a record.

    A single reading cannot detect a change, so the time since the last progress comes from timestamps.
    """
    view = RankView(run, rank)
    view.refresh()
    if not view.pid:
        return None
    status = view.status()
    call, mark = status.newest, last_mark(run.recorder(rank))
    progress_at = []
    if call is not None:
        progress_at += [call.entered, call.left]
    if mark is not None:
        progress_at.append(mark.at)
    return replace(status, quiet_s=max(0.0, now - max(progress_at, default=now)))


def _newest_checkpoint(run: RunDirectory) -> tuple[int | None, tuple[str, ...]]:
    """Return the newest undamaged checkpoint's step and the damage of newer checkpoints. Imports torch if any exist."""
    if not run.checkpoints.is_dir():
        return None, ()
    entry, damages = checkpoint.CheckpointDirectory(run.checkpoints).newest_good(deep=False)
    step = None if entry is None else entry.step
    return step, tuple(map(str, damages))


def _read_nccl(run: RunDirectory) -> NcclLog:
    """Read NCCL's log files; without them, read NCCL's lines in the logs of the ranks."""
    files = run.nccl_logs() or sorted((run.path / "logs").glob("rank*.*"))
    lines = []
    for file in files:
        lines += [line for line in _text(file).splitlines() if " NCCL " in line]
    return read_nccl_log(lines)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _tail(path: Path) -> str:
    return _text(path)[-_LOG_BYTES:]


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError):
        return None
    return value if isinstance(value, dict) else None
