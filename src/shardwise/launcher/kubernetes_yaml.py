"""Manifests as YAML, written by hand: plain mappings, lists and scalars need no library."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
_UNPRINTED = re.compile("[\\x7f-\\x9f\\u2028\\u2029\\ufeff]")
_WORDS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})
"""Which YAML 1.1 does not read as text."""


def to_yaml(documents: Iterable[Mapping[str, Any]]) -> str:
    """Return documents of mappings, lists, strings, whole numbers and booleans as one YAML text."""
    return "---\n".join("".join(f"{line}\n" for line in _lines(document)) for document in documents)


def _lines(value: Any) -> list[str]:
    if isinstance(value, dict) and value:
        return [line for key, inner in value.items() for line in _entry(f"{_scalar(key)}:", inner)]
    if isinstance(value, list) and value:
        return [line for inner in value for line in _item(inner)]
    return [_scalar(value)]


def _entry(key: str, value: Any) -> list[str]:
    if isinstance(value, dict | list) and value:
        return [key, *(f"  {line}" for line in _lines(value))]
    return [f"{key} {_scalar(value)}"]


def _item(value: Any) -> list[str]:
    first, *rest = _lines(value)
    return [f"- {first}", *(f"  {line}" for line in rest)]


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    # What JSON quotes, YAML reads, but for characters that it takes for line ends or does not print.
    quoted = json.dumps(value, ensure_ascii=False)
    return _UNPRINTED.sub(lambda found: f"\\u{ord(found[0]):04x}", quoted)
