"""Datasets of token files: a corpus of mixed sources to train on, and the rows of one source to evaluate on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from shardwise.data.corpus import Corpus
from shardwise.data.mixture import make_mixture
from shardwise.data.row_groups import make_group, read_packed, read_windows
from shardwise.data.sources.open import open_source
from shardwise.errors import DataError, nearest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shardwise.data.sources.source import TokenSource

    Paths = str | Path | Mapping[str, str | Path]

_ONLY = "tokens"
"""Name of a source that is passed without one."""


class TokenRows(Dataset[tuple[Tensor, ...]]):
    """The rows of one source in its order, each token once; items are as those of a Corpus.

    The rows of each chunk are computed from its lengths, once: for evaluation data, not for a large corpus.
    """

    def __init__(self, source: TokenSource, length: int, *, packed: bool) -> None:
        self._source, self._length, self._packed = source, length, packed
        chunks = range(source.num_chunks)
        self._groups = [make_group(source, np.array([chunk]), length=length, packed=packed) for chunk in chunks]
        self._ends = np.cumsum([group.num_rows for group in self._groups], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} is out of range for {len(self)} rows")
        number = int(np.searchsorted(self._ends, index, side="right"))
        group = self._groups[number]
        first = int(self._ends[number]) - group.num_rows
        read = read_packed if self._packed else read_windows
        fields = read([group.row(index - first)], [self._source], self._length)
        return tuple(torch.from_numpy(values[0]) for values in fields)


def tokens(
    train: Paths,
    *,
    length: int,
    test: str | Path | None = None,
    proportions: Mapping[str, float] | None = None,
    packed: bool = False,
) -> Callable[[str], Dataset[tuple[Tensor, ...]] | None]:
    """Return a factory of datasets from token files: a corpus of `shardwise data prepare`, or files of other tools.

    `train` is one path, or a mapping from names of sources to their paths; `proportions` are the relative numbers of
    rows of each source, which default to their numbers of tokens. Rows have `length` tokens: windows over concatenated
    documents, or `packed` documents, which need a model that restricts attention to `document_ids`. The training split
    has no end, so the job's length is in steps or tokens. `test` is the path of the test split.
    """
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise DataError(
            f"length must be a positive integer, got {length!r}",
            code="data.window-length-invalid",
            fix="pass length=1 or more",
        )
    paths = dict(train) if isinstance(train, Mapping) else {_ONLY: train}
    unknown = sorted(set(proportions or {}) - set(paths))
    if unknown:
        raise DataError(
            f"proportions contain {unknown[0]!r}, which is not the name of a source",
            code="data.proportion-unknown-source",
            fix=nearest(unknown[0], paths),
        )
    if proportions is not None:
        make_mixture(proportions)  # raises for invalid values now, not when training starts
    return _TokenData(paths=paths, test=test, length=length, proportions=proportions, packed=packed)


@dataclass(frozen=True, kw_only=True)
class _TokenData:
    """Maps a split to its dataset; the arguments of `tokens`."""

    paths: Mapping[str, str | Path]
    test: str | Path | None
    length: int
    proportions: Mapping[str, float] | None
    packed: bool

    def __call__(self, split: str) -> Dataset[tuple[Tensor, ...]] | None:
        if split == "train":
            return self._corpus()
        return None if self.test is None else TokenRows(open_source(self.test), self.length, packed=self.packed)

    def _corpus(self) -> Corpus:
        sources = {name: open_source(path) for name, path in self.paths.items()}
        shares: dict[str, float] = {name: source.num_tokens for name, source in sources.items()}
        if self.proportions is not None:
            shares = {name: self.proportions.get(name, 0) for name in sources}
        return Corpus(sources=sources, mixture=make_mixture(shares), length=self.length, packed=self.packed)
