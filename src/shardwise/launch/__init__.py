"""Starting, watching and stopping the ranks of a run; no torch in the process that supervises."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.launch.attempts import Launched as Launched
    from shardwise.launch.attempts import LaunchSpec as LaunchSpec
    from shardwise.launch.attempts import launch as launch
    from shardwise.launch.explain import explain_outcome as explain_outcome
    from shardwise.launch.fork import run_forked as run_forked
    from shardwise.launch.function import launch_function as launch_function
    from shardwise.launch.policy import Finish as Finish
    from shardwise.launch.policy import GiveUp as GiveUp
    from shardwise.launch.policy import RankExit as RankExit
    from shardwise.launch.policy import root_cause as root_cause
    from shardwise.launch.supervise import Observer as Observer
    from shardwise.launch.supervise import Outcome as Outcome
    from shardwise.launch.target import Module as Module
    from shardwise.launch.target import Program as Program
    from shardwise.launch.target import Script as Script
    from shardwise.launch.target import Target as Target

_PUBLIC = {
    "Finish": "policy",
    "GiveUp": "policy",
    "LaunchSpec": "attempts",
    "Launched": "attempts",
    "Module": "target",
    "Observer": "supervise",
    "Outcome": "supervise",
    "Program": "target",
    "RankExit": "policy",
    "Script": "target",
    "Target": "target",
    "explain_outcome": "explain",
    "launch": "attempts",
    "launch_function": "function",
    "root_cause": "policy",
    "run_forked": "fork",
}
"""Public name -> module: imported at first use, since a fork parent, which all ranks wait for, needs none of them."""

__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)


class _Room(ModuleType):
    """This room, which is also its in-process form: `sw.launch(fn, nproc=2)`."""

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Run a function on the ranks of this machine: `launch_function`."""
        from shardwise.launch.function import launch_function

        return launch_function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel by name, as modules do: functions that use this room are pickled on their way to ranks."""
        return importlib.import_module, (self.__name__,)


sys.modules[__name__].__class__ = _Room
