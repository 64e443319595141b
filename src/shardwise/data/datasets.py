"""Dataset factories: callables that map a split ("train" or "test") to a torch Dataset of images or byte-level text."""

from __future__ import annotations

import gzip
import math
import struct
import sysconfig
import zlib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from shardwise.data.documents import documents
from shardwise.data.images import images
from shardwise.data.tar_files import webdataset
from shardwise.data.token_datasets import token_files, tokens
from shardwise.errors import DataError, nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray

__all__ = (
    "digits",
    "documents",
    "fashion_mnist",
    "idx_folder",
    "images",
    "mnist",
    "text",
    "token_files",
    "tokens",
    "webdataset",
)

DIGITS = Path(__file__).parent / "files" / "digits"
WHITE = 255
"""The pixel value that is scaled to 1.0; in this scale, MNIST has the usual mean 0.1307 and std 0.3081."""


class ImageDataset(Dataset[tuple[Tensor, Tensor]]):
    """Grayscale images with labels: items are (standardized float32 [1, height, width], int64 scalar)."""

    def __init__(self, images: Tensor, labels: Tensor, *, mean: float, std: float) -> None:
        self.images = images
        """uint8 [count, 1, height, width], a quarter of the memory of float32."""
        self.labels = labels
        self._mean = mean * WHITE
        self._std = std * WHITE

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return (self.images[index] - self._mean) / self._std, self.labels[index]


def digits(split: str) -> ImageDataset:
    """Return the included UCI handwritten digits, 8 x 8: 1,438 training and 359 test images."""
    return _read(DIGITS, None, None, split)


def mnist(split: str) -> ImageDataset:
    """Return MNIST, 28 x 28, from the directory data/mnist, which `make data` downloads."""
    return _read(Path("data/mnist"), None, None, split)


def fashion_mnist(split: str) -> ImageDataset:
    """Return Fashion-MNIST, 28 x 28, from the directory data/fashion_mnist, which `make data` downloads."""
    return _read(Path("data/fashion_mnist"), None, None, split)


def idx_folder(path: str | Path, mean: float | None = None, std: float | None = None) -> Callable[[str], ImageDataset]:
    """Return a factory of datasets from a directory with MNIST's file names.

    `mean` and `std` refer to pixel values from 0.0 to 1.0; they default to those of the directory's training images.
    """
    if std is not None and not std > 0:
        raise DataError(
            f"std must be positive, got {std}", code="data.std-invalid", fix="pass a positive std, or omit it"
        )
    return partial(_read, Path(path), mean, std)


def _read(folder: Path, mean: float | None, std: float | None, split: str) -> ImageDataset:
    check_split(split)
    prefix = "train" if split == "train" else "t10k"
    images_file = find_idx(folder, f"{prefix}-images", num_dims=3)
    labels_file = find_idx(folder, f"{prefix}-labels", num_dims=1)
    images, labels = read_idx(images_file, num_dims=3), read_idx(labels_file, num_dims=1)
    if len(images) != len(labels):
        raise DataError(
            f"{images_file} has {len(images)} images, but {labels_file} has {len(labels)} labels",
            code="data.image-label-mismatch",
            fix="download both files again",
        )
    if images.size == 0:
        raise DataError(
            f"{images_file} contains no {split} images", code="data.no-images", fix="pass a directory with images"
        )
    if mean is None or std is None:
        train_images = images
        if split != "train":
            train_images = read_idx(find_idx(folder, "train-images", num_dims=3), num_dims=3)
        measured_mean, measured_std = _mean_and_std(train_images)
        mean = measured_mean if mean is None else mean
        std = measured_std if std is None else std
    if not std > 0:
        raise DataError(
            f"all pixels of the training images in {folder} have the same value, so their std is 0",
            code="data.images-constant",
            fix="use images with different pixel values, or pass std=1",
        )
    return ImageDataset(
        torch.from_numpy(images[:, None].copy()), torch.from_numpy(labels.astype(np.int64)), mean=mean, std=std
    )


def _mean_and_std(images: NDArray[np.uint8]) -> tuple[float, float]:
    """Return the mean and std of all pixels, computed from a histogram without a float copy of the images."""
    pieces = np.array_split(images, max(1, images.size // 2**20))
    counts = sum(np.bincount(piece.ravel(), minlength=256) for piece in pieces) / max(1, images.size)
    values = np.arange(256) / WHITE
    mean = float(counts @ values)
    return mean, float(counts @ (values - mean) ** 2) ** 0.5


# Reading MNIST's IDX files, plain or gzipped.


UBYTE = 0x08
"""The type code of unsigned 8-bit values: the third byte of the magic number. The fourth is the number of dims."""

DOWNLOAD = "run `make data` to download MNIST and Fashion-MNIST, or pass another directory to sw.datasets.idx_folder"


def find_idx(folder: Path, stem: str, *, num_dims: int) -> Path:
    """Return the path of the IDX file `stem` in `folder`, with `-` or `.` before idx; prefers a plain file to .gz."""
    if not folder.is_dir():
        raise DataError(f"data directory {folder} does not exist", code="data.folder-not-found", fix=DOWNLOAD)
    for suffix in ("", ".gz"):
        for separator in ("-", "."):
            path = folder / f"{stem}{separator}idx{num_dims}-ubyte{suffix}"
            if path.exists():
                return path
    raise DataError(
        f"data directory {folder} has no file {stem}-idx{num_dims}-ubyte, plain or .gz",
        code="data.idx-file-missing",
        fix=DOWNLOAD,
    )


def read_idx(path: Path, *, num_dims: int) -> NDArray[np.uint8]:
    """Read an IDX file of unsigned bytes with `num_dims` dimensions as a read-only array."""
    content = _content(path)
    header = struct.calcsize(f">{1 + num_dims}I")
    if len(content) < header:
        raise DataError(
            f"{path} is truncated: {len(content)} bytes", code="data.idx-size-mismatch", fix="download it again"
        )
    magic, *shape = struct.unpack_from(f">{1 + num_dims}I", content)
    expected = UBYTE << 8 | num_dims
    if magic != expected:
        raise DataError(
            f"the magic number of {path} must be 0x{expected:08x}, got 0x{magic:08x}",
            code="data.idx-wrong-magic",
            fix=f"use an IDX file of unsigned bytes with {num_dims} dims",
        )
    num_bytes = len(content) - header
    if num_bytes != math.prod(shape):
        problem = "truncated" if num_bytes < math.prod(shape) else "too long"
        raise DataError(
            f"{path} is {problem}: it has {num_bytes} bytes of values, but its header specifies {math.prod(shape)}",
            code="data.idx-size-mismatch",
            fix="download it again",
        )
    return np.frombuffer(content, dtype=np.uint8, offset=header).reshape(shape)


def _content(path: Path) -> bytes:
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if path.suffix == ".gz" else content
    except (OSError, EOFError, zlib.error) as error:  # a damaged gzip file raises any of the three
        raise DataError(f"{path} cannot be read ({error})", code="data.read-failed", fix="download it again") from error


# The splits of every dataset.


SPLITS = ("train", "test")


def check_split(split: str) -> None:
    """Raise DataError if a split is neither "train" nor "test"."""
    if split not in SPLITS:
        raise DataError(f"split {split!r} is unknown", code="data.unknown-split", fix=nearest(str(split), SPLITS))


STDLIB_BYTES = 2_000_000
"""Size of the default text from the standard library: about 50 of its files, read in milliseconds."""


class TextDataset(Dataset[tuple[Tensor, Tensor]]):
    """Non-overlapping windows of text: items are (int64 [length] bytes, int64 [length] next bytes)."""

    def __init__(self, content: Tensor, length: int) -> None:
        self.content = content
        """The text as uint8 [bytes]; bytes after the last full window are not used."""
        self.length = length

    def __len__(self) -> int:
        return max(0, len(self.content) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"window index {index} is out of range for {len(self)} windows")
        start = index % len(self) * self.length
        window = self.content[start : start + self.length + 1].long()
        return window[:-1], window[1:]


def text(length: int = 256, files: str | Path | Iterable[str | Path] | None = None) -> Callable[[str], TextDataset]:
    """Return a factory of datasets with windows of `length` bytes over the concatenated contents of `files`.

    Without files, the text is the first 2 MB of the top-level modules of the Python standard library, sorted by name.
    It is always available and identical in every process of one Python version. The last tenth is the test split.
    """
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise DataError(
            f"length must be a positive integer, got {length!r}",
            code="data.window-length-invalid",
            fix="pass length=1 or more",
        )
    if isinstance(files, str | Path):
        files = (files,)
    return partial(_read_text, length, None if files is None else tuple(map(Path, files)))


def _read_text(length: int, files: tuple[Path, ...] | None, split: str) -> TextDataset:
    check_split(split)
    content = _standard_library() if files is None else b"".join(map(_text_content, files))
    num_train = len(content) - len(content) // 10
    part = content[:num_train] if split == "train" else content[num_train:]
    if len(part) <= length:
        raise DataError(
            f"the {split} split of the text must have more than {length} bytes for one window, got {len(part)}",
            code="data.text-too-short",
            fix="pass more text or a smaller length",
        )
    return TextDataset(torch.frombuffer(bytearray(part), dtype=torch.uint8), length)


def _standard_library() -> bytes:
    content = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        content += _text_content(path)
        if len(content) >= STDLIB_BYTES:
            break
    return bytes(content[:STDLIB_BYTES])


def _text_content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            f"text file {path} cannot be read ({error.strerror})", code="data.read-failed", fix="pass readable files"
        ) from error
