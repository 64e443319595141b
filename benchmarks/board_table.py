"""Rows of the board from its records, on the terminal, as figures, and as the page docs/results/board.md."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import statistics
from pathlib import Path

from figures import figure

PAGE = Path(__file__).resolve().parents[1] / "docs" / "results" / "board.md"
START, END = "<!-- table: benchmarks/board.py -->\n", "<!-- end of table -->\n"
REFERENCE = "hand-written"
EAGER = "launch-bound"
"""The shape whose reference is not compiled."""
OURS = ("as-it-comes", "at-its-best", "no-masters", "float8", "blocks-fused")
GOALS = {
    ("gpt2-124m", "as-it-comes"): 1.0,
    ("gpt2-124m", "at-its-best"): 1.05,
    ("llama-1.2b", "as-it-comes"): 1.0,
    ("llama-1.2b", "at-its-best"): 1.05,
    ("llama-1.2b", "float8"): 1.25,
    ("width-4096", "float8"): 1.35,
    ("transformers", "as-it-comes"): 1.05,
    (EAGER, "as-it-comes"): 8.0,
}
"""(shape, contender) -> least speed in multiples of the reference."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """What one contender did between its construction and its end; one line of the JSON file."""

    run: str
    """Start of the command; ratios compare contenders of one command only."""
    device: str
    torch: str
    matmul_flops: float
    """Measured bf16 matrix rate, in FLOP/s."""
    shape: str
    contender: str
    num_parameters: int
    rows: int
    context: int
    flops: float
    """Model FLOPs of one step."""
    rates: tuple[float, ...] = ()
    """Steps per second, by turn."""
    losses: tuple[float, ...] = ()
    peak_bytes: int = 0
    cold_s: float | None = None
    """Seconds of construction and first turn with empty caches of the compiler."""
    warm_s: float | None = None
    """The same once more, with the caches of the first time."""
    note: str = ""
    error: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One contender of one shape beside the reference of the same command."""

    record: Record
    """The first record of the contender."""
    steps_per_s: float
    ratio: float
    peak_bytes: int
    memory_ratio: float
    loss: float
    loss_gap: float
    """Largest relative difference between losses of the same step."""
    cold_s: float | None
    warm_s: float | None
    drift: float | None
    """Change of speed between the first and the last measurement, of the reference only."""

    @property
    def tokens_per_s(self) -> float:
        """Trained tokens per second."""
        return self.steps_per_s * self.record.rows * self.record.context

    @property
    def achieved_flops(self) -> float:
        """Model FLOP/s."""
        return self.steps_per_s * self.record.flops

    @property
    def share(self) -> float:
        """Model FLOP/s in multiples of the bf16 matrix rate."""
        return self.achieved_flops / self.record.matmul_flops


def speed(records: list[Record]) -> float:
    """Return the median steps per second over the turns of all records; NaN without any."""
    rates = [rate for record in records for rate in record.rates]
    return statistics.median(rates) if rates else math.nan


def rows_of(records: list[Record]) -> list[Row]:
    """Return one row for each contender of one shape and one command that trained, in the order of the records."""
    trained = [record for record in records if record.rates]
    by_name = {
        name: [record for record in trained if record.contender == name]
        for name in dict.fromkeys(record.contender for record in trained)
    }
    reference = by_name.get(REFERENCE, [])
    return [_row(found, reference) for found in by_name.values()]


def _row(found: list[Record], reference: list[Record]) -> Row:
    exact = reference[0].losses if reference else ()
    gaps = [abs(loss - other) / abs(other) for loss, other in zip(found[0].losses, exact, strict=False)]
    reference_peak = max((record.peak_bytes for record in reference), default=0)
    peak = max(record.peak_bytes for record in found)
    return Row(
        record=found[0],
        steps_per_s=speed(found),
        ratio=speed(found) / speed(reference),
        peak_bytes=peak,
        memory_ratio=peak / reference_peak if reference_peak else math.nan,
        loss=found[0].losses[-1],
        loss_gap=max(gaps, default=math.nan),
        cold_s=_first(record.cold_s for record in found),
        warm_s=_first(record.warm_s for record in found),
        drift=speed(found[1:]) / speed(found[:1]) - 1 if len(found) > 1 else None,
    )


def _first(values) -> float | None:
    return next((value for value in values if value is not None), None)


def show(shape: str, rows: list[Row]) -> None:
    """Print the table of one shape and its figures."""
    heads = f"{'tokens/s':>10} {'x reference':>12} {'TFLOP/s':>8} {'share':>6} {'GiB':>7} {'loss':>8} {'loss gap':>9}"
    print(f"{shape:18} {heads} {'cold s':>7} {'warm s':>7}")
    for row in rows:
        print(
            f"{row.record.contender:18} {row.tokens_per_s:10,.0f} {row.ratio:12.3f} {row.achieved_flops / 1e12:8.0f}"
            f" {row.share:6.1%} {row.peak_bytes / 2**30:7.2f} {row.loss:8.4f} {row.loss_gap:9.1e}"
            f" {_seconds(row.cold_s):>7} {_seconds(row.warm_s):>7}"
        )
        if row.drift is not None:
            print(f"{'':18} drift of {row.record.contender}, last against first: {row.drift:+.1%}")
    print_figures(shape, {row.record.contender: row for row in rows})


def print_figures(shape: str, rows: dict[str, Row]) -> None:
    """Print speed and memory of each plan of shardwise in multiples of the reference, with their goals."""
    unit = "x-eager-hand-written" if shape == EAGER else "x-hand-written"
    for name in OURS:
        if name not in rows:
            continue
        goal = {"at_least": GOALS[shape, name]} if (shape, name) in GOALS else {}
        figure(f"board.{shape}.{name}", rows[name].ratio, unit, **goal)
        if shape != EAGER and rows[name].peak_bytes:
            figure(f"board.{shape}.{name}.memory", rows[name].memory_ratio, unit, at_most=1)
    if "float8" in rows and "torchao-by-hand" in rows:
        ratio = rows["float8"].steps_per_s / rows["torchao-by-hand"].steps_per_s
        goal = {"at_least": 1.0} if shape == "llama-1.2b" else {}
        figure(f"board.{shape}.float8.torchao", ratio, "x-torchao-by-hand", **goal)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


# The JSON file and the page of the documentation.


def append(path: Path | None, record: Record) -> None:
    """Append one line to the JSON file, if there is one."""
    if path is not None:
        with path.open("a") as file:
            file.write(json.dumps(dataclasses.asdict(record)) + "\n")


def read(paths: list[Path]) -> list[Record]:
    """Return the records of several JSON files."""
    lines = [line for path in paths for line in path.read_text().splitlines()]
    return [Record(**json.loads(line)) for line in lines if line]


def write_page(records: list[Record], page: Path = PAGE) -> None:
    """Replace the table in the page; every contender of a shape comes from the last command that measured it.

    Rows and notes of contenders that no record has measured are kept.
    """
    before, _, rest = page.read_text().partition(START)
    table, _, after = rest.partition(END)
    latest = latest_rows(records)
    page.write_text(before + START + merged(table.splitlines(), latest, failures(records, latest)) + END + after)


def latest_rows(records: list[Record]) -> dict[tuple[str, str], Row]:
    """Return (shape, contender) -> the row of the last command that measured it, shapes in the order of the records."""
    latest: dict[tuple[str, str], Row] = {}
    for run in sorted({record.run for record in records}):
        for shape in dict.fromkeys(record.shape for record in records if record.run == run):
            rows = rows_of([record for record in records if record.run == run and record.shape == shape])
            latest |= {(shape, row.record.contender): row for row in rows}
    shapes = list(dict.fromkeys(record.shape for record in records))
    return dict(sorted(latest.items(), key=lambda item: shapes.index(item[0][0])))


def failures(records: list[Record], latest: dict[tuple[str, str], Row]) -> dict[tuple[str, str], str]:
    """Return (shape, contender) -> the error of each contender that was never measured."""
    errors = {(record.shape, record.contender): record.error for record in records if record.error}
    return {key: error for key, error in errors.items() if key not in latest}


HEADS = (
    "shape",
    "contender",
    "tokens/s",
    "x hand-written",
    "TFLOP/s",
    "share",
    "peak GiB",
    "loss",
    "cold / warm s",
)


def merged(table: list[str], latest: dict[tuple[str, str], Row], failed: dict[tuple[str, str], str]) -> str:
    """Return one table of all shapes, new rows in place of old ones, and a line for each failure and note.

    `table` are the lines of the old table, whose other rows, notes and machines are kept.
    """
    rows = {_row_key(line): line for line in table if line.startswith("| ") and _row_key(line) != HEADS[:2]}
    rows |= {key: _line(row) for key, row in latest.items()}
    shapes = list(dict.fromkeys(shape for shape, _ in rows))
    ordered = sorted(rows, key=lambda key: shapes.index(key[0]))
    notes = {_note_key(line): line for line in table if line.startswith("- ")}
    notes = {key: line for key, line in notes.items() if key not in latest}
    notes |= {(shape, name): f"- {shape}, {name}: failed, {error}" for (shape, name), error in failed.items()}
    notes |= {key: f"- {', '.join(key)}: {row.record.note}" for key, row in latest.items() if row.record.note}
    lines = [
        *_machines(table, list(latest.values()), keeps_rows=any(key not in latest for key in rows)),
        "",
        f"| {' | '.join(HEADS)} |",
        "|---" * len(HEADS) + "|",
        *(rows[key] for key in ordered),
        "",
        *notes.values(),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _row_key(line: str) -> tuple[str, str]:
    """Return the shape and the contender of a row of the table."""
    shape, contender = line.removeprefix("| ").split(" | ")[:2]
    return shape, contender


def _note_key(line: str) -> tuple[str, str]:
    """Return the shape and the contender of a note below the table."""
    shape, contender = line.removeprefix("- ").partition(":")[0].split(", ", 1)
    return shape, contender


_MACHINE = re.compile(r"(.+), bf16 matrix products at (\d+)(?: to (\d+))? TFLOP/s\.")


def _machines(table: list[str], rows: list[Row], *, keeps_rows: bool) -> list[str]:
    """Return a sentence for each machine that measured rows of the table, with the range of its matrix rates."""
    rates: dict[str, list[int]] = {}
    for line in table if keeps_rows else ():
        if known := _MACHINE.fullmatch(line):
            rates.setdefault(known[1], []).extend(int(rate) for rate in known.groups()[1:] if rate)
    for row in rows:
        name = f"{row.record.device}, torch {row.record.torch}"
        rates.setdefault(name, []).append(round(row.record.matmul_flops / 1e12))
    return [
        f"{name}, bf16 matrix products at {_range(min(found), max(found))} TFLOP/s." for name, found in rates.items()
    ]


def _range(least: int, most: int) -> str:
    return f"{least}" if least == most else f"{least} to {most}"


def _line(row: Row) -> str:
    record = row.record
    return (
        f"| {record.shape} | {record.contender} | {row.tokens_per_s:,.0f} | {row.ratio:.3f} |"
        f" {row.achieved_flops / 1e12:.0f} | {row.share:.1%} | {row.peak_bytes / 2**30:.1f} | {row.loss:.4f} |"
        f" {_seconds(row.cold_s)} / {_seconds(row.warm_s)} |"
    )
