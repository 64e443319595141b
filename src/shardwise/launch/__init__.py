"""Starting, watching and stopping the ranks of a run."""

from shardwise.launch.explain import explain_outcome
from shardwise.launch.fork import run_forked
from shardwise.launch.local import Entry, launch_local
from shardwise.launch.policy import RankExit, root_cause
from shardwise.launch.supervise import Observer, Outcome

__all__ = [
    "Entry",
    "Observer",
    "Outcome",
    "RankExit",
    "explain_outcome",
    "launch_local",
    "root_cause",
    "run_forked",
]
