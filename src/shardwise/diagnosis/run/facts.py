"""What a run directory holds of a run, read once: events, failures, marks, records of calls, checkpoints, logs."""

from __future__ import annotations

import re
import socket
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec

from shardwise.diagnosis.guard.looking import RankView
from shardwise.diagnosis.run.nccl_log import NcclLog, read_nccl_log
from shardwise.errors import InputError
from shardwise.launcher.explain import gather_evidence
from shardwise.launcher.policy import RankExit
from shardwise.runs import RunDirectory
from shardwise.runs.failure import Failure, read_failure
from shardwise.runs.recorder import Mark, last_mark
from shardwise.runs.state import RunState, ranks_with_files

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from shardwise.diagnosis.guard.hang import RankStatus
    from shardwise.runs.state import LauncherState

_LOG_BYTES = 1 << 14
_RANK = re.compile(r"rank(\d+)")


@dataclass(frozen=True)
class Event:
    """One line of an events file."""

    at: float
    kind: str
    rank: int | None
    """None for what launchers and guards wrote."""
    fields: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class LauncherFacts:
    """One node's launcher: the last attempt it wrote down."""

    node: int = 0
    nodes: int = 1
    host: str = ""
    pid: int = 0
    target: str = ""
    """What was started, without its arguments."""
    world_size: int = 0
    pids: Mapping[int, int] = field(default_factory=dict)
    exits: tuple[RankExit, ...] = ()
    verdict: str = ""
    finished: str = ""
    """"finished", "failed" or "stopped"; empty when it never reported."""
    is_gone: bool = False
    """Its process is known to have ended."""


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """A run at one moment."""

    path: Path
    now: float
    events: tuple[Event, ...] = ()
    """Of all files, by time."""
    launchers: tuple[LauncherFacts, ...] = ()
    failures: Mapping[int, Failure] = field(default_factory=dict)
    marks: Mapping[int, Mark] = field(default_factory=dict)
    """The newest of each rank."""
    ranks: Mapping[int, RankStatus] = field(default_factory=dict)
    """By their records of calls; of ranks on this machine only, since process ids mean nothing elsewhere."""
    job: Mapping[str, Any] | None = None
    """What job.json holds; None for a plain script."""
    saved: int | None = None
    """Step of the newest sound checkpoint."""
    damages: tuple[str, ...] = ()
    """What is wrong with newer ones."""
    nccl: NcclLog = field(default_factory=NcclLog)
    variables: Mapping[str, str] = field(default_factory=dict)
    tails: Mapping[int, str] = field(default_factory=dict)
    """The end of each rank's standard error."""

    @property
    def hosts(self) -> dict[int, str]:
        """Where each rank ran."""
        return {rank: launcher.host for launcher in self.launchers for rank in launcher.pids}

    @property
    def newest(self) -> float:
        """Timestamp of the latest event or phase mark of any rank."""
        return max([*(event.at for event in self.events), *(mark.at for mark in self.marks.values())], default=0.0)


def read_run(path: Path) -> RunFacts:
    """Read a run directory; a path that is not one is refused."""
    if not path.is_dir():
        raise InputError(
            f"{path} is no folder", code="run.not-found", fix="name a run directory, such as one of ls -d runs/*"
        )
    if not (path / "events").is_dir() and not (path / "logs").is_dir():
        raise InputError(
            f"{path} is not a run directory", code="run.not-a-run", fix="name one with events and logs: ls -d runs/*"
        )
    run, now = RunDirectory(path), time.time()
    events: list[Event] = []
    state = RunState(run, listener=lambda writer, fields: _collect(events, writer, fields), all_ranks=True)
    while state.refresh_events():
        pass
    launchers = tuple(_launcher_facts(launcher, run) for launcher in state.launchers if launcher.has_events)
    numbers = ranks_with_files(run, ("events", "errors", "recorder", "logs"))
    for launcher in launchers:
        numbers.update(launcher.pids)
    remote = [launcher for launcher in launchers if launcher.host != socket.gethostname()]
    away = {rank for launcher in remote for rank in launcher.pids}
    saved, damages = _newest_checkpoint(run)
    return RunFacts(
        path=path,
        now=now,
        events=tuple(sorted(events, key=lambda event: event.at)),
        launchers=launchers,
        failures={rank: failure for rank in sorted(numbers) if (failure := read_failure(run.error(rank)))},
        marks={rank: mark for rank in sorted(numbers) if (mark := last_mark(run.recorder(rank)))},
        ranks={rank: status for rank in sorted(numbers - away) if (status := _look(run, rank, now))},
        job=_read_json(run.job),
        saved=saved,
        damages=damages,
        nccl=_read_nccl(run),
        variables={str(name): str(value) for name, value in (_read_json(run.environment) or {}).items()},
        tails={rank: tail for rank in sorted(numbers) if (tail := _tail(run.stderr(rank)))},
    )


def _collect(events: list[Event], writer: str, fields: Mapping[str, Any]) -> None:
    """Add one event that has a time; `writer` is rankN or a launcher."""
    if isinstance(fields.get("at"), int | float):
        number = _RANK.fullmatch(writer)
        events.append(Event(float(fields["at"]), fields["kind"], int(number[1]) if number else None, fields))


def _launcher_facts(launcher: LauncherState, run: RunDirectory) -> LauncherFacts:
    """Return the last attempt of one launcher, with the failures and logs of its ranks."""
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
        exits += gather_evidence([exit_], run)
    return LauncherFacts(
        node=launcher.node,
        nodes=launcher.nodes,
        host=launcher.host,
        pid=launcher.pid or 0,
        target=launcher.target,
        world_size=launcher.world_size,
        pids=launcher.pids,
        exits=tuple(exits),
        verdict=launcher.verdict,
        finished=launcher.finished,
        is_gone=launcher.is_gone,
    )


def _look(run: RunDirectory, rank: int, now: float) -> RankStatus | None:
    """Return the state of a rank by its record of calls; one reading cannot see a change."""
    view = RankView(run, rank)
    view.refresh()
    if not view.pid:
        return None
    status = view.status()
    call, mark = status.newest, last_mark(run.recorder(rank))
    signs = [*([call.entered, call.left] if call is not None else []), *([mark.at] if mark is not None else [])]
    return replace(status, quiet_s=max(0.0, now - max(signs)) if signs else 0.0)


def _newest_checkpoint(run: RunDirectory) -> tuple[int | None, tuple[str, ...]]:
    """Return the step of the newest sound checkpoint, and what is wrong with newer ones; only then torch is needed."""
    if not run.checkpoints.is_dir():
        return None, ()
    from shardwise.checkpoint.folder import CheckpointFolder

    entry, damages = CheckpointFolder(run.checkpoints).newest_good(deep=False)
    return (entry.step if entry is not None else None), tuple(str(damage) for damage in damages)


def _read_nccl(run: RunDirectory) -> NcclLog:
    """Read NCCL's own logs; where it was set to write elsewhere, what it wrote among a rank's lines."""
    files = run.nccl_logs() or sorted((run.path / "logs").glob("rank*.*"))
    lines = (line for file in files for line in _text(file).splitlines())
    return read_nccl_log(line for line in lines if " NCCL " in line)


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
