"""`shardwise doctor`: checks of this machine, its variables, the network and runs, and fault injection."""

from __future__ import annotations

import click

from shardwise.cli.main import WITH_UNDERSCORES, LazyGroup, present, refuse_started_ranks, takes
from shardwise.diagnosis.drill.drill import doctor_drill
from shardwise.diagnosis.drill.target import DrillSpec
from shardwise.diagnosis.env import EnvSpec, doctor_env, preset_lines
from shardwise.diagnosis.machine.observe import doctor
from shardwise.diagnosis.network.net import NetSpec, doctor_net
from shardwise.diagnosis.run.explain import RunSpec, doctor_run
from shardwise.errors import InputError
from shardwise.runs.console import echo

PARTS = {
    "drill": "Inject faults into your own job, and check that each is named and the job recovers.",
    "env": "Explain and check environment variables; print presets.",
    "net": "Check all hosts and the links between them; end with the launch line.",
    "run": "Explain a finished or stuck run from its directory.",
}


@click.group("doctor", cls=LazyGroup, parts=PARTS, invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print facts and verdicts as JSON.")
@click.pass_context
def command(context: click.Context, *, as_json: bool) -> int:
    """Check this machine: GPUs, torch, NCCL, interfaces, memory, limits, cores, disk, clock."""
    return 0 if context.invoked_subcommand is not None else present(doctor(), as_json=as_json)


@command.command(
    "drill",
    # Options stand before the script; the rest is the script's.
    context_settings={**WITH_UNDERSCORES, "allow_interspersed_args": False},
    no_args_is_help=True,
)
@takes(DrillSpec)
@click.option("--json", "as_json", is_flag=True, help="Write the results as JSON to standard output.")
def drill(spec: DrillSpec, *, as_json: bool) -> int:
    """Inject faults into ranks, links, checkpoints and disk of your own job; check that it is named and recovers."""
    refuse_started_ranks("drills start their own ranks")
    return present(doctor_drill(spec), as_json=as_json)


@command.command("env")
@takes(EnvSpec)
@click.option("--export", "as_shell", is_flag=True, help="Print the preset as shell lines, and check nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print verdicts as JSON.")
def env(spec: EnvSpec, *, as_shell: bool, as_json: bool) -> int:
    """Explain NCCL, gloo, OpenMP, CUDA and torch variables: what each does, what contradicts, what is ignored."""
    if not as_shell:
        return present(doctor_env(spec), as_json=as_json)
    if spec.preset is None:
        raise InputError(
            "--export prints a preset, and none is named",
            code="cli.options-incomplete",
            fix="add --preset gcp, or another",
        )
    echo(preset_lines(spec.preset))
    return 0


@command.command("net")
@takes(NetSpec)
@click.option("--json", "as_json", is_flag=True, help="Write what was found as JSON to standard output.")
def net(spec: NetSpec, *, as_json: bool) -> int:
    """Check logins, versions, names, clocks, storage, ports and links of all hosts; end with the launch line."""
    return present(doctor_net(spec), as_json=as_json)


@command.command("run", no_args_is_help=True)
@takes(RunSpec)
@click.option("--json", "as_json", is_flag=True, help="Print the story and the verdicts as JSON.")
def run(spec: RunSpec, *, as_json: bool) -> int:
    """Say what happened in the run directory RUN, why, what was lost, and what to type next."""
    return present(doctor_run(spec), as_json=as_json)
