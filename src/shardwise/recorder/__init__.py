"""What runs inside every rank, unseen: a record of its collectives, and a way to write down its stacks."""

from __future__ import annotations

from shardwise.recorder.start import start_record as start_record

__all__ = ["start_record"]
