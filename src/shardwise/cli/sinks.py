"""--sink: mirrors of a run into trackers, each a process of its own beside a training that ends soon after it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from shardwise.runs.console import complain

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import click

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
