"""Starting, watching and stopping the ranks of a run; no torch in the process that supervises."""

from shardwise.launch.explain import explain_outcome
from shardwise.launch.fork import run_forked
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
    "root_cause",
    "run_forked",
]
