"""Overrides from the command line: KEY=VALUE on frozen values, unknown keys refused with the nearest name."""

from __future__ import annotations

import dataclasses
import tomllib
from typing import TYPE_CHECKING, Any, TypeVar

from shardwise.errors import InputError, JobError, nearest
from shardwise.job.job import LENGTHS, Job

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

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


def literal(text: str) -> Any:
    """Read a value as TOML does (numbers, true, false, lists, quotes); `none` is None, anything else is text."""
    if text.lower() == "none":
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
