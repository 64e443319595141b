"""The run directory: its paths, a write check, the folder of multiprocessing sockets, and retention of checkpoints."""

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
    """The directory of one run, with the paths of its job, plan, events, logs, errors and report."""

    path: Path
    made: tuple[Path, ...] = ()
    """The folders that `create_run` created, outermost first; `remove` deletes only these."""

    @property
    def job(self) -> Path:
        """Identity of the job: file, attribute, overrides, content hash (JSON)."""
        return self.path / "job.json"

    @property
    def plan(self) -> Path:
        """The resolved plan (TOML)."""
        return self.path / "plan.toml"

    @property
    def start(self) -> Path:
        """Start time of the launcher, and the source of each value of the plan (JSON)."""
        return self.path / "start.json"

    @property
    def environment(self) -> Path:
        """Environment variables of the run that are on the allow-list (JSON)."""
        return self.path / "environment.json"

    @property
    def batch_script(self) -> Path:
        """The batch script that was submitted to SLURM; absent for other runs."""
        return self.path / "job.sbatch"

    @property
    def timeline(self) -> Path:
        """The start-up phases of rank 0 with their durations (JSON)."""
        return self.path / "timeline.json"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints from which training can resume."""
        return self.path / "checkpoints"

    @property
    def compiled(self) -> Path:
        """Folder of the compiled graphs that a restart or another node loads; absent without torch.compile."""
        return self.path / "compiled"

    @property
    def weights(self) -> Path:
        """The trained weights: a plain state dict that torch.load and Job.weights read."""
        return self.path / "weights.pt"

    @property
    def adapter(self) -> Path:
        """Folder of trained adapters in peft's format; absent for a job without adapters."""
        return self.path / "adapter"

    @property
    def model(self) -> Path:
        """Folder of config.json and generation_config.json of a transformers model; absent for other models."""
        return self.path / "model"

    @property
    def sinks(self) -> Path:
        """Folder of the state and the logs of experiment trackers."""
        return self.path / "sinks"

    @property
    def predicted(self) -> Path:
        """The memory that the planner predicts (JSON); absent if no prediction was requested."""
        return self.path / "predicted.json"

    @property
    def comparison(self) -> Path:
        """Predicted beside measured time and memory of the run (JSON); absent for a run too short to measure."""
        return self.path / "comparison.json"

    @property
    def report_json(self) -> Path:
        """The final report as JSON."""
        return self.path / "report.json"

    @property
    def report_markdown(self) -> Path:
        """The final report as Markdown."""
        return self.path / "report.md"

    def events(self, rank: int) -> Path:
        """Events of one rank, one JSON object per line."""
        return self.path / "events" / f"rank{rank}.jsonl"

    def launcher_events(self, node: int = 0) -> Path:
        """Events of one node's launcher, one JSON object per line."""
        return self.path / "events" / (f"launcher-{node}.jsonl" if node else "launcher.jsonl")

    def recorder(self, rank: int) -> Path:
        """The ring buffer of one rank's last phases."""
        return self.path / "recorder" / f"rank{rank}.ring"

    def calls(self, rank: int) -> Path:
        """The ring buffer of one rank's last collectives."""
        return self.path / "recorder" / f"rank{rank}.calls"

    def replicas(self, rank: int) -> Path:
        """Fingerprints of one rank's replicated tensors, one JSON object per line; absent without replica checks."""
        return self.path / "recorder" / f"rank{rank}.replicas.jsonl"

    def stack_samples(self, rank: int) -> Path:
        """The file to which one rank writes the stacks of its threads on request."""
        return self.path / "recorder" / f"rank{rank}.stacks"

    def stacks(self, rank: int) -> Path:
        """Stacks of one rank's threads at the time of a verdict; absent without a verdict."""
        return self.path / "stacks" / f"rank{rank}.txt"

    def stdout(self, rank: int) -> Path:
        """Standard output of one rank."""
        return self.path / "logs" / f"rank{rank}.out"

    def stderr(self, rank: int) -> Path:
        """Standard error of one rank."""
        return self.path / "logs" / f"rank{rank}.err"

    def nccl_log(self, rank: int) -> str:
        """Path pattern of NCCL's log of one rank, in which NCCL fills in host and process."""
        return str(self.path.absolute()).replace("%", "%%") + f"/logs/rank{rank}.nccl.%h.%p"

    def nccl_logs(self) -> list[Path]:
        """NCCL logs of all ranks and attempts."""
        return sorted((self.path / "logs").glob("rank*.nccl.*"))

    def error(self, rank: int) -> Path:
        """Failure of one rank (JSON); absent if it did not fail."""
        return self.path / "errors" / f"rank{rank}.json"

    @property
    def has_trained(self) -> bool:
        """Whether rank 0 has reported a completed training step."""
        events = self.events(0)
        return events.exists() and b'"kind":"steps"' in events.read_bytes()

    @property
    def is_resumable(self) -> bool:
        """Whether --resume auto can continue this run of a job file: it has checkpoints, or it has not finished."""
        return self.job.exists() and (self.checkpoints.exists() or not self.report_json.exists())

    def remove(self) -> None:
        """Delete the files and folders of a run that was rejected before its first step."""
        for name in (*_FOLDERS, "recorder", "stacks", "sinks"):
            shutil.rmtree(self.path / name, ignore_errors=True)
        for file in (self.job, self.plan, self.start, self.environment, self.timeline):
            file.unlink(missing_ok=True)
        for folder in reversed(self.made):
            with contextlib.suppress(OSError):
                folder.rmdir()


_FOLDERS = ("events", "logs", "errors")


def create_run(path: Path | None, name: str) -> RunDirectory:
    """Create a run directory: `path`, or runs/NAME-TIME under the current directory.

    A directory that was created when its job was submitted to SLURM, or before the job was requeued, is reused.
    """
    if path is not None and path.is_dir() and (RunDirectory(path).batch_script.exists() or _is_requeued()):
        return share_run(path)
    if path is not None:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            fix = "choose another directory with --run-dir"
            if RunDirectory(path).is_resumable:
                fix = f"continue its run with --resume auto, or use --resume {path} with another --run-dir"
            raise InputError(f"run directory {path} is not empty", code="run.directory-not-empty", fix=fix)
        return _make(path, exist_ok=True)
    wanted = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in itertools.count(2):
        try:
            return _make(wanted, exist_ok=False)
        except FileExistsError:  # two runs may start within one second
            wanted = wanted.with_name(f"{wanted.name.rpartition('~')[0] or wanted.name}~{number}")
    raise AssertionError("itertools.count does not end")


def _is_requeued() -> bool:
    return variables("SLURM_RESTART_COUNT").get("SLURM_RESTART_COUNT", "0") != "0"


def share_run(path: Path) -> RunDirectory:
    """Create the run directory that node 0 chose; it may already exist if the nodes share a file system."""
    try:
        for folder in _FOLDERS:
            (path / folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"run directory {path} of node 0 cannot be created on this node ({error.strerror})",
            code="run.create-failed",
            fix="choose a directory for this node with --run-dir",
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
            f"run directory {path} cannot be created ({error.strerror})",
            code="run.create-failed",
            fix="choose another directory with --run-dir",
        ) from None
    run = RunDirectory(path, made)
    refusal = write_error(path)
    if refusal is not None:
        run.remove()
        raise InputError(
            f"run directory {path} is not writable ({refusal.strerror})",
            code="run.write-failed",
            fix="free disk space, or choose another directory with --run-dir",
        )
    return run


# Write checks of the run directory, and a summary of the files in it after a full disk.


_PROBE_BYTES = 1 << 16
"""Size of the write probe: about that of the traceback that a failing rank writes to its log and its error file."""


def write_error(folder: Path) -> OSError | None:
    """Return the error of writing 64 KiB into `folder`; None if the write succeeds. The probe file is removed."""
    probe = folder / f".probe-{os.getpid()}"
    try:
        # Real data, not only a size: a quota can refuse blocks that the file system reports as free.
        probe.write_bytes(bytes(_PROBE_BYTES))
    except OSError as error:
        return error
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
    return None


def describe_kept(run: RunDirectory) -> str:
    """Return a sentence that names the checkpoints of a run whose disk is full."""
    names = sorted(path.name for path in run.checkpoints.glob("step-*"))  # checkpoints are published atomically
    if not names:
        return f"{run.path} has the logs and events up to the failure, but no checkpoint"
    checkpoints = counted(len(names), "checkpoint")
    return (
        f"{run.path} has {checkpoints}, the newest {names[-1]}: free disk space, then resume with --resume {run.path}"
    )


# The folder of multiprocessing's listener sockets.
#
# multiprocessing creates a `pymp-*` folder in the temporary directory of each process that passes descriptors (every
# DataLoader worker that returns tensors), and removes it when that process exits. A killed process removes nothing.
# So the process that starts ranks, which outlives them, creates one folder for all of them and removes it at the end:
# workers inherit the folder from their rank, however they are started.


def make_listener_folder() -> str:
    """Return the folder of this process for multiprocessing sockets; forked processes use the same folder."""
    return util.get_temp_dir()


def use_listener_folder(path: str) -> None:
    """Use another process's socket folder in this process and its workers; the other process removes the folder."""
    with contextlib.suppress(AttributeError):  # `get_temp_dir` reads this setting, which has no public name
        process.current_process()._config["tempdir"] = path  # type: ignore[attr-defined]  # noqa: SLF001


def remove_listener_folder(path: str) -> None:
    """Remove the socket folder, including sockets that killed ranks did not remove."""
    shutil.rmtree(path, ignore_errors=True)


# Retention rules of checkpoints: by count, by age, by the best value of a metric; and their syntax.


_AGE = re.compile(r"(\d+(?:\.\d+)?)([smhdw])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
GRAMMAR = "a count (3), an age (12h, 2d), min:METRIC or max:METRIC, comma separated, or all"


@dataclass(frozen=True, kw_only=True)
class Keep:
    """Retention rules: a checkpoint that any rule selects is kept; without a rule all checkpoints are kept."""

    last: int | None = None
    """Number of newest checkpoints to keep."""
    age_s: float | None = None
    """Checkpoints younger than this many seconds are kept."""
    best: int = 0
    """Number of checkpoints to keep with the best values of `metric`."""
    metric: str = ""
    highest: bool = False
    """Whether the best value is the highest; otherwise it is the lowest."""

    def __post_init__(self) -> None:
        if self.last is not None and self.last < 1:
            raise InputError(
                f"keep.last must be at least 1, got {self.last}",
                code="checkpoint.keep-last-invalid",
                fix="set keep.last to at least 1, or omit it to keep all checkpoints",
            )
        if self.age_s is not None and self.age_s < 0:
            raise InputError(
                f"keep.age_s must not be negative, got {self.age_s}",
                code="checkpoint.keep-age-invalid",
                fix="set keep.age_s to at least 0 seconds",
            )
        if self.best < 0 or bool(self.best) != bool(self.metric):
            raise InputError(
                f"keep.best and keep.metric must be set together, got best={self.best} and metric={self.metric!r}",
                code="checkpoint.keep-best-invalid",
                fix="set keep.best to at least 1 and keep.metric to a metric, or omit both",
            )


def parse_keep(text: str) -> Keep:
    """Parse rules such as "3", "2d", "max:accuracy" or "3,2d,min:loss"; "all" keeps every checkpoint."""
    if text == "all":
        return Keep()
    keep, seen = Keep(), set()
    for rule in text.split(","):
        name, fields = _parse_rule(rule.strip())
        if not fields:
            raise InputError(
                f"--keep {text!r} contains the invalid rule {rule!r}",
                code="checkpoint.keep-rule-invalid",
                fix=f"pass {GRAMMAR}",
            )
        if name in seen:
            raise InputError(
                f"--keep {text!r} has two {name} rules", code="checkpoint.keep-rule-repeated", fix="remove one rule"
            )
        seen.add(name)
        keep = replace(keep, **fields)
    return keep


def _parse_rule(rule: str) -> tuple[str, dict[str, Any]]:
    """Return the kind of a rule and the fields of Keep that it sets; no fields for an invalid rule."""
    if rule.isascii() and rule.isdigit():
        count = int(rule)
        return "count", {"last": count} if count > 0 else {}
    if age := _AGE.fullmatch(rule):
        return "age", {"age_s": float(age[1]) * _SECONDS[age[2]]}
    way, _, metric = rule.partition(":")
    if way in {"min", "max"} and metric:
        return "metric", {"best": 1, "metric": metric, "highest": way == "max"}
    return "rule", {}
