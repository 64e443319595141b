"""Iterable data as a TokenSource: shards of documents that any process can read again from their start.

A stream has a position only in the process that reads it, so a resumed run or another rank cannot continue it. Shards
make it exact: a shard is a chunk, the order of chunks is a permutation, and a position in a shard is found by reading
this shard again. The invariant: a shard has the same documents whenever it is read. The checksum of a shard is compared
with that of each earlier read, also of those before a checkpoint, and a source that violates the invariant is refused,
since rows would be lost or repeated.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np

from shardwise.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

MAX_SHARDS = 32
"""Shards that stay in memory: a group of 16 chunks, and the next one."""
MAX_SHARD_TOKENS = 2**26
"""Tokens of the largest shard: 128 MiB, or 256 MiB if the vocabulary exceeds 65,536."""


class ShardedIterable:
    """A TokenSource over shards of documents, each of which a function opens by its number."""

    def __init__(
        self,
        name: str,
        open_shard: Callable[[int], Iterable[Sequence[int] | NDArray[Any]]],
        num_shards: int,
        *,
        vocab_size: int | None = None,
        identity: str = "",
        describe_shard: Callable[[int], str] = "shard {}".format,
    ) -> None:
        """Create a source of `num_shards` shards; `open_shard(number)` returns the documents of one, as token ids.

        `identity` is a text that changes if documents do, such as sizes and checksums of files. `describe_shard`
        returns the name of a shard in errors, such as a range of rows.
        """
        if num_shards < 1:
            raise DataError(
                f"source {name} must have at least one shard, got {num_shards}",
                code="data.no-shards",
                fix="pass the number of shards that open_shard accepts",
            )
        self.name, self.num_chunks, self.vocab_size = name, num_shards, vocab_size
        self.identity = f"{num_shards} shards"
        if identity:
            self.identity += f", {identity}"
        self._open_shard, self._describe_shard = open_shard, describe_shard
        self._shards: OrderedDict[int, tuple[NDArray[np.int64], NDArray[Any]]] = OrderedDict()
        self._digests: dict[int, int] = {}

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all shards, which are all read to count them."""
        return sum(len(self.tokens(shard)) for shard in range(self.num_chunks))

    def lengths(self, chunk: int) -> NDArray[np.int64]:
        """Return the number of tokens of each document of a shard; documents without tokens are left out."""
        return self._load(chunk)[0]

    def tokens(self, chunk: int) -> NDArray[Any]:
        """Return the tokens of a shard, uint16 or uint32."""
        return self._load(chunk)[1]

    def digest(self, chunk: int) -> int:
        """Return a checksum of the documents of a shard."""
        self._load(chunk)
        return self._digests[chunk]

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the shards in memory; the receiver reads them again."""
        return {**self.__dict__, "_shards": OrderedDict()}

    def _load(self, shard: int) -> tuple[NDArray[np.int64], NDArray[Any]]:
        if shard in self._shards:
            self._shards.move_to_end(shard)
            return self._shards[shard]
        lengths, tokens = self._read(shard)
        self._check_same(shard, zlib.crc32(tokens.tobytes(), zlib.crc32(lengths.tobytes())))
        if len(self._shards) >= MAX_SHARDS:
            self._shards.popitem(last=False)
        self._shards[shard] = lengths, tokens
        return self._shards[shard]

    def _read(self, shard: int) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """Return the lengths and the tokens of the documents of a shard, at most MAX_SHARD_TOKENS tokens."""
        documents, num_tokens = [], 0
        for document in self._open_shard(shard):
            ids = self._checked(shard, document)
            num_tokens += len(ids)
            if num_tokens > MAX_SHARD_TOKENS:
                raise DataError(
                    f"{self._place(shard)} has more than {MAX_SHARD_TOKENS} tokens, or no end",
                    code="data.shard-too-large",
                    fix="split the data into more shards, or long documents into several, or write a corpus with"
                    " `shardwise data prepare`",
                )
            if len(ids):
                documents.append(ids)
        lengths = np.array([len(ids) for ids in documents], dtype=np.int64)
        return lengths, np.concatenate([np.empty(0, dtype=np.uint16), *documents])

    def _checked(self, shard: int, document: Sequence[int] | NDArray[Any]) -> NDArray[Any]:
        """Return the ids of a document as uint16 or uint32; raise DataError if they are not ids of the vocabulary."""
        ids = np.asarray(document)
        if ids.size == 0:
            return np.empty(0, dtype=np.uint16)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise DataError(
                f"{self._place(shard)} has a document of {ids.dtype} with shape {list(ids.shape)}",
                code="data.document-invalid",
                fix="return each document as one sequence of integers, its token ids",
            )
        lowest, highest = int(ids.min()), int(ids.max())
        limit = self.vocab_size or 2**32
        if lowest < 0 or highest >= limit:
            raise DataError(
                f"{self._place(shard)} has the token id {lowest if lowest < 0 else highest}, which is outside of 0 to"
                f" {limit - 1}",
                code="data.token-outside-vocabulary",
                fix="tokenize the documents with the tokenizer of the model, or correct vocab_size",
            )
        return ids.astype(np.uint16 if highest < 2**16 else np.uint32)

    def _place(self, shard: int) -> str:
        return f"{self._describe_shard(shard)} of source {self.name}"

    def _check_same(self, shard: int, digest: int) -> None:
        """Raise DataError if a shard differs from what was read before, also in the process that sent this object."""
        if self._digests.setdefault(shard, digest) != digest:
            raise shard_changed(self._place(shard), "when it was read before")


def shard_changed(what: str, when: str) -> DataError:
    """Return the error for shards that have other documents than `when` they were read before."""
    return DataError(
        f"{what} has other documents than {when}",
        code="data.shard-changed",
        fix="make the source deterministic, without shuffling or sampling: the corpus shuffles documents",
    )
