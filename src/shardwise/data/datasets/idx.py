"""Reading MNIST's IDX files, plain or gzipped, and finding them in a folder."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from typing import TYPE_CHECKING

import numpy as np

from shardwise.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

UBYTE = 0x08
"""The type byte of unsigned 8-bit values, the third of the magic number; the fourth is the number of dims."""

DOWNLOAD = "run `make data` to fetch MNIST and Fashion-MNIST, or name your own with sw.datasets.idx_folder(path)"


def find_idx(folder: Path, stem: str, *, num_dims: int) -> Path:
    """Return the folder's file of that stem: `-` or `.` before idx, plain before gzipped."""
    if not folder.is_dir():
        raise DataError(f"there is no data folder {folder}", code="data.folder-not-found", fix=DOWNLOAD)
    for end in ("", ".gz"):
        for mark in ("-", "."):
            path = folder / f"{stem}{mark}idx{num_dims}-ubyte{end}"
            if path.exists():
                return path
    raise DataError(
        f"data folder {folder} has no {stem}-idx{num_dims}-ubyte, plain or .gz",
        code="data.idx-file-missing",
        fix=DOWNLOAD,
    )


def read_idx(path: Path, *, num_dims: int) -> NDArray[np.uint8]:
    """Read one IDX file of unsigned bytes with that many dims; the array is read-only."""
    content = _content(path)
    header = struct.calcsize(f">{1 + num_dims}I")
    if len(content) < header:
        raise DataError(
            f"{path} is truncated: {len(content)} bytes", code="data.idx-size-mismatch", fix="fetch it again"
        )
    magic, *shape = struct.unpack_from(f">{1 + num_dims}I", content)
    expected = UBYTE << 8 | num_dims
    if magic != expected:
        raise DataError(
            f"{path} has the magic number 0x{magic:08x}, not 0x{expected:08x}",
            code="data.idx-wrong-magic",
            fix=f"use an IDX file of unsigned bytes with {num_dims} dims",
        )
    num_bytes = len(content) - header
    if num_bytes != math.prod(shape):
        cut = "truncated" if num_bytes < math.prod(shape) else "too long"
        raise DataError(
            f"{path} is {cut}: {num_bytes} bytes of values where its header says {math.prod(shape)}",
            code="data.idx-size-mismatch",
            fix="fetch it again",
        )
    return np.frombuffer(content, dtype=np.uint8, offset=header).reshape(shape)


def _content(path: Path) -> bytes:
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if path.suffix == ".gz" else content
    except (OSError, EOFError, zlib.error) as error:  # a damaged gzip raises any of the three
        raise DataError(f"{path} cannot be read ({error})", code="data.read-failed", fix="fetch it again") from error
