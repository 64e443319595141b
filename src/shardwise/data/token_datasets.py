"""Datasets of token files: a corpus of mixed sources to train on, and the rows of one source to evaluate on."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from shardwise.data.corpus import Corpus, MixtureStage
from shardwise.data.mixture import make_mixture
from shardwise.data.row_groups import make_group, read_packed, read_windows
from shardwise.data.sources.open import open_source
from shardwise.data.storage.locations import locate
from shardwise.errors import DataError, nearest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shardwise.data.sources.source import TokenSource

    Paths = str | Path | Mapping[str, str | Path]
    Proportions = Mapping[str, float]

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
        rows, sources = [group.row(index - first)], [self._source]
        fields: tuple[Any, ...]
        if self._packed:
            fields = read_packed(rows, sources, self._length, is_packed=[True])
        else:
            fields = read_windows(rows, sources, self._length)
        return tuple(torch.from_numpy(values[0]) for values in fields)


def tokens(
    train: Paths,
    *,
    length: int,
    test: str | Path | None = None,
    proportions: Proportions | Mapping[int, Proportions] | None = None,
    packed: bool | Collection[str] = False,
) -> Callable[[str], Dataset[tuple[Tensor, ...]] | None]:
    """Return a factory of datasets from token files: a corpus of `shardwise data prepare`, or files of other tools.

    `train` is one path or URL, or a mapping from names of sources to them. `proportions` are the relative numbers of
    rows of each source, which default to their numbers of tokens, or a curriculum: a mapping from the first step of a
    stage to its proportions. Rows have `length` tokens: windows over concatenated documents or, for all sources or
    those in `packed`, packed documents, which need a model that restricts attention to `document_ids`. The training
    split has no end, so the job's length is in steps or tokens. `test` is the path of the test split.
    """
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise DataError(
            f"length must be a positive integer, got {length!r}",
            code="data.window-length-invalid",
            fix="pass length=1 or more",
        )
    paths = dict(train) if isinstance(train, Mapping) else {_ONLY: train}
    chosen = frozenset(paths if packed is True else packed or ())
    for name in chosen - set(paths):
        raise _unknown_source("packed", name, paths)
    for path in (*paths.values(), *([] if test is None else [test])):
        locate(path)  # refuses a URL with a secret, before a run directory exists
    stages = None if proportions is None else _stages(proportions, paths)
    return _TokenData(paths=paths, test=test, length=length, stages=stages, packed=chosen)


def _stages(given: Proportions | Mapping[int, Proportions], names: Collection[str]) -> tuple[MixtureStage, ...]:
    """Return the stages of a curriculum, or the only stage of constant proportions."""
    is_curriculum = all(isinstance(key, int) for key in given) and bool(given)
    by_step: Mapping[Any, Any] = given if is_curriculum else {0: given}
    if min(by_step) != 0:
        raise DataError(
            f"the first stage of proportions starts at step {min(by_step)}, not at step 0",
            code="data.curriculum-start",
            fix="add the proportions of step 0",
        )
    stages = []
    for step in sorted(by_step):
        for name in sorted(set(by_step[step]) - set(names)):
            raise _unknown_source("proportions", name, names)
        mixture = make_mixture({name: by_step[step].get(name, 0) for name in names})
        stages.append(MixtureStage(first_step=step, mixture=mixture))
    return tuple(stages)


def _unknown_source(what: str, name: str, names: Collection[str]) -> DataError:
    return DataError(
        f"{what} contain {name!r}, which is not the name of a source",
        code="data.source-unknown",
        fix=nearest(str(name), names),
    )


@dataclass(frozen=True, kw_only=True)
class _TokenData:
    """Maps a split to its dataset; the arguments of `tokens`."""

    paths: Mapping[str, str | Path]
    test: str | Path | None
    length: int
    stages: tuple[MixtureStage, ...] | None
    """None for proportions by the number of tokens."""
    packed: frozenset[str]

    def __call__(self, split: str) -> Dataset[tuple[Tensor, ...]] | None:
        if split == "train":
            return self._corpus()
        return None if self.test is None else TokenRows(open_source(self.test), self.length, packed=bool(self.packed))

    def _corpus(self) -> Corpus:
        sources = {name: open_source(path) for name, path in self.paths.items()}
        stages = self.stages
        if stages is None:
            shares = {name: float(source.num_tokens) for name, source in sources.items()}
            stages = (MixtureStage(mixture=make_mixture(shares)),)
        return Corpus(sources=sources, stages=stages, length=self.length, packed=self.packed)
