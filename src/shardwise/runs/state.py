"""`RunState`: the incremental reader of a run directory that the progress bar, `watch`, sinks and `doctor` share.

Each rank and each launcher appends events to its own file. A refresh reads the next chunk of every file and folds its
events into the state. Its cost is proportional to the data appended since the last refresh, and other threads may use
the state between two chunks of a long run. Invariant: the state is a function of the files alone, independent of the
chunks. A replaced or truncated file means that the run was started again in the same directory: the state is reset, and
`identity` changes.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from shardwise.errors import InputError
from shardwise.runs.events import Tail, boot_id, machine_id
from shardwise.runs.failure import read_failure
from shardwise.runs.history import History, TrainingState
from shardwise.runs.status import CheckpointTable, RankEnd, RankTable, RunStatus, read_predicted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shardwise.runs.directory import RunDirectory

    Listener = Callable[[str, dict[str, Any]], None]
    """Receives the writer of an event, such as "rank0" or "launcher", and the event."""


CHUNK = 1 << 20
"""Maximum bytes of each file that one refresh reads: other threads may use the state between two chunks."""
LAST = 1 << 16
"""Bytes at the end of an events file that show the current step of its rank; only the file of rank 0 is read whole."""
SILENT_S = 60.0
"""Without a launcher, a run that has written nothing for this long is "silent"."""
GONE_S = 2.0
"""Maximum delay in seconds until the last events of an exited launcher become visible."""
_RANK = re.compile(r"rank(\d+)\b")


def check_run(path: Path) -> None:
    """Raise InputError if `path` is not a readable run directory."""
    try:
        _check(path)
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror})",
            code="run.read-failed",
            fix="pass a run directory with read permission",
        ) from None


def _check(path: Path) -> None:
    fix = "pass a folder that train or launch created, such as runs/NAME-TIME"
    if not path.exists():
        raise InputError(f"run directory {path} does not exist", code="run.not-found", fix=fix)
    if not path.is_dir():
        raise InputError(f"{path} is a file, not a run directory", code="run.not-a-run", fix=fix)
    if not _is_run(path):
        newest = newest_run(path)
        if newest is not None:
            fix = f"pass the newest run in it, {newest}"
        raise InputError(
            f"{path} is not a run directory: it must contain the folders events and logs", code="run.not-a-run", fix=fix
        )


def newest_run(folder: Path) -> Path | None:
    """Return the most recently started run directory in `folder`; None if it contains no run directory."""
    found = [path for path in folder.glob("*") if _is_run(path)]
    return max(found, key=lambda path: (path / "events").stat().st_mtime, default=None)


def _is_run(path: Path) -> bool:
    return (path / "events").is_dir() and (path / "logs").is_dir()


class RunState:
    """The state of one run, updated by `refresh` from the files that ranks and launchers write."""

    def __init__(self, run: RunDirectory, *, listener: Listener | None = None, all_ranks: bool = False) -> None:
        """Pass every event to `listener`; with `all_ranks`, read the complete events files of all ranks."""
        self.run = run
        self.identity = ""
        """Changes when the state is reset, so that clients discard their copy of the state."""
        self._listener = listener
        self._all_ranks = all_ranks
        self._reset()

    def _reset(self) -> None:
        self.identity = secrets.token_hex(4)
        self.training = TrainingState()
        self.history = History()
        self.ranks = RankTable(self.run)
        self._files: dict[str, Tail] = {}
        self._launchers: dict[str, LauncherState] = {}
        self._failures: dict[int, tuple[float, RankEnd]] = {}
        self._checkpoints = CheckpointTable(self.run)
        self._newest = 0.0
        self._began_at: float | None = None
        self._has_read_all = False

    def refresh(self) -> bool:
        """Read the next chunk of every file that grew; return whether there is more to read."""
        is_behind = self.refresh_events()
        if not is_behind:
            self._has_read_all = True
            self.ranks.refresh(self._known_ranks())
            self._find_failures()
        return is_behind

    def refresh_events(self) -> bool:
        """Read only events, not the marks and failures of ranks; return whether there is more to read."""
        self._find_files()
        is_behind = False
        for writer, file in self._files.items():
            events = file.events()
            if file.was_replaced:
                self._reset()
                return True
            for event in events:
                self._fold(writer, event)
            is_behind = is_behind or file.behind > 0
        return is_behind

    def refresh_all(self) -> None:
        """Read all files to their end."""
        while self.refresh():
            pass

    @property
    def launchers(self) -> list[LauncherState]:
        """The launchers that started ranks, in the order of nodes."""
        return [self._launchers[writer] for writer in sorted(self._launchers, key=lambda name: (len(name), name))]

    def _find_files(self) -> None:
        for path in sorted(self.run.events(0).parent.glob("*.jsonl")):
            if path.stem in self._files:
                continue
            rank = _RANK.fullmatch(path.stem)
            if rank is None:
                self._launchers[path.stem] = LauncherState()
            is_read_whole = rank is None or path.stem == "rank0" or self._all_ranks
            self._files[path.stem] = Tail(path, last=None if is_read_whole else LAST, chunk=CHUNK)

    def _fold(self, writer: str, event: dict[str, Any]) -> None:
        """Fold one event into the state; only steps and notes are used from ranks other than 0."""
        rank = _RANK.fullmatch(writer)
        number = int(rank[1]) if rank is not None else None
        if number is not None:
            self.ranks.take(event, number)
        if number:
            if event["kind"] == "note":
                self.history.add(event, number)
        else:
            self._add_time(event)
            if number == 0:
                self.training.fold(event)
            else:
                self._launchers[writer].fold(event)
            self.history.add(event)
        if self._listener is not None:
            self._listener(writer, event)

    @property
    def is_over(self) -> bool:
        """Whether the run has ended, successfully or not."""
        return self._state(time.time()) in {"finished", "failed", "stopped", "lost"}

    def status(self) -> RunStatus:
        """Return the status of the run at the last refresh."""
        clock = time.time()
        state = self._state(clock)
        now = clock if state == "running" else max(self._newest, self.ranks.newest)
        training, predicted = self.training, read_predicted(self.run)
        memory_rank, memory_bytes = self.ranks.highest_memory() or (None, None)
        devices = [str(facts.get("device", "")) for facts in training.placed.values()]
        rank_state = {"running": "running", "finished": "done"}.get(state, "gone")
        main = self.launchers[0] if self.launchers else LauncherState()
        return RunStatus(
            name=self.run.path.resolve().name,
            path=str(self.run.path),
            job=_job_name(self.run) or main.target,
            plan=training.facts.get("plan", ""),
            state=state,
            verdict=main.verdict or _first_message(self._failures),
            now=now,
            began_at=self._began_at,
            step=training.step,
            num_steps=training.num_steps,
            epoch=training.epoch,
            loss=training.loss,
            samples_per_s=training.samples_per_s,
            lr=training.lr,
            eta_s=training.eta_s if state == "running" else None,
            memory_bytes=memory_bytes,
            memory_rank=memory_rank,
            is_resident=any(device.startswith("cpu") for device in devices),
            predicted_bytes=predicted.peak_bytes,
            prediction=predicted.why_not,
            parameters=training.parameters,
            restarts=max((launcher.restarts for launcher in self.launchers), default=len(training.restarts)),
            restart_marks=tuple(training.restarts[-100:]),
            evaluation=training.evaluation,
            checkpoints=tuple(self._checkpoints.statuses(training.saves.values())),
            ranks=tuple(
                self.ranks.status(rank, self._facts(rank), self._end(rank), now=now, state=rank_state)
                for rank in self._known_ranks()
            ),
            reading=self._share_read(),
        )

    def _state(self, now: float) -> str:
        launchers = self.launchers
        newest = max(self._newest, self.ranks.newest)
        if launchers:
            if launchers[0].finished:
                return launchers[0].finished
            is_lost = now - newest > GONE_S and all(launcher.is_gone or launcher.finished for launcher in launchers)
            return "lost" if is_lost else "running"
        if self.training.has_ended:
            return "finished"
        if self._failures:
            return "failed"
        return "running" if now - newest < SILENT_S else "silent"

    def _share_read(self) -> float:
        """Return the fraction of rank 0's events that was read; 1.0 once all files were read to the end."""
        if self._has_read_all:
            return 1.0
        file = self._files.get("rank0")
        return 0.99 if file is None else 0.99 - file.behind / max(1, file.size)

    def _add_time(self, event: dict[str, Any]) -> None:
        at = event.get("at")
        if isinstance(at, int | float):
            self._newest = max(self._newest, at)
            self._began_at = at if self._began_at is None else min(at, self._began_at)

    def _known_ranks(self) -> list[int]:
        launchers = self.launchers
        started: set[int] = set()
        for launcher in launchers:
            started.update(launcher.pids)
        if started:
            world_size = launchers[0].world_size or max(launcher.world_size for launcher in launchers)
            return sorted(rank for rank in started if rank < world_size)
        return sorted(self.training.placed or ranks_with_files(self.run, ("events", "logs")))

    def _facts(self, rank: int) -> dict[str, Any]:
        """Return host, device and pid of a rank, from its launcher and from rank 0's start event."""
        known: dict[str, Any] = {}
        for launcher in reversed(self.launchers):
            if rank in launcher.pids:
                known = {"host": launcher.host, "pid": launcher.pids[rank]}
        return known | self.training.placed.get(rank, {})

    def _end(self, rank: int) -> RankEnd | None:
        for launcher in self.launchers:
            if rank in launcher.ends:
                return launcher.ends[rank]
        return self._failures[rank][1] if rank in self._failures else None

    def _find_failures(self) -> None:
        """Read the failures that ranks wrote, for runs without a launcher that reports exits."""
        if self._launchers:
            return
        for path in sorted(self.run.error(0).parent.glob("rank*.json")):
            with contextlib.suppress(ValueError, OSError):
                rank = int(path.stem.removeprefix("rank"))
                failure = read_failure(path) if rank not in self._failures else None
                if failure is not None:
                    message = f"{failure.kind}: {failure.first_line}"
                    self._failures[rank] = (failure.at, RankEnd("failed", message))
                    self.history.add({"kind": "exit", "at": failure.at, "rank": rank, "code": 1, "words": message})


def _first_message(failures: Mapping[int, tuple[float, RankEnd]]) -> str:
    """Return the message of the earliest failure; empty without a failure."""
    _, first = min(failures.values(), key=lambda found: found[0], default=(0.0, RankEnd("done", "")))
    return first.message


def _job_name(run: RunDirectory) -> str:
    """Return the file name of the job, with its attribute unless that is `job`; empty for a plain script."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        job = msgspec.json.decode(run.job.read_bytes())
        name = str(job.get("path", "")).rpartition("/")[2]
        return name if job.get("attribute", "job") == "job" else f"{name}:{job['attribute']}"
    return ""


def ranks_with_files(run: RunDirectory, folders: tuple[str, ...]) -> set[int]:
    """Return the ranks that have a file in any of these folders of the run directory."""
    found = set()
    for folder in folders:
        for path in (run.path / folder).glob("rank*"):
            if number := _RANK.match(path.name):
                found.add(int(number[1]))
    return found


# The state of one launcher, folded from its events: the ranks that it started, their exits, and the verdict.


@dataclass
class LauncherState:
    """The last attempt of one node's launcher."""

    attempts: int = 0
    """Number of times that the launcher started its ranks."""
    has_events: bool = False
    """Whether the launcher has written an event."""
    node: int = 0
    nodes: int = 1
    host: str = ""
    boot: str = ""
    machine: str = ""
    """Boot id of the machine; empty if it was not recorded."""
    pid: int | None = None
    target: str = ""
    world_size: int = 0
    pids: dict[int, int] = field(default_factory=dict)
    ends: dict[int, RankEnd] = field(default_factory=dict)
    verdict: str = ""
    finished: str = ""
    """"finished", "failed" or "stopped"; empty while the launcher runs."""

    def fold(self, event: Mapping[str, Any]) -> None:
        """Fold one event into the state; a malformed event is skipped."""
        self.has_events = True
        try:
            self._fold(event)
        except (KeyError, TypeError, ValueError, AttributeError):
            return  # written by a different version of shardwise

    def _fold(self, event: Mapping[str, Any]) -> None:
        match event["kind"]:
            case "attempt":
                self.attempts += 1
                self.pids = {int(rank): int(pid) for rank, pid in event["ranks"].items()}
                self.world_size = int(event.get("world_size", len(self.pids)))
                self.host, self.target = str(event.get("host", "")), str(event.get("target", ""))
                self.pid, self.boot = event.get("launcher"), str(event.get("boot", ""))
                self.machine = str(event.get("machine", ""))
                self.node, self.nodes = int(event.get("node", 0)), int(event.get("nodes", 1))
                self.ends, self.verdict, self.finished = {}, "", ""
            case "exit":
                self.ends[int(event["rank"])] = _rank_end(event)
            case "verdict":
                self.verdict = str(event["text"])
            case "finish":
                self.finished = str(event["state"])

    @property
    def restarts(self) -> int:
        """Number of attempts after the first."""
        return max(0, self.attempts - 1)

    @property
    def is_gone(self) -> bool:
        """Whether the launcher's process has exited; always False for a launcher on a different machine."""
        if self.pid is None or self.host != socket.gethostname() or not Path("/proc/self").exists():
            return False
        if self.boot and self.boot != boot_id():  # rebooted, or another machine with the same host name
            return bool(self.machine) and self.machine == machine_id()
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return True
        return state in "ZX"  # nothing has waited for it: a container may have no init process


def _rank_end(event: Mapping[str, Any]) -> RankEnd:
    at = float(event.get("at", 0.0))
    if event["code"] == 0:
        return RankEnd("done", "", stopped=bool(event.get("stopped")), at=at)
    stopped = bool(event["stopped"])
    state = "stopped" if stopped else "failed"
    return RankEnd(state, str(event["words"]), code=int(event["code"]), stopped=stopped, at=at)
