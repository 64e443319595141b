"""What was found about overlap, in words, as a table and as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.bench.report.findings import Bars, Findings, Section, Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.bench.overlap import Advice, Overlap
    from shardwise.bench.split import Split

_TOO_NOISY = 0.5
"""Half the quartiles' distance of a share, above which the share says nothing."""
METHOD = (
    "Each setting is built anew in every round, and settings take turns: what a busy machine slows, it slows in all.",
    "The step is timed whole; then with every collective left out, which returns at once with its tensors as they are.",
    "That is compute. Then its collectives alone, with tensors of the same shapes, one after the other.",
    "All ranks begin a timed piece together, and the slowest counts. Data is read before; the optimizer is included.",
    "hidden = 1 - (step - compute) / communication, from medians; the spread is half the distance of the quartiles.",
    "Where hidden is below 0, communication also slows compute.",
    "A value is recommended if its step is shorter by more than the spreads of both, and in every round of several.",
    "What it gains is at most what the step waits less for communication: compute is the same work in all settings.",
)


def hidden_words(measured: Overlap) -> str:
    """Say which share of communication is hidden, or that the machine is too busy to tell."""
    split = measured.split
    if split.hidden is None:
        return "nothing sent"
    if split.hidden_spread > _TOO_NOISY:
        return "too noisy"
    return f"{split.hidden:.0%} ± {split.hidden_spread:.0%}"


def setting_words(measured: Overlap) -> str:
    """Say which setting it is."""
    values = (f"{name.rpartition('.')[2]} {_number(value)}" for name, value in measured.values.items())
    return ", ".join(values) or "as planned"


def overlap_table(measured: Sequence[Overlap], advice: Advice) -> Table:
    """Return one row a setting; the chosen one has a star."""
    rows = []
    for number, each in enumerate(measured):
        split = each.split
        name = ("plan: " if number == 0 else "") + setting_words(each) + (" *" if number == advice.chosen else "")
        rows.append(
            (
                name,
                f"{1e3 * split.step.median_s:.2f}",
                f"±{split.step.spread:.1%}",
                f"{1e3 * split.compute.median_s:.2f}" if split.compute else "",
                f"{1e3 * split.communication.median_s:.2f}",
                str(split.collectives),
                f"{split.num_bytes / 2**20:.2f}",
                hidden_words(each),
            )
        )
    header = ("setting", "step ms", "spread", "compute ms", "communication ms", "collectives", "MiB", "hidden")
    return Table(header=header, rows=tuple(rows))


def verdict(measured: Sequence[Overlap], advice: Advice) -> str:
    """Return the one sentence to read: what to change, and what it saves."""
    own, chosen = measured[0], measured[advice.chosen]
    step_s = own.split.step.median_s
    if len(measured) == 1:
        reason = "nothing else of this plan can be set, or it would come to the same"
        return f"{setting_words(own)}: communication hidden {hidden_words(own)}; {reason}."
    if advice.chosen:
        return (
            f"{setting_words(chosen)} takes {advice.gain_s / step_s:.1%} less than {setting_words(own)}"
            f" (spread {advice.spread_s / step_s:.1%}): take it."
        )
    best = f"the best of the others gains {advice.gain_s / step_s:+.1%}, the spread is {advice.spread_s / step_s:.1%}"
    if len(own.rounds) == 1:
        best = f"one round is not enough to recommend another ({best})"
    return f"Keep {setting_words(own)}: {best}."


def overlap_findings(
    measured: Sequence[Overlap], advice: Advice, *, title: str, facts: tuple[tuple[str, str], ...]
) -> Findings:
    """Return what a report shows."""
    bars = Bars(
        title="A step",
        unit="ms",
        parts=("compute", "compute that hides communication", "waiting for communication"),
        rows=tuple((setting_words(each), tuple(1e3 * part for part in _parts(each.split))) for each in measured),
    )
    return Findings(
        title=title,
        verdict=verdict(measured, advice),
        facts=facts,
        method=METHOD,
        sections=(Section(title="Settings", parts=(overlap_table(measured, advice), bars)),),
    )


def _parts(split: Split) -> tuple[float, float, float]:
    """Return seconds of a step: compute alone, compute beside communication, and waiting for communication."""
    step = split.step.median_s
    waiting = min(step, max(0.0, split.exposed_s))
    hiding = min(step - waiting, max(0.0, split.communication.median_s - waiting))
    return step - waiting - hiding, hiding, waiting


def _number(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
