"""data_inspect: counts, document lengths, decoded samples and exact duplicates of a corpus or a token file."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import numpy as np

from shardwise.data.sources.open import open_source
from shardwise.data.sources.shards import INDEX, TOKENIZER, TokenizerName, open_corpus
from shardwise.data.sources.source import ReadsAhead
from shardwise.data.storage.files import is_file
from shardwise.data.storage.locations import locate
from shardwise.data.tokenizer import BYTES, Tokenizer, load_tokenizer
from shardwise.errors import DataError
from shardwise.spec import NonNegativeInt, Report, Spec, argument, option, spec_function

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardwise.data.sources.shards import TokenShards
    from shardwise.data.sources.source import TokenSource

PERCENTILES = (0, 5, 25, 50, 75, 95, 99, 100)
_BAR_COLUMNS = 40
_AHEAD = 4
"""Chunks of a remote source that are downloaded ahead."""
_SAMPLE_TOKENS = 200
"""Tokens of a document that a sample shows."""


class DataInspectSpec(Spec, frozen=True, kw_only=True):
    """The request to describe a corpus or a token file."""

    path: Annotated[str, argument("PATH")]
    """A folder of `data prepare`, a .bin or .npy file, or a folder of such files; or the URL of one."""
    tokenizer: Annotated[str | None, option("--tokenizer", metavar="NAME")] = None
    """Tokenizer that decodes samples: bytes, or the path of a tokenizer.json; by default that of the corpus."""
    end_id: NonNegativeInt | None = None
    """Token that ends documents, for files that do not store documents."""
    dtype: Literal["uint16", "uint32"] = "uint16"
    """Type of the tokens of .bin files without a header."""
    samples: NonNegativeInt = 3
    """Number of documents to show."""
    duplicates: bool = True
    """Count documents that occur more than once, which reads every token; --no-duplicates skips it."""
    verify: bool = False
    """Verify stored checksums, that every id is in the stored vocabulary, and that none is negative."""

    def __post_init__(self) -> None:
        """Accept a Path, as a caller in Python may pass it."""
        path: Any = self.path
        if isinstance(path, Path):
            msgspec.structs.force_setattr(self, "path", str(path))
        super().__post_init__()


class LengthBin(msgspec.Struct, frozen=True, kw_only=True):
    """A bar of the histogram: the documents with lengths in [low, high)."""

    low: int
    high: int
    num_documents: int


class DataSample(msgspec.Struct, frozen=True, kw_only=True):
    """The first tokens of a document."""

    chunk: int
    document: int
    """Number of the document in its chunk."""
    num_tokens: int
    ids: tuple[int, ...]
    text: str | None
    """None without a tokenizer."""


class DataInspectReport(Report, frozen=True, kw_only=True):
    """The facts of a corpus or a token file."""

    path: str
    tokenizer: TokenizerName | None
    vocab_size: int | None
    num_chunks: int
    num_documents: int
    num_tokens: int
    length_percentiles: dict[str, int]
    """Percentile -> document length in tokens, the end-of-document id included."""
    histogram: tuple[LengthBin, ...]
    """Lengths in powers of two."""
    num_duplicates: int | None
    """Documents that are equal to an earlier one; None if they were not counted."""
    smallest_id: int | None
    """None if the tokens were not read."""
    largest_id: int | None
    is_verified: bool
    """Whether no id is negative, and what `verified` lists was found correct."""
    verified: tuple[Literal["checksums", "vocabulary"], ...]
    """What was verified of the facts that only some formats store."""
    samples: tuple[DataSample, ...]

    def to_text(self) -> str:
        """Return the counts, the percentiles, the histogram and the samples."""
        name = f"{self.tokenizer.name} {self.tokenizer.sha256[:12]}".strip() if self.tokenizer else "unknown"
        lines = [
            f"path        {self.path}",
            f"tokenizer   {name}, vocabulary {self.vocab_size or 'unknown'}",
            f"documents   {self.num_documents:,} in {self.num_chunks:,} chunks",
            f"tokens      {self.num_tokens:,}",
        ]
        if self.is_verified:
            lines.insert(1, f"verified    {self._verified_text()}")
        if self.largest_id is not None:
            lines.append(f"ids         {self.smallest_id} to {self.largest_id}")
        if self.num_duplicates is not None:
            share = self.num_duplicates / max(1, self.num_documents)
            lines.append(f"duplicates  {self.num_duplicates:,} documents ({share:.2%}) are equal to an earlier one")
        shown = " · ".join(f"p{name} {value:,}" for name, value in self.length_percentiles.items())
        lines += [f"lengths     {shown}", "", *self._histogram_lines()]
        for sample in self.samples:
            title = f"document {sample.document} of chunk {sample.chunk}, {sample.num_tokens:,} tokens"
            text = " ".join(map(str, sample.ids)) if sample.text is None else _without_controls(sample.text)
            lines += ["", f"--- {title}", text]
        return "\n".join(lines)

    def _verified_text(self) -> str:
        if "checksums" in self.verified:
            return "checksums, and every id is in the vocabulary"
        if "vocabulary" in self.verified:
            return "every id is in the vocabulary; the format stores no checksums"
        return "no id is negative; the format stores neither checksums nor a vocabulary"

    def _histogram_lines(self) -> list[str]:
        most = max((each.num_documents for each in self.histogram), default=1)
        lines = []
        for each in self.histogram:
            bar = "█" * -(-each.num_documents * _BAR_COLUMNS // most)
            lines.append(f"{each.low:>9,} to {each.high - 1:<9,} {bar} {each.num_documents:,}")
        return lines


def _without_controls(text: str) -> str:
    """Return text in which control characters, such as the escape codes of a terminal, are replaced."""
    return "".join(character if character.isprintable() or character in "\n\t" else "\ufffd" for character in text)


@spec_function(DataInspectSpec)
def data_inspect(spec: DataInspectSpec) -> DataInspectReport:
    """Describe a corpus of `data prepare` or a token file: counts, document lengths, samples and duplicates."""
    source: TokenSource = open_source(spec.path, end_id=spec.end_id, dtype=spec.dtype)
    location = locate(spec.path)
    shards = open_corpus(location) if is_file(location / INDEX) else None
    tokenizer = _find_tokenizer(spec, shards)
    verified: list[Literal["checksums", "vocabulary"]] = []
    if spec.verify and shards is not None:
        shards.check_checksums()
        verified.append("checksums")
    scan = _Scan(source, reads_tokens=spec.duplicates or spec.verify, hashes_documents=spec.duplicates)
    if spec.verify:
        _check_ids(spec.path, scan, source.vocab_size)
        if source.vocab_size is not None:
            verified.append("vocabulary")
    lengths = scan.lengths
    return DataInspectReport(
        path=spec.path,
        tokenizer=tokenizer.name if tokenizer else None,
        vocab_size=source.vocab_size,
        num_chunks=source.num_chunks,
        num_documents=lengths.total(),
        num_tokens=source.num_tokens,
        length_percentiles=percentiles(lengths),
        histogram=histogram(lengths),
        num_duplicates=scan.num_duplicates() if spec.duplicates else None,
        smallest_id=scan.smallest_id,
        largest_id=scan.largest_id,
        is_verified=spec.verify,
        verified=tuple(verified),
        samples=tuple(_sample(source, tokenizer, spec.samples)),
    )


def _find_tokenizer(spec: DataInspectSpec, shards: TokenShards | None) -> Tokenizer | None:
    """Return the requested tokenizer, that of the corpus, or None if the path has none."""
    if spec.tokenizer is not None:
        path = None if spec.tokenizer == BYTES else locate(spec.tokenizer)
        return load_tokenizer(path.name if path else BYTES, path, end_id=spec.end_id or 0)  # decoding needs no end id
    if shards is None:
        return None
    index = shards.index
    if index.tokenizer.name == BYTES:
        return load_tokenizer(BYTES, None)
    path = shards.folder / TOKENIZER
    tokenizer = load_tokenizer(index.tokenizer.name, path, end_id=index.end_id)
    if tokenizer.name != index.tokenizer:
        raise DataError(
            f"the SHA-256 of {path} is {tokenizer.name.sha256}, but {INDEX} specifies {index.tokenizer.sha256}",
            code="data.tokenizer-changed",
            fix="restore the file, or prepare the corpus again",
        )
    return tokenizer


def _check_ids(path: str, scan: _Scan, vocab_size: int | None) -> None:
    if scan.smallest_id is not None and scan.smallest_id < 0:
        raise DataError(
            f"{path} contains id {scan.smallest_id}, which is negative",
            code="data.id-outside-vocabulary",
            fix="write the tokens again as uint16 or uint32",
        )
    if scan.largest_id is not None and vocab_size is not None and scan.largest_id >= vocab_size:
        raise DataError(
            f"{path} contains id {scan.largest_id}, but its vocabulary has {vocab_size} ids",
            code="data.id-outside-vocabulary",
            fix="prepare the corpus again with the tokenizer of the model",
        )


class _Scan:
    """One pass over a source: lengths, and, if tokens are read, the range of ids and a hash of each document."""

    def __init__(self, source: TokenSource, *, reads_tokens: bool, hashes_documents: bool) -> None:
        self.lengths: Counter[int] = Counter()
        """Length -> number of documents: the memory depends on the number of different lengths only."""
        self.smallest_id: int | None = None
        self.largest_id: int | None = None
        self._hashes: list[NDArray[np.uint64]] = []
        for chunk in range(source.num_chunks):
            if reads_tokens and isinstance(source, ReadsAhead):
                source.prefetch(range(chunk + _AHEAD, min(chunk + _AHEAD + 1, source.num_chunks)))
            lengths = source.lengths(chunk)
            values, counts = np.unique(lengths, return_counts=True)
            self.lengths.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
            if reads_tokens and len(lengths):
                tokens = source.tokens(chunk)
                smallest, largest = int(tokens.min()), int(tokens.max())
                self.smallest_id = smallest if self.smallest_id is None else min(self.smallest_id, smallest)
                self.largest_id = largest if self.largest_id is None else max(self.largest_id, largest)
                if hashes_documents:
                    self._hashes.append(_hash_documents(tokens.astype(np.int64), lengths))

    def num_duplicates(self) -> int:
        """Return the number of documents with the hash of another document, less one per group."""
        if not self._hashes:
            return 0
        hashes = np.concatenate(self._hashes)
        return len(hashes) - len(np.unique(hashes))


def _hash_documents(tokens: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return 64 bits of each document's BLAKE2 hash: two of 10^8 different documents agree with probability 3e-4."""
    content = tokens.data.cast("B")
    digests = []
    start = 0
    for length in lengths.tolist():
        stop = start + length * tokens.itemsize
        digests.append(hashlib.blake2b(content[start:stop], digest_size=8).digest())
        start = stop
    return np.frombuffer(b"".join(digests), np.uint64)


def percentiles(lengths: Counter[int]) -> dict[str, int]:
    """Return the length at each percentile, by the nearest-rank method."""
    values = np.array(sorted(lengths), np.int64)
    if not len(values):
        return {}
    up_to = np.cumsum([lengths[value] for value in values.tolist()])
    found = {}
    for percent in PERCENTILES:
        rank = max(1, -(-percent * int(up_to[-1]) // 100))
        found[str(percent)] = int(values[np.searchsorted(up_to, rank)])
    return found


def histogram(lengths: Counter[int]) -> tuple[LengthBin, ...]:
    """Return the number of documents with lengths from each power of two to the next."""
    bins: Counter[int] = Counter()
    for length, count in lengths.items():
        bins[length.bit_length() - 1] += count
    if not bins:
        return ()
    powers = range(min(bins), max(bins) + 1)
    return tuple(LengthBin(low=2**power, high=2 ** (power + 1), num_documents=bins[power]) for power in powers)


def _sample(source: TokenSource, tokenizer: Tokenizer | None, count: int) -> list[DataSample]:
    """Return the first document of `count` chunks at equal distances, then further documents of these chunks."""
    samples: list[DataSample] = []
    if count == 0:
        return samples
    chunks = np.unique(np.linspace(0, source.num_chunks - 1, count).astype(int)).tolist()
    per_chunk = -(-count // len(chunks))
    for chunk in chunks:
        start = 0
        for document, length in enumerate(source.lengths(chunk)[:per_chunk].tolist()):
            ids = source.tokens(chunk)[start : start + min(length, _SAMPLE_TOKENS)]
            samples.append(
                DataSample(
                    chunk=chunk,
                    document=document,
                    num_tokens=length,
                    ids=tuple(ids.tolist()),
                    text=tokenizer.decode(ids[ids >= 0]) if tokenizer else None,
                )
            )
            start += length
    return samples[:count]
