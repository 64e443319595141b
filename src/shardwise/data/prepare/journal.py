"""The journal of `data prepare`: which shards are complete, and at which document the next one starts.

    prepare.jsonl   line 1: settings and inputs; then one line per complete shard

A line is appended after both files of its shard are on disk under their names. So after a kill, the shards of the
journal are complete, and preparing continues at the position of its last line. Complete shards are kept as far as they
come from inputs that have not changed: if input k changed, those that end before input k.
"""

from __future__ import annotations

import errno
import fcntl
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from shardwise.data.prepare.inputs import InputFile  # noqa: TC001 - msgspec reads the annotations
from shardwise.data.sources.shards import (
    JOURNAL,
    TOKENIZER,
    VERSION,
    ShardFacts,
    TokenizerName,
    check_checksum,
    remove_partial_files,
    shard_paths,
)
from shardwise.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from typing import BinaryIO

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
"""Errors of file systems without locks, on which two commands with one output folder are not detected."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything beside the inputs that determines the bytes of a corpus."""

    version: int = VERSION
    tokenizer: TokenizerName
    end_id: int
    text_field: str
    shard_tokens: int
    piece_bytes: int


class JournalHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of the journal."""

    settings: Settings
    inputs: tuple[InputFile, ...]


class InputPosition(msgspec.Struct, frozen=True, kw_only=True):
    """A document among all inputs."""

    file: int = 0
    piece: int = 0
    document: int = 0
    """Number of non-empty documents of the piece before this one."""


class CompleteShard(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the journal."""

    facts: ShardFacts
    next: InputPosition
    """The first document after this shard."""
    num_empty: int
    """Empty documents in all pieces that were begun so far."""


@dataclass(frozen=True)
class PrepareJournal:
    """The locked journal of an output folder, open for appending."""

    file: BinaryIO
    shards: list[CompleteShard]
    """The complete shards that are kept."""

    def append(self, shard: CompleteShard) -> None:
        """Record a complete shard."""
        self.file.write(msgspec.json.encode(shard) + b"\n")
        self.file.flush()
        os.fsync(self.file.fileno())
        self.shards.append(shard)


def parse_journal(content: bytes) -> tuple[JournalHeader, list[CompleteShard]] | None:
    """Return the header and the shards of a journal; None if it is invalid. An incomplete last line is left out."""
    lines = content.split(b"\n")[:-1]
    try:
        header = msgspec.json.decode(lines[0], type=JournalHeader)
        return header, [msgspec.json.decode(line, type=CompleteShard) for line in lines[1:]]
    except (msgspec.MsgspecError, IndexError):
        return None


def kept_shards(header: JournalHeader, found: JournalHeader, shards: list[CompleteShard]) -> list[CompleteShard]:
    """Return the shards of the journal `found` that `header` would produce too."""
    if header == found:
        return shards
    if header.settings != found.settings:
        return []
    num_equal = 0
    for old, new in zip(found.inputs, header.inputs, strict=False):
        if old != new:
            break
        num_equal += 1
    # The last shard of all inputs ends after them: with more inputs, it would be longer.
    return [shard for shard in shards if shard.next.file < num_equal]


def open_journal(folder: Path, header: JournalHeader) -> PrepareJournal:
    """Lock the journal of a folder, keep what is complete and unchanged, and remove all other files of shards."""
    file = (folder / JOURNAL).open("a+b")
    _lock(file, folder)
    file.seek(0)
    content = file.read()
    found = parse_journal(content)
    shards = kept_shards(header, *found) if found else []
    shards = shards[: _num_intact(folder, shards)]
    _remove_others(folder, len(shards))
    lines: list[Any] = [header, *shards]
    kept = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
    if content.startswith(kept):
        file.truncate(len(kept))
    else:
        file.truncate(0)
        file.write(kept)
    file.flush()
    os.fsync(file.fileno())
    return PrepareJournal(file, shards)


def _lock(file: BinaryIO, folder: Path) -> None:
    try:
        # A lock of this process: forked workers do not inherit it. Closing any descriptor of the file would release it.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return
        file.close()
        raise DataError(
            f"another process is preparing {folder}",
            code="data.prepare-running",
            fix="wait for it, or pass another folder with --out",
        ) from None


def _num_intact(folder: Path, shards: Sequence[CompleteShard]) -> int:
    """Return how many of the first shards have both files with the recorded checksums."""
    for number, shard in enumerate(shards):
        expected = (shard.facts.tokens_crc32, shard.facts.starts_crc32)
        for path, crc32 in zip(shard_paths(folder, number), expected, strict=True):
            try:
                check_checksum(path, crc32)
            except DataError:
                return number
    return len(shards)


def _remove_others(folder: Path, num_kept: int) -> None:
    kept: set[Path] = set()
    for number in range(num_kept):
        kept.update(shard_paths(folder, number))
    remove_partial_files(folder)
    for pattern in ("shard-*.bin", "shard-*.idx", TOKENIZER):
        for path in folder.glob(pattern):
            if path not in kept:
                path.unlink()
