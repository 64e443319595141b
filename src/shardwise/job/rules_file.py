"""Tensor rules in a file: written where they were confirmed, read by a Job that names it."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path

from shardwise.errors import JobError

_FIX = "write it by shardwise verify JOB.py --propose-rules --out FILE"


def as_rules(given: Mapping[str, str] | str | None) -> Mapping[str, str] | None:
    """Return rules that are given as such, or by the path of a TOML file with a table [tensor_rules]."""
    if given is None or isinstance(given, Mapping):
        return given
    if not isinstance(given, str):
        raise JobError(
            f"Job.tensor_rules is {given!r}",
            code="job.tensor-rules-invalid",
            fix="give a dict of name patterns and styles, or a path",
        )
    try:
        rules = tomllib.loads(Path(given).read_text()).get("tensor_rules")
    except OSError:
        raise JobError(
            f"Job.tensor_rules {given} cannot be read", code="job.tensor-rules-read-failed", fix=_FIX
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise JobError(
            f"Job.tensor_rules {given} is not TOML ({error})", code="job.tensor-rules-not-toml", fix=_FIX
        ) from None
    if not isinstance(rules, dict) or not rules or not all(isinstance(style, str) for style in rules.values()):
        raise JobError(
            f"Job.tensor_rules {given} has no table [tensor_rules] of names and styles",
            code="job.tensor-rules-no-table",
            fix=_FIX,
        )
    return rules


def rules_to_toml(rules: Mapping[str, str], about: str) -> str:
    """Write rules as `as_rules` reads them, under a comment of one line."""
    lines = [f"{json.dumps(pattern)} = {json.dumps(style)}" for pattern, style in rules.items()]
    return "\n".join([f"# {about}", "[tensor_rules]", *lines]) + "\n"
