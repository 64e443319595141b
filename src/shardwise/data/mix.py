"""data_mix: what proportions of sources mean in rows, tokens and epochs, before a training starts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec

from shardwise.data.mixture import make_mixture
from shardwise.data.packing import pack
from shardwise.data.sources.open import check_documents, open_source
from shardwise.errors import DataError, InputError
from shardwise.runs.console import counted
from shardwise.spec import NonNegativeInt, PositiveInt, Report, Spec, argument, option, spec_function
from shardwise.units import format_count

if TYPE_CHECKING:
    from shardwise.data.sources.source import TokenSource

_SAMPLED_CHUNKS = 4
"""Chunks of a source whose documents are packed to estimate how full its rows are."""


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
    """Fraction of a row that has tokens; below 1 for packed rows."""
    long_documents: float | None
    """Fraction of the documents that are longer than a row, which packing splits; None for windows."""
    epochs: float


class DataMixReport(Report, frozen=True, kw_only=True):
    """The shares of all sources in a training."""

    period: int
    """Rows after which the order of sources repeats."""
    num_rows: int
    num_tokens: int
    """Tokens of all rows, without the padding of packed ones."""
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
    fills = {name: _Fill() for name in sources}
    if spec.packed:
        fills = {name: _measure(source, spec.length) for name, source in sources.items()}
    proportions = _proportions(given, sources)
    mixture = make_mixture(proportions)
    num_rows = _num_rows(spec, sources, fills)
    total = sum(proportions.values())
    shares = []
    for (name, path, _), per_period, rows in zip(given, mixture.shares, mixture.counts(num_rows).tolist(), strict=True):
        size = sources[name].num_tokens
        shares.append(
            SourceShare(
                name=name,
                path=path,
                num_tokens=size,
                proportion=proportions[name] / total,
                rows_per_period=per_period,
                rows=rows,
                fill=fills[name].fill,
                long_documents=fills[name].long_documents,
                epochs=rows * spec.length * fills[name].fill / size if size else 0.0,
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


class _Fill(NamedTuple):
    """What packing makes of the documents of a source."""

    fill: float = 1.0
    long_documents: float | None = None


def _measure(source: TokenSource, length: int) -> _Fill:
    """Return the fractions of packed rows with tokens, and of long documents, from the documents of a few chunks."""
    num_tokens = num_rows = num_documents = num_long = 0
    step = max(1, source.num_chunks // _SAMPLED_CHUNKS)
    for chunk in range(0, source.num_chunks, step):
        lengths = source.lengths(chunk)
        num_tokens += int(lengths.sum())
        num_rows += pack(lengths, length).num_rows
        num_documents += len(lengths)
        num_long += int((lengths > length).sum())
    if not num_rows:
        return _Fill(long_documents=0.0)
    return _Fill(num_tokens / (num_rows * length), num_long / num_documents)


def _num_rows(spec: DataMixSpec, sources: dict[str, TokenSource], fills: dict[str, _Fill]) -> int:
    if spec.steps is not None:
        return spec.steps * spec.batch_size
    per_step = spec.batch_size * spec.length
    if spec.tokens is not None:
        return -(-spec.tokens // per_step) * spec.batch_size
    needed = sum(source.num_tokens / fills[name].fill for name, source in sources.items())
    return max(1, -(-int(needed) // per_step)) * spec.batch_size
