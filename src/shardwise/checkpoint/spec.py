"""The Specs and Reports of `shardwise checkpoint`: ls, check, inspect, diff, prune and convert."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path  # noqa: TC003 - msgspec reads the annotations
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from shardwise.data.storage.locations import RemotePath, check_url
from shardwise.errors import InputError
from shardwise.runs.console import render_table
from shardwise.runs.directory import parse_keep
from shardwise.spec import NonNegativeInt, PositiveInt, Report, Spec, argument, is_url, option
from shardwise.units import MISSING, format_bytes_si

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


Kind = Literal["torch", "dcp", "hf", "mlx", "peft", "deepspeed", "shardwise"]
"""The checkpoint formats that `convert` writes."""


class ListSpec(Spec, frozen=True, kw_only=True):
    """The request to list checkpoints."""

    path: Annotated[str, argument("PATH")]
    """A run directory, a directory of checkpoints, or a checkpoint; also the URL of one on object storage."""

    def __post_init__(self) -> None:
        """Accept a Path, and reject URLs that contain secrets."""
        msgspec.structs.force_setattr(self, "path", str(self.path))
        super().__post_init__()
        if is_url(self.path):
            check_url(self.path)


class CheckSpec(ListSpec, frozen=True, kw_only=True):
    """The request to verify the checksums of checkpoints."""


class InspectSpec(Spec, frozen=True, kw_only=True):
    """The request to describe a checkpoint of any supported format."""

    path: Annotated[Path, argument("PATH")]
    tensors: bool = False
    """List every tensor with its dtype and shape."""


class DiffSpec(Spec, frozen=True, kw_only=True):
    """The request to compare two checkpoints of any supported formats."""

    left: Annotated[Path, argument("LEFT")]
    right: Annotated[Path, argument("RIGHT")]


class PruneSpec(Spec, frozen=True, kw_only=True):
    """The request to remove old checkpoints from a directory."""

    path: Annotated[Path, argument("PATH")]
    keep: Annotated[str, option("--keep", metavar="RULES")]
    """Checkpoints to keep: a number (3), an age (12h, 2d), min:METRIC or max:METRIC, comma separated, or all."""

    def __post_init__(self) -> None:
        """Validate the retention rules."""
        super().__post_init__()
        parse_keep(self.keep)


class ConvertSpec(Spec, frozen=True, kw_only=True):
    """The request to convert a checkpoint to a different format."""

    source: Annotated[Path, argument("SOURCE")]
    target: Annotated[Path, argument("TARGET")]
    to: Kind
    """Format of TARGET."""
    weights: bool = False
    """Convert only the model weights; for torch, write a plain state dict."""
    step: NonNegativeInt | None = None
    """Number of optimizer steps, if SOURCE does not contain it."""
    config: Path | None = None
    """config.json, or a folder with it, to copy into a Hugging Face directory; by default that of the run."""
    zero: Annotated[int, msgspec.Meta(ge=1, le=3)] | None = None
    """DeepSpeed: write ZeRO files of this stage; requires --nproc."""
    nproc: PositiveInt | None = None
    """DeepSpeed: number of ranks of the ZeRO files; without it, write a universal checkpoint."""

    def __post_init__(self) -> None:
        """Check that `zero` and `nproc` are both set or both unset."""
        super().__post_init__()
        if (self.zero is None) != (self.nproc is None):
            raise InputError(
                "--zero and --nproc must be used together, got only one of them",
                code="cli.options-incomplete",
                fix="pass both options, or neither for a universal checkpoint",
            )


MAX_ROWS = 20
"""Maximum number of differing tensors to show, largest difference first."""
_MAX_FACT_LENGTH = 300
"""Maximum number of characters to show of a fact."""


class ListingRow(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint in a listing; if its manifest is unreadable, the fields read from it are None or empty."""

    path: Path | RemotePath
    is_latest: bool
    damages: tuple[str, ...]
    step: int | None
    saved_at: float | None = None
    """Seconds since 1970."""
    num_bytes: int | None = None
    layout: str = ""
    """Empty for a checkpoint of a custom loop, which is saved without a plan."""
    metrics: dict[str, float] = {}
    is_best: bool = False
    """Whether it is the best by the metric of --keep."""


class ListReport(Report, frozen=True, kw_only=True):
    """All checkpoints at a path, including damaged ones."""

    rows: tuple[ListingRow, ...]

    def to_text(self) -> str:
        """Return a table of the checkpoints, followed by the damage of each damaged checkpoint."""
        cells = []
        for row in self.rows:
            step = saved = size = ""
            if row.step is not None:
                step = str(row.step)
            if row.saved_at is not None:
                saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.saved_at))
            if row.num_bytes is not None:
                size = format_bytes_si(row.num_bytes)
            metrics = " ".join(f"{name} {value:.4g}" for name, value in row.metrics.items())
            state = "damaged" if row.damages else "sound"
            marks = [mark for mark, is_set in (("latest", row.is_latest), ("best", row.is_best)) if is_set]
            name = f"{row.path.name} ({', '.join(marks)})" if marks else row.path.name
            cells.append((step, saved, size, row.layout or MISSING, metrics, state, name))
        table = _table(("step", "saved", "size", "layout", "metrics", "state", "name"), cells)
        return "\n".join([table, *self._damage_lines()])

    def _damage_lines(self) -> list[str]:
        lines = []
        for row in self.rows:
            lines += _titled("damaged", row.damages)
        return lines


class CheckReport(ListReport, frozen=True, kw_only=True):
    """The result of verifying the checksums of all checkpoints at a path."""

    def to_text(self) -> str:
        """Return one line per intact checkpoint."""
        return "\n".join(f"sound: {row.path}" for row in self.rows if not row.damages)

    def note(self) -> str:
        """Return one line per damaged file."""
        return "\n".join(self._damage_lines())


class TensorRow(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor of an inspected checkpoint."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


class InspectReport(Report, frozen=True, kw_only=True):
    """The facts and tensors of a checkpoint."""

    path: Path
    kind: str
    step: int
    tensors: tuple[TensorRow, ...]
    facts: dict[str, Any]
    not_understood: tuple[str, ...]
    lists_tensors: bool

    def to_text(self) -> str:
        """Return the size of the model and optimizer state, the facts and, if requested, the tensors."""
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
    """The difference between the values of a tensor in two checkpoints."""

    name: str
    num_different: int
    """Number of elements that are not bitwise equal."""
    num_elements: int
    largest: float
    """Largest absolute difference of two elements; NaN if exactly one of them is NaN."""
    relative: float
    """Largest difference divided by the largest magnitude in either tensor."""


class DiffReport(Report, frozen=True, kw_only=True):
    """The differences between two checkpoints."""

    left: Path
    right: Path
    num_equal: int
    """Number of tensors that are bitwise equal."""
    only_left: tuple[str, ...]
    only_right: tuple[str, ...]
    other_form: tuple[str, ...]
    """Tensors with a different shape or dtype, each with both values."""
    values: tuple[TensorDifference, ...]
    facts: tuple[tuple[str, Any, Any], ...]
    """Name, left value and right value of each differing fact; None if a value is missing."""

    @property
    def are_tensors_equal(self) -> bool:
        """Whether both checkpoints contain the same tensors, bitwise equal."""
        return not (self.only_left or self.only_right or self.other_form or self.values)

    def to_text(self) -> str:
        """Return the tensors that differ, largest difference first, and the metadata that differs."""
        lines = _titled(f"only in {self.left}", self.only_left)
        lines += _titled(f"only in {self.right}", self.only_right)
        lines += _titled("different shape or dtype", self.other_form)
        if self.values:
            # An element that is NaN in only one of the two tensors counts as the largest difference.
            worst = sorted(self.values, key=lambda found: (math.isnan(found.relative), found.relative), reverse=True)
            cells = map(_difference_cells, worst[:MAX_ROWS])
            lines.append(_table(("tensor", "differing", "largest", "relative"), cells))
            if len(worst) > MAX_ROWS:
                lines.append(f"and {len(worst) - MAX_ROWS} more tensors")
        lines += [f"{name}: {_fact(name, one)} | {_fact(name, other)}" for name, one, other in self.facts]
        result = "all tensors are equal" if self.are_tensors_equal else "the tensors differ"
        lines.append(f"{result}: {self.num_equal} with the same bits, {len(self.values)} with different values")
        return "\n".join(lines)


class PruneReport(Report, frozen=True, kw_only=True):
    """The checkpoints that `prune` removed."""

    removed: tuple[Path, ...]
    num_kept: int

    def to_text(self) -> str:
        """Return the removed checkpoints and the number of remaining checkpoints."""
        return "\n".join([*_titled("removed", map(str, self.removed)), f"{self.num_kept} checkpoints remain"])


class ConvertReport(Report, frozen=True, kw_only=True):
    """The result of converting a checkpoint."""

    source_kind: str
    target_kind: str
    path: Path
    step: int
    """Number of optimizer steps of the source, even if the target contains only weights."""
    num_tensors: int
    num_bytes: int
    tied: dict[str, str]
    left_out: tuple[str, ...]
    """Contents of the source that the target does not contain, one sentence each."""
    moved: tuple[str, ...] = ()
    """Convolution weights whose axes were permuted between the layouts of MLX and torch."""

    def to_text(self) -> str:
        """Return a summary of the target and the contents of the source that were left out."""
        size = format_bytes_si(self.num_bytes)
        kinds = f"{self.source_kind} -> {self.target_kind}"
        lines = [f"{kinds}: {self.num_tensors} tensors, {size}, step {self.step}, in {self.path}"]
        lines += _titled("tied", [f"{alias} is {name}" for alias, name in self.tied.items()])
        lines += _titled("axes permuted (convolution)", self.moved)
        lines += _titled("left out", self.left_out)
        return "\n".join(lines)


def _tensor_cells(tensor: TensorRow) -> tuple[str, ...]:
    shape = " x ".join(map(str, tensor.shape)) or "scalar"
    return tensor.name, tensor.dtype, shape, format_bytes_si(tensor.num_bytes)


def _difference_cells(found: TensorDifference) -> tuple[str, ...]:
    share = f"{found.num_different:,} of {found.num_elements:,}"
    return found.name, share, f"{found.largest:.3g}", f"{found.relative:.3g}"


def _fact(name: str, value: Any) -> str:
    """Format a fact as one line, or as several lines if it is a multi-line string such as a plan."""
    if value is None:
        return "nothing"
    if name == "random" and isinstance(value, dict):
        return f"states of {len(value)} ranks"
    if isinstance(value, str) and "\n" in value:
        return "\n  " + value.strip().replace("\n", "\n  ")
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return text if len(text) <= _MAX_FACT_LENGTH else f"{text[:_MAX_FACT_LENGTH]}..."


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
