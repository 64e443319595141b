"""Loading of job files by path and attribute, with the overrides of --set; every rank loads the same bytes."""

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
from shardwise.job.job import CALLABLES, FOLDER, LENGTHS, Job
from shardwise.plans.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from types import ModuleType


class JobReference(msgspec.Struct, frozen=True, kw_only=True):
    """Reference to a job in a file: every rank loads the file itself and compares its hash."""

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
    """Return the reference of a job given as FILE.py or FILE.py:ATTRIBUTE."""
    path_text, _, attribute = target.partition(":")
    path = Path(path_text)
    if not path.is_file():
        raise JobError(
            f"job file {path_text} does not exist",
            code="job.file-not-found",
            fix="pass a Python file that defines job = sw.Job(...)",
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
        fix = nearest(reference.attribute, jobs) if jobs else "define job = sw.Job(...) in the file"
        if jobs and reference.attribute == "job":
            fix = f"pass one of its jobs: {' or '.join(f'{path.name}:{name}' for name in jobs)}"
        raise JobError(f"{path.name} has no attribute {reference.attribute!r}", code="job.attribute-missing", fix=fix)
    if isinstance(job, FunctionType):
        arguments = job_arguments(job, overrides)
        with _described_errors(path):
            job = job(**arguments)
    if not isinstance(job, Job):
        raise JobError(
            f"{reference.attribute} in {path.name} must be a Job, got a {type(job).__name__}",
            code="job.not-a-job",
            fix="write job = sw.Job(...), or def job() -> sw.Job",
        )
    return override_job(job, overrides)


def _import(path: Path) -> ModuleType:
    """Import a job file as a module, with its directory on sys.path as for a script."""
    name = f"shardwise_job_{path.stem.replace('-', '_')}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise JobError(
            f"{path.name} is not a Python file", code="job.not-python-file", fix="pass a file that ends in .py"
        )
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # DataLoader workers unpickle classes of the file from it
    vars(module)[_IS_LOADING] = True
    try:
        with _described_errors(path):
            spec.loader.exec_module(module)
    finally:
        vars(module).pop(_IS_LOADING, None)
    return module


_IS_LOADING = "__shardwise_is_loading__"
"""Variable that is set in the module of a job file during its import."""


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
    """Run code of a job file with fixed seeds, equal on every rank, and raise its exceptions as JobError."""
    from shardwise.job.generators import seeded_generators  # imports torch, as a job file does

    folder = FOLDER.set(path.parent)
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
    finally:
        FOLDER.reset(folder)


# A job file may define a function that returns its Job: its parameters are hyperparameters that --set overrides.


def job_parameters(target: str) -> frozenset[str]:
    """Return the parameters of the function that FILE.py:NAME defines, without importing the file; empty for a Job."""
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
                fix=f"rename the parameter, for example to my_{name}",
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
    """Convert the value of --set NAME=TEXT to its annotation; for str, a number stays a string."""
    for value in (literal(text), text):
        with suppress(msgspec.ValidationError):
            return msgspec.convert(value, hint, dec_hook=lambda kind, given: kind(given))
    raise JobError(
        f"--set {name}={text} must be of type {getattr(hint, '__name__', hint)}",
        code="job.parameter-type",
        fix=f"pass a value of this type, or change the annotation of {name!r} in the job file",
    )


def _advice(error: Exception) -> str:
    """Return the fix for an error of a job file: the nearest name, a package to install, or --debug."""
    match = re.search(r"Job.__init__\(\) got an unexpected keyword argument '(\w+)'", str(error))
    if match is not None:
        of_plan = f"remove it: {match[1]} is a field of the plan, which --set {match[1]}=VALUE sets"
        fields = [field.name for field in dataclasses.fields(Job)]
        return of_plan if match[1] in Plan.__dataclass_fields__ else nearest(match[1], fields)
    if isinstance(error, ModuleNotFoundError) and error.name in _EXTRAS:
        return f"pip install 'shardwise[{_EXTRAS[error.name]}]'"
    if isinstance(error, ImportError) and str(error.name).startswith("shardwise"):
        return "write import shardwise as sw, and use sw.Job, sw.train, sw.losses ..."
    if isinstance(error, ModuleNotFoundError):
        return f"install its package, for example with pip install {error.name}, or correct the import"
    if isinstance(error, AttributeError) and "module 'shardwise' has no" in str(error):
        return nearest(str(error.name), sys.modules["shardwise"].__all__)
    return "correct the file; shardwise --debug shows the traceback"


_EXTRAS = {"mlx": "mlx", "transformers": "hf", "peft": "hf", "deepspeed": "deepspeed", "mpi4py": "mpi"}
"""Module that a job file may import -> extra that installs it."""


def _place(error: Exception, path: Path) -> str:
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"line {lines[-1]}" if lines else "import"


T = TypeVar("T")


def parse_overrides(texts: Iterable[str]) -> dict[str, str]:
    """Return the keys and values of --set options; the last value of a repeated key is used."""
    overrides = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise InputError(f"--set {text!r} has no key or no '='", code="cli.set-syntax", fix="write --set key=value")
        overrides[key.strip()] = value.strip()
    return overrides


def override_job(job: Job, overrides: Mapping[str, str]) -> Job:
    """Return `job` with overrides applied; one of epochs, steps and tokens replaces the length of the job."""
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
    if isinstance(value, list) and sum(map(dataclasses.is_dataclass, value)) == 1:
        # a list of callbacks: the key is a field of the only callback that has fields
        return [replace_at(each, key, new, whole_key) if dataclasses.is_dataclass(each) else each for each in value]  # type: ignore[return-value]
    if callable(value) and (isinstance(value, type) or not dataclasses.is_dataclass(value)):
        return _with_keyword(value, key, new, whole_key)  # type: ignore[return-value]
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        raise JobError(
            f"--set {whole_key} cannot be applied, because {type(value).__name__} has no fields",
            code="cli.set-no-fields",
            fix="change the value in the job file, or make it a parameter of a function: def job(NAME=...)",
        )
    fields = {field.name for field in dataclasses.fields(value)}
    if name not in fields:
        raise JobError(
            f"--set {whole_key} has an unknown key {name!r}", code="cli.set-unknown-key", fix=nearest(name, fields)
        )
    if rest:
        new = replace_at(getattr(value, name), rest, new, whole_key)
    elif callable(getattr(value, name)):
        raise JobError(
            f"--set cannot change {whole_key}, which is Python code",
            code="cli.set-python-code",
            fix="edit the job file",
        )
    return dataclasses.replace(value, **{name: new})


def _with_keyword(function: Callable[..., Any], name: str, new: Any, whole_key: str) -> Callable[..., Any]:
    """Return a function with one keyword argument set, such as lr of an optimizer factory."""
    parameters = inspect.signature(function).parameters.values()
    names = [each.name for each in parameters if each.kind in {each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY}]
    if name not in names and not any(each.kind is each.VAR_KEYWORD for each in parameters):
        field = whole_key.removesuffix(f".{name}")
        raise JobError(
            f"--set {whole_key} cannot be applied, because Job.{field} is a function without the keyword {name!r}",
            code="cli.set-no-fields",
            fix=f"write {field}=functools.partial(FUNCTION, {name}=...), or def {field}(..., {name}=...)",
        )
    return functools.partial(function, **{name: new})


def literal(text: str) -> Any:
    """Parse a TOML value (number, true, false, list, quoted string); `none` is None, other text is a string."""
    if text.lower() == "none":
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
