"""The final report of a run: JSON for programs, Markdown for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.runs.directory import RunDirectory
    from shardwise.runs.timeline import Phase


def write_report(run: RunDirectory, result: Any, phases: Sequence[Phase]) -> None:
    """Write report.json and report.md; `result` is any value msgspec turns into a JSON object."""
    values = msgspec.to_builtins(result)
    content = {"result": values, "start_up": msgspec.to_builtins(phases)}
    run.report_json.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1))
    run.report_markdown.write_text(_markdown(run, values, phases))


def _markdown(run: RunDirectory, values: dict[str, Any], phases: Sequence[Phase]) -> str:
    tested = {f"test {name}": value for name, value in values.get("evaluation", {}).items()}
    flat = {**tested, **{name: value for name, value in values.items() if not isinstance(value, dict)}}
    rows = [f"| {name} | {_words(value)} |" for name, value in flat.items()]
    starts = [f"| {phase.name} | {phase.seconds:.2f} s |" for phase in phases]
    return "\n".join(
        [
            f"# Run {run.path.name}",
            "",
            "| result | value |",
            "|---|---|",
            *rows,
            "",
            "| start-up of rank 0 | time |",
            "|---|---|",
            *starts,
            "",
            "Plan: [plan.toml](plan.toml) · job: [job.json](job.json) · events, logs and errors per rank beside them.",
            "",
        ]
    )


def _words(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
