"""Plans as TOML: every value with its origin as a comment. Unknown keys raise an error with the nearest name."""

from __future__ import annotations

import dataclasses
import tomllib
from typing import TYPE_CHECKING, Any

import tomlkit

from shardwise.errors import PlanError, nearest
from shardwise.layout import Layout, parse_layout
from shardwise.plans.plan import Plan

if TYPE_CHECKING:
    from pathlib import Path


def plan_to_toml(plan: Plan) -> str:
    """Return a plan as TOML, with the origin of each value as a comment."""
    document = tomlkit.document()
    document.add(tomlkit.comment("How to train one job on one layout of ranks."))
    _fill(document, plan, plan, prefix="")
    return tomlkit.dumps(document)


def _fill(table: Any, value: Any, plan: Plan, prefix: str) -> None:
    for part in dataclasses.fields(value):
        given, name = getattr(value, part.name), prefix + part.name
        if name == "sources":
            continue
        if dataclasses.is_dataclass(given) and not isinstance(given, Layout):
            section = tomlkit.table()
            _fill(section, given, plan, f"{name}.")
            table.add(part.name, section)
            continue
        item = tomlkit.item(str(given) if isinstance(given, Layout) else given)
        source = plan.source(name)
        if source != "default":
            item.comment(source)
        table.add(part.name, item)


def plan_from_toml(text: str, origin: str) -> Plan:
    """Return the plan of a TOML document; `origin` is its name in errors and sources."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        fact = f"{origin} is not valid TOML ({error})"
        raise PlanError(fact, code="plan.not-toml", fix="correct the TOML syntax") from None
    if "version" not in data:
        raise PlanError(f"{origin} has no version", code="plan.version-missing", fix="add version = 1 at the top")
    sources = dict.fromkeys(_dotted(data), origin)
    plan: Plan = _build(Plan, data, origin, sources=sources)
    return plan


def read_plan(path: Path) -> Plan:
    """Return the plan of a TOML file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise PlanError(
            f"plan file {path} cannot be read ({why})", code="plan.read-failed", fix="pass a .toml file"
        ) from None
    return plan_from_toml(text, path.name)


def _build(kind: type[Any], data: dict[str, Any], origin: str, prefix: str = "", **extra: Any) -> Any:
    parts: dict[str, Any] = {part.name: part for part in dataclasses.fields(kind) if part.name != "sources"}
    values: dict[str, Any] = dict(extra)
    for key, given in data.items():
        if key not in parts:
            raise PlanError(
                f"{origin} has an unknown key {prefix + key!r}", code="plan.unknown-key", fix=nearest(key, parts)
            )
        default = parts[key].default_factory
        if key == "layout" and kind is Plan:
            values[key] = parse_layout(str(given))
        elif isinstance(default, type):
            if not isinstance(given, dict):
                raise PlanError(
                    f"{prefix + key} in {origin} must be a section, got {given!r}",
                    code="plan.not-a-section",
                    fix=f"write a section [{prefix + key}]",
                )
            values[key] = _build(default, given, origin, f"{prefix + key}.")
        else:
            values[key] = tuple(given) if isinstance(given, list) else given
    return kind(**values)


def _dotted(data: dict[str, Any], prefix: str = "") -> list[str]:
    names = []
    for key, value in data.items():
        names += _dotted(value, f"{prefix}{key}.") if isinstance(value, dict) else [prefix + key]
    return names
