"""The run directory: the paths that tie the verbs together."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from shardwise.environment import variables
from shardwise.errors import InputError
from shardwise.runs.disk import write_error


@dataclass(frozen=True)
class RunDirectory:
    """Where one run keeps its job, plan, events, logs, errors and report."""

    path: Path
    made: tuple[Path, ...] = ()
    """The folders that `create_run` made, outermost first: all that `remove` may delete."""

    @property
    def job(self) -> Path:
        """Which job this is: file, attribute, overrides, content hash (JSON)."""
        return self.path / "job.json"

    @property
    def plan(self) -> Path:
        """The resolved plan (TOML)."""
        return self.path / "plan.toml"

    @property
    def environment(self) -> Path:
        """Environment variables that explain the run, by allow-list (JSON)."""
        return self.path / "environment.json"

    @property
    def batch_script(self) -> Path:
        """What was submitted to SLURM; absent when the run was started otherwise."""
        return self.path / "job.sbatch"

    @property
    def timeline(self) -> Path:
        """What rank 0 spent its start on (JSON)."""
        return self.path / "timeline.json"

    @property
    def checkpoints(self) -> Path:
        """Folder of the states a training can go on from."""
        return self.path / "checkpoints"

    @property
    def weights(self) -> Path:
        """The trained weights: a plain state dict that torch.load and Job.weights read."""
        return self.path / "weights.pt"

    @property
    def adapter(self) -> Path:
        """Folder of trained adapters in peft's format; absent for a job without."""
        return self.path / "adapter"

    @property
    def sinks(self) -> Path:
        """Folder of what mirrors into trackers remember and said."""
        return self.path / "sinks"

    @property
    def report_json(self) -> Path:
        """The final report for programs."""
        return self.path / "report.json"

    @property
    def report_markdown(self) -> Path:
        """The final report for people."""
        return self.path / "report.md"

    def events(self, rank: int) -> Path:
        """Events of one rank, one JSON object per line."""
        return self.path / "events" / f"rank{rank}.jsonl"

    def launcher_events(self, node: int = 0) -> Path:
        """Events of one node's launcher, one JSON object per line."""
        return self.path / "events" / (f"launcher-{node}.jsonl" if node else "launcher.jsonl")

    def recorder(self, rank: int) -> Path:
        """The ring of one rank's last phases."""
        return self.path / "recorder" / f"rank{rank}.ring"

    def calls(self, rank: int) -> Path:
        """The ring of one rank's last collectives."""
        return self.path / "recorder" / f"rank{rank}.calls"

    def replicas(self, rank: int) -> Path:
        """Fingerprints of what one rank should hold like others, one JSON object per line; absent if nobody asked."""
        return self.path / "recorder" / f"rank{rank}.replicas.jsonl"

    def stack_samples(self, rank: int) -> Path:
        """Where one rank writes the stacks of its threads whenever it is asked to."""
        return self.path / "recorder" / f"rank{rank}.stacks"

    def stacks(self, rank: int) -> Path:
        """Stacks of one rank's threads at the time of a verdict; absent when there was none."""
        return self.path / "stacks" / f"rank{rank}.txt"

    def stdout(self, rank: int) -> Path:
        """Standard output of one rank."""
        return self.path / "logs" / f"rank{rank}.out"

    def stderr(self, rank: int) -> Path:
        """Standard error of one rank."""
        return self.path / "logs" / f"rank{rank}.err"

    def nccl_log(self, rank: int) -> str:
        """Where NCCL writes what it tells of one rank: a pattern in which NCCL itself fills in host and process."""
        return str(self.path.absolute()).replace("%", "%%") + f"/logs/rank{rank}.nccl.%h.%p"

    def nccl_logs(self) -> list[Path]:
        """What NCCL wrote, all ranks and attempts."""
        return sorted((self.path / "logs").glob("rank*.nccl.*"))

    def error(self, rank: int) -> Path:
        """Failure of one rank (JSON); absent when it did not fail."""
        return self.path / "errors" / f"rank{rank}.json"

    @property
    def has_trained(self) -> bool:
        """Whether a step was reported: from then on the directory is a result and is kept."""
        events = self.events(0)
        return events.exists() and b'"kind":"steps"' in events.read_bytes()

    def remove(self) -> None:
        """Delete what `create_run` made: for runs refused before their first step."""
        for name in (*_FOLDERS, "recorder", "stacks", "sinks"):
            shutil.rmtree(self.path / name, ignore_errors=True)
        for file in (self.job, self.plan, self.environment, self.timeline):
            file.unlink(missing_ok=True)
        for folder in reversed(self.made):
            with contextlib.suppress(OSError):
                folder.rmdir()


_FOLDERS = ("events", "logs", "errors")


def create_run(path: Path | None, name: str) -> RunDirectory:
    """Make a new run directory: `path`, or runs/NAME-TIME under the current directory.

    One that was made when its job was submitted to SLURM is taken as it is, also by a job that was requeued.
    """
    if path is not None and path.is_dir() and (RunDirectory(path).batch_script.exists() or _is_requeued()):
        return share_run(path)
    if path is not None:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise InputError(
                f"run directory {path} is not empty",
                code="run.directory-not-empty",
                fix="name another one with --run-dir",
            )
        return _make(path, exist_ok=True)
    wanted = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in itertools.count(2):
        try:
            return _make(wanted, exist_ok=False)
        except FileExistsError:  # two runs may start within one second
            wanted = wanted.with_name(f"{wanted.name.rpartition('~')[0] or wanted.name}~{number}")
    raise AssertionError("count is endless")


def _is_requeued() -> bool:
    return variables("SLURM_RESTART_COUNT").get("SLURM_RESTART_COUNT", "0") != "0"


def share_run(path: Path) -> RunDirectory:
    """Make the run directory that another node has named, which may be there already if the nodes share a disk."""
    try:
        for folder in _FOLDERS:
            (path / folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"run directory {path} of node 0 cannot be made here ({error.strerror})",
            code="run.create-failed",
            fix="name one for this node with --run-dir",
        ) from None
    return RunDirectory(path)


def _make(path: Path, *, exist_ok: bool) -> RunDirectory:
    made = tuple(folder for folder in [*reversed(path.parents), path] if not folder.exists())
    try:
        path.mkdir(parents=True, exist_ok=exist_ok)
        for folder in _FOLDERS:
            (path / folder).mkdir()
    except FileExistsError:
        raise
    except OSError as error:
        raise InputError(
            f"run directory {path} cannot be made ({error.strerror})",
            code="run.create-failed",
            fix="name another one with --run-dir",
        ) from None
    run = RunDirectory(path, made)
    refusal = write_error(path)
    if refusal is not None:
        run.remove()
        raise InputError(
            f"run directory {path} cannot be written ({refusal.strerror})",
            code="run.write-failed",
            fix="free space there, or name another one with --run-dir",
        )
    return run
