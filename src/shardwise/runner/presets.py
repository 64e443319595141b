"""--preset: which variables ranks get beside the user's own, and afterwards whether NCCL read them."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from shardwise.diagnosis.catalogue import find_preset
from shardwise.diagnosis.env_rules import CERTAIN, EnvironmentFacts
from shardwise.diagnosis.run.nccl_log import run_effects
from shardwise.environment import variables
from shardwise.errors import LaunchError
from shardwise.hardware import usable_cores
from shardwise.runs.console import echo_error

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardwise.runs import RunDirectory


def preset_variables(name: str | None) -> dict[str, str]:
    """Return what the preset of this name adds to the user's own variables; unknown ones are refused."""
    return {} if name is None else find_preset(name).missing_from(variables(""))


def report_preset(name: str | None) -> None:
    """Report what a preset sets, and which variables of the user's own stay; unknown ones are refused."""
    if name is None:
        return
    preset, own = find_preset(name), variables("")
    added = " ".join(f"{key}={value}" for key, value in preset.missing_from(own).items())
    kept = " ".join(f"{key}={value}" for key, value in preset.overruled_by(own).items())
    stays = f"; your own {kept} stays" if kept else ""
    echo_error(f"shardwise: preset {name} sets {added or 'nothing'}{stays}")


def settle_preset(name: str | None, *, nproc: int, num_gpus: int, uses_ddp: bool) -> dict[str, str]:
    """Return what a preset adds to the variables of `nproc` ranks; refuse those with which ranks cannot run.

    `shardwise doctor env` reports what is only doubtful. `num_gpus` is 0 where ranks train on the CPU.
    """
    added = preset_variables(name)
    here = EnvironmentFacts(
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        num_gpus=num_gpus,
        uses_nccl=num_gpus > 0,
        uses_ddp=uses_ddp,
        nproc=nproc,
        cores=usable_cores(),
    )
    for rule in CERTAIN:
        for verdict in rule({**variables(""), **added}, here):
            if verdict.state == "fail":
                raise LaunchError(f"{verdict.name}: {verdict.fact}", code="env.variable-unusable", fix=verdict.fix)
    return added


def report_effects(name: str | None, added: Mapping[str, str], run: RunDirectory) -> None:
    """Report which variables of a preset NCCL read in a run that has ended; nothing without one."""
    if name is None:
        return
    verdicts = run_effects(added, run)
    idle = [verdict for verdict in verdicts if verdict.state != "ok"]
    if len(idle) < len(verdicts):
        echo_error(f"shardwise: preset {name}: NCCL read {len(verdicts) - len(idle)} of {len(verdicts)}")
    for verdict in idle:
        echo_error(f"shardwise: preset {name}: {verdict.name}: {verdict.fact}: {verdict.fix}")
