"""Options of launch and train: --sink for experiment trackers, --preset for variables of a kind of cluster."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from shardwise.doctor.catalogue import find_preset
from shardwise.doctor.env_rules import CERTAIN, EnvironmentFacts
from shardwise.doctor.run.nccl_log import effects, read_nccl_log
from shardwise.environment import variables
from shardwise.errors import LaunchError
from shardwise.hardware import usable_cores
from shardwise.runs.console import complain

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import click

    from shardwise.doctor.catalogue import Verdict
    from shardwise.monitor.sinks import SinkSpec
    from shardwise.runs import RunDirectory


HELP = "tensorboard:DIR, wandb:PROJECT or mlflow:EXPERIMENT"
PATIENCE_S = 10.0
"""For a mirror to bring the rest after the run: less than what batch systems leave after they ask for an end."""
_NICENESS = 10
"""Ranks go first where a machine has no core to spare."""


def checked_sinks(_context: click.Context, _option: click.Parameter, texts: Any) -> Any:
    """Read what was given to --sink, once or many times; refuse what cannot work before anything starts."""
    from shardwise.monitor.sinks import parse_sink

    if isinstance(texts, tuple):
        return tuple(parse_sink(text) for text in texts)
    return None if texts is None else parse_sink(texts)


class Mirrors:
    """One process per sink that runs `shardwise watch RUN --sink SINK`; what it says is in the run directory."""

    def __init__(self, run: RunDirectory, sinks: Sequence[SinkSpec]) -> None:
        self._run = run
        self._children = [(sink, *self._start(sink, number)) for number, sink in enumerate(sinks)]

    def _start(self, sink: SinkSpec, number: int) -> tuple[subprocess.Popen[bytes], Path]:
        self._run.sinks.mkdir(exist_ok=True)
        log = self._run.sinks / f"{sink.kind}-{number}.log"
        command = [sys.executable, "-m", "shardwise", "watch", str(self._run.path), "--sink", str(sink)]
        with log.open("ab") as file:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, child.pid, _NICENESS)
        return child, log

    def close(self) -> None:
        """Let the mirrors bring the rest of a run that has ended, and end those that hang; say which did not do it."""
        deadline = time.monotonic() + PATIENCE_S
        for sink, child, log in self._children:
            again = f"shardwise watch {self._run.path} --sink {sink}"
            try:
                if child.wait(max(0.0, deadline - time.monotonic())) != 0:
                    said = log.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
                    complain(f"shardwise: {sink} is not complete ({said[-1].removeprefix('shardwise: ')}); try {again}")
            except subprocess.TimeoutExpired:
                complain(f"shardwise: {sink} was slower than the run; {again} brings the rest")
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)  # with what the tracker started beside it
                child.wait()


# --preset: which variables ranks get beside the user's own, and afterwards whether NCCL read them.


def preset_variables(name: str | None) -> dict[str, str]:
    """Return what the preset of this name adds to the user's own variables; unknown ones are refused."""
    return {} if name is None else find_preset(name).missing_from(variables(""))


def tell_preset(name: str | None) -> None:
    """Say what a preset sets, and which variables of the user's own stay; unknown ones are refused."""
    if name is None:
        return
    preset, own = find_preset(name), variables("")
    added = " ".join(f"{key}={value}" for key, value in preset.missing_from(own).items())
    kept = " ".join(f"{key}={value}" for key, value in preset.overruled_by(own).items())
    stays = f"; your own {kept} stays" if kept else ""
    complain(f"shardwise: preset {name} sets {added or 'nothing'}{stays}")


def settle_preset(name: str | None, *, nproc: int, num_gpus: int, uses_ddp: bool) -> dict[str, str]:
    """Return what a preset adds to the variables of `nproc` ranks; refuse those with which ranks cannot run.

    What is only doubtful is for `shardwise doctor env` to say. `num_gpus` is 0 where ranks train on the CPU.
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


def tell_effects(name: str | None, added: Mapping[str, str], run: RunDirectory) -> None:
    """Say which variables of a preset NCCL read in a run that has ended; nothing without one."""
    if name is None:
        return
    verdicts = run_effects(added, run)
    idle = [verdict for verdict in verdicts if verdict.state != "ok"]
    if len(idle) < len(verdicts):
        complain(f"shardwise: preset {name}: NCCL read {len(verdicts) - len(idle)} of {len(verdicts)}")
    for verdict in idle:
        complain(f"shardwise: preset {name}: {verdict.name}: {verdict.fact}: {verdict.fix}")


def run_effects(asked: Mapping[str, str], run: RunDirectory) -> list[Verdict]:
    """Return whether each NCCL variable took effect, from what NCCL wrote in a run directory."""
    lines = (line for path in run.nccl_logs() for line in path.read_text(errors="replace").splitlines())
    return effects(asked, read_nccl_log(lines))
