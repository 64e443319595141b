"""Terminal output, printable text, and exit codes with their meaning."""

from __future__ import annotations

import contextlib
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from collections.abc import Iterable


def echo(text: str) -> None:
    """Write a line to standard output."""
    with contextlib.suppress(OSError):  # a closed terminal or pipe must not fail the command
        _print(text, sys.stdout)


def echo_error(text: str) -> None:
    """Write a line to standard error."""
    with contextlib.suppress(OSError):
        _print(text, sys.stderr)


def _print(text: str, stream: TextIO) -> None:
    try:
        print(text, file=stream, flush=True)
    except UnicodeEncodeError:  # a byte that is not UTF-8, or a character that the terminal cannot encode
        encoding = stream.encoding or "ascii"
        print(text.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)


def render_table(table: Any, *, width: int) -> str:
    """Return a rich table as text with the width and colors of the terminal; `width` columns without a terminal."""
    from rich.console import Console

    console = Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else width)
    with console.capture() as captured:
        console.print(table)
    return captured.get().rstrip("\n")


# Text that can be encoded as UTF-8: the bytes of a path or an argument need not be UTF-8.


def printable(text: str) -> str:
    r"""Return `text` with each lone surrogate, which stands for a byte that is not UTF-8, written as \udcNN."""
    return text.encode("utf-8", "backslashreplace").decode()


def printable_fields(value: Any) -> Any:
    """Return nested lists and dicts with every string converted by `printable`."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable_fields(name): printable_fields(content) for name, content in value.items()}
    if isinstance(value, list | tuple):
        return [printable_fields(content) for content in value]
    return value


# Counts and ranks as text.


def counted(number: int, noun: str, plural: str = "s") -> str:
    """Return a number with its noun, such as "1 rank", "2,048 ranks" or, with the plural ending "es", "2 processes"."""
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def name_ranks(ranks: Iterable[int]) -> str:
    """Return "rank 3", "ranks 0-2" or "ranks 0-2, 5"."""
    members = set(ranks)
    return f"{'rank' if len(members) == 1 else 'ranks'} {rank_spans(members)}"


def rank_spans(ranks: Iterable[int]) -> str:
    """Return ranks as ranges: 0-12, 14-63."""
    members = set(ranks)
    starts = sorted(rank for rank in members if rank - 1 not in members)
    ends = sorted(rank for rank in members if rank + 1 not in members)
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in zip(starts, ends, strict=True))


# Source lines in messages.


def short(location: str) -> str:
    """Return FILE:LINE with the path relative to the current directory if the file is below it."""
    file, _, line = location.rpartition(":")
    try:
        return f"{Path(file).relative_to(Path.cwd())}:{line}"
    except (ValueError, OSError):
        return location


# Exit codes: constants of shardwise, and the meaning of the code or signal with which a process ended.


DONE = 0
JOB_FAILED = 1
BAD_INPUT = 2
CHECK_FAILED = 3
PREEMPTED = 75
INTERRUPTED = 130

_SIGNAL_CAUSES = {
    signal.SIGKILL: "usually the kernel when host memory runs out, or kill -9",
    signal.SIGBUS: "usually a full /dev/shm, or a full disk under a memory-mapped file",
    signal.SIGSEGV: "a native library accessed invalid memory",
    signal.SIGABRT: "a native library aborted; the log has its last message",
    signal.SIGTERM: "another process asked it to terminate",
}


def describe_exit(returncode: int) -> str:
    """Return the meaning of a return code as text; negative codes are signals, as in subprocess."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        number = signal.Signals(-returncode)
    except ValueError:
        return f"signal {-returncode}"
    cause = _SIGNAL_CAUSES.get(number)
    if cause is None:
        return number.name
    return f"{number.name} ({cause})"
