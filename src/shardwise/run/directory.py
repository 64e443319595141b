"""The run directory: the paths that tie the verbs together."""

from __future__ import annotations

import contextlib
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from shardwise.errors import InputError


@dataclass(frozen=True)
class RunDirectory:
    """Where one run keeps its job, plan, events, logs, errors and report."""

    path: Path

    @property
    def job(self) -> Path:
        """Which job this is: file, attribute, overrides, content hash (JSON)."""
        return self.path / "job.json"

    @property
    def plan(self) -> Path:
        """The resolved plan (TOML)."""
        return self.path / "plan.toml"

    @property
    def timeline(self) -> Path:
        """What rank 0 spent its start on (JSON)."""
        return self.path / "timeline.json"

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

    def log(self, rank: int) -> Path:
        """Standard output and error of one rank."""
        return self.path / "logs" / f"rank{rank}.log"

    def error(self, rank: int) -> Path:
        """Failure of one rank (JSON); absent when it did not fail."""
        return self.path / "errors" / f"rank{rank}.json"

    def remove(self) -> None:
        """Delete the whole directory: for runs refused before their first step."""
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.path.parent.rmdir()  # runs/, when this was its only run


def create_run(path: Path | None, name: str) -> RunDirectory:
    """Make a new run directory: `path`, or runs/NAME-TIME under the current directory."""
    if path is None:
        path = _free_name(Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise InputError(f"run directory {path} is not empty", fix="name another one with --run-dir")
    try:
        for folder in ("events", "logs", "errors"):
            (path / folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"run directory {path} cannot be made ({error.strerror})", fix="name another one with --run-dir"
        ) from None
    return RunDirectory(path)


def _free_name(path: Path) -> Path:
    """Two runs may start within one second."""
    candidate, number = path, 2
    while candidate.exists():
        candidate, number = path.with_name(f"{path.name}-{number}"), number + 1
    return candidate
