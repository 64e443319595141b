"""open_source: a corpus, a token file or a folder of token files as a TokenSource, by its detected format."""

from __future__ import annotations

from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Literal

from shardwise.data.sources.shards import INDEX, JOURNAL, open_corpus
from shardwise.data.sources.source import CHUNK_TOKENS, FileSource
from shardwise.data.sources.token_files import is_megatron, open_megatron, open_streams
from shardwise.data.storage.files import is_file, is_folder, list_files, size_and_version
from shardwise.data.storage.locations import locate
from shardwise.errors import DataError

if TYPE_CHECKING:
    from shardwise.data.sources.source import TokenSource
    from shardwise.data.storage.locations import Location

_SUFFIXES = (".bin", ".npy")
MAX_CHECKED = 10_000
"""Shards whose sizes are compared with the index when a corpus is opened: those of a million shards took 39 s."""


def open_source(
    path: str | Path,
    *,
    end_id: int | None = None,
    dtype: Literal["uint16", "uint32"] = "uint16",
    chunk_tokens: int = CHUNK_TOKENS,
) -> FileSource:
    """Return the TokenSource at a path or URL: a corpus of `data prepare`, a token file, or a folder of token files.

    `end_id` splits files without documents at this token; `dtype` is that of `.bin` files without a header;
    `chunk_tokens` is the size of chunks, which a corpus of `data prepare` stores. Opening a corpus checks the sizes
    of its files, not their content. Those of a corpus with more than MAX_CHECKED shards, or on a web server, are
    checked when a shard is first read.
    """
    location = locate(path)
    if location.suffix in {*_SUFFIXES, ".idx"}:
        found = _open_file(location, end_id=end_id, dtype=dtype, chunk_tokens=chunk_tokens)
        if found is not None:
            return found
    if is_file(location / INDEX):
        shards = open_corpus(location)
        if (isinstance(location, Path) or location.can_list) and shards.index.num_shards <= MAX_CHECKED:
            shards.check_sizes()
        return shards.source()
    if is_file(location / JOURNAL):
        raise DataError(
            f"{location} has no {INDEX}, because `data prepare` was interrupted",
            code="data.corpus-incomplete",
            fix="repeat the command that prepared it",
        )
    if is_folder(location):
        return open_streams(location, _token_files(location), end_id=end_id, dtype=dtype, chunk_tokens=chunk_tokens)
    if is_file(location):
        raise _unknown_format(location)
    raise DataError(
        f"{location} does not exist", code="data.path-not-found", fix="pass a corpus folder or a token file"
    )


def check_documents(name: str, source: TokenSource, *, fix: str) -> None:
    """Raise DataError if packed rows of a source would consist of chunks, because its documents are unknown."""
    if not getattr(source, "has_documents", True):
        raise DataError(
            f"source {name} is packed, but its files do not store where documents end, so they would attend to each"
            " other",
            code="data.packed-without-documents",
            fix=fix,
        )


def _open_file(path: Location, *, end_id: int | None, dtype: str, chunk_tokens: int) -> FileSource | None:
    """Return the source of a token file; None if it does not exist."""
    index = path.with_suffix(".idx")
    if path.suffix in {".bin", ".idx"} and is_megatron(index):
        return open_megatron(path.with_suffix(".bin"), index, chunk_tokens=chunk_tokens)
    if not is_file(path):
        return None
    if path.suffix not in _SUFFIXES:
        raise _unknown_format(path)
    size, _ = size_and_version(path) or (0, 0)
    return open_streams(path.parent, {path.name: size}, end_id=end_id, dtype=dtype, chunk_tokens=chunk_tokens)


def _token_files(folder: Location) -> dict[str, int]:
    """Return name -> size of the token files of a folder; raises DataError unless all have the same suffix."""
    sizes = list_files(folder, _SUFFIXES)
    names = list(sizes)
    if not names or len({PurePath(name).suffix for name in names}) > 1:
        raise _unknown_format(folder)
    if is_file((folder / names[0]).with_suffix(".idx")):
        raise _unknown_format(folder)
    return sizes


def _unknown_format(path: Location) -> DataError:
    return DataError(
        f"{path} is not in a supported token format",
        code="data.unknown-format",
        fix=f"pass a folder with {INDEX}, a .bin or .npy file, or a folder with files of one of these suffixes",
    )
