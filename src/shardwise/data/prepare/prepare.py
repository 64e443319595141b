"""data_prepare: tokenizes documents in parallel into shards, with the same bytes at any number of processes.

Workers tokenize pieces of the inputs; this process writes their tokens in the order of the inputs and starts a new
shard where the next document would exceed `shard_tokens`. So neither the tokens nor the shard boundaries depend on the
workers. The index is written last. An interrupted run continues at the document after its last complete shard.
"""

from __future__ import annotations

import itertools
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from shardwise.data.prepare.inputs import (
    PIECE_BYTES,
    InputFile,
    InputPiece,
    find_ignored,
    find_inputs,
    list_pieces,
    read_texts,
)
from shardwise.data.prepare.journal import (
    CompleteShard,
    InputPosition,
    JournalHeader,
    PrepareJournal,
    Settings,
    open_journal,
    parse_journal,
)
from shardwise.data.prepare.spec import DataPrepareReport, DataPrepareSpec, PrepareProgress
from shardwise.data.prepare.workers import map_in_order
from shardwise.data.sources.shards import (
    INDEX,
    JOURNAL,
    TOKENIZER,
    CorpusIndex,
    ShardWriter,
    open_corpus,
    remove_partial_files,
    replace_file,
    smallest_dtype,
    token_dtype,
    write_index,
)
from shardwise.data.storage.files import unreadable
from shardwise.data.storage.locations import locate, locate_all
from shardwise.data.tokenizer import BYTES, EncodedTexts, Tokenizer, load_tokenizer
from shardwise.errors import DataError
from shardwise.hardware.probe import usable_cores
from shardwise.spec import spec_function

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@spec_function(DataPrepareSpec)
def data_prepare(spec: DataPrepareSpec) -> DataPrepareReport:
    """Tokenize documents into a corpus of token shards, which `open_source` reads."""
    return prepare_corpus(spec)


def prepare_corpus(
    spec: DataPrepareSpec, *, on_progress: Callable[[PrepareProgress], None] | None = None
) -> DataPrepareReport:
    """Tokenize documents into a corpus; calls `on_progress` after each piece of the inputs."""
    started = time.monotonic()
    tokenizer = _load(spec)
    inputs = locate_all(spec.inputs)
    header = JournalHeader(
        settings=Settings(
            tokenizer=tokenizer.name,
            end_id=tokenizer.end_id,
            text_field=spec.text_field,
            shard_tokens=spec.shard_tokens,
            piece_bytes=PIECE_BYTES,
        ),
        inputs=tuple(find_inputs(inputs)),
    )
    report = partial(_report, spec.out, ignored=tuple(find_ignored(inputs)))
    if _is_complete(spec.out, header):
        index = open_corpus(spec.out).index
        return report(index, num_kept=index.num_shards, num_new=0, seconds=time.monotonic() - started)
    is_new = _make_folder(spec.out)
    journal: PrepareJournal | None = None
    try:
        journal = open_journal(spec.out, header)
        num_kept = len(journal.shards)
        num_old = sum(shard.facts.tokens for shard in journal.shards)
        index = _Preparation(spec, tokenizer, header.inputs, journal).run(on_progress)
    except OSError as error:  # errors of inputs are DataErrors already
        raise DataError(
            f"output folder {spec.out} cannot be written ({error.strerror or error})",
            code="data.write-failed",
            fix="free disk space, then repeat the command, which continues after the last complete shard",
        ) from error
    finally:
        if journal is not None:
            remove_partial_files(spec.out)
            journal.file.close()
            if not journal.shards:
                (spec.out / JOURNAL).unlink()
                if is_new:
                    spec.out.rmdir()
    seconds = time.monotonic() - started
    return report(index, num_kept=num_kept, num_new=index.num_tokens - num_old, seconds=seconds)


def _load(spec: DataPrepareSpec) -> Tokenizer:
    path = None if spec.tokenizer == BYTES else locate(spec.tokenizer)
    tokenizer = load_tokenizer(path.name if path else BYTES, path, end_token=spec.end_token)
    if spec.vocab_size is not None and tokenizer.vocab_size > spec.vocab_size:
        raise DataError(
            f"tokenizer {spec.tokenizer} has {tokenizer.vocab_size} ids, but the vocabulary has {spec.vocab_size}",
            code="data.tokenizer-too-large",
            fix=f"set the vocabulary size of the model to {tokenizer.vocab_size} or more, or use another tokenizer",
        )
    return tokenizer


def _is_complete(folder: Path, header: JournalHeader) -> bool:
    """Return whether a folder has the complete corpus already; raises DataError if it has other files."""
    try:
        names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    except OSError as error:
        raise unreadable(folder, error) from error
    if names and JOURNAL not in names:
        raise DataError(
            f"output folder {folder} is not empty", code="data.output-not-empty", fix="pass a new folder with --out"
        )
    if INDEX not in names:
        return False
    found = parse_journal((folder / JOURNAL).read_bytes())
    if found is None or found[0] != header:
        raise DataError(
            f"output folder {folder} has a corpus of other inputs or settings",
            code="data.output-other-corpus",
            fix="pass a new folder with --out, or delete the corpus",
        )
    open_corpus(folder).check_sizes()
    return True


def _make_folder(folder: Path) -> bool:
    """Create the output folder, and return whether it did not exist."""
    if folder.is_dir():
        return False
    try:
        folder.mkdir()
    except OSError as error:
        raise DataError(
            f"output folder {folder} cannot be created ({error.strerror})",
            code="data.output-not-created",
            fix="create its parent folder, or pass another one with --out",
        ) from None
    return True


@dataclass(frozen=True)
class _Task:
    """A piece of an input."""

    file: int
    number: int
    piece: InputPiece


class _Preparation:
    """The state of one run: the open shard, and the counts so far."""

    def __init__(
        self, spec: DataPrepareSpec, tokenizer: Tokenizer, inputs: tuple[InputFile, ...], journal: PrepareJournal
    ) -> None:
        self._spec = spec
        self._tokenizer = tokenizer
        self._inputs = inputs
        self._paths = locate_all(file.path for file in inputs)
        self._journal = journal
        self._dtype = smallest_dtype(tokenizer.vocab_size)
        self._writer: ShardWriter | None = None
        self._num_shards = len(journal.shards)
        self._closing: Future[None] | None = None
        """The shard before the open one, while it is flushed to disk."""
        self._start = InputPosition()
        self._num_empty = 0
        if journal.shards:
            self._start = journal.shards[-1].next
            self._num_empty = journal.shards[-1].num_empty

    def run(self, on_progress: Callable[[PrepareProgress], None] | None) -> CorpusIndex:
        """Write the remaining shards and the index."""
        total_bytes = sum(file.size for file in self._inputs)
        num_bytes = sum(file.size for file in self._inputs[: self._start.file])
        num_tokens = sum(shard.facts.tokens for shard in self._journal.shards)
        processes = self._spec.processes or usable_cores()
        with ThreadPoolExecutor(1) as flusher:
            for task, encoded in map_in_order(self._encode, self._tasks(), processes=processes):
                self._add(task, encoded, flusher)
                num_bytes += task.piece.num_bytes
                num_tokens += len(encoded.tokens)
                if on_progress is not None:
                    on_progress(PrepareProgress(num_bytes=num_bytes, total_bytes=total_bytes, num_tokens=num_tokens))
            if self._writer is not None:
                self._close_shard(InputPosition(file=len(self._inputs)), flusher)
            self._wait_for_flush()
        return self._finish()

    def _tasks(self) -> Iterator[_Task]:
        """Yield the pieces of all inputs from the start position."""
        for file in range(self._start.file, len(self._inputs)):
            pieces = enumerate(list_pieces(self._inputs[file], self._paths[file]))
            first = self._start.piece if file == self._start.file else 0
            for number, piece in itertools.islice(pieces, first, None):
                yield _Task(file, number, piece)

    def _encode(self, task: _Task) -> EncodedTexts:
        """Read and tokenize a piece; runs in a worker."""
        file, path = self._inputs[task.file], self._paths[task.file]
        return self._tokenizer.encode(read_texts(file, path, task.piece, self._spec.text_field))

    def _add(self, task: _Task, encoded: EncodedTexts, flusher: ThreadPoolExecutor) -> None:
        """Append the documents of a piece to the open shard, and to new ones where it is full."""
        document = 0
        if (task.file, task.number) == (self._start.file, self._start.piece):
            document = self._start.document
        if document == 0:  # else the shard before has counted them
            self._num_empty += encoded.num_empty
        ends = np.concatenate([[0], np.cumsum(encoded.lengths)])
        while document < len(encoded.lengths):
            if self._writer is None:
                self._writer = ShardWriter(self._spec.out, self._num_shards, self._dtype)
                self._num_shards += 1
            free = self._spec.shard_tokens - self._writer.num_tokens
            stop = int(np.searchsorted(ends, ends[document] + free, side="right")) - 1
            if self._writer.num_tokens == 0:
                stop = max(stop, document + 1)  # a document longer than a shard has a shard of its own
            if stop > document:
                self._writer.add(encoded.tokens[ends[document] : ends[stop]], encoded.lengths[document:stop])
            document = stop
            if document < len(encoded.lengths):
                following = InputPosition(file=task.file, piece=task.number, document=document)
                self._close_shard(following, flusher, num_ahead=0 if document else encoded.num_empty)

    def _close_shard(self, following: InputPosition, flusher: ThreadPoolExecutor, num_ahead: int = 0) -> None:
        """Complete the open shard in a thread, since workers would wait while this thread waits for the disk.

        `num_ahead` are empty documents of the piece at `following`, which a resumed command counts again.
        """
        writer, num_empty = self._writer, self._num_empty - num_ahead
        assert writer is not None  # noqa: S101 - callers have opened it
        self._writer = None

        def complete() -> None:
            self._journal.append(CompleteShard(facts=writer.close(), next=following, num_empty=num_empty))

        self._wait_for_flush()  # the journal has shards in order, and at most one of them waits in memory
        self._closing = flusher.submit(complete)

    def _wait_for_flush(self) -> None:
        if self._closing is not None:
            self._closing.result()

    def _finish(self) -> CorpusIndex:
        if not self._journal.shards:
            raise DataError(
                f"the inputs have no documents, only {self._num_empty} empty ones",
                code="data.no-documents",
                fix="pass inputs with text",
            )
        if self._tokenizer.content:
            replace_file(self._spec.out / TOKENIZER, self._tokenizer.content)
        return write_index(
            self._spec.out,
            [shard.facts for shard in self._journal.shards],
            dtype=self._dtype,
            tokenizer=self._tokenizer.name,
            vocab_size=self._tokenizer.vocab_size,
            end_id=self._tokenizer.end_id,
            num_empty=self._num_empty,
        )


def _report(
    folder: Path, index: CorpusIndex, *, ignored: tuple[str, ...], num_kept: int, num_new: int, seconds: float
) -> DataPrepareReport:
    return DataPrepareReport(
        path=folder,
        num_shards=index.num_shards,
        num_kept=num_kept,
        num_documents=index.num_documents,
        num_empty=index.num_empty,
        ignored=ignored,
        num_tokens=index.num_tokens,
        vocab_size=index.vocab_size,
        end_id=index.end_id,
        dtype=index.dtype,
        num_bytes=index.num_tokens * token_dtype(index.dtype).itemsize,
        seconds=seconds,
        tokens_per_s=num_new / seconds if num_new else None,
    )
