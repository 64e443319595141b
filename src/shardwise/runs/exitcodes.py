"""Exit codes in words: what a process ended with, and what usually causes it."""

from __future__ import annotations

import signal

DONE = 0
JOB_FAILED = 1
BAD_INPUT = 2
CHECK_FAILED = 3
PREEMPTED = 75
INTERRUPTED = 130

_SIGNAL_CAUSES = {
    signal.SIGKILL: "usually the kernel when host memory runs out, or kill -9",
    signal.SIGBUS: "memory that a file or /dev/shm could not give",
    signal.SIGSEGV: "a native library read memory it does not own",
    signal.SIGABRT: "a native library gave up; its last words are in the log",
    signal.SIGTERM: "something asked it to stop",
}


def describe_exit(returncode: int) -> str:
    """Say a return code in words; negative codes are signals, as subprocess counts them."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        number = signal.Signals(-returncode)
    except ValueError:
        return f"signal {-returncode}"
    cause = _SIGNAL_CAUSES.get(number)
    return f"{number.name} ({cause})" if cause else number.name
