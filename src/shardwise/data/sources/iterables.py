"""Iterable data as a TokenSource: shards of documents that any process can read again from their start.

A stream has a position only in the process that reads it, so a resumed run or another rank cannot continue it. Shards
make it exact: a shard is a chunk, the order of chunks is a permutation, and a position in a shard is found by reading
this shard again. The invariant: a shard has the same documents whenever it is read; a source that violates it is
refused, since rows would be lost or repeated.
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


class ShardedIterable:
    """A TokenSource over shards of documents, each of which a function opens by its number."""

    def __init__(
        self,
        name: str,
        open_shard: Callable[[int], Iterable[Sequence[int] | NDArray[Any]]],
        num_shards: int,
        *,
        vocab_size: int | None = None,
    ) -> None:
        """Create a source of `num_shards` shards; `open_shard(number)` returns the documents of one, as token ids."""
        if num_shards < 1:
            raise DataError(
                f"source {name} must have at least one shard, got {num_shards}",
                code="data.no-shards",
                fix="pass the number of shards that open_shard accepts",
            )
        self.name, self.num_chunks, self.vocab_size = name, num_shards, vocab_size
        self.identity = f"{num_shards} shards"
        self._open_shard = open_shard
        self._shards: OrderedDict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = OrderedDict()
        self._digests: dict[int, int] = {}

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all shards, which are all read to count them."""
        return sum(len(self.tokens(shard)) for shard in range(self.num_chunks))

    def lengths(self, chunk: int) -> NDArray[np.int64]:
        """Return the number of tokens of each document of a shard."""
        return self._load(chunk)[0]

    def tokens(self, chunk: int) -> NDArray[np.int64]:
        """Return the tokens of a shard."""
        return self._load(chunk)[1]

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the shards in memory; the receiver reads them again."""
        return {**self.__dict__, "_shards": OrderedDict()}

    def _load(self, shard: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        if shard in self._shards:
            self._shards.move_to_end(shard)
            return self._shards[shard]
        documents = [np.asarray(document, dtype=np.int64) for document in self._open_shard(shard)]
        lengths = np.array([len(document) for document in documents], dtype=np.int64)
        tokens = np.concatenate(documents) if documents else np.empty(0, dtype=np.int64)
        self._check_same(shard, zlib.crc32(tokens.tobytes(), zlib.crc32(lengths.tobytes())))
        if len(self._shards) >= MAX_SHARDS:
            self._shards.popitem(last=False)
        self._shards[shard] = lengths, tokens
        return self._shards[shard]

    def _check_same(self, shard: int, digest: int) -> None:
        """Raise DataError if a shard differs from what was read before, also in the process that sent this object."""
        if self._digests.setdefault(shard, digest) != digest:
            raise DataError(
                f"shard {shard} of source {self.name} has other documents than when it was read before",
                code="data.shard-changed",
                fix="make open_shard deterministic, without shuffling or sampling: the corpus shuffles documents",
            )
