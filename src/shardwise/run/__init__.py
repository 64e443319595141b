"""The run directory, its events and failures, and the one renderer. No torch."""

from shardwise.run.directory import RunDirectory, create_run, share_run
from shardwise.run.events import EventLog, Tail

__all__ = ["EventLog", "RunDirectory", "Tail", "create_run", "share_run"]
