"""What was found about scaling, in words, as tables and as plots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.bench.report.findings import Bars, Findings, Plot, Section, Series, Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.bench.scaling import Curve, Point

_CLOSE = 0.95
"""From this efficiency on, nothing is said to limit."""
_TOO_NOISY = 0.3
"""A spread of efficiency above which nothing can be said."""
PARTS = {
    "compute": "compute",
    "communication": "communication that steps wait for",
    "data": "reading data",
    "idle": "waiting for the slowest rank",
}
JOB_METHOD = (
    "Ranks are fresh processes, with the threads a training would give them; numbers of ranks take turns.",
    "Strong scaling keeps the global batch, weak scaling keeps the batch of every rank.",
    "Throughput is of steps that read their data.",
    "The same steps are timed again on data that is there, and once more with every collective left out.",
    "compute: without collectives, mean of all ranks; idle: what the slowest of them takes longer.",
    "communication: what the whole step takes longer than the slowest rank's compute; data: what reading adds.",
    "efficiency = throughput / (ranks x throughput of one); medians, with half the distance of the quartiles of both.",
    "predicted: what `shardwise plan` says of the same plan on this machine.",
)
SCRIPT_METHOD = (
    "The script is started as by `shardwise launch`, by a process with torch imported; numbers of ranks take turns.",
    "efficiency = throughput / (ranks x throughput of one); medians, with half the distance of the quartiles of both.",
)


def scaling_table(curve: Curve) -> Table:
    """Return one row for each number of ranks."""
    has_parts = any(point.parts is not None for point in curve.points)
    has_batch = any(point.batch_size is not None for point in curve.points)
    has_predicted = any(point.predicted_per_s is not None for point in curve.points)
    header = ["ranks", *(["batch", "plan"] if has_batch else []), curve.unit, "spread", "efficiency"]
    header += ["predicted"] if has_predicted else []
    header += [f"{name} ms" for name in PARTS] if has_parts else []
    rows = []
    for point in curve.points:
        row = [str(point.ranks), *([str(point.batch_size), point.plan] if has_batch else [])]
        row += [_rate(point.per_s), "" if point.spread is None else f"±{point.spread:.1%}"]
        row += [_efficiency(curve, point)]
        row += [_rate(point.predicted_per_s) if point.predicted_per_s else ""] if has_predicted else []
        parts = point.parts
        row += ["" if parts is None else f"{1e3 * parts[name]:.2f}" for name in PARTS] if has_parts else []
        rows.append(tuple(row))
    return Table(header=tuple(header), rows=tuple(rows))


@dataclass(frozen=True, kw_only=True)
class Room:
    """What ranks on this machine have to share."""

    cores: int | None = None
    """Of a CPU that they compute on; None for ranks on GPUs."""
    threads: int | None = None
    """That each rank was told to use; None shares out the cores."""
    gpus: int = 0

    def crowd(self, ranks: int, first: int) -> str:
        """Say how so many ranks stand in each other's way where the `first` ones did not; empty if they do not."""
        if self.cores is None:
            return f"they share {self.gpus} GPU" + "s" * (self.gpus > 1) if ranks > self.gpus else ""
        if self.threads is None:
            return (
                f"they share {self.cores} cores, which {'one had to itself' if first == 1 else f'{first} had before'}"
            )
        crowded = ranks * self.threads > self.cores
        return (
            f"they share {self.cores} cores, with {self.threads} thread{'s' * (self.threads > 1)} each"
            if crowded
            else ""
        )


def limits(curve: Curve, room: Room) -> list[str]:
    """Say, for each number of ranks after the first, what keeps it from the ideal."""
    return [f"{point.ranks} ranks: {_limit(curve, point, room)}" for point in curve.points[1:]]


def _limit(curve: Curve, point: Point, room: Room) -> str:
    crowd = room.crowd(point.ranks, curve.points[0].ranks)
    reasons = [crowd] if crowd else []
    growth = curve.growth(point) or {}
    worst = max(growth, key=lambda name: growth[name], default=None)
    if (curve.efficiency_spread(point) or 0.0) > _TOO_NOISY:
        reasons.append("times vary too much to say more")
    elif curve.efficiency(point) >= _CLOSE:
        reasons.append("close to ideal")
    elif worst is not None and growth[worst] > 0:
        reasons.append(f"most is lost to {PARTS[worst]} ({1e3 * growth[worst]:+.1f} ms a step)")
    return f"{_efficiency(curve, point)} of ideal" + "".join(f"; {reason}" for reason in reasons)


def _efficiency(curve: Curve, point: Point) -> str:
    spread = curve.efficiency_spread(point)
    return f"{curve.efficiency(point):.0%}" + ("" if spread is None else f" ± {spread:.0%}")


def verdict(curves: Sequence[Curve]) -> str:
    """Return the one sentence to read: what the most ranks gave."""
    return "; ".join(_gain(curve) for curve in curves) + "."


def _gain(curve: Curve) -> str:
    first, last = curve.points[0], curve.points[-1]
    if (curve.efficiency_spread(last) or 0.0) > _TOO_NOISY:
        return f"{curve.mode}: times vary too much to say (efficiency {_efficiency(curve, last)} on {last.ranks} ranks)"
    words = f"{curve.mode}: {last.ranks} ranks do {last.per_s / first.per_s:.2f} times the work of {first.ranks}"
    return f"{words} (efficiency {_efficiency(curve, last)})"


def scaling_findings(
    curves: Sequence[Curve], *, title: str, facts: tuple[tuple[str, str], ...], notes: Sequence[Sequence[str]]
) -> Findings:
    """Return what a report shows; `notes` say of each curve what limits it."""
    is_job = any(point.batch_size is not None for curve in curves for point in curve.points)
    return Findings(
        title=title,
        verdict=verdict(curves),
        facts=facts,
        method=JOB_METHOD if is_job else SCRIPT_METHOD,
        sections=tuple(_section(curve, words) for curve, words in zip(curves, notes, strict=True)),
    )


def _section(curve: Curve, words: Sequence[str]) -> Section:
    parts: list[Plot | Bars | Table] = [scaling_table(curve), _throughput(curve)]
    split = [
        (f"{point.ranks} rank{'s' * (point.ranks > 1)}", point.parts)
        for point in curve.points
        if point.parts is not None
    ]
    if split:
        parts.append(
            Bars(
                title="Where the time of a step goes",
                unit="ms",
                parts=tuple(PARTS.values()),
                rows=tuple((label, tuple(1e3 * values[name] for name in PARTS)) for label, values in split),
            )
        )
    text = " ".join(f"{sentence[0].upper()}{sentence[1:]}." for sentence in (*words, curve.note) if sentence)
    return Section(title=curve.title.capitalize(), text=text, parts=tuple(parts))


def _throughput(curve: Curve) -> Plot:
    first = curve.points[0]
    series = [
        Series(name="measured", points=tuple((point.ranks, point.per_s) for point in curve.points)),
        Series(
            name="ideal",
            points=tuple((point.ranks, first.per_s * point.ranks / first.ranks) for point in curve.points),
            dashed=True,
        ),
    ]
    predicted = tuple((point.ranks, point.predicted_per_s) for point in curve.points if point.predicted_per_s)
    if predicted:
        series.append(Series(name="predicted", points=predicted, dashed=True))
    return Plot(title="Throughput", x_label="ranks", y_label=curve.unit, series=tuple(series))


def _rate(per_s: float) -> str:
    return f"{per_s:,.1f}" if per_s >= 10 else f"{per_s:.3f}"
