"""What a tracker is told of a run beside its curves: the job, the plan, the world it started in, and what came out."""

from __future__ import annotations

import contextlib
import tomllib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from shardwise.monitor.growing import GrowingFile

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from shardwise.runs import RunDirectory


@dataclass(frozen=True, kw_only=True)
class About:
    """A run as a tracker lists it."""

    name: str
    path: str
    config: dict[str, str | int | float | bool]
    """Flat: job.*, plan.*, world.*, model.*, training.*"""


def describe_run(run: RunDirectory) -> About:
    """Return what the run's files say of it; a part that is missing or broken is left out."""
    start = _start_of(run)
    ranks = start.get("ranks", [])
    facts = {
        "job": _read(run.job, msgspec.json.decode),
        "plan": _read(run.plan, lambda content: tomllib.loads(content.decode())),
        "world": {
            "size": len(ranks),
            "hosts": ", ".join(dict.fromkeys(str(rank.get("host")) for rank in ranks)),
            "devices": ", ".join(dict.fromkeys(str(rank.get("device")) for rank in ranks)),
        },
        "model": {"parameters": start.get("parameters")},
        "training": {"steps": start.get("num_steps")},
    }
    path = run.path.resolve()
    return About(name=path.name, path=str(path), config=dict(flat(facts)))


def read_result(run: RunDirectory) -> dict[str, str | int | float | bool]:
    """Return the result of the final report, flat; empty where there is none."""
    return dict(flat(_read(run.report_json, msgspec.json.decode).get("result", {})))


def flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str | int | float | bool]]:
    """Yield names with dots and plain values; lists as words, nothing for None and for what is empty."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{before}{name}.")
        elif isinstance(value, str | int | float | bool):
            yield before + name, value
        elif value:
            yield before + name, ", ".join(str(part) for part in value)


def as_markdown(values: Mapping[str, Any]) -> str:
    """Return a table of names and values."""
    rows = [f"| {name} | {str(value).replace('|', '/')} |" for name, value in values.items()]
    return "\n".join(["| | |", "|---|---|", *rows])


def _start_of(run: RunDirectory) -> dict[str, Any]:
    file = GrowingFile(run.events(0))
    while events := file.read():
        for event in events:
            if event["kind"] == "start":
                return event
    return {}


def _read(path: Path, decode: Any) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        content = decode(path.read_bytes())
        if isinstance(content, dict):
            return content
    return {}
