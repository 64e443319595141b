"""`shardwise doctor env`: the variables of this shell, of a preset or of a run, explained and judged."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardwise.cli.doctor import say_json, say_verdicts
from shardwise.doctor.catalogue import exit_code, find_preset, read_catalogue
from shardwise.environment import variables
from shardwise.errors import InputError
from shardwise.runs import RunDirectory
from shardwise.runs.console import say

if TYPE_CHECKING:
    from shardwise.doctor.catalogue import Verdict
    from shardwise.doctor.env_rules import EnvironmentFacts


@click.command("env")
@click.option(
    "--preset", metavar="NAME", help="Judge a preset on top: gcp, infiniband, aws-efa, azure-nd, workstation."
)
@click.option("--export", "as_shell", is_flag=True, help="Print the preset as shell lines, and judge nothing.")
@click.option("--nproc", type=click.IntRange(min=1), default=1, help="Ranks on this machine, for what they share.")
@click.option(
    "--run", "path", type=click.Path(path_type=Path, file_okay=False), help="Say what NCCL read in this run instead."
)
@click.option("--json", "as_json", is_flag=True, help="Print verdicts as JSON.")
def command(*, preset: str | None, as_shell: bool, nproc: int, path: Path | None, as_json: bool) -> int:
    """Explain NCCL, gloo, OpenMP, CUDA and torch variables: what each does, what contradicts, what is ignored."""
    if as_shell:
        if preset is None:
            raise InputError(
                "--export prints a preset, and none is named",
                code="cli.options-incomplete",
                fix="add --preset gcp, or another",
            )
        say(_shell_lines(preset))
        return 0
    verdicts = _lint(preset, nproc) if path is None else _effects(path)
    if as_json:
        say_json({"verdicts": verdicts})
    elif verdicts:
        say_verdicts(verdicts)
    else:
        say("no variable is set that a distributed job obeys" if path is None else "the run set no variable of NCCL")
    return exit_code(verdicts)


def _lint(preset: str | None, nproc: int) -> list[Verdict]:
    from shardwise.doctor.env_rules import lint
    from shardwise.runner.presets import preset_variables

    found = lint({**variables(""), **preset_variables(preset)}, _here(nproc))
    return [*found.explained, *found.found]


def _here(nproc: int) -> EnvironmentFacts:
    from shardwise.doctor.env_rules import EnvironmentFacts
    from shardwise.doctor.machine.observe import observe_gpus, observe_interfaces, observe_rdma
    from shardwise.hardware import usable_cores
    from shardwise.versions import package_version

    _, gpus, hidden = observe_gpus()
    return EnvironmentFacts(
        interfaces=tuple(interface.name for interface in observe_interfaces()),
        has_rdma=any(observe_rdma()),
        num_gpus=len(gpus) + hidden,
        uses_nccl=bool(gpus) and "+cpu" not in package_version("torch"),
        nproc=nproc,
        cores=usable_cores(),
    )


def _effects(path: Path) -> list[Verdict]:
    import msgspec

    from shardwise.runner.presets import run_effects

    run = RunDirectory(path)
    try:
        asked = msgspec.json.decode(run.environment.read_bytes(), type=dict[str, str])
    except (OSError, msgspec.DecodeError):
        raise InputError(
            f"{path} is no run directory: it has no environment.json", code="run.not-a-run", fix="name one below runs/"
        ) from None
    return run_effects(asked, run)


def _shell_lines(name: str) -> str:
    preset, known = find_preset(name), read_catalogue().variables
    lines = [f"# {preset.about} ({preset.source})", *(f"# {note}" for note in preset.notes)]
    pairs = [(f"export {key}={shlex.quote(value)}", known[key].meaning) for key, value in preset.variables.items()]
    width = max(len(line) for line, _ in pairs)
    lines += [f"{line:<{width}}  # {meaning}" for line, meaning in pairs]
    return "\n".join([*lines, f"# set for each rank by shardwise launch: {' '.join(preset.per_rank)}"])
