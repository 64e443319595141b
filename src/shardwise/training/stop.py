"""Stop requests: a signal asks the training to save and leave, and it does so between two steps."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from shardwise.errors import ShardwiseError
from shardwise.runs.exitcodes import PREEMPTED

if TYPE_CHECKING:
    from collections.abc import Iterator

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""What SLURM, Kubernetes and the launcher send before they end a job."""


class StoppedError(ShardwiseError):
    """The training saved its state and left because it was asked to; run it again to continue."""

    exit_code = PREEMPTED


class StopRequest:
    """Whether somebody has asked this rank to stop."""

    def __init__(self) -> None:
        self.is_set = False

    def set(self, *_: object) -> None:
        """Take note of a request."""
        self.is_set = True


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Take note of stop signals in here, instead of dying of them; where signals cannot be caught, never set."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.signal(number, request.set) for number in STOP_SIGNALS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
