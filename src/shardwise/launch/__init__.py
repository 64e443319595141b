"""Starting, watching and stopping the ranks of a run; no torch in the process that supervises."""

import sys
from types import ModuleType

from shardwise.launch.explain import explain_outcome
from shardwise.launch.fork import run_forked
from shardwise.launch.function import launch_function
from shardwise.launch.launch import Launched, LaunchSpec, launch
from shardwise.launch.policy import Finish, GiveUp, RankExit, root_cause
from shardwise.launch.supervise import Observer, Outcome
from shardwise.launch.target import Module, Program, Script, Target

__all__ = [
    "Finish",
    "GiveUp",
    "LaunchSpec",
    "Launched",
    "Module",
    "Observer",
    "Outcome",
    "Program",
    "RankExit",
    "Script",
    "Target",
    "explain_outcome",
    "launch",
    "launch_function",
    "root_cause",
    "run_forked",
]


class _Room(ModuleType):
    """This room, which is also its in-process form: `sw.launch(fn, nproc=2)`."""

    __call__ = staticmethod(launch_function)


sys.modules[__name__].__class__ = _Room
