"""Loading a job file: by path, attribute and overrides, the same bytes on every rank."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import re
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from shardwise.errors import JobError, ShardwiseError, nearest
from shardwise.job.job import Job
from shardwise.job.overrides import override_job

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType


class JobReference(msgspec.Struct, frozen=True, kw_only=True):
    """A job that can travel: every rank loads it again and compares the hash."""

    path: str
    attribute: str
    overrides: dict[str, str]
    digest: str
    """SHA-256 of the file."""

    @property
    def name(self) -> str:
        """Short name for run directories."""
        stem = Path(self.path).stem
        return stem if self.attribute == "job" else f"{stem}-{self.attribute}"


def refer(target: str, overrides: Mapping[str, str]) -> JobReference:
    """Make a reference from what the user typed: FILE.py or FILE.py:ATTRIBUTE."""
    path_text, _, attribute = target.partition(":")
    path = Path(path_text)
    if not path.is_file():
        raise JobError(
            f"job file {path_text} is not there",
            code="job.file-not-found",
            fix="name a Python file that defines job = sw.Job(...)",
        )
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return JobReference(
        path=str(path.resolve()), attribute=attribute or "job", overrides=dict(overrides), digest=digest
    )


def load_job(reference: JobReference) -> Job:
    """Import the job file and return its Job with the overrides applied."""
    path = Path(reference.path)
    if hashlib.sha256(path.read_bytes()).hexdigest() != reference.digest:
        raise JobError(f"{path} changed since the run was started", code="job.file-changed", fix="start the run again")
    module = _import(path)
    job = getattr(module, reference.attribute, None)
    if job is None:
        jobs = [name for name, value in vars(module).items() if isinstance(value, Job)]
        fix = nearest(reference.attribute, jobs) if jobs else "write job = sw.Job(...) in it"
        raise JobError(f"{path.name} has no attribute {reference.attribute!r}", code="job.attribute-missing", fix=fix)
    if not isinstance(job, Job):
        raise JobError(
            f"{path.name}: {reference.attribute} is a {type(job).__name__}, not a Job",
            code="job.not-a-job",
            fix="write job = sw.Job(...)",
        )
    return override_job(job, reference.overrides)


def _import(path: Path) -> ModuleType:
    """Import a file as a module of its own, its folder on the path as Python does for scripts."""
    name = f"shardwise_job_{path.stem.replace('-', '_')}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise JobError(
            f"{path.name} is not a Python file", code="job.not-python-file", fix="name a file that ends in .py"
        )
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # so that what the file defines can be pickled for DataLoader workers
    from shardwise.job.generators import seeded_generators  # brings torch, which a job file does as well

    try:
        with seeded_generators(0):  # what the file draws, such as an order of its samples, is the same on every rank
            spec.loader.exec_module(module)
    except ShardwiseError:
        raise
    except Exception as error:
        raise JobError(
            f"{path.name} raised {type(error).__name__} at {_place(error, path)}: {error}",
            code="job.file-raised",
            fix=_advice(error),
        ) from error
    return module


def _advice(error: Exception) -> str:
    """Name the nearest field for a misspelled one of Job, or the extra that brings a module; else where to look."""
    match = re.search(r"Job.__init__\(\) got an unexpected keyword argument '(\w+)'", str(error))
    if match is not None:
        return nearest(match[1], [field.name for field in dataclasses.fields(Job)])
    if isinstance(error, ModuleNotFoundError) and error.name in _EXTRAS:
        return f"pip install 'shardwise[{_EXTRAS[error.name]}]'"
    return "mend the file; shardwise --debug shows the traceback"


_EXTRAS = {"mlx": "mlx", "transformers": "hf", "peft": "hf", "deepspeed": "deepspeed", "mpi4py": "mpi"}
"""Modules that a job may import and an extra brings."""


def _place(error: Exception, path: Path) -> str:
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"line {lines[-1]}" if lines else "import"
