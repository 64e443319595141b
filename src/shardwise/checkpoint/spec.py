"""What `checkpoint` is asked (to list, check, inspect, compare, prune, convert), and the Reports that answer it."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path  # noqa: TC003 - msgspec reads the annotations
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from shardwise.errors import InputError
from shardwise.runs.console import render_table
from shardwise.runs.directory import parse_keep
from shardwise.spec import NonNegativeInt, PositiveInt, Report, Spec, argument, option
from shardwise.units import format_bytes_si

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


Kind = Literal["torch", "dcp", "hf", "mlx", "peft", "deepspeed", "shardwise"]
"""The kinds that `convert` writes."""


class ListSpec(Spec, frozen=True, kw_only=True):
    """Checkpoints to list by their manifests, sizes and headers."""

    path: Annotated[Path, argument("PATH")]
    """A run directory, a folder of checkpoints, or one."""


class CheckSpec(ListSpec, frozen=True, kw_only=True):
    """Checkpoints whose every byte is read."""


class InspectSpec(Spec, frozen=True, kw_only=True):
    """A checkpoint of any kind to describe."""

    path: Annotated[Path, argument("PATH")]
    tensors: bool = False
    """List every tensor with dtype and shape."""


class DiffSpec(Spec, frozen=True, kw_only=True):
    """Two checkpoints of any kinds to compare."""

    left: Annotated[Path, argument("LEFT")]
    right: Annotated[Path, argument("RIGHT")]


class PruneSpec(Spec, frozen=True, kw_only=True):
    """A folder of checkpoints, and which of them stay."""

    path: Annotated[Path, argument("PATH")]
    keep: Annotated[str, option("--keep", metavar="RULES")]
    """Checkpoints that stay: a count (3), an age (12h, 2d), min:METRIC or max:METRIC, comma separated, or all."""

    def __post_init__(self) -> None:
        """Refuse rules that cannot be read."""
        super().__post_init__()
        parse_keep(self.keep)


class ConvertSpec(Spec, frozen=True, kw_only=True):
    """A checkpoint of any kind, and the kind to write it as."""

    source: Annotated[Path, argument("SOURCE")]
    target: Annotated[Path, argument("TARGET")]
    to: Kind
    """What to write."""
    weights: bool = False
    """Only the model's weights, as a plain state dict where TARGET is torch."""
    step: NonNegativeInt | None = None
    """Optimizer steps made, where SOURCE does not hold their number."""
    config: Path | None = None
    """config.json to put beside the weights of a Hugging Face folder."""
    zero: Annotated[int, msgspec.Meta(ge=1, le=3)] | None = None
    """DeepSpeed: ZeRO files of this stage, for --nproc."""
    nproc: PositiveInt | None = None
    """DeepSpeed: ranks that load them; without, a universal one."""

    def __post_init__(self) -> None:
        """Refuse half of what ZeRO files need."""
        super().__post_init__()
        if (self.zero is None) != (self.nproc is None):
            raise InputError(
                "--zero and --nproc go together",
                code="cli.options-incomplete",
                fix="give both, or neither for a universal checkpoint",
            )


# The Reports of `checkpoint`: what a listing, a check, a comparison or a conversion found, and how it is shown.


MAX_ROWS = 20
"""Differing tensors that are shown, the worst first."""
_LONGEST = 300
"""Characters of a fact that are shown."""


class ListingRow(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint; what only its manifest holds is None where that cannot be read."""

    path: Path
    is_latest: bool
    damages: tuple[str, ...]
    step: int | None
    saved_at: float | None = None
    """Seconds since 1970."""
    num_bytes: int | None = None
    layout: str = ""
    metrics: dict[str, float] = {}


class ListReport(Report, frozen=True, kw_only=True):
    """Every checkpoint at a path, sound or not."""

    rows: tuple[ListingRow, ...]

    def to_text(self) -> str:
        """Return a table of checkpoints, and below it what is wrong with the damaged ones."""
        cells = []
        for row in self.rows:
            step = "" if row.step is None else str(row.step)
            saved = ""
            if row.saved_at is not None:
                saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.saved_at))
            size = "" if row.num_bytes is None else format_bytes_si(row.num_bytes)
            metrics = " ".join(f"{name} {value:.4g}" for name, value in row.metrics.items())
            state = "damaged" if row.damages else "sound"
            name = f"{row.path.name} (latest)" if row.is_latest else row.path.name
            cells.append((step, saved, size, row.layout, metrics, state, name))
        lines = [_table(("step", "saved", "size", "layout", "metrics", "state", "name"), cells)]
        for row in self.rows:
            lines += _titled("damaged", row.damages)
        return "\n".join(lines)


class CheckReport(ListReport, frozen=True, kw_only=True):
    """Whether every byte of each checkpoint matches its checksum."""

    def to_text(self) -> str:
        """Return the sound checkpoints."""
        return "\n".join(f"sound: {row.path}" for row in self.rows if not row.damages)

    def note(self) -> str:
        """Return what is damaged."""
        lines = []
        for row in self.rows:
            lines += _titled("damaged", row.damages)
        return "\n".join(lines)


class TensorRow(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of a checkpoint."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


class InspectReport(Report, frozen=True, kw_only=True):
    """The facts and tensors of a checkpoint of any kind."""

    path: Path
    kind: str
    step: int
    tensors: tuple[TensorRow, ...]
    facts: dict[str, Any]
    not_understood: tuple[str, ...]
    lists_tensors: bool

    def to_text(self) -> str:
        """Return how much of each part there is, the facts, and the tensors if they were asked for."""
        parts: dict[str, list[TensorRow]] = {}
        for tensor in self.tensors:
            parts.setdefault(tensor.name.partition("/")[0], []).append(tensor)
        cells = []
        for part, tensors in parts.items():
            elements = sum(math.prod(tensor.shape) for tensor in tensors)
            size = sum(tensor.num_bytes for tensor in tensors)
            cells.append((part, str(len(tensors)), f"{elements:,}", format_bytes_si(size)))
        lines = [f"{self.path}: {self.kind}, step {self.step}"]
        lines.append(_table(("part", "tensors", "elements", "size"), cells))
        lines += [f"{name}: {_fact(name, value)}" for name, value in self.facts.items()]
        lines += _titled("not understood", self.not_understood)
        if self.lists_tensors:
            lines.append(_table(("tensor", "dtype", "shape", "size"), map(_tensor_cells, self.tensors)))
        return "\n".join(lines)


@dataclass(frozen=True)
class TensorDifference:
    """How the values of one tensor differ."""

    name: str
    num_different: int
    """Elements with other bits."""
    num_elements: int
    largest: float
    """Largest difference of two elements; nan where only one of them is a number."""
    relative: float
    """That, divided by the largest magnitude in either."""


class DiffReport(Report, frozen=True, kw_only=True):
    """Two checkpoints side by side."""

    left: Path
    right: Path
    num_equal: int
    """Tensors with the same bits."""
    only_left: tuple[str, ...]
    only_right: tuple[str, ...]
    other_form: tuple[str, ...]
    """Of another shape or dtype, each with both."""
    values: tuple[TensorDifference, ...]
    facts: tuple[tuple[str, Any, Any], ...]
    """Name, left and right value; None where it is missing."""

    @property
    def are_tensors_equal(self) -> bool:
        """Whether both hold the same tensors, bit for bit."""
        return not (self.only_left or self.only_right or self.other_form or self.values)

    def to_text(self) -> str:
        """Return which tensors and facts differ, and by how much."""
        lines = _titled(f"only in {self.left}", self.only_left)
        lines += _titled(f"only in {self.right}", self.only_right)
        lines += _titled("other shape or dtype", self.other_form)
        if self.values:
            # NaN where the other has a number is worst of all.
            worst = sorted(self.values, key=lambda found: math.inf if math.isnan(found.relative) else found.relative)
            worst.reverse()
            lines.append(
                _table(("tensor", "differing", "largest", "relative"), map(_difference_cells, worst[:MAX_ROWS]))
            )
            if len(worst) > MAX_ROWS:
                lines.append(f"and {len(worst) - MAX_ROWS} more tensors")
        lines += [f"{name}: {_fact(name, one)} | {_fact(name, other)}" for name, one, other in self.facts]
        result = "all tensors are equal" if self.are_tensors_equal else "the tensors differ"
        lines.append(f"{result}: {self.num_equal} with the same bits, {len(self.values)} with other values")
        return "\n".join(lines)


class PruneReport(Report, frozen=True, kw_only=True):
    """Which checkpoints were removed."""

    removed: tuple[Path, ...]
    num_kept: int

    def to_text(self) -> str:
        """Return what was removed, and how many stay."""
        return "\n".join([*_titled("removed", map(str, self.removed)), f"{self.num_kept} checkpoints stay"])


class ConvertReport(Report, frozen=True, kw_only=True):
    """What one conversion wrote, and what it left out."""

    source_kind: str
    target_kind: str
    path: Path
    step: int
    """Optimizer steps that the source had made, also where the target holds weights alone."""
    num_tensors: int
    num_bytes: int
    tied: dict[str, str]
    left_out: tuple[str, ...]
    """What of the source is not in the target, one sentence each."""
    moved: tuple[str, ...] = ()
    """Tensors whose axes are in another order than in the source: those taken for a convolution of MLX."""

    def to_text(self) -> str:
        """Return what was written, and what was not."""
        size = format_bytes_si(self.num_bytes)
        kinds = f"{self.source_kind} -> {self.target_kind}"
        lines = [f"{kinds}: {self.num_tensors} tensors, {size}, step {self.step}, in {self.path}"]
        lines += _titled("tied", [f"{alias} is {name}" for alias, name in self.tied.items()])
        lines += _titled("axes moved, as a convolution's", self.moved)
        lines += _titled("left out", self.left_out)
        return "\n".join(lines)


def _tensor_cells(tensor: TensorRow) -> tuple[str, ...]:
    shape = " x ".join(map(str, tensor.shape)) or "scalar"
    return tensor.name, tensor.dtype, shape, format_bytes_si(tensor.num_bytes)


def _difference_cells(found: TensorDifference) -> tuple[str, ...]:
    share = f"{found.num_different:,} of {found.num_elements:,}"
    return found.name, share, f"{found.largest:.3g}", f"{found.relative:.3g}"


def _fact(name: str, value: Any) -> str:
    """Return one fact in a line, or a plan in its own lines."""
    if value is None:
        return "nothing"
    if name == "random" and isinstance(value, dict):
        return f"states of {len(value)} ranks"
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    if isinstance(value, str) and "\n" in value:
        return "\n  " + value.strip().replace("\n", "\n  ")
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _titled(title: str, items: Iterable[str]) -> list[str]:
    return [f"{title}: {item}" for item in items]


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return render_table(table, width=160)
