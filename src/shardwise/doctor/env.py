"""The lint of environment variables: what each does, what contradicts, what is ignored; pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.doctor.catalogue import FAMILIES, Catalogue, read_catalogue
from shardwise.doctor.check import Verdict, ok, warn
from shardwise.doctor.env_rules import RULES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardwise.doctor.env_rules import Surroundings


@dataclass(frozen=True, kw_only=True)
class Lint:
    """What the lint found."""

    explained: tuple[Verdict, ...]
    """One for every variable that is set, by name."""
    found: tuple[Verdict, ...]
    """What contradicts, is ignored or cannot work; the gravest first."""


def lint(environ: Mapping[str, str], here: Surroundings) -> Lint:
    """Explain and judge the variables of `environ` that a distributed job obeys."""
    named = {name: environ[name] for name in sorted(environ) if FAMILIES.fullmatch(name)}
    catalogue = read_catalogue()
    explained = tuple(_explain(name, value, catalogue) for name, value in named.items())
    found = [verdict for rule in RULES for verdict in rule(environ, here)]
    found.sort(key=lambda verdict: verdict.state != "fail")
    return Lint(explained=explained, found=tuple(found))


def _explain(name: str, value: str, catalogue: Catalogue) -> Verdict:
    """Say what one variable does, and whether its value is one that it takes."""
    shown = f"is {value or '(empty)'}"
    known = catalogue.variables.get(name)
    if known is None:
        meant = catalogue.misspelt(name)
        if meant:
            return warn(name, f"{shown}; nobody reads this name", f"did you mean {meant}?")
        return ok(name, f"{shown}; not in the catalogue, not judged")
    if known.state:
        gone = "nobody reads this name any more" if known.state == "removed" else "an old name"
        return warn(name, f"{shown}; {gone}", f"use {known.use}")
    wanted = known.refuses(value)
    if wanted:
        return warn(name, f"{shown}; {known.meaning}; this value is not one of its own", f"use {wanted}")
    default = f" (default {known.default})" if known.default else ""
    return ok(name, f"{shown}; {known.meaning}{default}")
