"""`doctor env`: the variables of this shell, of a preset or of a run, explained and checked."""

from __future__ import annotations

import shlex
from pathlib import Path  # noqa: TC003 - the Spec reads its annotations
from typing import Annotated

import msgspec

from shardwise.diagnosis.catalogue import find_preset, read_catalogue
from shardwise.diagnosis.env_rules import EnvironmentFacts, explain_variables, lint
from shardwise.diagnosis.machine.observe import observe_gpus, observe_interfaces, observe_rdma
from shardwise.diagnosis.run.nccl_log import run_effects
from shardwise.diagnosis.verdicts import Verdict, VerdictReport, verdict_lines
from shardwise.environment import variables
from shardwise.errors import InputError
from shardwise.hardware import usable_cores
from shardwise.runs import RunDirectory
from shardwise.spec import PositiveInt, Spec, option, spec_function
from shardwise.versions import package_version


class EnvSpec(Spec, frozen=True, kw_only=True):
    """What `shardwise doctor env` is asked."""

    preset: Annotated[str | None, option(metavar="NAME")] = None
    """Check a preset on top: gcp, infiniband, aws-efa, azure-nd, workstation."""
    nproc: PositiveInt = 1
    """Ranks on this machine, for what they share."""
    run: Path | None = None
    """Report what NCCL read in this run instead."""


class EnvReport(VerdictReport, frozen=True, kw_only=True):
    """What `shardwise doctor env` answers."""

    def to_text(self) -> str:
        """Return the verdicts, or that there is no variable to explain."""
        return "\n".join(verdict_lines(self.verdicts)) if self.verdicts else "there is no variable to explain"


@spec_function(EnvSpec)
def doctor_env(spec: EnvSpec) -> EnvReport:
    """Explain NCCL, gloo, OpenMP, CUDA and torch variables: what each does, what contradicts, what is ignored."""
    return EnvReport(verdicts=tuple(_lint(spec.preset, spec.nproc) if spec.run is None else _effects(spec.run)))


def preset_lines(name: str) -> str:
    """Return a preset as lines for a shell, each variable with its meaning."""
    preset, known = find_preset(name), read_catalogue().variables
    exports = {f"export {key}={shlex.quote(value)}": known[key].meaning for key, value in preset.variables.items()}
    width = max(map(len, exports))
    lines = [f"# {preset.about} ({preset.source})"]
    lines += [f"# {note}" for note in preset.notes]
    lines += [f"{line:<{width}}  # {meaning}" for line, meaning in exports.items()]
    return "\n".join([*lines, f"# set for each rank by shardwise launch: {' '.join(preset.per_rank)}"])


def _lint(preset: str | None, nproc: int) -> list[Verdict]:
    own = variables("")
    added = {} if preset is None else find_preset(preset).missing_from(own)
    _, gpus, hidden = observe_gpus()
    here = EnvironmentFacts(
        interfaces=tuple(interface.name for interface in observe_interfaces()),
        has_rdma=any(observe_rdma()),
        num_gpus=len(gpus) + hidden,
        uses_nccl=bool(gpus) and "+cpu" not in package_version("torch"),
        nproc=nproc,
        cores=usable_cores(),
    )
    environ = {**own, **added}
    return explain_variables(environ) + lint(environ, here)


def _effects(path: Path) -> list[Verdict]:
    run = RunDirectory(path)
    try:
        asked = msgspec.json.decode(run.environment.read_bytes(), type=dict[str, str])
    except (OSError, msgspec.DecodeError):
        raise InputError(
            f"{path} is not a run directory: it has no environment.json",
            code="run.not-a-run",
            fix="name one below runs/",
        ) from None
    return run_effects(asked, run)
