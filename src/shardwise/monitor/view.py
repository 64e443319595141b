"""The view of a run: its files folded into one state, a piece at a time, and read again only where they grew."""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from shardwise.errors import InputError
from shardwise.monitor.growing import GrowingFile
from shardwise.monitor.predicted import read_predicted
from shardwise.monitor.ranks import CheckpointStatus, RankTable, RunStatus
from shardwise.monitor.story import Story
from shardwise.monitor.training import Training
from shardwise.runs.failure import read_failure

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardwise.runs import RunDirectory


SILENT_S = 60.0
"""Without a launcher, a run that has written nothing for so long says no more than that."""
GONE_S = 2.0
"""A launcher that is gone may have written its last words just now."""


def check_run(path: Path) -> None:
    """Refuse a path that is no run directory."""
    try:
        _check(path)
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror})", code="run.read-failed", fix="name a run directory of yours"
        ) from None


def _check(path: Path) -> None:
    if not path.is_dir():
        fact = f"{path} is a file, not a run directory" if path.exists() else f"there is no run directory {path}"
        raise InputError(
            fact,
            code="run.not-a-run" if path.exists() else "run.not-found",
            fix="name a folder that train or launch wrote, such as runs/NAME-TIME",
        )
    if not _is_run(path):
        inside = [folder for folder in path.iterdir() if folder.is_dir() and _is_run(folder)]
        newest = max(inside, key=lambda folder: folder.stat().st_mtime, default=None)
        fix = f"the newest run in it is {newest}" if newest else "name a folder that train or launch wrote"
        raise InputError(f"{path} is not a run directory: it has no events and no logs", code="run.not-a-run", fix=fix)


def _is_run(path: Path) -> bool:
    return (path / "events").is_dir() and (path / "logs").is_dir()


class RunView:
    """The state of one run; `refresh` reads what is new, everything else only looks at what was read."""

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        self.identity = ""
        """Changes when what was told before no longer holds, so that whoever follows begins again."""
        self._begin()

    def _begin(self) -> None:
        self.identity = secrets.token_hex(4)
        self.training = Training()
        self.story = Story()
        self.ranks = RankTable(self.run)
        self._events = GrowingFile(self.run.events(0))
        self._launches: dict[Path, tuple[Launch, GrowingFile]] = {}
        self._failures: dict[int, tuple[float, RankEnd]] = {}
        self._sizes: dict[str, int] = {}
        self._newest = 0.0
        self._began_at: float | None = None
        self._has_looked = False

    def refresh(self) -> bool:
        """Read the next piece of every file that grew; return whether there is more to read at once."""
        self._find_launchers()
        files = [(self._events, self._take_rank_zero), *((file, launch.fold) for launch, file in self._launchers())]
        for file, take in files:
            events = file.read()
            if file.was_replaced:  # the run was started anew in the same place
                self._begin()
                return True
            for event in events:
                self._take_time(event)
                take(event)
                self.story.tell(event)
        is_behind = any(file.behind for file, _ in files)
        if not is_behind:
            self._has_looked = True
            self.ranks.refresh(self._known_ranks(), self.story.tell)
            self._find_failures()
        return is_behind

    def refresh_whole(self) -> None:
        """Read all there is."""
        while self.refresh():
            pass

    @property
    def is_over(self) -> bool:
        """Whether the run has ended, well or badly."""
        return self._state(time.time()) in {"finished", "failed", "stopped", "lost"}

    def status(self) -> RunStatus:
        """Return the state of the run as the last refresh found it."""
        clock = time.time()
        state = self._state(clock)
        now = clock if state == "running" else max(self._newest, self.ranks.newest)
        training, (predicted, why_not) = self.training, read_predicted(self.run)
        memory = self.ranks.highest_memory()
        lead = next((launch for launch, _ in self._launchers()), None)
        failed = min(self._failures.values(), default=None, key=lambda found: found[0])
        rank_state = {"running": "running", "finished": "done"}.get(state, "gone")
        return RunStatus(
            name=self.run.path.resolve().name,
            path=str(self.run.path),
            job=self._job() or (lead.target if lead is not None else ""),
            plan=training.facts.get("plan", ""),
            state=state,
            verdict=(lead.verdict if lead is not None else "") or (failed[1].words if failed else ""),
            now=now,
            began_at=self._began_at,
            step=training.step,
            num_steps=training.num_steps,
            epoch=training.epoch,
            loss=training.loss,
            samples_per_s=training.samples_per_s,
            lr=training.lr,
            eta_s=training.eta_s if state == "running" else None,
            memory_bytes=memory[1] if memory else None,
            memory_rank=memory[0] if memory else None,
            is_resident=any(str(place.get("device", "")).startswith("cpu") for place in training.placed.values()),
            predicted_bytes=predicted,
            prediction=why_not,
            parameters=training.parameters,
            restarts=max((launch.restarts for launch, _ in self._launchers()), default=len(training.restarts)),
            restart_marks=tuple(training.restarts[-100:]),
            evaluation=training.evaluation,
            checkpoints=tuple(self._checkpoints()),
            ranks=tuple(
                self.ranks.status(rank, self._facts(rank), self._end(rank), now=now, state=rank_state)
                for rank in self._known_ranks()
            ),
            reading=1.0 if self._has_looked else 0.99 - self._events.behind / max(1, self._events.size),
        )

    def _state(self, now: float) -> str:
        launches = [launch for launch, _ in self._launchers()]
        newest = max(self._newest, self.ranks.newest)
        if launches:
            if launches[0].finished:
                return launches[0].finished
            is_lost = now - newest > GONE_S and all(launch.is_gone or launch.finished for launch in launches)
            return "lost" if is_lost else "running"
        if self.training.has_ended:
            return "finished"
        if self._failures:
            return "failed"
        return "running" if now - newest < SILENT_S else "silent"

    def _take_rank_zero(self, event: dict[str, Any]) -> None:
        self.training.fold(event)
        self.ranks.take(event, 0)

    def _take_time(self, event: dict[str, Any]) -> None:
        at = event.get("at")
        if isinstance(at, int | float):
            self._newest = max(self._newest, at)
            self._began_at = at if self._began_at is None else min(at, self._began_at)

    def _find_launchers(self) -> None:
        for path in sorted(self.run.launcher_events().parent.glob("launcher*.jsonl")):
            if path not in self._launches:
                self._launches[path] = (Launch(), GrowingFile(path))

    def _launchers(self) -> list[tuple[Launch, GrowingFile]]:
        """Return the launchers that started ranks, that of node 0 first, however late its file was found."""
        return [self._launches[path] for path in sorted(self._launches, key=lambda path: (len(path.name), path.name))]

    def _known_ranks(self) -> list[int]:
        launches = [launch for launch, _ in self._launchers()]
        if any(launch.pids for launch in launches):
            world_size = launches[0].world_size or max(launch.world_size for launch in launches)
            started = {rank for launch in launches for rank in launch.pids}
            return sorted(rank for rank in started if rank < world_size)
        if self.training.placed:
            return sorted(self.training.placed)
        return sorted(_ranks_of(self.run.events(0).parent) | _ranks_of(self.run.stdout(0).parent))

    def _facts(self, rank: int) -> dict[str, Any]:
        """Return host, device and pid of a rank, from whoever told."""
        launched = next((launch for launch, _ in self._launchers() if rank in launch.pids), None)
        known = {"host": launched.host, "pid": launched.pids[rank]} if launched is not None else {}
        return known | self.training.placed.get(rank, {})

    def _end(self, rank: int) -> RankEnd | None:
        ends = [launch.ends[rank] for launch, _ in self._launchers() if rank in launch.ends]
        if ends:
            return ends[0]
        return self._failures[rank][1] if rank in self._failures else None

    def _find_failures(self) -> None:
        """Read what failed ranks left behind, where no launcher tells of their end."""
        if self._launches:
            return
        for path in sorted(self.run.error(0).parent.glob("rank*.json")):
            with contextlib.suppress(ValueError, OSError):
                rank = int(path.stem.removeprefix("rank"))
                failure = read_failure(path) if rank not in self._failures else None
                if failure is not None:
                    words = f"{failure.kind}: {(failure.message.splitlines() or [''])[0]}"
                    self._failures[rank] = (failure.at, RankEnd("failed", words))
                    self.story.tell({"kind": "exit", "at": failure.at, "rank": rank, "code": 1, "words": words})

    def _checkpoints(self) -> Iterator[CheckpointStatus]:
        """Yield the saves, newest first, with their size where they are whole and still there."""
        there: dict[int, int] = {}
        with contextlib.suppress(OSError):
            for folder in self.run.checkpoints.iterdir():
                step = folder.name.removeprefix("step-").partition("~")[0]
                if step.isdigit() and (folder / "manifest.json").exists():
                    there[int(step)] = self._size(folder)
        for save in sorted(self.training.saves.values(), key=lambda save: -save.step):
            yield CheckpointStatus(step=save.step, at=save.at, num_bytes=there.get(save.step))

    def _size(self, folder: Path) -> int:
        if folder.name not in self._sizes:  # it was published whole, so it never changes
            self._sizes[folder.name] = sum(file.stat().st_size for file in folder.iterdir())
        return self._sizes[folder.name]

    def _job(self) -> str:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            job = msgspec.json.decode(self.run.job.read_bytes())
            name = str(job.get("path", "")).rpartition("/")[2]
            return name if job.get("attribute", "job") == "job" else f"{name}:{job['attribute']}"
        return ""


def _ranks_of(folder: Path) -> set[int]:
    numbers = (path.name.removeprefix("rank").partition(".")[0] for path in folder.glob("rank*"))
    return {int(number) for number in numbers if number.isdigit()}


# The launchers of a run, folded from their events: which ranks they started, how those ended, and the verdict.


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
                end = RankEnd("done", "")
                if event["code"] != 0:
                    end = RankEnd("stopped" if event["stopped"] else "failed", str(event["words"]))
                self.ends[int(event["rank"])] = end
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
