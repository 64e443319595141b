"""Start the recorder of a rank before its script runs, and patch torch when the script imports it."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.engines import RECORDED_MODULES
from shardwise.environment import adopt, identify, variables
from shardwise.recorder.imports import be_deterministic, take_options, when_imported
from shardwise.recorder.replicas import record_replicas, record_separate_steps
from shardwise.recorder.torch_calls import record_batches, record_collectives, record_functional
from shardwise.runs.calls import CallRing
from shardwise.torch_private.distributed import FUNCTIONAL_COLLECTIVES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardwise.runs import RunDirectory


_C10D = "torch.distributed.distributed_c10d"
STACKS_SIGNAL = signal.SIGRTMIN + 11 if hasattr(signal, "SIGRTMIN") else 0
"""Signal on which a rank dumps the stacks of its threads; a real-time signal, since scripts use the named signals."""


def start_record(run: RunDirectory, rank: int, world_size: int) -> None:
    """Start recording this rank in `run`, and apply the options that the launcher passed.

    If files cannot be mapped or the disk is full, the rank runs without a record.
    """
    options = take_options()
    if options.deterministic:
        be_deterministic(seed=rank)
    if options.check_replicas:
        record_replicas(run.replicas(rank), options.check_replicas)
    try:
        number = _register_stacks(run, rank)
        ring = CallRing(run.calls(rank), stacks_signal=number)
    except OSError:
        return
    os.register_at_fork(after_in_child=ring.detach)

    when_imported(
        {
            _C10D: lambda: _record(ring, world_size),
            "torch.utils.data.dataloader": lambda: record_batches(ring),
            "torch.optim.optimizer": lambda: record_separate_steps(ring, world_size),
            **{name: partial(_record_engine, name, ring, world_size) for name in RECORDED_MODULES},
        }
    )


def _record_engine(module: str, ring: CallRing, world_size: int) -> None:
    sys.modules[module].record(ring, world_size)


def _record(ring: CallRing, world_size: int) -> None:
    recorder = record_collectives(ring, world_size)
    when_imported({FUNCTIONAL_COLLECTIVES: lambda: record_functional(recorder, sys.modules[FUNCTIONAL_COLLECTIVES])})


def _register_stacks(run: RunDirectory, rank: int) -> int:
    """Dump all stacks to a file on STACKS_SIGNAL, even while C code holds the GIL; return the signal's number.

    Fatal signals, such as SIGABRT from gloo, dump the stacks too, unless faulthandler was enabled before.
    """
    if not STACKS_SIGNAL:
        return 0
    path = run.stack_samples(rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a")
    if not faulthandler.is_enabled():
        faulthandler.enable(file=file, all_threads=True)
    with contextlib.suppress(RuntimeError, ValueError):  # a platform without this signal records no stacks
        faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True)
        return int(STACKS_SIGNAL)
    return 0


# Starting the recorder in a new interpreter: Python imports `sitecustomize` before the script.


_RUN = "SHARDWISE_RECORD"
_LISTENERS = "SHARDWISE_LISTENERS"
_PATH = "PYTHONPATH"
_FOLDER = str(Path(__file__).with_name("site"))


def record_variables(environ: Mapping[str, str], run: Path) -> dict[str, str]:
    """Return the environment variables that make a new interpreter record in `run`; the interpreter unsets them."""
    path = environ.get(_PATH)
    return {_RUN: str(run), _PATH: f"{_FOLDER}{os.pathsep}{path}" if path else _FOLDER}


def listener_variables(folder: str) -> dict[str, str]:
    """Return the environment variables that make a recorded interpreter put multiprocessing's sockets in `folder`."""
    return {_LISTENERS: folder}


def start_here() -> None:
    """Start the recorder that the environment requests, restore the environment, and run the user's sitecustomize."""
    environ = variables("")
    run, listeners = environ.pop(_RUN, ""), environ.pop(_LISTENERS, "")
    others = [entry for entry in environ.pop(_PATH, "").split(os.pathsep) if entry and entry != _FOLDER]
    if others:
        environ[_PATH] = os.pathsep.join(others)
    adopt(environ)
    sys.path[:] = [entry for entry in sys.path if entry != _FOLDER]
    if run:
        from shardwise.runs import RunDirectory

        me = identify()
        start_record(RunDirectory(Path(run)), me.rank, me.world_size)
    if listeners:
        from shardwise.runs.directory import use_listener_folder

        use_listener_folder(listeners)
    del sys.modules["sitecustomize"]
    importlib.invalidate_caches()
    # Without a sitecustomize of the user, this must raise ModuleNotFoundError: Python then assumes that there is none,
    # but reports an import that succeeded without its module as an error.
    importlib.import_module("sitecustomize")
