"""Starting the record of a rank that is a fresh interpreter: Python imports `sitecustomize` before any script."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.environment import adopt, identify, variables

if TYPE_CHECKING:
    from collections.abc import Mapping

_PLACE = "SHARDWISE_RECORD"
_LISTENERS = "SHARDWISE_LISTENERS"
_PATH = "PYTHONPATH"
_FOLDER = str(Path(__file__).with_name("site"))


def record_variables(environ: Mapping[str, str], run: Path) -> dict[str, str]:
    """Return what makes a fresh interpreter record its collectives in `run`; it takes them away again at once."""
    path = environ.get(_PATH)
    return {_PLACE: str(run), _PATH: _FOLDER if not path else f"{_FOLDER}{os.pathsep}{path}"}


def listener_variables(folder: str) -> dict[str, str]:
    """Return what makes a fresh interpreter that records use `folder` for multiprocessing's sockets."""
    return {_LISTENERS: folder}


def start_here() -> None:
    """Begin the record that the environment asks for, clear our traces, and let the user's own sitecustomize follow."""
    environ = variables("")
    run, listeners = environ.pop(_PLACE, ""), environ.pop(_LISTENERS, "")
    others = [entry for entry in environ.pop(_PATH, "").split(os.pathsep) if entry and entry != _FOLDER]
    adopt({**environ, **({_PATH: os.pathsep.join(others)} if others else {})})
    sys.path[:] = [entry for entry in sys.path if entry != _FOLDER]
    if run:
        from shardwise.recorder.start import start_record
        from shardwise.runs import RunDirectory

        me = identify()
        start_record(RunDirectory(Path(run)), me.rank, me.world_size)
    if listeners:
        from shardwise.runs.listener_folder import use_listener_folder

        use_listener_folder(listeners)
    del sys.modules["sitecustomize"]
    importlib.invalidate_caches()
    # Where the user has none this raises ModuleNotFoundError, and must: Python takes that to mean that there is no
    # sitecustomize, and reports an import that succeeded without its module as an error.
    importlib.import_module("sitecustomize")
