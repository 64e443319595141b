"""Where a rank begins to sum with others over MLX's ring, and where it waits for that: a record may listen here.

Callers use these functions as attributes of this module, so that `recorder.start` can wrap them.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx


def begin(step: int, *arrays: Any) -> None:  # noqa: ARG001 - for who listens
    """Let MLX begin to compute what a step ends with, or trees of it, without waiting; communicates over its group."""
    mx.async_eval(*arrays)  # type: ignore[no-untyped-call]


def finish(step: int, array: mx.array) -> None:  # noqa: ARG001
    """Wait for an array of a step that was begun, and so for the ranks that it is summed over."""
    mx.eval(array)
