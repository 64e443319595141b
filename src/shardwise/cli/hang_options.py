"""Options of launch and train about hangs, and the guard that they ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from shardwise.runs.console import complain

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shardwise.doctor.guard.guard import Guard, HangLimits
    from shardwise.doctor.guard.neighbours import Exchange
    from shardwise.doctor.guard.replicas import ReplicaWatch
    from shardwise.runs import RunDirectory

HANG_AFTER_S = 10.0
_OPTIONS = (
    click.option(
        "--hang-after",
        type=click.FloatRange(min=0),
        default=HANG_AFTER_S,
        show_default=True,
        metavar="SECONDS",
        help="Name ranks that others wait for, after so long; 0 records and notices nothing.",
    ),
    click.option(
        "--on-hang",
        type=click.Choice(["report", "stop"]),
        default="report",
        show_default=True,
        help="What follows a verdict: go on, or stop all ranks.",
    ),
)


def hang_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options about hangs to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def settle_hang(options: Mapping[str, Any]) -> HangLimits | None:
    """Return what the options say of hangs; None if they are not looked for."""
    from shardwise.doctor.guard.guard import HangLimits

    after_s = float(options["hang_after"])
    return HangLimits(after_s=after_s, stop=options["on_hang"] == "stop") if after_s else None


def start_guard(
    run: RunDirectory,
    limits: HangLimits | None,
    ranks: range,
    *,
    exchange: Exchange | None = None,
    say: Callable[[str], None] = complain,
) -> list[Guard]:
    """Return what looks on for hangs, mismatches and slow ranks: one guard, or none without limits.

    `exchange` is the link to other nodes, None where there are none.
    """
    if limits is None:
        return []
    from shardwise.doctor.guard.guard import Guard

    guard = Guard(run, limits, say, exchange)
    guard.follow(ranks)
    return [guard]


def close_guards(guards: Sequence[Guard | ReplicaWatch], explanation: str) -> None:
    """End the report of a launch that failed: where each rank was, why it failed, and a verdict if that is not it."""
    for guard in guards:
        if not guard.verdict and (places := guard.places()):
            complain(places)
    complain(explanation)
    for guard in guards:
        if guard.verdict and guard.verdict not in explanation:
            complain(guard.verdict)
