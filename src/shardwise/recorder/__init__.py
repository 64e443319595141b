"""The recorder in every rank, which records collectives and dumps the stacks of all threads on request."""

from __future__ import annotations

from shardwise.recorder.start import start_record as start_record

__all__ = ["start_record"]
