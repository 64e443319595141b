"""The run directory, its events and failures, and the one renderer. No torch."""

from shardwise.runs.directory import RunDirectory, create_run, share_run
from shardwise.runs.events import EventLog, Tail

__all__ = ["EventLog", "RunDirectory", "Tail", "create_run", "share_run"]
