"""open_source: a corpus, a token file or a folder of token files as a TokenSource, by its detected format."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from shardwise.data.sources.shards import INDEX, JOURNAL, open_corpus
from shardwise.data.sources.source import CHUNK_TOKENS, FileSource, unreadable
from shardwise.data.sources.token_files import is_megatron, open_megatron, open_streams
from shardwise.errors import DataError

_SUFFIXES = (".bin", ".npy")


def open_source(
    path: str | Path,
    *,
    end_id: int | None = None,
    dtype: Literal["uint16", "uint32"] = "uint16",
    chunk_tokens: int = CHUNK_TOKENS,
) -> FileSource:
    """Return the TokenSource at a path: a corpus of `data prepare`, a token file, or a folder of token files.

    `end_id` splits files without documents at this token; `dtype` is that of `.bin` files without a header;
    `chunk_tokens` is the size of chunks, which a corpus of `data prepare` stores. Opening a corpus
    checks the sizes of all its files, not their content.
    """
    path = Path(path)
    if (path / INDEX).is_file():
        shards = open_corpus(path)
        shards.check_sizes()
        return shards.source()
    if (path / JOURNAL).is_file():
        raise DataError(
            f"{path} has no {INDEX}, because `data prepare` was interrupted",
            code="data.corpus-incomplete",
            fix="repeat the command that prepared it",
        )
    if path.is_dir():
        return open_streams(path, _token_files(path), end_id=end_id, dtype=dtype, chunk_tokens=chunk_tokens)
    if not path.exists():
        raise DataError(
            f"{path} does not exist", code="data.path-not-found", fix="pass a corpus folder or a token file"
        )
    index = path.with_suffix(".idx")
    if path.suffix in {".bin", ".idx"} and is_megatron(index):
        return open_megatron(path.with_suffix(".bin"), index, chunk_tokens=chunk_tokens)
    if path.suffix not in _SUFFIXES:
        raise _unknown_format(path)
    return open_streams(path.parent, [path.name], end_id=end_id, dtype=dtype, chunk_tokens=chunk_tokens)


def _token_files(folder: Path) -> list[str]:
    """Return the names of the token files of a folder, sorted; raises DataError unless all have the same suffix."""
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(_SUFFIXES))  # noqa: PTH208 - names, not paths
    except OSError as error:
        raise unreadable(folder, error) from error
    if not names or len({Path(name).suffix for name in names}) > 1 or (folder / names[0]).with_suffix(".idx").exists():
        raise _unknown_format(folder)
    return names


def _unknown_format(path: Path) -> DataError:
    return DataError(
        f"{path} is not in a supported token format",
        code="data.unknown-format",
        fix=f"pass a folder with {INDEX}, a .bin or .npy file, or a folder with files of one of these suffixes",
    )
