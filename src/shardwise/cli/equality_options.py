"""Options of launch and train about equal results: replicas that must not drift, and runs that repeat."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, Any, TypeVar

import click

from shardwise.runs.console import complain

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shardwise.doctor.guard.replicas import ReplicaLimits, ReplicaWatch
    from shardwise.runs import RunDirectory

Command = TypeVar("Command", bound="Callable[..., Any]")


def equality_options(*, check_every: int) -> Callable[[Command], Command]:
    """Give a command the options about equal results; `check_every` is the default of --check-replicas."""
    options = (
        click.option(
            "--check-replicas",
            type=click.IntRange(min=0),
            default=check_every,
            show_default=True,
            metavar="STEPS",
            help="Compare weights that should be equal over ranks, every so often; 0 does not.",
        ),
        click.option(
            "--on-drift",
            type=click.Choice(["report", "stop"]),
            default="report",
            show_default=True,
            help="What follows when they differ: go on, or stop all ranks.",
        ),
        click.option(
            "--deterministic", is_flag=True, help="The same bits in every run; operations that cannot are refused."
        ),
    )
    return lambda command: reduce(lambda inner, option: option(inner), reversed(options), command)


def settle_equality(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ranks of a training are told of replicas and determinism."""
    return {name: options[name] for name in ("check_replicas", "on_drift", "deterministic")}


def settle_replicas(options: Mapping[str, Any]) -> ReplicaLimits | None:
    """Return what the options of a launch say of replicas; None if they are not compared."""
    from shardwise.doctor.guard.replicas import ReplicaLimits

    every = int(options["check_replicas"])
    return ReplicaLimits(every=every, stop=options["on_drift"] == "stop") if every else None


def equality_variables(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables by which ranks of a launch are told of replicas and determinism."""
    from shardwise.environment import variables
    from shardwise.recorder.asked import Asked
    from shardwise.recorder.deterministic import deterministic_variables

    is_deterministic = bool(options["deterministic"])
    asked = Asked(deterministic=is_deterministic, check_replicas=int(options["check_replicas"]))
    return {**asked.variables(), **(deterministic_variables(variables("")) if is_deterministic else {})}


def start_replica_watch(
    run: RunDirectory, limits: ReplicaLimits | None, ranks: range, node: int = 0
) -> list[ReplicaWatch]:
    """Return what compares the replicas of a launch: one watch, or none without limits."""
    if limits is None:
        return []
    from shardwise.doctor.guard.replicas import ReplicaWatch

    watch = ReplicaWatch(run, limits, complain, node)
    watch.follow(ranks)
    return [watch]
