"""Inputs of `data prepare`: JSONL, plain or gzipped, Parquet, Hugging Face datasets on disk, and text files.

An input is split into pieces that depend on its content only, never on the number of processes: that is what makes the
corpus the same at any number. The parent process lists the pieces without reading documents, except in gzipped files,
which it must decompress. A worker reads the texts of one piece. A piece of a JSONL file is a range of bytes; its
documents are the lines that start in the range, so no pass over the file is necessary to find line boundaries.
"""

from __future__ import annotations

import gzip
import itertools
import os
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from shardwise.data.sources.shards import INDEX
from shardwise.data.storage.files import (
    is_file,
    is_folder,
    list_files,
    list_others,
    missing,
    open_stream,
    read_file,
    size_and_version,
    unreadable,
)
from shardwise.errors import DataError, MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from shardwise.data.storage.locations import Location

PIECE_BYTES = 2**20
"""Bytes of text in a piece: enough for a batch of documents, small enough to balance workers."""
_ENDS_BYTES = 2**16
_ARROW_FILE = b"ARROW1"
Kind = Literal["jsonl", "jsonl.gz", "parquet", "arrow", "text"]
_SUFFIXES: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".jsonl.gz": "jsonl.gz",
    ".json.gz": "jsonl.gz",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
}
DATASET_STATE = "state.json"
"""File of a Hugging Face dataset folder that lists its Arrow files."""


class InputFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file with documents, and facts that change if its content does."""

    path: str
    kind: Kind
    size: int
    modified_ns: int
    """Time of the last change; of an object, a hash of its version."""
    ends_crc32: int
    """CRC-32 of the first and the last 64 KiB."""


class InputPiece(msgspec.Struct, frozen=True, kw_only=True):
    """A part of an input: a range of bytes, of Parquet row groups or of Arrow record batches."""

    start: int
    stop: int
    num_bytes: int
    """Bytes of the input file that the piece takes, for the progress bar."""
    bytes_in_memory: int = 0
    """Bytes of its rows after decompression; 0 for lines and texts."""
    data: bytes | None = None
    """Decompressed lines of a gzipped file."""


def find_inputs(paths: Iterable[Location]) -> list[InputFile]:
    """Return the files of the paths, in the order of the paths, files of a folder by name; raises DataError if none."""
    files: list[Location] = []
    for path in paths:
        files += _files_of(path)
    if not files:
        raise DataError("there are no input files", code="data.no-input", fix="pass files or folders with documents")
    return [_describe(file) for file in files]


def find_ignored(paths: Iterable[Location]) -> list[str]:
    """Return the paths of files and subfolders in folders that are not inputs, such as those of other suffixes."""
    folders = [path for path in paths if is_folder(path) and not is_file(path / DATASET_STATE)]
    return [f"{folder}/{name}" for folder in folders for name in list_others(folder, tuple(_SUFFIXES))]


def _files_of(path: Location) -> list[Location]:
    if is_file(path):
        return [path]
    if not is_folder(path):
        raise DataError(
            f"input {path} does not exist", code="data.path-not-found", fix="pass an existing file or folder"
        )
    if is_file(path / INDEX):
        raise DataError(
            f"input {path} is a corpus, which is tokenized already", code="data.input-is-corpus", fix="pass documents"
        )
    if is_file(path / DATASET_STATE):
        return _dataset_files(path)
    if is_file(path / "dataset_dict.json"):
        splits = sorted(each.parent.name for each in path.glob(f"*/{DATASET_STATE}")) if isinstance(path, Path) else []
        raise DataError(
            f"{path} is a dataset with the splits {', '.join(splits)}",
            code="data.several-splits",
            fix=f"pass one of them, such as {path / splits[0]}" if splits else "pass the folder of one split",
        )
    found = [path / name for name in list_files(path, tuple(_SUFFIXES))]
    if not found:
        raise DataError(
            f"folder {path} has no file of a supported format",
            code="data.no-input",
            fix=f"pass files with one of the suffixes {', '.join(_SUFFIXES)}",
        )
    return found


def _dataset_files(folder: Location) -> list[Location]:
    """Return the Arrow files of a dataset that Hugging Face datasets saved with save_to_disk."""
    try:
        state = msgspec.json.decode(read_file(folder / DATASET_STATE), type=dict)
        names = [entry["filename"] for entry in state["_data_files"]]
    except (msgspec.MsgspecError, KeyError, TypeError):
        raise DataError(
            f"{folder / DATASET_STATE} does not list the files of a dataset",
            code="data.dataset-invalid",
            fix="save the dataset again with save_to_disk",
        ) from None
    if state.get("_indices_data_files"):
        raise DataError(
            f"{folder} stores selected rows as indices",
            code="data.dataset-indices",
            fix="call flatten_indices() before save_to_disk",
        )
    return [folder / name for name in names]


def _kind_of(path: Location) -> Kind | None:
    suffix = "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix
    return _SUFFIXES.get(suffix)


def _describe(path: Location) -> InputFile:
    kind = _kind_of(path)
    if kind is None:
        raise DataError(
            f"{path} is not in a supported format",
            code="data.unknown-format",
            fix=f"pass files with one of the suffixes {', '.join(_SUFFIXES)}",
        )
    found = size_and_version(path)
    if found is None:
        raise missing(path)
    size, version = found
    try:
        with open_stream(path) as file:
            crc32 = zlib.crc32(file.read(_ENDS_BYTES))
            file.seek(max(0, size - _ENDS_BYTES))
            crc32 = zlib.crc32(file.read(_ENDS_BYTES), crc32)
    except OSError as error:
        raise unreadable(path, error) from error
    return InputFile(path=str(path), kind=kind, size=size, modified_ns=version, ends_crc32=crc32)


# The pieces of an input, listed by the parent process.


def list_pieces(file: InputFile, path: Location) -> Iterator[InputPiece]:
    """Yield the pieces of an input in order; the same ones for the same content. `path` is its location."""
    if file.kind == "jsonl":
        for start in range(0, file.size, PIECE_BYTES):
            stop = min(start + PIECE_BYTES, file.size)
            yield InputPiece(start=start, stop=stop, num_bytes=stop - start)
    elif file.kind == "jsonl.gz":
        yield from _gzip_pieces(path)
    elif file.kind == "parquet":
        metadata = _open_parquet(path).metadata
        for group in range(metadata.num_row_groups):
            yield InputPiece(
                start=group,
                stop=group + 1,
                num_bytes=file.size // metadata.num_row_groups,
                bytes_in_memory=metadata.row_group(group).total_byte_size,
            )
    elif file.kind == "arrow":
        yield from _arrow_pieces(path)
    else:
        yield InputPiece(start=0, stop=file.size, num_bytes=file.size)


def _gzip_pieces(path: Location) -> Iterator[InputPiece]:
    """Yield the lines of a gzipped file in blocks; `start` counts the lines before the block."""
    num_lines, consumed = 0, 0
    try:
        with open_stream(path) as raw, gzip.GzipFile(fileobj=raw) as file:
            while lines := file.readlines(PIECE_BYTES):
                position = raw.seek(0, os.SEEK_CUR)
                yield InputPiece(
                    start=num_lines,
                    stop=num_lines + len(lines),
                    num_bytes=position - consumed,
                    data=b"".join(lines),
                )
                num_lines += len(lines)
                consumed = position
    except (OSError, EOFError, zlib.error) as error:  # a damaged gzip file raises any of the three
        raise DataError(
            f"{path} cannot be decompressed ({error})", code="data.read-failed", fix="download it again"
        ) from None


def _arrow_pieces(path: Location) -> Iterator[InputPiece]:
    """Yield groups of record batches with at least PIECE_BYTES each."""
    start, num_bytes = 0, 0
    number = -1
    for number, batch in enumerate(_record_batches(path)):
        num_bytes += batch.nbytes
        if num_bytes >= PIECE_BYTES:
            yield InputPiece(start=start, stop=number + 1, num_bytes=num_bytes, bytes_in_memory=num_bytes)
            start, num_bytes = number + 1, 0
    if start <= number:
        yield InputPiece(start=start, stop=number + 1, num_bytes=num_bytes, bytes_in_memory=num_bytes)


# The texts of a piece, read by a worker.


def read_texts(file: InputFile, path: Location, piece: InputPiece, text_field: str) -> list[str]:
    """Return the texts of the documents of a piece; empty ones included."""
    try:
        if file.kind == "jsonl":
            return _decode_lines(_read_lines(path, piece), path, piece, text_field)
        if file.kind == "jsonl.gz":
            return _decode_lines(piece.data or b"", path, piece, text_field)
        if file.kind == "text":
            return [read_file(path).decode()]
    except OSError as error:
        raise unreadable(path, error) from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 (byte {error.start})", code="data.text-not-utf8", fix="convert it to UTF-8"
        ) from None
    if file.kind == "parquet":
        parquet = _open_parquet(path)
        _check_column(path, parquet.schema_arrow, text_field)
        column = parquet.read_row_group(piece.start, columns=[text_field]).column(0)
        return _column_texts(column, f"row group {piece.start} of {path}", text_field)
    texts: list[str] = []
    for number, batch in enumerate(itertools.islice(_record_batches(path), piece.start, piece.stop), piece.start):
        _check_column(path, batch.schema, text_field)
        texts += _column_texts(batch.column(text_field), f"record batch {number} of {path}", text_field)
    return texts


def _read_lines(path: Location, piece: InputPiece) -> bytes:
    """Return the lines that start in a range of bytes; the last of them may end after it."""
    with open_stream(path) as file:
        file.seek(max(0, piece.start - 1))
        if piece.start:
            file.readline()  # belongs to the piece before, unless the byte before this piece ends a line
        start = file.seek(0, os.SEEK_CUR)
        if start >= piece.stop:
            return b""
        content = file.read(piece.stop - start)
        if not content.endswith(b"\n"):
            content += file.readline()
        return content


def _decode_lines(content: bytes, path: Location, piece: InputPiece, text_field: str) -> list[str]:
    """Return the text field of each JSON line; other fields are skipped without creating objects."""
    row_type = msgspec.defstruct(
        "TextRow", [("text", str | msgspec.UnsetType, msgspec.UNSET)], rename={"text": text_field}
    )
    decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(row_type)
    try:
        texts = [row.text for row in decoder.decode_lines(content)]
    except (msgspec.MsgspecError, UnicodeDecodeError):
        texts = []
        is_valid = False
    else:
        is_valid = msgspec.UNSET not in texts
    if not is_valid:
        raise _first_mistake(content.split(b"\n"), decoder, path, piece, text_field)
    return texts


def _first_mistake(lines: list[bytes], decoder: Any, path: Location, piece: InputPiece, text_field: str) -> DataError:
    """Return the error for the first line that is not a JSON object with the text field."""
    problem = ""
    number = 0
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            row = decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            problem = str(error)
            break
        if row.text is msgspec.UNSET:
            return _field_missing(f"{path}:{_lines_before(path, piece) + number + 1}", text_field)
    place = f"{path}:{_lines_before(path, piece) + number + 1}"
    return DataError(
        f"{place} is not a JSON object with text in {text_field!r} ({problem})",
        code="data.json-invalid",
        fix="correct the line, or remove it",
    )


def _lines_before(path: Location, piece: InputPiece) -> int:
    """Return the number of lines before a piece; reads the file up to it, which only an error message needs."""
    if piece.data is not None:
        return piece.start
    count, left = 0, piece.start
    last = b"\n"
    with open_stream(path) as file:
        while left and (block := file.read(min(left, 2**24))):
            count += block.count(b"\n")
            left -= len(block)
            last = block[-1:]
    return count if last == b"\n" else count + 1


def _field_missing(place: str, text_field: str) -> DataError:
    return DataError(
        f"{place} has no field {text_field!r}",
        code="data.text-field-missing",
        fix="pass its name as text_field (--text-field)",
    )


# Parquet and Arrow, through pyarrow.


def _open_parquet(path: Location) -> Any:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise MissingExtraError.of(f"reading {path}", "data") from None
    try:
        if isinstance(path, Path):
            return parquet.ParquetFile(path, memory_map=True)
        return parquet.ParquetFile(open_stream(path), pre_buffer=True)
    except (OSError, ArrowException) as error:
        raise _damaged(path, error) from None


def _record_batches(path: Location) -> Iterator[Any]:
    """Yield the record batches of an Arrow file, memory-mapped; both formats, that of streams and that of files."""
    try:
        import pyarrow as pa
    except ImportError:
        raise MissingExtraError.of(f"reading {path}", "data") from None
    try:
        file = pa.memory_map(str(path)) if isinstance(path, Path) else pa.PythonFile(open_stream(path), "r")
        with file as source:
            if source.read(len(_ARROW_FILE)) == _ARROW_FILE:
                batches = pa.ipc.open_file(source)
                yield from map(batches.get_batch, range(batches.num_record_batches))
            else:
                source.seek(0)
                yield from pa.ipc.open_stream(source)
    except (OSError, pa.ArrowException) as error:
        raise _damaged(path, error) from None


def _damaged(path: Location, error: Exception) -> DataError:
    return DataError(
        f"{path} cannot be read ({' '.join(str(error).split())})", code="data.read-failed", fix="download it again"
    )


def _check_column(path: Location, schema: Any, text_field: str) -> None:
    if text_field not in schema.names:
        raise _field_missing(f"{path} (columns {', '.join(schema.names)})", text_field)


def _column_texts(column: Any, place: str, text_field: str) -> list[str]:
    """Return the values of a column as texts; a null is refused, as in JSONL."""
    texts: list[Any] = column.to_pylist()
    for row, text in enumerate(texts):
        if not isinstance(text, str):
            found = "null" if text is None else f"{column.type}, not text,"
            raise DataError(
                f"column {text_field!r} contains {found} in row {row} of {place}",
                code="data.text-field-invalid",
                fix="pass the name of a column of strings as text_field (--text-field), and remove rows without text",
            )
    return texts
