"""Documents that are tokenized during training: JSONL, Parquet, Arrow and text files, and Hugging Face datasets.

Every input becomes a ShardedIterable. A shard is a part of the input that is read by itself: a range of bytes, a row
group, a range of rows, or a shard of an IterableDataset. So a position is found by reading one group of shards again,
nothing has to be recorded while documents are read, and memory is bounded by the largest shard. The price: every rank
tokenizes every document, since rows depend on lengths; `shardwise data prepare` tokenizes once.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from shardwise.data.prepare.inputs import InputFile, InputPiece, find_inputs, list_pieces, read_texts
from shardwise.data.sources.iterables import ShardedIterable
from shardwise.data.storage.locations import Location, locate, locate_all
from shardwise.data.tokenizer import BYTES, Tokenizer, load_tokenizer
from shardwise.errors import DataError, nearest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

_ROWS_PER_SHARD = 1024
"""Rows of a map-style dataset that are one shard: 4 MB of text if a document has 4,000 characters."""
_ROWS_PER_CALL = 256
"""Documents of an IterableDataset that are tokenized in one call."""
_EVERY_ROW_ONCE = "all_exhausted_without_replacement"
"""The stopping strategy of interleaved datasets under which shards have the rows of the whole."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Documents:
    """Documents and how they are tokenized; `open` reads nothing but sizes and metadata."""

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

    def _make(
        self, name: str, encoder: _Encoder, num_shards: int, open_shard: Any, identity: Sequence[object]
    ) -> ShardedIterable:
        facts = msgspec.json.encode([*identity, self.text_field, encoder.identity])
        return ShardedIterable(
            name,
            open_shard,
            num_shards,
            vocab_size=self.vocab_size if encoder.tokenizer is None else encoder.tokenizer.vocab_size,
            identity=f"{zlib.crc32(facts):08x}",
        )

    def _open_files(self, name: str, encoder: _Encoder) -> ShardedIterable:
        if encoder.tokenizer is None:
            raise DataError(
                f"source {name} consists of files with text, but its tokenizer is None",
                code="data.tokenizer-missing",
                fix='pass tokenizer="bytes", or the path of a tokenizer.json',
            )
        shards: list[tuple[InputFile, Location, InputPiece]] = []
        files = find_inputs(locate_all(_paths(self.data)))
        for file in files:
            if file.kind == "jsonl.gz":
                raise DataError(
                    f"{file.path} is compressed, so a part of it cannot be read without the bytes before it",
                    code="data.documents-compressed",
                    fix="decompress it, or write a corpus with `shardwise data prepare`",
                )
            path = locate(file.path)
            shards += [(file, path, piece) for piece in list_pieces(file, path)]
        if not shards:
            raise _no_documents(name)
        identity = [(file.size, file.ends_crc32) for file in files]  # not their times: a copy is the same data
        return self._make(name, encoder, len(shards), partial(_read_piece, shards, encoder), identity)

    def _open_rows(self, name: str, encoder: _Encoder) -> ShardedIterable:
        """Open a map-style dataset: a shard is a range of its rows."""
        num_rows = len(self.data)
        if not num_rows:
            raise _no_documents(name)
        num_shards = -(-num_rows // _ROWS_PER_SHARD)
        return self._make(name, encoder, num_shards, partial(_read_rows, self.data, encoder), [num_rows])

    def _open_iterable(self, name: str, encoder: _Encoder) -> ShardedIterable:
        """Open an IterableDataset of Hugging Face by its shards."""
        _check_shards(name, self.data)
        num_shards = self.data.num_shards
        return self._make(name, encoder, num_shards, partial(_read_shard, self.data, num_shards, encoder), [])


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
        """Return the documents of texts, or of lists of token ids; None counts as an empty document."""
        if self.tokenizer is None:
            return [np.asarray(ids) for ids in texts if ids is not None]
        texts = ["" if text is None else text for text in texts]
        for text in texts:
            if not isinstance(text, str):
                raise DataError(
                    f"field {self.text_field!r} contains {type(text).__name__}, not text",
                    code="data.text-field-invalid",
                    fix="pass the name of a field of strings as text_field, or tokenizer=None for token ids",
                )
        encoded = self.tokenizer.encode(texts)
        return np.split(encoded.tokens, np.cumsum(encoded.lengths)[:-1])

    def field(self, row: Mapping[str, Any]) -> Any:
        """Return the field of a row, or of a range of rows."""
        if self.text_field not in row:
            raise DataError(
                f"the dataset has no field {self.text_field!r}",
                code="data.text-field-missing",
                fix=f"pass its name as text_field: {nearest(self.text_field, map(str, row))}",
            )
        return row[self.text_field]


# The documents of one shard.


def _read_piece(
    shards: Sequence[tuple[InputFile, Location, InputPiece]], encoder: _Encoder, number: int
) -> Iterable[NDArray[Any]]:
    return encoder.encode(read_texts(*shards[number], encoder.text_field))


def _read_rows(dataset: Any, encoder: _Encoder, number: int) -> Iterable[NDArray[Any]]:
    start = number * _ROWS_PER_SHARD
    return encoder.encode(encoder.field(dataset[start : min(start + _ROWS_PER_SHARD, len(dataset))]))


def _read_shard(dataset: Any, num_shards: int, encoder: _Encoder, number: int) -> Iterator[NDArray[Any]]:
    rows = iter(dataset.shard(num_shards=num_shards, index=number))
    while block := list(islice(rows, _ROWS_PER_CALL)):
        yield from encoder.encode([encoder.field(row) for row in block])
