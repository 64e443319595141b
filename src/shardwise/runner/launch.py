"""`launch`: run a script on the ranks of one or more nodes, and return a LaunchReport."""

from __future__ import annotations

import inspect
import shlex
from functools import partial
from typing import TYPE_CHECKING, Any

from shardwise.errors import LaunchError
from shardwise.launcher.explain import explain_outcome
from shardwise.launcher.local.attempts import Launched
from shardwise.launcher.local.attempts import launch as launch_local
from shardwise.launcher.local.function import launch_function
from shardwise.launcher.local.processes import become_reaper, kill_descendants
from shardwise.launcher.local.target import check_target
from shardwise.launcher.nodes.node import join_run, node_facts
from shardwise.launcher.nodes.rounds import launch_nodes
from shardwise.launcher.policy import GiveUp
from shardwise.launcher.spec import LaunchSpec
from shardwise.runner.local import SettledLaunch, describe, settle_launch, target_of, watches_hangs
from shardwise.runner.observers import (
    Tee,
    failure_text,
    report_effects,
    report_preset,
    start_guard,
    start_replica_watch,
)
from shardwise.runner.remote import start_by_slurm, start_remote
from shardwise.runs import create_run, share_run
from shardwise.runs.console import INTERRUPTED, JOB_FAILED, echo_error
from shardwise.spec import Report, option_names, signature_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shardwise.diagnosis.guard.guard import Guard
    from shardwise.diagnosis.guard.replicas import ReplicaWatch
    from shardwise.runs import RunDirectory


class LaunchReport(Report, frozen=True, kw_only=True):
    """The result of a launch: exit code, run directory, restarts and failure."""

    exit_code: int
    run: str = ""
    """The run directory; empty if no ranks ran on this machine."""
    restarts: int = 0
    failure: str = ""
    """The failed rank, its traceback and the fix; empty without a failure."""
    text: str = ""
    """Output of --dry-run."""

    def to_text(self) -> str:
        """Return the text for standard output."""
        return self.text

    def note(self) -> str:
        """Return the text for standard error."""
        return self.failure


def launch(target: str | LaunchSpec | Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Run a script or a function on several processes. Replaces torchrun.

    `launch("train.py", nproc=2)` runs a script, accepts the options of `shardwise launch` and returns a LaunchReport.
    `launch(fn, 1, x=2, nproc=2)` calls fn(1, x=2) on every rank and returns the results by rank; of the options, a
    function accepts nproc (default: 2) and start_method.
    """
    if isinstance(target, LaunchSpec):
        return launch_script(target)
    if callable(target):
        return _launch_function(target, arguments, options)
    return launch_script(LaunchSpec.of(str(target), tuple(map(str, arguments)), **options))


launch.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [
        inspect.Parameter("target", inspect.Parameter.POSITIONAL_ONLY),
        inspect.Parameter("arguments", inspect.Parameter.VAR_POSITIONAL),
        *(each for each in signature_of(LaunchSpec).parameters.values() if each.kind is inspect.Parameter.KEYWORD_ONLY),
    ]
)


def _launch_function(fn: Callable[..., Any], arguments: tuple[Any, ...], given: dict[str, Any]) -> list[Any]:
    """Call a function on every rank with those keywords that are not options of `launch`."""
    names = option_names(LaunchSpec)
    try:
        parameters = list(inspect.signature(fn).parameters)[len(arguments) :]
    except ValueError:  # some built-in functions have no signature
        parameters = []
    options: dict[str, Any] = {"nproc_per_node": 2}
    keywords: dict[str, Any] = {}
    for name, value in given.items():
        if name not in names:
            keywords[name] = value
            continue
        if name in parameters:
            raise LaunchError(
                f"{name!r} is an option of sw.launch and also a parameter of {getattr(fn, '__name__', fn)}",
                code="launch.option-is-parameter",
                fix="pass the parameter by position, or rename it",
            )
        if names[name] not in {"nproc_per_node", "start_method"}:
            raise LaunchError(
                f"sw.launch does not support the option {name!r} for a function, only nproc and start_method",
                code="launch.option-of-scripts",
                fix=f"remove {name}=, or launch a script: sw.launch('train.py', {name}={value!r})",
            )
        options[names[name]] = value
    spec = LaunchSpec.of("", **options)
    return launch_function(partial(fn, *arguments, **keywords), spec.nproc, fork=spec.start_method == "fork")


def launch_script(spec: LaunchSpec, *, owns_process: bool = False) -> LaunchReport:
    """Run a script on all ranks, on this or other machines, and return a LaunchReport.

    `owns_process` means that this process does nothing else: it becomes the reaper of orphans and kills all its
    descendants at the end. A Python process that calls `launch` may have other children.
    """
    report_preset(spec.preset)  # first, so that an unknown preset raises here and not on every machine
    code = start_remote(spec, grace_s=spec.grace_s, dry_run=spec.dry_run)
    if code is not None:
        return LaunchReport(exit_code=code)
    target = target_of(spec)
    check_target(target)
    code = start_by_slurm(spec, target.name, grace_s=spec.grace_s, dry_run=spec.dry_run)
    if code is not None:
        return LaunchReport(exit_code=code)
    settled = settle_launch(target, spec)
    if spec.dry_run:
        return LaunchReport(exit_code=0, text=describe(spec, settled))
    if settled.note:
        echo_error(settled.note)
    if owns_process:
        become_reaper()
    try:
        launched, run, guards, tee = _run(spec, settled)
    finally:
        if owns_process:
            kill_descendants()  # includes processes that left the process group of their rank
    report_effects(spec.preset, settled.local.variables, run)
    return _report(launched, run, guards, tee)


def _report(launched: Launched, run: RunDirectory, guards: list[Guard | ReplicaWatch], tee: Tee) -> LaunchReport:
    failure, code = "", JOB_FAILED
    if isinstance(launched.decision, GiveUp):
        why = failure_text(guards, explain_outcome(launched.outcome, run, shown=tee.ranks))
        failure = f"{why}\nshardwise: the run is in {run.path}"
    else:
        code = launched.decision.exit_code  # type: ignore[union-attr]
        if launched.outcome.interrupted and code == 0:
            failure, code = f"\nshardwise: interrupted; the run is in {run.path}", INTERRUPTED
    return LaunchReport(exit_code=code, run=str(run.path), restarts=launched.restarts, failure=failure)


def _run(spec: LaunchSpec, settled: SettledLaunch) -> tuple[Launched, RunDirectory, list[Guard | ReplicaWatch], Tee]:
    """Run the script on this node, or with other nodes, and return the outcome, the run directory and the observers."""
    local = settled.local
    hang = spec.hang if watches_hangs(spec, local.target) else spec.hang.replace(after_s=0)
    guards: list[Guard | ReplicaWatch]
    if settled.nodes is None:
        run = create_run(spec.run_dir, local.target.name)
        ranks = range(local.nproc)
        guards = [*start_guard(run, hang, ranks), *start_replica_watch(run, spec.replicas, ranks)]
        tee = Tee(run, settled.shown)
        return launch_local(local, run, observers=[tee, *guards], note=echo_error), run, guards, tee

    def make_run(named: Path | None, _: str) -> RunDirectory:
        return create_run(spec.run_dir, local.target.name) if named is None else share_run(spec.run_dir or named)

    facts = node_facts(settled.nodes, shlex.join(local.target.typed()))
    with join_run(settled.nodes, facts, make_run, echo_error) as (link, run):
        tee = Tee(run, settled.shown)
        guards = [
            *start_guard(run, hang, range(0), exchange=link),
            *start_replica_watch(run, spec.replicas, range(0), link.node),
        ]

        def follow(ranks: range) -> None:
            tee.follow(ranks)
            for guard in guards:
                guard.follow(ranks)

        observers = [tee, *guards]
        launched = launch_nodes(
            local, settled.nodes, link, run, observers=observers, on_assigned=follow, note=echo_error
        )
        return launched, run, guards, tee
