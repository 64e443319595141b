"""A catalogue of environment variables with their sources, and presets of variables per cluster type."""

from __future__ import annotations

import difflib
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from shardwise.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping


_FILE = Path(__file__).with_name("env_catalogue.toml")
FAMILIES = re.compile(
    r"(NCCL|GLOO|TP|OMP|MKL|KMP|TORCH|PYTORCH|MASTER|FI|OFI_NCCL)_\w+|CUDA_(VISIBLE_DEVICES|DEVICE\w+|LAUNCH\w+|MODULE\w+)"
    r"|(LOCAL_|GROUP_|NODE_)?RANK|(LOCAL_|GROUP_)?WORLD_SIZE"
)
"""Names of the variables that a distributed job reads."""
_SPELLING_SIMILARITY = 0.86
"""Minimum `difflib` ratio of a misspelled name to a known name: at most one wrong letter in eight."""


class Variable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An environment variable: its meaning, its valid values and the document that describes it."""

    meaning: str
    kind: Literal["flag", "integer", "choice", "choices", "level", "interfaces", "path", "text"]
    source: str
    """Source document, by its key in [sources]."""
    values: tuple[str, ...] = ()
    range: tuple[int, int] | None = None
    default: str = ""
    since: str = ""
    """The first version of the library that reads the variable; empty if unknown."""
    state: Literal["", "deprecated", "removed"] = ""
    use: str = ""
    """The replacement of a deprecated or removed variable."""

    def allowed_values(self, value: str) -> str:
        """Return a description of the valid values if `value` is invalid; empty if `value` is valid."""
        if self.kind == "flag":
            is_flag = value in {"0", "1"} or value.lower() in {"true", "false"}
            return "" if is_flag else "0 or 1"
        if self.kind == "integer":
            return self._allowed_integers(value)
        choices = value.split(",") if self.kind == "choices" else [value]
        known = {choice.upper() for choice in self.values}
        for choice in choices:
            if known and choice.strip().lstrip("^").upper() not in known:
                return ", ".join(self.values)
        return ""

    def _allowed_integers(self, value: str) -> str:
        is_integer = re.fullmatch(r"-?\d+", value) is not None
        if self.range is None:
            return "" if is_integer else "an integer"
        low, high = self.range
        if is_integer and low <= int(value) <= high:
            return ""
        return f"an integer from {low} to {high}"


class VariableCatalogue(msgspec.Struct, frozen=True, kw_only=True):
    """All known environment variables by name."""

    variables: dict[str, Variable]
    sources: dict[str, str]
    undocumented: frozenset[str]
    """Variables that NCCL reads but does not document."""

    def correct_spelling(self, name: str) -> str:
        """Return the known variable that `name` most likely misspells; empty if `name` is known or none is similar."""
        if name in self.variables or name in self.undocumented:
            return ""
        close = difflib.get_close_matches(name, self.variables, n=1, cutoff=_SPELLING_SIMILARITY)
        return next(iter(close), "")


class Preset(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Recommended environment variables for one type of cluster."""

    about: str
    source: str
    variables: dict[str, str]
    notes: tuple[str, ...] = ()
    per_rank: tuple[str, ...] = ()
    """Variables that the launcher sets to a different value on each rank, so that no preset can contain them."""

    def missing_from(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the preset's variables that `environ` does not set."""
        return {name: value for name, value in self.variables.items() if name not in environ}

    def overridden_by(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of `environ` whose values differ from the preset's."""
        return {name: environ[name] for name, value in self.variables.items() if environ.get(name, value) != value}


@cache
def read_catalogue() -> VariableCatalogue:
    """Read the catalogue of environment variables."""
    data = tomllib.loads(_FILE.read_text())
    return msgspec.convert(
        {"variables": data["variables"], "sources": data["sources"], "undocumented": data["undocumented"]["names"]},
        VariableCatalogue,
    )


@cache
def read_presets() -> dict[str, Preset]:
    """Return all presets by name."""
    return msgspec.convert(tomllib.loads(_FILE.with_name("presets.toml").read_text()), dict[str, Preset])


def find_preset(name: str) -> Preset:
    """Return the preset called `name`; raise InputError if it does not exist."""
    presets = read_presets()
    if name not in presets:
        raise InputError(
            f"preset {name!r} does not exist", code="doctor.unknown-preset", fix=f"choose one of {', '.join(presets)}"
        )
    return presets[name]
