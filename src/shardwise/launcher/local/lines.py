"""Messages between our processes, one JSON object per line, in which any argument or variable can travel.

The operating system's strings are bytes. Python shows those that are not UTF-8 as lone surrogates, which the standard
library's JSON escapes and restores, while msgspec's own JSON refuses them.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec


def encode_line(message: msgspec.Struct) -> bytes:
    """Return one message as a line with its end."""
    return json.dumps(msgspec.to_builtins(message), separators=(",", ":")).encode() + b"\n"


def decode_line(line: bytes, kind: Any) -> Any:
    """Return the message in a line; msgspec.DecodeError when it is not one of `kind`, a type or union of types."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise msgspec.DecodeError(f"not JSON: {error}") from None
    return msgspec.convert(content, kind)
