"""What a run keeps of its checkpoints: by count, by age, the best by a metric, and the words that say so."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from shardwise.errors import InputError

_AGE = re.compile(r"(\d+(?:\.\d+)?)([smhdw])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
GRAMMAR = "a count (3), an age (12h, 2d), min:METRIC or max:METRIC, comma separated, or all"


@dataclass(frozen=True, kw_only=True)
class Keep:
    """What to keep: a checkpoint stays if any of the rules wants it; without any rule all stay."""

    last: int | None = None
    """The newest so many."""
    age_s: float | None = None
    """Those younger than so many seconds."""
    best: int = 0
    """So many with the best value of `metric`."""
    metric: str = ""
    highest: bool = False
    """Whether the best value is the highest; else the lowest."""

    def __post_init__(self) -> None:
        if self.last is not None and self.last < 1:
            raise InputError(
                f"keep.last is {self.last}",
                code="checkpoint.keep-last-invalid",
                fix="keep at least 1, or leave it out to keep all",
            )
        if self.age_s is not None and self.age_s < 0:
            raise InputError(
                f"keep.age_s is {self.age_s}", code="checkpoint.keep-age-invalid", fix="use seconds, at least 0"
            )
        if self.best < 0 or bool(self.best) != bool(self.metric):
            raise InputError(
                f"keep.best is {self.best} of metric {self.metric!r}",
                code="checkpoint.keep-best-invalid",
                fix="give both or neither",
            )


def parse_keep(text: str) -> Keep:
    """Read rules such as "3", "2d", "max:accuracy" or "3,2d,min:loss"; "all" is no rule."""
    if text == "all":
        return Keep()
    keep, said = Keep(), set()
    for rule in text.split(","):
        name, found = _parse_rule(rule.strip())
        if not found or name in said:
            words = f"says {name} twice" if found else f"has {rule!r}, which is no rule"
            raise InputError(
                f"--keep {text!r} {words}",
                code="checkpoint.keep-rule-repeated" if found else "checkpoint.keep-rule-invalid",
                fix=f"give {GRAMMAR}",
            )
        said.add(name)
        keep = replace(keep, **found)
    return keep


def _parse_rule(rule: str) -> tuple[str, dict[str, Any]]:
    """Return what a rule is about and the fields it sets, none where it is no rule."""
    if rule.isascii() and rule.isdigit():
        return "count", {"last": int(rule)} if int(rule) else {}
    if age := _AGE.fullmatch(rule):
        return "age", {"age_s": float(age[1]) * _SECONDS[age[2]]}
    way, _, metric = rule.partition(":")
    if way in {"min", "max"} and metric:
        return "metric", {"best": 1, "metric": metric, "highest": way == "max"}
    return "rule", {}
