"""The recorder inside of every rank: a record of its collectives, and stacks of its threads on request."""

from __future__ import annotations

from shardwise.recorder.start import start_record as start_record

__all__ = ["start_record"]
