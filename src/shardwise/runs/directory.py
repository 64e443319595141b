"""The run directory: its paths, whether it can be written, the folder of listener sockets, and retention rules."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import time
from dataclasses import dataclass, replace
from multiprocessing import process, util
from pathlib import Path
from typing import Any

from shardwise.environment import variables
from shardwise.errors import InputError
from shardwise.runs.console import counted


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
    def start(self) -> Path:
        """When the launcher began, and where each value of the plan came from (JSON)."""
        return self.path / "start.json"

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
        """Folder of the states that a training can resume from."""
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
        """Folder of the state and the logs of mirrors into trackers."""
        return self.path / "sinks"

    @property
    def predicted(self) -> Path:
        """The memory that planning predicts (JSON); absent when nobody asked for it."""
        return self.path / "predicted.json"

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
        """Where NCCL writes its log of one rank: a pattern in which NCCL itself fills in host and process."""
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
        for file in (self.job, self.plan, self.start, self.environment, self.timeline):
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


# Whether a run directory can still be written, and what it keeps when it cannot.


_PROBE_BYTES = 1 << 16
"""Enough for what a failing rank writes: its traceback, in the log and in its error file."""


def write_error(folder: Path) -> OSError | None:
    """Return the error of writing 64 KiB into `folder`, None when that works; the probe is removed."""
    probe = folder / f".probe-{os.getpid()}"
    try:
        probe.write_bytes(bytes(_PROBE_BYTES))  # written, not only sized: free blocks are no proof under a quota
    except OSError as error:
        return error
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
    return None


def describe_kept(run: RunDirectory) -> str:
    """Return what a run whose disk is full has kept, in one sentence."""
    names = sorted(path.name for path in run.checkpoints.glob("step-*"))  # published whole, or not at all
    if not names:
        return f"{run.path} keeps the logs and events up to the failure, and no checkpoint"
    checkpoints = counted(len(names), "checkpoint")
    return f"{run.path} keeps {checkpoints}, the newest {names[-1]}: with free space, continue with --resume {run.path}"


# Where multiprocessing puts the sockets of its listeners.
#
# multiprocessing makes a `pymp-*` folder in the temporary directory of each process that passes descriptors (every
# DataLoader worker that returns tensors), and removes it when that process exits. A killed process removes nothing.
# So the process that starts ranks, which outlives them, makes one folder for all of them and removes it at the end:
# workers inherit the folder from their rank, however they are started.


def make_listener_folder() -> str:
    """Return the folder of this process, made at the first call; forks of this process use it too."""
    return util.get_temp_dir()


def use_listener_folder(path: str) -> None:
    """Use the folder of another process, which removes it, in this process and in the workers that it starts."""
    with contextlib.suppress(AttributeError):  # where `get_temp_dir` looks, though without a public name
        process.current_process()._config["tempdir"] = path  # type: ignore[attr-defined]  # noqa: SLF001


def remove_listener_folder(path: str) -> None:
    """Remove the folder and what killed ranks left in it."""
    shutil.rmtree(path, ignore_errors=True)


# What a run keeps of its checkpoints: by count, by age, the best by a metric, and the syntax of these rules.


_AGE = re.compile(r"(\d+(?:\.\d+)?)([smhdw])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
GRAMMAR = "a count (3), an age (12h, 2d), min:METRIC or max:METRIC, comma separated, or all"


@dataclass(frozen=True, kw_only=True)
class Keep:
    """What to keep: a checkpoint stays if any of the rules wants it; without any rule all stay."""

    last: int | None = None
    """The newest so many."""
    age_s: float | None = None
    """Those younger than so many seconds."""
    best: int = 0
    """So many with the best value of `metric`."""
    metric: str = ""
    highest: bool = False
    """Whether the best value is the highest; else the lowest."""

    def __post_init__(self) -> None:
        if self.last is not None and self.last < 1:
            raise InputError(
                f"keep.last is {self.last}",
                code="checkpoint.keep-last-invalid",
                fix="keep at least 1, or leave it out to keep all",
            )
        if self.age_s is not None and self.age_s < 0:
            raise InputError(
                f"keep.age_s is {self.age_s}", code="checkpoint.keep-age-invalid", fix="use seconds, at least 0"
            )
        if self.best < 0 or bool(self.best) != bool(self.metric):
            raise InputError(
                f"keep.best is {self.best} of metric {self.metric!r}",
                code="checkpoint.keep-best-invalid",
                fix="give both or neither",
            )


def parse_keep(text: str) -> Keep:
    """Read rules such as "3", "2d", "max:accuracy" or "3,2d,min:loss"; "all" means none."""
    if text == "all":
        return Keep()
    keep, seen = Keep(), set()
    for rule in text.split(","):
        name, found = _parse_rule(rule.strip())
        if not found or name in seen:
            fact = f"has {name} twice" if found else f"has {rule!r}, which is not a rule"
            raise InputError(
                f"--keep {text!r} {fact}",
                code="checkpoint.keep-rule-repeated" if found else "checkpoint.keep-rule-invalid",
                fix=f"give {GRAMMAR}",
            )
        seen.add(name)
        keep = replace(keep, **found)
    return keep


def _parse_rule(rule: str) -> tuple[str, dict[str, Any]]:
    """Return what a rule is about and the fields it sets, none where it is not a rule."""
    if rule.isascii() and rule.isdigit():
        return "count", {"last": int(rule)} if int(rule) else {}
    if age := _AGE.fullmatch(rule):
        return "age", {"age_s": float(age[1]) * _SECONDS[age[2]]}
    way, _, metric = rule.partition(":")
    if way in {"min", "max"} and metric:
        return "metric", {"best": 1, "metric": metric, "highest": way == "max"}
    return "rule", {}
