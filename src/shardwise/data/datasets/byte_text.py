"""Bytes of text, for models that predict the next byte: vocabulary 256, no tokenizer."""

from __future__ import annotations

import sysconfig
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.data import Dataset

from shardwise.data.datasets.images import check_split
from shardwise.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

STDLIB_BYTES = 2_000_000
"""How much of the standard library the default text takes: about 50 of its files, read in milliseconds."""


class TextDataset(Dataset[tuple[Tensor, Tensor]]):
    """Windows that do not overlap: item = (int64 [length] bytes, int64 [length] the byte after each)."""

    def __init__(self, content: Tensor, length: int) -> None:
        self.content = content
        """uint8 [bytes]; what is left after the last whole window is not used."""
        self.length = length

    def __len__(self) -> int:
        return max(0, len(self.content) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index % len(self) * self.length
        window = self.content[start : start + self.length + 1].long()
        return window[:-1], window[1:]


def text(length: int = 256, files: Iterable[str | Path] | None = None) -> Callable[[str], TextDataset]:
    """Return the source of windows of `length` bytes over the files, joined in the order given.

    Without files, the first 2 MB of the Python standard library's own top-level modules in the order of their
    names: always present, the same for every process of one Python version. The last tenth is the test split.
    """
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise DataError(
            f"text window length is {length!r}",
            code="data.window-length-invalid",
            fix="use a whole number of at least 1",
        )
    return partial(_read, length, None if files is None else tuple(Path(file) for file in files))


def _read(length: int, files: tuple[Path, ...] | None, split: str) -> TextDataset:
    check_split(split)
    content = _standard_library() if files is None else b"".join(_content(file) for file in files)
    cut = len(content) - len(content) // 10
    part = content[:cut] if split == "train" else content[cut:]
    if len(part) <= length:
        raise DataError(
            f"the {split} split of the text has {len(part)} bytes, too few for one window of {length}",
            code="data.text-too-short",
            fix="use more text or a smaller length",
        )
    return TextDataset(torch.frombuffer(bytearray(part), dtype=torch.uint8), length)


def _standard_library() -> bytes:
    content = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        content += _content(path)
        if len(content) >= STDLIB_BYTES:
            break
    return bytes(content[:STDLIB_BYTES])


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            f"text file {path} cannot be read ({error.strerror})", code="data.read-failed", fix="name files that exist"
        ) from error
