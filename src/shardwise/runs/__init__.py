"""The run directory, its events and failures, and the renderer of terminal output. Nothing here imports torch."""

from shardwise.runs.directory import RunDirectory, create_run, share_run
from shardwise.runs.events import EventLog, Tail

__all__ = ["EventLog", "RunDirectory", "Tail", "create_run", "share_run"]
