"""The only module of this folder that imports inside shardwise: when packages move, edit this file and no golden."""

import contextlib
import dataclasses
import io
import sysconfig
from pathlib import Path
from unittest import mock

import msgspec

from shardwise.cli.main import cli, main
from shardwise.parity.reference import true_double
from shardwise.plans.toml import plan_from_toml, plan_to_toml
from shardwise.runs import RunDirectory
from shardwise.runs.state import RunState
from shardwise.testing import run_ranks

__all__ = [
    "cli",
    "command",
    "corpus",
    "global_loss",
    "in_double",
    "plan_from_toml",
    "plan_to_toml",
    "run_directory",
    "run_ranks",
    "run_status",
    "true_double",
    "whole_weights",
]


def command(*arguments):
    """Run one command line in this process; return its exit code and its standard output."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        code = main([str(argument) for argument in arguments])
    return code, shown.getvalue()


def run_directory(path):
    """Return what `sw.train(run=...)` takes for a folder."""
    path.mkdir(parents=True, exist_ok=True)
    return RunDirectory(Path(path))


def run_status(path):
    """Return what `shardwise watch` reads from a run directory: numbers and names, none of its sentences."""
    state = RunState(RunDirectory(Path(path)))
    state.refresh_all()
    status = msgspec.to_builtins(state.status())
    names = ("job", "state", "began_at", "now", "step", "num_steps", "loss", "samples_per_s", "lr", "parameters")
    of_rank = ("rank", "host", "device", "pid", "phase", "since", "step", "memory_bytes", "state")
    return {
        **{name: status[name] for name in (*names, "restarts", "memory_bytes")},
        "checkpoints": [[each["step"], each["at"], each["num_bytes"]] for each in status["checkpoints"]],
        "ranks": [{name: each[name] for name in of_rank} for each in status["ranks"]],
    }


def global_loss(report, world):
    """Return the mean loss of the global batch of one step (communicates, on every rank)."""
    report = getattr(report, "report", report)  # of a callback's context
    return world.sum({"loss": float(report.loss_share)})["loss"]


def whole_weights(step):
    """Return all weights of the trained model by name, on rank 0 (communicates, on every rank)."""
    return step.whole_weights()


def in_double(plan):
    """Return a plan that stores, computes, reduces and updates in fp64."""
    names = ("parameter", "compute", "reduce", "optimizer")
    precision = dataclasses.replace(plan.precision, **dict.fromkeys(names, "fp64"))
    return dataclasses.replace(plan, precision=precision)


@contextlib.contextmanager
def corpus(folder):
    """Let `sw.datasets.text` read a generated text, since the standard library differs between Python versions."""
    (folder / "corpus.py").write_bytes(_generated_text(80_000))
    real = sysconfig.get_path

    def get_path(name, *arguments, **options):
        return str(folder) if name == "stdlib" else real(name, *arguments, **options)

    with mock.patch.object(sysconfig, "get_path", get_path):
        yield


def _generated_text(num_bytes):
    """Return printable bytes of a linear congruential generator (constants of MMIX, by D. Knuth)."""
    state, content = 1, bytearray()
    for _ in range(num_bytes):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        content.append(32 + (state >> 40) % 90)
    return bytes(content)
