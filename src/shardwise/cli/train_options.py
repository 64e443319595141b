"""Options that train shares with launch and bench: checkpoints, replicas and determinism, hangs, device and backend."""

from __future__ import annotations

from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from shardwise.environment import variables
from shardwise.errors import InputError, LaunchError
from shardwise.runs.console import complain
from shardwise.runs.directory import GRAMMAR, parse_keep

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shardwise.doctor.guard.guard import Guard, HangLimits
    from shardwise.doctor.guard.neighbours import Exchange
    from shardwise.doctor.guard.replicas import ReplicaWatch
    from shardwise.runs import RunDirectory
    from shardwise.runs.drift import ReplicaSpec


Command = TypeVar("Command", bound="Callable[..., Any]")


def _checked_keep(_context: click.Context, _option: click.Parameter, rules: str) -> str:
    """Refuse rules that cannot be read before anything starts."""
    parse_keep(rules)
    return rules


_SAVING = (
    click.option(
        "--save-every", type=click.IntRange(min=0), default=0, help="Steps between checkpoints (0: at a stop)."
    ),
    click.option(
        "--keep",
        default="3",
        show_default=True,
        metavar="RULES",
        callback=_checked_keep,
        help=f"Checkpoints that stay: {GRAMMAR}.",
    ),
    click.option(
        "--must-save", is_flag=True, help="Fail when a checkpoint cannot be saved (default: say so and go on)."
    ),
    click.option("--resume", default="never", help="A run directory or a checkpoint to go on from."),
)


def saving_options(command: Command) -> Command:
    """Give a command the options about checkpoints, in this order."""
    return reduce(lambda inner, option: option(inner), reversed(_SAVING), command)


def settle_saving(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ranks are told of saving; refuse to go on from a path with nothing there before anything starts."""
    names = ("save_every", "keep", "must_save")
    return {**{name: options[name] for name in names}, "resume": _resumable(options["resume"])}


def _resumable(resume: str) -> str:
    if resume == "never":
        return resume
    path = Path(resume)
    if not (path / "manifest.json").exists() and not any((path / name).is_dir() for name in ("", "checkpoints")):
        raise InputError(
            f"--resume {resume} is no run directory and no checkpoint",
            code="checkpoint.resume-not-found",
            fix="name one that is there",
        )
    return str(path.resolve())


# Options of launch and train about equal results: replicas that must not drift, and runs that repeat.


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


def settle_replicas(options: Mapping[str, Any]) -> ReplicaSpec | None:
    """Return what the options of a launch say of replicas; None if they are not compared."""
    from shardwise.runs.drift import ReplicaSpec

    every = int(options["check_replicas"])
    return ReplicaSpec(every=every, stop=options["on_drift"] == "stop") if every else None


def equality_variables(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables by which ranks of a launch are told of replicas and determinism."""
    from shardwise.recorder.imports import Asked, deterministic_variables

    is_deterministic = bool(options["deterministic"])
    asked = Asked(deterministic=is_deterministic, check_replicas=int(options["check_replicas"]))
    return {**asked.variables(), **(deterministic_variables(variables("")) if is_deterministic else {})}


def start_replica_watch(
    run: RunDirectory, limits: ReplicaSpec | None, ranks: range, node: int = 0
) -> list[ReplicaWatch]:
    """Return what compares the replicas of a launch: one watch, or none without limits."""
    if limits is None:
        return []
    from shardwise.doctor.guard.replicas import ReplicaWatch

    watch = ReplicaWatch(run, limits, complain, node)
    watch.follow(ranks)
    return [watch]


# Options of launch and train about hangs, and the guard that they ask for.


HANG_AFTER_S = 10.0
_HANG = (
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
    for option in reversed(_HANG):
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


# Options of train and bench about where ranks compute and what they talk over.


def place_options(
    *, device: str, backend: str, devices: Sequence[str] = ("cpu", "cuda")
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return what adds --device, one of `devices`, and --backend, in small letters, with these words of help.

    Backend mpi alone asks for the CPU, and with anything else is refused.
    """
    options = (
        click.option("--device", type=click.Choice(devices), callback=_settle_device, help=device),
        # Eager, so that it is known when --device is settled.
        click.option("--backend", metavar="NAME", is_eager=True, callback=_lower, help=backend),
    )

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def _lower(_context: click.Context, _option: click.Parameter, name: str | None) -> str | None:
    return None if name is None else name.lower()


def _settle_device(context: click.Context, _option: click.Parameter, asked: str | None) -> str | None:
    if context.params["backend"] != "mpi":
        return asked
    if asked not in (None, "cpu"):
        raise LaunchError(
            f"--device {asked}, but --backend mpi carries tensors of the CPU alone",
            code="world.backend-device-mismatch",
            fix="leave --device out, or use --backend nccl",
        )
    return "cpu"
