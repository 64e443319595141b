"""The text of a DeepSpeed JSON: parsed strictly, mistakes named by line and column."""

from __future__ import annotations

import json
import re
from typing import Any

from shardwise.errors import PlanError


def parse(text: str, origin: str) -> dict[str, Any]:
    """Return the object in a JSON text; anything else, comments and keys given twice are refused by line and column."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise PlanError(
                    f"{origin} has the key {key!r} twice", code="plan.deepspeed-key-repeated", fix="keep one of them"
                )
            found[key] = value
        return found

    def refuse(word: str) -> Any:
        raise PlanError(
            f"{origin} holds {word}, which is no number of JSON",
            code="plan.deepspeed-not-finite",
            fix="write a finite number",
        )

    try:
        data = json.loads(text, object_pairs_hook=once, parse_constant=refuse)
    except json.JSONDecodeError as error:
        words, where = _mistake(text, error)
        line, column = text.count("\n", 0, where) + 1, where - text.rfind("\n", 0, where)
        raise PlanError(
            f"{origin} is no JSON: {words} at line {line} column {column}",
            code="plan.deepspeed-not-json",
            fix="mend it there",
        ) from None
    except RecursionError:
        raise PlanError(
            f"{origin} is nested too deeply", code="plan.deepspeed-nested-deeply", fix="name a DeepSpeed JSON"
        ) from None
    if not isinstance(data, dict):
        raise PlanError(
            f"{origin} holds a {type(data).__name__}", code="plan.deepspeed-not-object", fix="write an object, { ... }"
        )
    return data


def _mistake(text: str, error: json.JSONDecodeError) -> tuple[str, int]:
    """Name the two mistakes that DeepSpeed's own reader lets pass; others in json's words."""
    rest, before = text[error.pos :], re.search(r",\s*$", text[: error.pos])
    if re.match(r"//|/\*|#", rest):
        return "a comment", error.pos
    if re.match(r"[}\]]", rest) and before:
        return "a comma before the end", before.start()
    if re.match(r",\s*[}\]]", rest):  # where Python 3.13 sees it
        return "a comma before the end", error.pos
    return error.msg[:1].lower() + error.msg[1:], error.pos
