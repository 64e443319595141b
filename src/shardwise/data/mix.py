"""data_mix: what proportions of sources mean in rows, tokens and epochs, before a training starts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np

from shardwise.data.mixture import make_mixture
from shardwise.data.row_groups import CHUNKS_PER_GROUP, chunks_of_group, make_group, source_seed
from shardwise.data.sources.open import check_documents, open_source
from shardwise.data.sources.source import without_rows
from shardwise.errors import DataError, InputError
from shardwise.runs.console import counted
from shardwise.spec import NonNegativeInt, PositiveInt, Report, Spec, argument, option, spec_function
from shardwise.units import format_count

if TYPE_CHECKING:
    from shardwise.data.sources.source import TokenSource

_SAMPLED_GROUPS = 4
"""Shuffle groups of a source whose rows are counted: those of an epoch of 67 million tokens."""


class DataMixSpec(Spec, frozen=True, kw_only=True):
    """The request to compute the shares of sources in a training."""

    sources: Annotated[tuple[str, ...], argument("NAME=PATH[:PROPORTION]...")]
    """Sources with their relative numbers of rows; without any proportion, they are the numbers of tokens."""
    length: PositiveInt = 2048
    """Tokens per row."""
    batch_size: PositiveInt = 1
    """Rows per optimizer step."""
    steps: PositiveInt | None = None
    """Optimizer steps of the training."""
    tokens: PositiveInt | None = None
    """Tokens of the training, padding included as in a job, in place of steps; without both, one epoch of all."""
    packed: Annotated[bool, option("--packed")] = False
    """Rows are packed documents instead of windows over concatenated documents."""
    end_id: NonNegativeInt | None = None
    """Token that ends documents, for files that do not store documents."""
    dtype: Literal["uint16", "uint32"] = "uint16"
    """Type of the tokens of .bin files without a header."""

    def __post_init__(self) -> None:
        """Raise InputError if the length of the training is given twice."""
        super().__post_init__()
        if self.steps is not None and self.tokens is not None:
            raise InputError(
                f"both steps={self.steps} and tokens={self.tokens} are given",
                code="data.mix-two-lengths",
                fix="pass one of them",
            )


class SourceShare(msgspec.Struct, frozen=True, kw_only=True):
    """The share of one source in a training."""

    name: str
    path: str
    num_tokens: int
    """Tokens of one epoch."""
    proportion: float
    """Requested fraction of the rows."""
    rows_per_period: int
    rows: int
    """Rows of the training."""
    fill: float
    """Fraction of a row that has tokens, on average; the rest is padding."""
    long_documents: float | None
    """Fraction of the documents that are longer than a row, which packing splits; None for windows."""
    epochs: float


class DataMixReport(Report, frozen=True, kw_only=True):
    """The shares of all sources in a training."""

    period: int
    """Rows after which the order of sources repeats."""
    num_rows: int
    num_tokens: int
    """Tokens of all rows, without padding."""
    shares: tuple[SourceShare, ...]

    def to_text(self) -> str:
        """Return one line per source."""
        total = f"{counted(self.num_rows, 'row')} with {format_count(self.num_tokens)} tokens"
        lines = [
            f"{total}; the order of sources repeats after {counted(self.period, 'row')}",
            "",
            f"{'source':16} {'tokens':>18} {'share':>8} {'rows':>14} {'epochs':>8}",
        ]
        for share in self.shares:
            exact = share.rows_per_period / self.period
            lines.append(f"{share.name:16} {share.num_tokens:18,} {exact:8.2%} {share.rows:14,} {share.epochs:8.2f}")
        long = {share.name: share.long_documents for share in self.shares if share.long_documents}
        lines += [f"{part:.2%} of the documents of {name} are longer than a row" for name, part in long.items()]
        return "\n".join(lines)


@spec_function(DataMixSpec)
def data_mix(spec: DataMixSpec) -> DataMixReport:
    """Compute rows, tokens and epochs of each source of a mixture."""
    given = [_parse(text) for text in spec.sources]
    names = [name for name, _, _ in given]
    for name in names:
        if names.count(name) > 1:
            raise DataError(
                f"source {name} is given twice", code="data.source-repeated", fix="give sources different names"
            )
    sources = {name: _open(spec, name, path) for name, path, _ in given}
    proportions = _proportions(given, sources)
    mixture = make_mixture(proportions)
    epochs = {name: _measure(name, source, spec) for name, source in sources.items()}
    num_rows = _num_rows(spec, epochs)
    total = sum(proportions.values())
    shares = []
    for (name, path, _), per_period, rows in zip(given, mixture.shares, mixture.counts(num_rows).tolist(), strict=True):
        epoch = epochs[name]
        if rows and not epoch.num_rows:
            raise without_rows(name)
        shares.append(
            SourceShare(
                name=name,
                path=path,
                num_tokens=sources[name].num_tokens,
                proportion=proportions[name] / total,
                rows_per_period=per_period,
                rows=rows,
                fill=epoch.tokens_per_row / spec.length,
                long_documents=epoch.long_documents if spec.packed else None,
                epochs=rows / epoch.num_rows if rows else 0.0,
            )
        )
    num_tokens = round(sum(share.rows * share.fill for share in shares) * spec.length)
    return DataMixReport(period=mixture.period, num_rows=num_rows, num_tokens=num_tokens, shares=tuple(shares))


def _open(spec: DataMixSpec, name: str, path: str) -> TokenSource:
    source = open_source(path, end_id=spec.end_id, dtype=spec.dtype)
    if spec.packed:
        check_documents(name, source, fix="pass --end-id with the token that ends each document, or omit --packed")
    return source


def _parse(text: str) -> tuple[str, str, float | None]:
    """Return name, path and proportion of NAME=PATH[:PROPORTION]."""
    name, separator, rest = text.partition("=")
    path, _, proportion = rest.rpartition(":")
    if not separator or not name or not rest:
        raise DataError(
            f"source {text!r} is not of the form NAME=PATH[:PROPORTION]",
            code="data.source-invalid",
            fix="pass for example web=corpora/web:0.7",
        )
    if not path:
        return name, rest, None
    try:
        return name, path, float(proportion)
    except ValueError:
        return name, rest, None  # a colon of the path


def _proportions(given: list[tuple[str, str, float | None]], sources: dict[str, TokenSource]) -> dict[str, float]:
    """Return the proportions; those of all sources or of none must be given."""
    missing = [name for name, _, proportion in given if proportion is None]
    if len(missing) == len(given):
        return {name: float(source.num_tokens) for name, source in sources.items()}
    if missing:
        raise DataError(
            f"source {missing[0]} has no proportion, but others have",
            code="data.proportion-missing",
            fix=f"pass {missing[0]}=PATH:PROPORTION, or no proportion at all",
        )
    found: dict[str, Any] = {name: proportion for name, _, proportion in given}
    return found


class _Epoch(NamedTuple):
    """The rows of one epoch of a source."""

    num_rows: float = 0.0
    tokens_per_row: float = 0.0
    """Mean number of tokens of a row: of windows, those with a target; of packed rows, those of documents."""
    long_documents: float = 0.0
    """Fraction of the documents that are longer than a row."""


def _measure(name: str, source: TokenSource, spec: DataMixSpec) -> _Epoch:
    """Return the rows of an epoch, from all of its shuffle groups if they are few, else from some of them."""
    num_groups = -(-source.num_chunks // CHUNKS_PER_GROUP)
    for most in (_SAMPLED_GROUPS, num_groups):  # all groups if those of the sample have no rows
        groups = np.unique(np.linspace(0, num_groups - 1, min(most, num_groups)).astype(int)).tolist()
        sizes = [_measure_group(source, group, spec, seed=source_seed(name, 0)) for group in groups]
        num_rows, num_tokens, num_documents, num_long = np.sum(sizes, axis=0).tolist()
        if num_rows:
            return _Epoch(num_rows * num_groups / len(groups), num_tokens / num_rows, num_long / num_documents)
    return _Epoch()


def _measure_group(source: TokenSource, group: int, spec: DataMixSpec, *, seed: int) -> tuple[int, int, int, int]:
    """Return the rows, tokens, documents and long documents of one shuffle group of the first epoch."""
    chunks = chunks_of_group(source.num_chunks, group, size=CHUNKS_PER_GROUP, seed=seed, epoch=0)
    lengths = np.concatenate([source.lengths(chunk) for chunk in chunks.tolist()])
    rows = make_group(source, chunks, length=spec.length, packed=spec.packed)
    num_tokens = int(lengths.sum())
    if not spec.packed:
        num_tokens = max(0, num_tokens - 1)  # the first token is not a target
    return rows.num_rows, num_tokens, len(lengths), int((lengths > spec.length).sum())


def _num_rows(spec: DataMixSpec, epochs: dict[str, _Epoch]) -> int:
    if spec.steps is not None:
        return spec.steps * spec.batch_size
    if spec.tokens is not None:
        return -(-spec.tokens // (spec.batch_size * spec.length)) * spec.batch_size
    needed = max(1, math.ceil(sum(epoch.num_rows for epoch in epochs.values())))
    return -(-needed // spec.batch_size) * spec.batch_size
