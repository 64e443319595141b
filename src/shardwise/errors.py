"""Exception classes of shardwise. Every message states the problem and the fix, and has a stable code."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Iterable


class ShardwiseError(Exception):
    """Base class of all shardwise errors; the message states the problem (`fact`), then the fix.

    `code` identifies the error for programs and tests, as `area.condition` ("plan.batch-not-divisible"). It is stable,
    while the message may change. All arguments are strings, so that a rank can pickle the error for its launcher.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, fact: str, *, code: str, fix: str = "") -> None:
        super().__init__(fact, code, fix)
        self.fact = fact
        self.code = code
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.fact}: {self.fix}" if self.fix else self.fact

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.fact, self.code, self.fix))


class InputError(ShardwiseError):
    """The user's input is invalid; nothing was started or changed."""

    exit_code = 2


class EnvironmentVariablesError(InputError):
    """Environment variables are missing, malformed or inconsistent."""


class LayoutError(InputError):
    """A layout is invalid or does not match the number of ranks."""


class JobError(InputError):
    """A job file or a value of a Job is invalid."""


class PlanError(InputError):
    """A plan is inconsistent, or does not match the job or the world."""


class HardwareError(InputError):
    """A device, node or cluster is unknown or invalid."""


class WorldError(InputError):
    """A process group cannot be initialized with the given arguments."""


class DataError(InputError):
    """A dataset is missing, unreadable or invalid."""


class LaunchError(InputError):
    """Processes cannot be launched with the given options."""


class MissingExtraError(InputError):
    """An optional dependency is not installed."""

    @classmethod
    def of(cls, feature: str, extra: str) -> MissingExtraError:
        """Return the error for a feature, with the pip command that installs its extra."""
        return cls(
            f"{feature} requires the extra [{extra}]",
            code=f"extra.{extra}-missing",
            fix=f"pip install 'shardwise[{extra}]'",
        )


class TrainingError(ShardwiseError):
    """Training failed after it had started."""


class RankFailedError(ShardwiseError):
    """A rank of a launched world failed; the message is that of the rank."""


def with_code(message: str, code: str) -> str:
    """Return a message followed by its code in brackets, for printing."""
    return f"{message} [{code}]" if code else message


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return a fix that suggests the choice closest to `name`, or lists all choices if none is close."""
    known = sorted(choices)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"choose one of {', '.join(known)}"


def some_of(names: Iterable[str], most: int = 3) -> str:
    """Return the first names as text: "a", "a, b, c and 60 more", "nothing"."""
    known = list(names)
    if not known:
        return "nothing"
    text = ", ".join(known[:most])
    if len(known) > most:
        text += f" and {len(known) - most} more"
    return text


def _rebuild(kind: type[ShardwiseError], fact: str, code: str, fix: str) -> ShardwiseError:
    return kind(fact, code=code, fix=fix)
