"""Text that every file and terminal can take: the bytes of a path or an argument need not be UTF-8."""

from __future__ import annotations

from typing import Any


def printable(text: str) -> str:
    r"""Return `text` with each lone surrogate, which stands for a byte that is not UTF-8, written as \udcNN."""
    return text.encode("utf-8", "backslashreplace").decode()


def printable_fields(value: Any) -> Any:
    """Return lists and dicts of a document with all of their text printable."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable_fields(name): printable_fields(content) for name, content in value.items()}
    if isinstance(value, list | tuple):
        return [printable_fields(content) for content in value]
    return value
