"""Datasets of tokens: a corpus of mixed sources to train on, and the rows of one source to evaluate on."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from shardwise.data.corpus import Corpus, MixtureStage
from shardwise.data.documents import Documents
from shardwise.data.mixture import make_mixture
from shardwise.data.row_groups import make_group
from shardwise.data.row_reads import BatchMemory, RowRequest, find_unknown_id, read_packed, read_windows
from shardwise.data.sources.iterables import ShardedIterable
from shardwise.data.sources.open import check_documents, open_source
from shardwise.data.sources.source import outside_vocabulary, vocabulary_too_large
from shardwise.data.storage.locations import locate
from shardwise.errors import DataError, nearest

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.data.sources.source import TokenSource

    Given: TypeAlias = "str | Path | TokenFiles | Documents | TokenSource"
    """A path for `open_source`, with or without options, documents that are tokenized during training, or a source."""
    Proportions = Mapping[str, float]

_TEST = "test"
"""Name of the source of the test split in errors."""
Dtype = Literal["uint16", "uint32"]

_ONLY = "tokens"
"""Name of a source that is passed without one."""
_END_ID_FIX = "pass sw.datasets.token_files(path, end_id=ID), where ID ends documents, or do not pack it"


class TokenRows(Dataset[tuple[Tensor, ...]]):
    """The rows of one source in its order, each token once; items are as those of a Corpus.

    The rows of each chunk are computed from its lengths, once: for evaluation data, not for a large corpus.
    """

    def __init__(self, source: TokenSource, length: int, *, packed: bool, split_documents: bool = True) -> None:
        self.source, self._length, self._packed = source, length, packed
        chunks = range(source.num_chunks)
        make_rows = partial(make_group, source, length=length, packed=packed, split_documents=split_documents)
        self._groups = [make_rows(np.array([chunk])) for chunk in chunks]
        self._ends = np.cumsum([group.num_rows for group in self._groups], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def limit_ids(self, vocab_size: int) -> None:
        """Raise DataError if a token id is not below `vocab_size`; reads all tokens if the vocabulary is unknown."""
        size = getattr(self.source, "vocab_size", None)
        if size is not None and size > vocab_size:
            raise vocabulary_too_large(_TEST, size, vocab_size)
        if size is not None:
            return
        for row in range(len(self)):
            unknown = find_unknown_id([field[None] for field in self[row]], vocab_size)
            if unknown is not None:
                raise outside_vocabulary(_TEST, unknown[1], vocab_size)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} is out of range for {len(self)} rows")
        number = int(np.searchsorted(self._ends, index, side="right"))
        group = self._groups[number]
        first = int(self._ends[number]) - group.num_rows
        place = index - first
        request = RowRequest(group.read_order(place, place + 1), np.zeros(1, dtype=np.int64))
        sources, memory = [self.source], BatchMemory()
        if self._packed:
            fields = read_packed(request, sources, self._length, memory, is_packed=np.ones(1, dtype=np.bool_))
        else:
            fields = read_windows(request, sources, self._length, memory)
        return tuple(values[0] for values in fields)


@dataclass(frozen=True, kw_only=True)
class TokenFiles:
    """A token file or a folder of such files, and what they do not store."""

    path: str | Path
    end_id: int | None
    dtype: Dtype

    def open(self) -> TokenSource:
        """Return the files as a source."""
        return open_source(self.path, end_id=self.end_id, dtype=self.dtype)


def token_files(path: str | Path, *, end_id: int | None = None, dtype: Dtype = "uint16") -> TokenFiles:
    """Return a source for `tokens`: `.bin` or `.npy` files of other tools, with facts that the files do not store.

    `end_id` is the token that ends each document, which packed rows require; `dtype` is that of `.bin` files without a
    header. Formats that store documents or their dtype use what they store.
    """
    if dtype not in get_args(Dtype):
        raise DataError(
            f"dtype {dtype!r} is unknown", code="data.dtype-unknown", fix=nearest(str(dtype), get_args(Dtype))
        )
    if end_id is not None and (not isinstance(end_id, int) or isinstance(end_id, bool) or end_id < 0):
        raise DataError(
            f"end_id must be a token id of at least 0, got {end_id!r}",
            code="data.end-id-invalid",
            fix="pass the token that ends documents, or None",
        )
    return TokenFiles(path=path, end_id=end_id, dtype=dtype)


def tokens(
    train: Given | Mapping[str, Given],
    *,
    length: int,
    test: Given | None = None,
    proportions: Proportions | Mapping[int, Proportions] | None = None,
    packed: bool | Collection[str] = False,
    split_documents: bool = True,
) -> Callable[[str], Dataset[tuple[Tensor, ...]] | None]:
    """Return a factory of datasets from a corpus of `shardwise data prepare`, token files of other tools, or documents.

    `train` is a path or URL, the result of `documents`, or a TokenSource; or a mapping from names of sources to these.
    `proportions` are the relative numbers of rows of each source, which default to their numbers of tokens if these are
    stored, or a curriculum: a mapping from the first step of a stage to its proportions. Rows have `length` tokens:
    windows over concatenated documents or, for all sources or those in `packed`, packed documents, which need a model
    that restricts attention to `document_ids`. A packed document that is longer than a row is split, or refused if
    `split_documents` is False. The training split has no end, so the job's length is in steps or tokens. `test` is the
    test split.
    """
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise DataError(
            f"length must be a positive integer, got {length!r}",
            code="data.window-length-invalid",
            fix="pass length=1 or more",
        )
    given = dict(train) if isinstance(train, Mapping) else {_ONLY: train}
    if isinstance(packed, str):
        packed = (packed,)  # else its letters would be the names
    chosen = frozenset(given if packed is True else packed or ())
    for name in chosen - set(given):
        raise _unknown_source("packed", name, given)
    if not split_documents and not chosen:
        raise DataError(
            "split_documents is False, but no source is packed, so rows are windows that begin anywhere",
            code="data.split-without-packing",
            fix="pass packed=True, or remove split_documents=",
        )
    for each in (*given.values(), test):
        path = each.path if isinstance(each, TokenFiles) else each
        if isinstance(path, str | Path):
            locate(path)  # refuses a URL with a secret, before a run directory exists
    stages = None if proportions is None else _stages(proportions, given)
    return _TokenData(
        given=given, test=test, length=length, stages=stages, packed=chosen, split_documents=split_documents
    )


def _stages(given: Proportions | Mapping[int, Proportions], names: Collection[str]) -> tuple[MixtureStage, ...]:
    """Return the stages of a curriculum, or the only stage of constant proportions."""
    by_step: Mapping[Any, Any] = {0: given}
    if isinstance(given, Mapping) and given and all(type(key) is int for key in given):
        by_step = given
    for proportions in by_step.values():
        if not isinstance(proportions, Mapping) or not all(isinstance(name, str) for name in proportions):
            raise DataError(
                f"proportions must map names of sources to numbers, got {proportions!r}",
                code="data.proportions-invalid",
                fix='pass {"web": 3, "code": 1}, or stages by their first step, {0: {"web": 1}, 100: {"code": 1}}',
            )
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

    given: Mapping[str, Given]
    test: Given | None
    length: int
    stages: tuple[MixtureStage, ...] | None
    """None for proportions by the number of tokens."""
    packed: frozenset[str]
    split_documents: bool

    def __call__(self, split: str) -> Dataset[tuple[Tensor, ...]] | None:
        if split == "train":
            return self._corpus()
        if self.test is None:
            return None
        source = _open(_TEST, self.test)
        if self.packed:
            check_documents(_TEST, source, fix=_END_ID_FIX)
        rows = TokenRows(source, self.length, packed=bool(self.packed), split_documents=self.split_documents)
        if not len(rows):
            raise DataError(
                f"source {_TEST} has no row of {self.length} tokens, so there is nothing to evaluate",
                code="data.source-empty",
                fix="pass a test source with documents, or omit test=",
            )
        return rows

    def _corpus(self) -> Corpus:
        sources = {name: _open(name, given) for name, given in self.given.items()}
        for name in sorted(self.packed):
            check_documents(name, sources[name], fix=_END_ID_FIX)
        stages = self.stages or (MixtureStage(mixture=make_mixture(_shares(sources))),)
        return Corpus(
            sources=sources,
            stages=stages,
            length=self.length,
            packed=self.packed,
            split_documents=self.split_documents,
        )


def _open(name: str, given: Given) -> TokenSource:
    if isinstance(given, str | Path):
        return open_source(given)
    if isinstance(given, TokenFiles):
        return given.open()
    if isinstance(given, Documents):
        return given.open(name)
    if not (callable(getattr(given, "lengths", None)) and callable(getattr(given, "tokens", None))):
        raise DataError(
            f"source {name} is a {type(given).__name__}, which is not a source of tokens",
            code="data.source-invalid",
            fix="pass a path, sw.datasets.documents(...) for text or a dataset, or a ShardedIterable",
        )
    return given


def _shares(sources: Mapping[str, TokenSource]) -> dict[str, float]:
    """Return the number of tokens of each source; raise DataError if a source would be read to count them."""
    if len(sources) == 1:
        return dict.fromkeys(sources, 1.0)
    for name, source in sources.items():
        if isinstance(source, ShardedIterable):
            raise DataError(
                f"the number of tokens of source {name} is unknown before it is read",
                code="data.proportions-missing",
                fix="pass proportions=, the relative numbers of rows of each source",
            )
    return {name: float(source.num_tokens) for name, source in sources.items()}
