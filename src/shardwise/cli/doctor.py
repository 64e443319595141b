"""`shardwise doctor`: diagnosis of this machine, environment variables, the network and runs, and fault injection."""

from __future__ import annotations

import click

from shardwise.cli.main import WITH_UNDERSCORES, LazyGroup, present, refuse_started_ranks, spec_options
from shardwise.diagnosis.drill.drill import doctor_drill
from shardwise.diagnosis.drill.target import DrillSpec
from shardwise.diagnosis.env import EnvSpec, doctor_env, preset_lines
from shardwise.diagnosis.machine.observe import doctor
from shardwise.diagnosis.network.net import NetSpec, doctor_net
from shardwise.diagnosis.run.explain import RunSpec, doctor_run
from shardwise.errors import InputError
from shardwise.runs.console import echo

PARTS = {
    "drill": "Inject faults into your job, and check that each is diagnosed and the job recovers.",
    "env": "Explain and check environment variables, and print presets.",
    "net": "Check all hosts and the links between them, and print the launch command.",
    "run": "Diagnose a finished or hanging run from its directory.",
}


@click.group("doctor", cls=LazyGroup, parts=PARTS, invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print facts and verdicts as JSON.")
@click.pass_context
def command(context: click.Context, *, as_json: bool) -> int:
    """Check this machine: GPUs, torch, NCCL, network interfaces, memory, limits, cores, disk and clock."""
    return 0 if context.invoked_subcommand is not None else present(doctor(), as_json=as_json)


@command.command(
    "drill",
    # Options precede the script; all arguments after it are passed to the script.
    context_settings={**WITH_UNDERSCORES, "allow_interspersed_args": False},
    no_args_is_help=True,
)
@spec_options(DrillSpec)
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
def drill(spec: DrillSpec, *, as_json: bool) -> int:
    """Inject faults into the ranks, links, checkpoints and disk of your job, and check diagnosis and recovery."""
    refuse_started_ranks("drills start their own ranks")
    return present(doctor_drill(spec), as_json=as_json)


@command.command("env")
@spec_options(EnvSpec)
@click.option("--export", "as_shell", is_flag=True, help="Print the preset as shell commands, without checks.")
@click.option("--json", "as_json", is_flag=True, help="Print verdicts as JSON.")
def env(spec: EnvSpec, *, as_shell: bool, as_json: bool) -> int:
    """Explain NCCL, gloo, OpenMP, CUDA and torch variables, and find those that conflict or are ignored."""
    if not as_shell:
        return present(doctor_env(spec), as_json=as_json)
    if spec.preset is None:
        raise InputError(
            "--export requires --preset",
            code="cli.options-incomplete",
            fix="add a preset, such as --preset gcp",
        )
    echo(preset_lines(spec.preset))
    return 0


@command.command("net")
@spec_options(NetSpec)
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
def net(spec: NetSpec, *, as_json: bool) -> int:
    """Check logins, versions, names, clocks, storage, ports and links of all hosts, and print the launch command."""
    return present(doctor_net(spec), as_json=as_json)


@command.command("run", no_args_is_help=True)
@spec_options(RunSpec)
@click.option("--json", "as_json", is_flag=True, help="Print the history and the verdicts as JSON.")
def run(spec: RunSpec, *, as_json: bool) -> int:
    """Diagnose the run in directory RUN: its history, the cause of a failure, lost work, and how to continue."""
    return present(doctor_run(spec), as_json=as_json)
