"""One family of errors: what was asked, what is true, what to type."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Iterable


class ShardwiseError(Exception):
    """A failure explained in one sentence: the fact, then the fix.

    `code` names the condition for programs and tests, as `area.condition` ("plan.batch-not-divisible"): it stays the
    same while the sentence may change. Plain arguments only, so that it survives pickling from a rank to its launcher.
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
    """What the user typed or wrote cannot work; nothing was touched."""

    exit_code = 2


class EnvironmentVariablesError(InputError):
    """Environment variables that are missing, malformed or contradict each other."""


class LayoutError(InputError):
    """A layout that does not fit the number of ranks."""


class JobError(InputError):
    """A job file, or a value inside a Job, that cannot be trained."""


class PlanError(InputError):
    """A plan that contradicts itself, the job or the world."""


class HardwareError(InputError):
    """A device, node or cluster that nobody can plan for."""


class WorldError(InputError):
    """A process group that cannot be started as asked."""


class DataError(InputError):
    """A dataset that is missing, unreadable or invalid."""


class LaunchError(InputError):
    """Processes that cannot be started as asked."""


class MissingExtraError(InputError):
    """A feature whose optional dependency is not installed."""

    @classmethod
    def of(cls, feature: str, extra: str) -> MissingExtraError:
        """Name the feature and the pip line that brings it."""
        return cls(
            f"{feature} needs the extra [{extra}]",
            code=f"extra.{extra}-missing",
            fix=f"pip install 'shardwise[{extra}]'",
        )


class TrainingError(ShardwiseError):
    """Training started and could not continue."""


class RankFailedError(ShardwiseError):
    """A rank of a launched world failed; carries its own message."""


def with_code(sentence: str, code: str) -> str:
    """Return a sentence as it is shown to people: what to search for stands at its end, in brackets."""
    return f"{sentence} [{code}]" if code else sentence


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return advice naming the choice that `name` was probably meant to be."""
    known = sorted(choices)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"choose one of {', '.join(known)}"


def some_of(names: Iterable[str], most: int = 3) -> str:
    """Name the first few of many: "a", "a, b, c and 60 more", "nothing"."""
    known = list(names)
    return (", ".join(known[:most]) + (f" and {len(known) - most} more" if len(known) > most else "")) or "nothing"


def _rebuild(kind: type[ShardwiseError], fact: str, code: str, fix: str) -> ShardwiseError:
    return kind(fact, code=code, fix=fix)
