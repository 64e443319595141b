"""The last lines of a training: what came out, how long it took, where to look."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from shardwise.runs.console import say

if TYPE_CHECKING:
    from shardwise.runs import RunDirectory


def summarise(run: RunDirectory) -> None:
    """Say the result of a finished run."""
    result = msgspec.json.decode(run.report_json.read_bytes())["result"]
    for name, value in result["evaluation"].items():
        shown = "nan" if value is None else f"{value:.2%}" if "accuracy" in name else f"{value:.4f}"
        say(f"test {name:<10} {shown}")
    first_step = result["first_step"]
    resumed = f", resumed at step {first_step}" if first_step else ""
    say(f"training time   {result['training_s']:.1f} s for {result['steps'] - first_step} steps{resumed}")
    say(f"weights         {run.weights}")
    if run.adapter.is_dir():
        say(f"adapter         {run.adapter}")
    say(f"run directory   {run.path}")
