"""Loading a job file by path, attribute and overrides (KEY=VALUE on frozen values), the same bytes on every rank."""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import importlib.util
import inspect
import re
import sys
import tomllib
import traceback
import typing
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from shardwise.errors import InputError, JobError, ShardwiseError, nearest
from shardwise.job.job import CALLABLES, LENGTHS, Job
from shardwise.plans.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
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
            f"job file {path_text} does not exist",
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
    overrides = dict(reference.overrides)
    if job is None:
        jobs = [name for name, value in vars(module).items() if isinstance(value, Job)]
        fix = nearest(reference.attribute, jobs) if jobs else "write job = sw.Job(...) in it"
        if jobs and reference.attribute == "job":
            fix = f"name one of its jobs: {' or '.join(f'{path.name}:{name}' for name in jobs)}"
        raise JobError(f"{path.name} has no attribute {reference.attribute!r}", code="job.attribute-missing", fix=fix)
    if isinstance(job, FunctionType):
        arguments = job_arguments(job, overrides)
        with _described_errors(path):
            job = job(**arguments)
    if not isinstance(job, Job):
        raise JobError(
            f"{path.name}: {reference.attribute} is a {type(job).__name__}, not a Job",
            code="job.not-a-job",
            fix="write job = sw.Job(...), or def job() -> sw.Job",
        )
    return override_job(job, overrides)


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
    vars(module)[_IS_LOADING] = True
    try:
        with _described_errors(path):
            spec.loader.exec_module(module)
    finally:
        vars(module).pop(_IS_LOADING, None)
    return module


_IS_LOADING = "__shardwise_is_loading__"
"""In the namespace of a job file while it is imported."""


def refuse_during_import(call: str) -> None:
    """Raise JobError if a job file makes this call while it is imported: every rank that imports it would train."""
    for name, module in list(sys.modules.items()):
        if name.startswith("shardwise_job_") and _IS_LOADING in vars(module):
            raise JobError(
                f"{Path(str(module.__file__)).name} calls {call} while it is imported as a job file",
                code="job.trains-on-import",
                fix=f'write if __name__ == "__main__": above {call}',
            )


@contextmanager
def _described_errors(path: Path) -> Iterator[None]:
    """Run code of the job file; what it draws, such as an order of its samples, is the same on every rank."""
    from shardwise.job.generators import seeded_generators  # brings torch, which a job file does as well

    try:
        with seeded_generators(0):
            yield
    except ShardwiseError:
        raise
    except Exception as error:
        raise JobError(
            f"{path.name} raised {type(error).__name__} at {_place(error, path)}: {error}",
            code="job.file-raised",
            fix=_advice(error),
        ) from error


# A job file may define a function that returns its Job: its parameters are hyperparameters that --set overrides.


def job_parameters(target: str) -> frozenset[str]:
    """Return the parameters of the function that FILE.py:NAME defines, without importing the file; none for a Job."""
    path, _, attribute = target.partition(":")
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return frozenset()  # reported when the file is loaded
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == (attribute or "job"):
            return frozenset(argument.arg for argument in (*node.args.args, *node.args.kwonlyargs))
    return frozenset()


def job_arguments(function: FunctionType, overrides: dict[str, str]) -> dict[str, Any]:
    """Remove the overrides of a job function's parameters and return them, each converted to the parameter's type."""
    fields = {field.name: kind.__name__ for kind in (Plan, Job) for field in dataclasses.fields(kind)}
    hints = typing.get_type_hints(function)
    arguments = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if name in fields and name not in CALLABLES:  # --set data=x.txt has one meaning: Job.data is Python code
            raise JobError(
                f"parameter {name!r} of {function.__name__}() is named like a field of {fields[name]}",
                code="job.parameter-reserved",
                fix=f"rename it, such as my_{name}",
            )
        default = parameter.default
        if name in overrides:
            inferred = Any if default is parameter.empty or default is None else type(default)
            hint = hints.get(name, inferred)
            arguments[name] = _converted(name, overrides.pop(name), hint)
        elif default is parameter.empty:
            raise JobError(
                f"{function.__name__}() has no value for its parameter {name!r}",
                code="job.parameter-missing",
                fix=f"use --set {name}=VALUE, or write a default in the job file",
            )
    return arguments


def _converted(name: str, text: str, hint: Any) -> Any:
    """Return the value of --set NAME=TEXT as its annotation requires; for str, what looks like a number is text."""
    for value in (literal(text), text):
        with suppress(msgspec.ValidationError):
            return msgspec.convert(value, hint, dec_hook=lambda kind, given: kind(given))
    raise JobError(
        f"--set {name}={text} is not of type {getattr(hint, '__name__', hint)}",
        code="job.parameter-type",
        fix=f"give a value of the annotation of {name!r} in the job file",
    )


def _advice(error: Exception) -> str:
    """Name the nearest field for a misspelled one of Job, or the extra that brings a module; else where to look."""
    match = re.search(r"Job.__init__\(\) got an unexpected keyword argument '(\w+)'", str(error))
    if match is not None:
        return nearest(match[1], [field.name for field in dataclasses.fields(Job)])
    if isinstance(error, ModuleNotFoundError) and error.name in _EXTRAS:
        return f"pip install 'shardwise[{_EXTRAS[error.name]}]'"
    if isinstance(error, ImportError) and str(error.name).startswith("shardwise"):
        return "write import shardwise as sw, and use sw.Job, sw.train, sw.losses ..."
    if isinstance(error, ModuleNotFoundError):
        return f"install what brings it, such as pip install {error.name}, or correct the import"
    if isinstance(error, AttributeError) and "module 'shardwise' has no" in str(error):
        return nearest(str(error.name), sys.modules["shardwise"].__all__)
    return "mend the file; shardwise --debug shows the traceback"


_EXTRAS = {"mlx": "mlx", "transformers": "hf", "peft": "hf", "deepspeed": "deepspeed", "mpi4py": "mpi"}
"""Modules that a job may import and an extra brings."""


def _place(error: Exception, path: Path) -> str:
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"line {lines[-1]}" if lines else "import"


T = TypeVar("T")


def parse_overrides(texts: Iterable[str]) -> dict[str, str]:
    """Split what was typed after --set into keys and values; the last of equal keys wins."""
    overrides = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise InputError(f"--set {text!r} has no key or no '='", code="cli.set-syntax", fix="write --set key=value")
        overrides[key.strip()] = value.strip()
    return overrides


def override_job(job: Job, overrides: Mapping[str, str]) -> Job:
    """Return `job` with overrides applied; naming one length (epochs, steps, tokens) drops the others."""
    named = [name for name in LENGTHS if name in overrides]
    if named:
        cleared: dict[str, Any] = dict.fromkeys(LENGTHS)
        cleared[named[0]] = literal(overrides[named[0]])
        job = dataclasses.replace(job, **cleared)
    for key, text in overrides.items():
        if key not in named[:1]:
            job = replace_at(job, key, literal(text))
    return job


def replace_at(value: T, key: str, new: Any, whole_key: str | None = None) -> T:
    """Return a copy of a frozen dataclass with the field at dotted `key` replaced."""
    whole_key = whole_key or key
    name, _, rest = key.partition(".")
    if callable(value) and (isinstance(value, type) or not dataclasses.is_dataclass(value)):
        return _with_keyword(value, key, new, whole_key)  # type: ignore[return-value]
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        raise JobError(
            f"--set {whole_key}: {type(value).__name__} has no fields to set",
            code="cli.set-no-fields",
            fix="set it in the job file",
        )
    fields = {field.name for field in dataclasses.fields(value)}
    if name not in fields:
        raise JobError(
            f"--set {whole_key}: there is no key {name!r}", code="cli.set-unknown-key", fix=nearest(name, fields)
        )
    if rest:
        new = replace_at(getattr(value, name), rest, new, whole_key)
    elif callable(getattr(value, name)):
        raise JobError(
            f"--set {whole_key}: {name} is Python code", code="cli.set-python-code", fix="change it in the job file"
        )
    return dataclasses.replace(value, **{name: new})


def _with_keyword(function: Callable[..., Any], name: str, new: Any, whole_key: str) -> Callable[..., Any]:
    """Return a function with one of its keywords set: an optimizer factory that takes lr=, or a functools.partial."""
    parameters = inspect.signature(function).parameters.values()
    names = [each.name for each in parameters if each.kind in {each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY}]
    if name not in names and not any(each.kind is each.VAR_KEYWORD for each in parameters):
        field = whole_key.removesuffix(f".{name}")
        raise JobError(
            f"--set {whole_key}: Job.{field} is a function without the keyword {name!r}",
            code="cli.set-no-fields",
            fix=f"write {field}=functools.partial(FUNCTION, {name}=...), or def {field}(..., {name}=...)",
        )
    return functools.partial(function, **{name: new})


def literal(text: str) -> Any:
    """Read a value as TOML does (numbers, true, false, lists, quotes); `none` is None, anything else is text."""
    if text.lower() == "none":
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
