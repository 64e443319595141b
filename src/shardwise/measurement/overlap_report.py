"""`bench overlap`: measures communication settings of a plan, and recommends the fastest."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from shardwise.environment import identify
from shardwise.errors import InputError
from shardwise.measurement.overlap import (
    BUCKETS_MB,
    PREFETCHES,
    Advice,
    Effort,
    Overlap,
    advise,
    advised_plan,
    check_plan,
    measure_overlap,
    vary,
)
from shardwise.measurement.report import BenchReport, machine_facts
from shardwise.measurement.specs import bench_device, load_torch_job, warn_if_busy
from shardwise.planner.settle import settle, split_settings
from shardwise.plans import Plan  # noqa: TC001 - read at run time by msgspec
from shardwise.plans.rules import uses_ddp
from shardwise.plots.figures import Bars, Table, table_lines
from shardwise.plots.page import Findings, Section

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from shardwise.measurement.specs import OverlapSpec
    from shardwise.measurement.split import Split


class OverlapReport(BenchReport, frozen=True, kw_only=True):
    """The measurements of each setting, and the recommended one."""

    title: str
    settings: tuple[Overlap, ...]
    """Measurements of each setting, the plan's own first."""
    advice: Advice
    plan: Plan
    """The plan with the recommended values."""
    device: str

    def to_json(self) -> str:
        """Return each setting with the share of its communication that is hidden, the advice and the verdict."""
        settings = []
        for each in self.settings:
            share = {"hidden": each.split.hidden, "hidden_spread": each.split.hidden_spread}
            settings.append({**msgspec.to_builtins(each), **share})
        sentence = verdict(self.settings, self.advice)
        document = {"title": self.title, "settings": settings, "advice": self.advice, "verdict": sentence}
        return msgspec.json.encode(document).decode()

    def to_text(self) -> str:
        """Return a table with one row per setting, and the recommendation."""
        table = overlap_table(self.settings, self.advice)
        return "\n".join([self.title, *table_lines(table), verdict(self.settings, self.advice)])

    def findings(self) -> Findings:
        """Return the content of the HTML or Markdown report."""
        facts = machine_facts(torch.device(self.device))
        return overlap_findings(self.settings, self.advice, title=f"Overlap: {self.title}", facts=facts)


def measure(spec: OverlapSpec) -> OverlapReport | None:
    """Measure a job with several settings of a plan; return None on ranks other than 0 of an existing world."""
    buckets = read_numbers("--buckets", spec.buckets)
    prefetch = read_numbers("--prefetch", spec.prefetch)
    reference, overrides = split_settings(spec.job, spec.settings)
    started = identify().world_size
    size = started if started > 1 else spec.nproc or 1
    where, opened = bench_device(spec.place, spec.nproc or 1)
    batch_size = load_torch_job(reference).batch_size
    plan = settle(spec.plan, batch_size=batch_size, world_size=size, device=where, overrides=overrides)
    check_plan(plan)
    varied = _settings(plan, buckets, prefetch)
    warn_if_busy()
    effort = Effort(rounds=spec.rounds)
    found = measure_overlap(
        reference, plan, varied, effort=effort, nproc=spec.nproc, device=opened, backend=spec.place.backend
    )
    if found is None:
        return None
    advice = advise(found)
    return OverlapReport(
        title=f"{Path(reference.path).name} on {plan.layout} (zero {plan.zero}), {size} ranks",
        settings=tuple(found),
        advice=advice,
        plan=advised_plan(plan, found, advice),
        device=opened,
    )


def read_numbers(option: str, text: str | None) -> tuple[float, ...] | None:
    """Parse comma-separated positive numbers; return None if `text` is None."""
    if text is None:
        return None
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or not all(0 < value < float("inf") for value in values):
        raise InputError(
            f"{option} must be a list of positive numbers, got {text!r}",
            code="cli.number-list-invalid",
            fix="use comma-separated numbers above 0, such as 1,5,25",
        )
    return values


def _settings(
    plan: Plan, buckets: tuple[float, ...] | None, prefetch: tuple[float, ...] | None
) -> list[dict[str, Any]]:
    """Return the settings to measure; raise InputError for options that do not apply to the plan."""
    kind = f"plan {plan.layout} (zero {plan.zero})"
    if buckets is not None and not uses_ddp(plan):
        raise InputError(
            f"--buckets applies to DDP, which {kind} does not use",
            code="bench.buckets-without-ddp",
            fix="use --plan ddp, or omit --buckets",
        )
    if prefetch is not None and plan.zero < 2:
        raise InputError(
            f"--prefetch applies to sharded parameters, but {kind} does not shard them",
            code="bench.prefetch-without-shards",
            fix="use --plan fsdp, or omit --prefetch",
        )
    if prefetch is not None and not all(depth == int(depth) for depth in prefetch):
        raise InputError(
            f"--prefetch must be integers, got {', '.join(f'{depth:g}' for depth in prefetch)}",
            code="bench.prefetch-not-whole",
            fix="use integers, such as 1,2,4",
        )
    return vary(plan, buckets=buckets or BUCKETS_MB, prefetches=tuple(int(depth) for depth in prefetch or PREFETCHES))


# The results as text, as a table and as bars.


_TOO_NOISY = 0.5
"""Spread of the hidden share above which it is reported as too noisy."""
METHOD = (
    "Each setting is built again in every round, and settings alternate, so that load on the machine affects all.",
    "step is the complete step; compute is the step with every collective skipped, leaving tensors unchanged.",
    "communication is the collectives of the step alone, with tensors of the same shapes, one after the other.",
    "All ranks start a timed block together, and the slowest counts. Data is read before; the optimizer is included.",
    "hidden = 1 - (step - compute) / communication, from medians; the spread is half the interquartile range.",
    "If hidden is negative, communication also slows compute down.",
    "A value is recommended if its step is shorter by more than the spreads of both, in every one of several rounds.",
    "Its gain is at most the reduction of exposed communication: compute is the same work in all settings.",
)


def hidden_text(measured: Overlap) -> str:
    """Return the share of communication that compute hides as text, or "too noisy"."""
    split = measured.split
    if split.hidden is None:
        return "no communication"
    if split.hidden_spread > _TOO_NOISY:
        return "too noisy"
    return f"{split.hidden:.0%} ± {split.hidden_spread:.0%}"


def setting_text(measured: Overlap) -> str:
    """Return the values of a setting as text, such as "bucket_mb 25"."""
    values = (f"{name.rpartition('.')[2]} {_number(value)}" for name, value in measured.values.items())
    return ", ".join(values) or "as planned"


def overlap_table(measured: Sequence[Overlap], advice: Advice) -> Table:
    """Return a table with one row per setting and a star at the recommended setting."""
    rows = []
    for number, each in enumerate(measured):
        split = each.split
        name = setting_text(each)
        if number == 0:
            name = f"plan: {name}"
        if number == advice.chosen:
            name = f"{name} *"
        rows.append(
            (
                name,
                f"{1e3 * split.step.median_s:.2f}",
                f"±{split.step.spread:.1%}",
                f"{1e3 * split.compute.median_s:.2f}" if split.compute else "",
                f"{1e3 * split.communication.median_s:.2f}",
                str(split.collectives),
                f"{split.num_bytes / 2**20:.2f}",
                hidden_text(each),
            )
        )
    header = ("setting", "step ms", "spread", "compute ms", "communication ms", "collectives", "MiB", "hidden")
    return Table(header=header, rows=tuple(rows))


def verdict(measured: Sequence[Overlap], advice: Advice) -> str:
    """Return the recommendation and its gain in one sentence."""
    own, chosen = measured[0], measured[advice.chosen]
    step_s = own.split.step.median_s
    if len(measured) == 1:
        reason = "this plan has no other setting of different effect"
        return f"{setting_text(own)}: communication hidden {hidden_text(own)}; {reason}."
    if advice.chosen:
        return (
            f"{setting_text(chosen)} takes {advice.gain_s / step_s:.1%} less than {setting_text(own)}"
            f" (spread {advice.spread_s / step_s:.1%}): use it."
        )
    best = f"the best other setting gains {advice.gain_s / step_s:+.1%}, the spread is {advice.spread_s / step_s:.1%}"
    if len(own.rounds) == 1:
        best = f"one round is not enough to recommend another setting ({best})"
    return f"Keep {setting_text(own)}: {best}."


def overlap_findings(
    measured: Sequence[Overlap], advice: Advice, *, title: str, facts: tuple[tuple[str, str], ...]
) -> Findings:
    """Return the content of the HTML or Markdown report."""
    bars = Bars(
        title="A step",
        unit="ms",
        parts=("compute", "compute that overlaps communication", "exposed communication"),
        rows=tuple((setting_text(each), tuple(1e3 * part for part in _parts(each.split))) for each in measured),
    )
    return Findings(
        title=title,
        verdict=verdict(measured, advice),
        facts=facts,
        method=METHOD,
        sections=(Section(title="Settings", parts=(overlap_table(measured, advice), bars)),),
    )


def _parts(split: Split) -> tuple[float, float, float]:
    """Return seconds of a step: compute alone, compute that overlaps communication, and exposed communication."""
    step = split.step.median_s
    waiting = min(step, max(0.0, split.exposed_s))
    hiding = min(step - waiting, max(0.0, split.communication.median_s - waiting))
    return step - waiting - hiding, hiding, waiting


def _number(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
