"""The catalogue of environment variables with their sources, and presets of them for kinds of clusters."""

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
"""Names of variables that a distributed job reads."""
_ALMOST = 0.86
"""How alike a name must be to count as misspelt: one letter of fifteen wrong, or two swapped."""


class Variable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One environment variable."""

    meaning: str
    kind: Literal["flag", "integer", "choice", "choices", "level", "interfaces", "path", "text"]
    source: str
    """Source document, by its key in [sources]."""
    values: tuple[str, ...] = ()
    range: tuple[int, int] | None = None
    default: str = ""
    since: str = ""
    """Version of the library that has it first; empty: unknown."""
    state: Literal["", "deprecated", "removed"] = ""
    use: str = ""
    """What to write in place of one that is deprecated or removed."""

    def refuses(self, value: str) -> str:
        """Return what this variable takes if `value` is not that; empty when it is."""
        if self.kind == "flag":
            return "" if value in {"0", "1"} or value.lower() in {"true", "false"} else "0 or 1"
        if self.kind == "integer":
            low, high = self.range or (-(1 << 62), 1 << 62)
            allowed = f"a whole number from {low} to {high}" if self.range else "a whole number"
            return "" if re.fullmatch(r"-?\d+", value) and low <= int(value) <= high else allowed
        given = [choice.strip().lstrip("^") for choice in value.split(",")] if self.kind == "choices" else [value]
        known = {one.upper() for one in self.values}
        return "" if not known or all(choice.upper() in known for choice in given) else ", ".join(self.values)


class VariableCatalogue(msgspec.Struct, frozen=True, kw_only=True):
    """All variables that are known, by name."""

    variables: dict[str, Variable]
    sources: dict[str, str]
    undocumented: frozenset[str]
    """Read by NCCL, explained nowhere."""

    def misspelt(self, name: str) -> str:
        """Return the variable that an unknown `name` was probably meant to be; empty when none is near."""
        if name in self.variables or name in self.undocumented:
            return ""
        close = difflib.get_close_matches(name, self.variables, n=1, cutoff=_ALMOST)
        return close[0] if close else ""


class Preset(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Variables for one kind of cluster."""

    about: str
    source: str
    variables: dict[str, str]
    notes: tuple[str, ...] = ()
    per_rank: tuple[str, ...] = ()
    """What a launcher sets for each rank: no preset can."""

    def missing_from(self, own: Mapping[str, str]) -> dict[str, str]:
        """Return what this preset adds to the user's own variables, which win."""
        return {name: value for name, value in self.variables.items() if name not in own}

    def overruled_by(self, own: Mapping[str, str]) -> dict[str, str]:
        """Return the user's own variables that differ from this preset's."""
        return {name: own[name] for name, value in self.variables.items() if own.get(name, value) != value}


@cache
def read_catalogue() -> VariableCatalogue:
    """Return the catalogue."""
    data = tomllib.loads(_FILE.read_text())
    return msgspec.convert(
        {"variables": data["variables"], "sources": data["sources"], "undocumented": data["undocumented"]["names"]},
        VariableCatalogue,
    )


@cache
def read_presets() -> dict[str, Preset]:
    """Return every preset by name."""
    return msgspec.convert(tomllib.loads(_FILE.with_name("presets.toml").read_text()), dict[str, Preset])


def find_preset(name: str) -> Preset:
    """Return the preset of this name; unknown ones are refused."""
    presets = read_presets()
    if name not in presets:
        raise InputError(
            f"there is no preset {name!r}", code="doctor.unknown-preset", fix=f"choose one of {', '.join(presets)}"
        )
    return presets[name]
