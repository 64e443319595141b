"""Documents that are tokenized during training: JSONL, Parquet, Arrow and text files, and Hugging Face datasets.

Every input becomes a ShardedIterable. A shard is a part of the input that is read by itself: a range of bytes, a row
group, a range of rows, or a shard of an IterableDataset. So a position is found by reading one group of shards again,
nothing has to be recorded while documents are read, and memory is bounded by the largest shard. The price: every rank
tokenizes every document, since rows depend on lengths; `shardwise data prepare` tokenizes once.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np

from shardwise.data.prepare.inputs import InputFile, InputPiece, find_inputs, list_pieces, read_texts
from shardwise.data.sources.iterables import ShardedIterable
from shardwise.data.storage.locations import Location, locate, locate_all
from shardwise.data.streams import check_not_split
from shardwise.data.tokenizer import BYTES, Tokenizer, load_tokenizer
from shardwise.errors import DataError, nearest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

_ROWS_PER_SHARD = 1024
"""Rows of a map-style dataset that are one shard, fewer of long documents: 4 MB of text at 4,000 characters each."""
_SHARD_TOKENS = 2**24
"""Estimated tokens of a shard above which its rows are divided: 32 such shards take 1 GiB. It is twice the size that
earlier versions accepted, so that the shards of their runs stay the same."""
_SAMPLED_ROWS = 256
"""Rows from which the tokens of a shard are estimated."""
_ROWS_PER_CALL = 256
"""Documents of an IterableDataset that are tokenized in one call."""
_EVERY_ROW_ONCE = "all_exhausted_without_replacement"
"""The stopping strategy of interleaved datasets under which shards have the rows of the whole."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Documents:
    """Documents and how they are tokenized; `open` reads sizes, metadata and a sample of rows."""

    data: Any
    """Path, paths, or a Hugging Face dataset."""
    tokenizer: str | Path | None
    text_field: str
    end_token: str | None
    vocab_size: int | None

    def open(self, name: str) -> ShardedIterable:
        """Return the documents as a source with this name."""
        encoder = _Encoder(self._load_tokenizer(), self.text_field)
        if _paths(self.data):
            return self._open_files(name, encoder)
        if hasattr(self.data, "column_names") and hasattr(self.data, "__len__"):
            return self._open_rows(name, encoder)
        if hasattr(self.data, "num_shards") and hasattr(self.data, "shard"):
            return self._open_iterable(name, encoder)
        raise DataError(
            f"source {name} is a {type(self.data).__name__}, which cannot be read by shards",
            code="data.source-invalid",
            fix="pass a path, a Dataset or IterableDataset of Hugging Face, or a ShardedIterable",
        )

    def _load_tokenizer(self) -> Tokenizer | None:
        if self.tokenizer is None:
            return None
        path = None if str(self.tokenizer) == BYTES else locate(self.tokenizer)
        return load_tokenizer(path.name if path else BYTES, path, end_token=self.end_token)

    def _make(self, name: str, encoder: _Encoder, shards: _Shards, identity: Sequence[object]) -> ShardedIterable:
        facts = msgspec.json.encode([*identity, self.text_field, encoder.identity])
        return ShardedIterable(
            name,
            partial(shards.read, encoder),
            shards.num_shards,
            vocab_size=self.vocab_size if encoder.tokenizer is None else encoder.tokenizer.vocab_size,
            identity=f"{zlib.crc32(facts):08x}",
            describe_shard=shards.describe,
        )

    def _open_files(self, name: str, encoder: _Encoder) -> ShardedIterable:
        if encoder.tokenizer is None:
            raise DataError(
                f"source {name} consists of files with text, but its tokenizer is None",
                code="data.tokenizer-missing",
                fix='pass tokenizer="bytes", or the path of a tokenizer.json',
            )
        files = find_inputs(locate_all(_paths(self.data)))
        shards = []
        for file in files:
            if file.kind == "jsonl.gz":
                raise DataError(
                    f"{file.path} is compressed, so a part of it cannot be read without the bytes before it",
                    code="data.documents-compressed",
                    fix="decompress it, or write a corpus with `shardwise data prepare`",
                )
            path = locate(file.path)
            shards += [_FilePart(file, path, piece) for piece in list_pieces(file, path)]
        if not shards:
            raise _no_documents(name)
        identity = [(file.size, file.ends_crc32) for file in files]  # not their times: a copy is the same data
        return self._make(name, encoder, _FileShards(_divided(shards, encoder)), identity)

    def _open_rows(self, name: str, encoder: _Encoder) -> ShardedIterable:
        """Open a map-style dataset: a shard is a range of its rows."""
        dataset = self.data
        if dataset.format["type"] != "custom":  # that of set_transform
            dataset = dataset.with_format(None)
        num_rows = len(dataset)
        if not num_rows:
            raise _no_documents(name)
        sample = encoder.field(dataset[_sampled(num_rows)])
        num_parts = _num_parts(encoder.mean_tokens(sample) * min(num_rows, _ROWS_PER_SHARD))
        shards = _RowShards(dataset, num_rows, max(1, _ROWS_PER_SHARD // num_parts))
        return self._make(name, encoder, shards, [num_rows])

    def _open_iterable(self, name: str, encoder: _Encoder) -> ShardedIterable:
        """Open an IterableDataset of Hugging Face by its shards."""
        _check_shards(name, self.data)
        return self._make(name, encoder, _IterableShards(self.data.with_format(None), self.data.num_shards), [])


def documents(
    data: Any,
    *,
    tokenizer: str | Path | None = BYTES,
    text_field: str = "text",
    end_token: str | None = None,
    vocab_size: int | None = None,
) -> Documents:
    """Return a source for `tokens`: documents that are tokenized during training, without `shardwise data prepare`.

    `data` is a path or several (`.jsonl`, `.parquet`, `.arrow`, `.txt`, or folders with such files), or a Dataset or
    IterableDataset of Hugging Face. `tokenizer` is "bytes" or the path of a tokenizer.json; None for a dataset whose
    field `text_field` has token ids, below `vocab_size` if it is given. `end_token` is the token after each document.
    Paths may be URLs of object storage.
    """
    if isinstance(data, Mapping):
        raise DataError(
            f"the documents are a mapping with the splits {', '.join(map(str, data))}",
            code="data.several-splits",
            fix="pass one of them",
        )
    locate_all(_paths(data) if tokenizer is None else [*_paths(data), tokenizer])  # refuses URLs with secrets
    return Documents(data=data, tokenizer=tokenizer, text_field=text_field, end_token=end_token, vocab_size=vocab_size)


def _paths(data: Any) -> list[str | Path]:
    """Return the paths that are the documents; empty for a dataset."""
    paths = [data] if isinstance(data, str | Path) else data
    if isinstance(paths, list | tuple) and all(isinstance(path, str | Path) for path in paths):
        return list(paths)
    return []


def _parts(dataset: Any) -> Iterator[Any]:
    """Yield the operations and sources of a Hugging Face IterableDataset."""
    waiting = [getattr(dataset, "_ex_iterable", None)]
    while waiting:
        part = waiting.pop()
        if part is not None:
            yield part
            waiting += [getattr(part, "ex_iterable", None), *getattr(part, "ex_iterables", ())]


def _check_shards(name: str, dataset: Any) -> None:
    """Raise DataError if the rows of the shards of an IterableDataset are not those of the whole."""
    check_not_split(f"source {name}", dataset)
    for part in _parts(dataset):
        if hasattr(part, "buffer_size") and hasattr(part, "generator"):
            raise DataError(
                f"source {name} is shuffled with a buffer, whose content depends on where reading starts",
                code="data.iterable-shuffled",
                fix="pass the dataset before shuffle(): the corpus shuffles documents",
            )
        if getattr(part, "split_when_sharding", False) and dataset.num_shards > 1:
            raise DataError(
                f"source {name} takes or skips a number of rows of {dataset.num_shards} shards, which would be divided"
                " among the starts of all shards",
                code="data.iterable-limited",
                fix="divide the data by files, or select rows of a Dataset before to_iterable_dataset()",
            )
        if getattr(part, "with_indices", False) and dataset.num_shards > 1:
            raise DataError(
                f"source {name} maps or filters rows by their indices, which would start at 0 in each of"
                f" {dataset.num_shards} shards",
                code="data.iterable-indexed",
                fix="map or filter without with_indices, or a Dataset before to_iterable_dataset()",
            )
        strategy = getattr(part, "stopping_strategy", _EVERY_ROW_ONCE)
        if strategy != _EVERY_ROW_ONCE:
            raise DataError(
                f"source {name} interleaves datasets with stopping_strategy={strategy!r}, which stops in each shard",
                code="data.iterable-interleaved",
                fix="pass each dataset as a source of its own, with proportions=",
            )


def _no_documents(name: str) -> DataError:
    return DataError(
        f"source {name} has no documents", code="data.source-empty", fix="pass data with at least one document"
    )


@dataclass(frozen=True)
class _Encoder:
    """Turns rows into documents of token ids."""

    tokenizer: Tokenizer | None
    """None if the field has token ids."""
    text_field: str

    @property
    def identity(self) -> object:
        if self.tokenizer is None:
            return None
        return self.tokenizer.name, self.tokenizer.end_id

    def encode(self, texts: Sequence[Any]) -> Iterable[NDArray[Any]]:
        """Return the documents of texts, or of lists of token ids; None is refused, as in files."""
        for text in texts:
            if text is None or (self.tokenizer is not None and not isinstance(text, str)):
                expected = "token ids" if self.tokenizer is None else "text"
                raise DataError(
                    f"field {self.text_field!r} contains {type(text).__name__}, not {expected}",
                    code="data.text-field-invalid",
                    fix="pass the name of a field of strings as text_field, or tokenizer=None for token ids, and"
                    " filter() rows without a value",
                )
        if self.tokenizer is None:
            return [np.asarray(ids) for ids in texts]
        encoded = self.tokenizer.encode(texts)
        return np.split(encoded.tokens, np.cumsum(encoded.lengths)[:-1])

    def mean_tokens(self, texts: Sequence[Any]) -> float:
        """Return the mean number of tokens of these documents."""
        return sum(map(len, self.encode(texts))) / len(texts)

    def field(self, row: Mapping[str, Any]) -> Any:
        """Return the field of a row, or of a range of rows."""
        if self.text_field not in row:
            raise DataError(
                f"the dataset has no field {self.text_field!r}",
                code="data.text-field-missing",
                fix=f"pass its name as text_field: {nearest(self.text_field, map(str, row))}",
            )
        return row[self.text_field]


# The documents of one shard. Shards that would have too many tokens are divided into 2, 4, 8, ... parts by rows, which
# follow from a sample: the same data has the same shards, on every rank and after a resume.


class _Shards(Protocol):
    """The shards of documents."""

    @property
    def num_shards(self) -> int:
        """Number of shards."""

    def read(self, encoder: _Encoder, number: int) -> Iterable[NDArray[Any]]:
        """Return the documents of a shard."""

    def describe(self, number: int) -> str:
        """Return the name of a shard in errors."""


@dataclass(frozen=True)
class _FilePart:
    """A piece of a file, or one of several parts of its rows."""

    file: InputFile
    path: Location
    piece: InputPiece
    part: int = 0
    num_parts: int = 1

    def texts(self, text_field: str) -> list[str]:
        """Return the texts of the part; the rest of the piece is read as well."""
        texts = read_texts(self.file, self.path, self.piece, text_field)
        first, stop = (len(texts) * part // self.num_parts for part in (self.part, self.part + 1))
        return texts[first:stop]


@dataclass(frozen=True)
class _FileShards:
    parts: Sequence[_FilePart]

    @property
    def num_shards(self) -> int:
        return len(self.parts)

    def read(self, encoder: _Encoder, number: int) -> Iterable[NDArray[Any]]:
        return encoder.encode(self.parts[number].texts(encoder.text_field))

    def describe(self, number: int) -> str:
        part = self.parts[number]
        unit = {"parquet": "row group", "arrow": "record batch"}.get(part.file.kind, "byte")
        return f"shard {number} ({part.path} from {unit} {part.piece.start})"


@dataclass(frozen=True)
class _RowShards:
    dataset: Any
    num_rows: int
    rows_per_shard: int

    @property
    def num_shards(self) -> int:
        return -(-self.num_rows // self.rows_per_shard)

    def read(self, encoder: _Encoder, number: int) -> Iterable[NDArray[Any]]:
        first, stop = self._range(number)
        return encoder.encode(encoder.field(self.dataset[first:stop]))

    def describe(self, number: int) -> str:
        first, stop = self._range(number)
        return f"shard {number} (rows {first} to {stop - 1})"

    def _range(self, number: int) -> tuple[int, int]:
        first = number * self.rows_per_shard
        return first, min(first + self.rows_per_shard, self.num_rows)


@dataclass(frozen=True)
class _IterableShards:
    dataset: Any
    num_shards: int

    def read(self, encoder: _Encoder, number: int) -> Iterator[NDArray[Any]]:
        rows = iter(self.dataset.shard(num_shards=self.num_shards, index=number))
        while block := list(islice(rows, _ROWS_PER_CALL)):
            yield from encoder.encode([encoder.field(row) for row in block])

    def describe(self, number: int) -> str:
        return f"shard {number}"


def _divided(parts: list[_FilePart], encoder: _Encoder) -> list[_FilePart]:
    """Return the shards of files, divided by rows where row groups or record batches have too many tokens.

    Tokens per byte are those of the largest piece, which is read only if it has more bytes than a shard has tokens.
    """
    largest = max(parts, key=lambda part: part.piece.bytes_in_memory)
    if largest.piece.bytes_in_memory <= _SHARD_TOKENS:
        return parts
    texts = largest.texts(encoder.text_field)
    if not texts:
        return parts
    num_tokens = encoder.mean_tokens([texts[row] for row in _sampled(len(texts))]) * len(texts)
    per_byte = num_tokens / largest.piece.bytes_in_memory
    divided = []
    for whole in parts:
        num_parts = _num_parts(per_byte * whole.piece.bytes_in_memory)
        divided += [replace(whole, part=part, num_parts=num_parts) for part in range(num_parts)]
    return divided


def _num_parts(num_tokens: float) -> int:
    """Return the smallest power of two that divides a shard into parts of at most _SHARD_TOKENS tokens."""
    return 1 << max(0, math.ceil(math.log2(max(num_tokens, 1) / _SHARD_TOKENS)))


def _sampled(num_rows: int) -> list[int]:
    """Return at most _SAMPLED_ROWS rows at equal distances."""
    count = min(num_rows, _SAMPLED_ROWS)
    return [number * num_rows // count for number in range(count)]
