"""What a page is told: everything at first, then only what is new since the cursor that it was given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from shardwise.monitor.status import Entry, RunStatus  # noqa: TC001 - read at run time by msgspec
from shardwise.monitor.thin import Row  # noqa: TC001

if TYPE_CHECKING:
    from shardwise.monitor.view import RunView


class CurveIncrement(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of a curve that take the place of all from number `start` on."""

    start: int
    width: int
    """Steps in a row's range."""
    rows: list[Row]


class Increment(msgspec.Struct, frozen=True, kw_only=True):
    """An answer to a page."""

    cursor: str
    whole: bool
    """Whether this is everything, and what the page knew before is void."""
    status: RunStatus
    curves: dict[str, CurveIncrement]
    entries: list[Entry]


class _Cursor(msgspec.Struct, frozen=True, kw_only=True):
    """What a page knows: which view it follows, and how much it has of each curve and of the story."""

    identity: str
    curves: dict[str, tuple[int, int]]
    entries: int


def increment(view: RunView, cursor: str) -> Increment:
    """Return what is new in `view` since `cursor`; everything, if that is empty or of another view."""
    known = _read(cursor)
    if known is None or known.identity != view.identity:
        known = _Cursor(identity=view.identity, curves={}, entries=0)
        is_whole = True
    else:
        is_whole = False
    curves, seen = {}, {}
    for name, curve in view.training.curves.items():
        generation, length = known.curves.get(name, (-1, 0))
        start = max(0, length - 1) if generation == curve.generation else 0  # the last row may have changed
        seen[name] = (curve.generation, len(curve))
        if len(curve) > start or generation != curve.generation:
            curves[name] = CurveIncrement(start=start, width=curve.width, rows=curve.rows(start))
    entries = view.story.since(known.entries)
    now_known = _Cursor(identity=view.identity, curves=seen, entries=view.story.count)
    return Increment(
        cursor=msgspec.json.encode(now_known).decode(),
        whole=is_whole,
        status=view.status(),
        curves=curves,
        entries=entries,
    )


def _read(cursor: str) -> _Cursor | None:
    try:
        found: Any = msgspec.json.decode(cursor, type=_Cursor)
    except ValueError:  # no cursor, or not one of ours
        return None
    return found if isinstance(found, _Cursor) else None
