"""The run directory, its events and failures, and terminal output. This package does not import torch."""

from shardwise.runs.directory import RunDirectory, create_run, share_run
from shardwise.runs.events import EventLog, Tail

__all__ = ["EventLog", "RunDirectory", "Tail", "create_run", "share_run"]
