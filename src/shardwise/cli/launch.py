"""`shardwise launch`: any script on N processes, with torchrun's options."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardwise.cli.launch_plan import node_options
from shardwise.cli.train_options import close_guards, equality_options, hang_options, start_guard, start_replica_watch
from shardwise.runs import create_run, share_run
from shardwise.runs.console import INTERRUPTED, JOB_FAILED, complain, say

if TYPE_CHECKING:
    from shardwise.cli.follow import Tee
    from shardwise.cli.launch_plan import SettledLaunch
    from shardwise.doctor.guard.guard import Guard
    from shardwise.doctor.guard.replicas import ReplicaWatch
    from shardwise.launcher.local.attempts import Launched
    from shardwise.runs import RunDirectory


@click.command(
    "launch",
    context_settings={
        "token_normalize_func": lambda token: token.replace("_", "-"),
        "allow_interspersed_args": False,  # options stand before the script, the rest is the script's
        "auto_envvar_prefix": "PET",  # torchrun reads PET_NNODES and its like
    },
    no_args_is_help=True,
)
@click.option(
    "--nproc-per-node", "--nproc", "nproc_per_node", default="1", help="Processes: a number, gpu, cpu or auto."
)
@click.option("--max-restarts", type=click.IntRange(min=0), default=0, help="Times to start all again after a failure.")
@click.option("--standalone", is_flag=True, help="One machine, any free port (the default).")
@node_options
@click.option("--role", default="default", help="Accepted for torchrun's sake.")
@click.option("--monitor-interval", type=float, help="Accepted for torchrun's sake: exits are seen at once.")
@click.option(
    "--start-method", type=click.Choice(["fork", "spawn"]), default="fork", help="fork from one import of torch."
)
@click.option(
    "--shutdown-timeout", type=click.FloatRange(min=0), default=30.0, help="Seconds from a stop request to a kill."
)
@click.option(
    "--preset", metavar="NAME", help="Variables for a kind of cluster: gcp, infiniband, aws-efa, azure-nd ..."
)
@click.option("--log-dir", "--run-dir", "log_dir", type=click.Path(path_type=Path), help="Default: runs/NAME-TIME.")
@click.option("-r", "--redirects", help="Output to files only: 0-3 or RANK:N,...; 0 keeps the terminal.")
@click.option("-t", "--tee", default="0", help="Output to files and, with its rank, here: 0-3 or RANK:N,...")
@click.option("--local-ranks-filter", default="", help="Show only these ranks, such as 0,1.")
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as with python -m.")
@click.option("--no-python", is_flag=True, help="SCRIPT is any program.")
@hang_options
@equality_options(check_every=0)
@click.option("--dry-run", is_flag=True, help="Print what would run.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(*, script: str, arguments: tuple[str, ...], log_dir: Path | None, dry_run: bool, **options: Any) -> int:
    """Start SCRIPT on many processes of this machine, or of many machines, in place of torchrun."""
    from shardwise.cli.elsewhere import start_elsewhere
    from shardwise.cli.launch_plan import settle_launch, settle_target
    from shardwise.cli.node_words import describe
    from shardwise.cli.sinks import tell_effects, tell_preset
    from shardwise.cli.slurm import start_by_slurm
    from shardwise.launcher.explain import explain_outcome
    from shardwise.launcher.local.processes import become_reaper, kill_descendants
    from shardwise.launcher.policy import GiveUp

    tell_preset(options["preset"])  # first: an unknown one is refused here, not on every machine
    elsewhere = start_elsewhere(grace_s=options["shutdown_timeout"], dry_run=dry_run)
    if elsewhere is not None:
        return elsewhere
    target = settle_target(script, arguments, options)
    submitted = start_by_slurm(target.name, log_dir, grace_s=float(options["shutdown_timeout"]), dry_run=dry_run)
    if submitted is not None:
        return submitted
    settled = settle_launch(target, options)
    if dry_run:
        say(describe(settled, click.get_current_context()))
        return 0
    if settled.note:
        complain(settled.note)
    become_reaper()
    try:
        launched, run, guards, tee = _launch(settled, log_dir)
    finally:
        kill_descendants()  # also what left its rank's process group, or outlived a killed fork parent
    tell_effects(options["preset"], settled.spec.variables, run)
    if isinstance(launched.decision, GiveUp):
        close_guards(guards, explain_outcome(launched.outcome, run, shown=tee.ranks))
        complain(f"shardwise: the run is in {run.path}")
        return JOB_FAILED
    if launched.outcome.interrupted and launched.decision.exit_code == 0:  # type: ignore[union-attr]
        complain(f"\nshardwise: interrupted; the run is in {run.path}")
        return INTERRUPTED
    return launched.decision.exit_code  # type: ignore[union-attr]


def _launch(
    settled: SettledLaunch, log_dir: Path | None
) -> tuple[Launched, RunDirectory, list[Guard | ReplicaWatch], Tee]:
    """Run it on this machine, or on this and others; return how it ended, where that is written, and who looked on."""
    from shardwise.cli.follow import Tee
    from shardwise.launcher.local.attempts import launch

    spec = settled.spec
    guards: list[Guard | ReplicaWatch]
    if settled.nodes is None:
        run = create_run(log_dir, spec.target.name)
        ranks = range(spec.nproc)
        guards = [*start_guard(run, settled.hang, ranks), *start_replica_watch(run, settled.replicas, ranks)]
        tee = Tee(run, settled.shown)
        launched = launch(spec, run, observers=[tee, *guards], note=complain)
        return launched, run, guards, tee

    from shardwise.launcher.nodes.node import join_run, node_facts
    from shardwise.launcher.nodes.rounds import launch_nodes

    facts = node_facts(settled.nodes, shlex.join(spec.target.words()))

    def make_run(named: Path | None) -> RunDirectory:
        return create_run(log_dir, spec.target.name) if named is None else share_run(log_dir or named)

    with join_run(settled.nodes, facts, make_run, complain) as (link, run):
        tee = Tee(run, settled.shown)
        guards = [
            *start_guard(run, settled.hang, range(0), exchange=link),
            *start_replica_watch(run, settled.replicas, range(0), link.node),
        ]

        def follow(ranks: range) -> None:
            tee.follow(ranks)
            for guard in guards:
                guard.follow(ranks)

        launched = launch_nodes(spec, settled.nodes, link, run, observers=[tee, *guards], placed=follow, note=complain)
        return launched, run, guards, tee
