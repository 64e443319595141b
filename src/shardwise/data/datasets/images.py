"""Labelled grey images: the shipped digits, MNIST, Fashion-MNIST and any folder of IDX files."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from shardwise.errors import DataError, nearest

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray


DIGITS = Path(__file__).parent.parent / "files" / "digits"
WHITE = 255
"""The pixel value that counts as 1.0, so that MNIST's mean and std are the familiar 0.1307 and 0.3081."""


class ImageDataset(Dataset[tuple[Tensor, Tensor]]):
    """Grey images with labels: item = (standardised float32 [1, height, width], int64 scalar)."""

    def __init__(self, images: Tensor, labels: Tensor, *, mean: float, std: float) -> None:
        self.images = images
        """uint8 [count, 1, height, width]: a quarter of the memory of float32, for every rank."""
        self.labels = labels
        self._centre = mean * WHITE
        self._spread = std * WHITE

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return (self.images[index] - self._centre) / self._spread, self.labels[index]


def digits(split: str) -> ImageDataset:
    """Return the shipped UCI handwritten digits, 8 x 8: 1,438 to train, 359 to test."""
    return _read(DIGITS, None, None, split)


def mnist(split: str) -> ImageDataset:
    """Return MNIST, 28 x 28, from the folder data/mnist that `make data` fills."""
    return _read(Path("data/mnist"), None, None, split)


def fashion_mnist(split: str) -> ImageDataset:
    """Return Fashion-MNIST, 28 x 28, from the folder data/fashion_mnist that `make data` fills."""
    return _read(Path("data/fashion_mnist"), None, None, split)


def idx_folder(path: str | Path, mean: float | None = None, std: float | None = None) -> Callable[[str], ImageDataset]:
    """Return the source of a folder with MNIST's file names; mean and std count white as 1.0.

    Where they are not given, they are those of the folder's training images.
    """
    if std is not None and not std > 0:
        raise DataError(
            f"std must be positive, got {std}", code="data.std-invalid", fix="pass a positive number, or leave it out"
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
            f"{len(images)} images in {images_file}, {len(labels)} labels in {labels_file}",
            code="data.image-label-mismatch",
            fix="fetch both files again",
        )
    if images.size == 0:
        raise DataError(
            f"{images_file} has no {split} images", code="data.no-images", fix="use a folder that holds some"
        )
    if mean is None or std is None:
        train_file = find_idx(folder, "train-images", num_dims=3)
        measured = _mean_and_std(images if split == "train" else read_idx(train_file, num_dims=3))
        mean = measured[0] if mean is None else mean
        std = measured[1] if std is None else std
    if not std > 0:
        raise DataError(
            f"the training images of {folder} are all of one grey",
            code="data.images-constant",
            fix="use others, or give std=1",
        )
    return ImageDataset(
        torch.from_numpy(images[:, None].copy()), torch.from_numpy(labels.astype(np.int64)), mean=mean, std=std
    )


def _mean_and_std(images: NDArray[np.uint8]) -> tuple[float, float]:
    """Mean and std from the exact histogram, image by image: no float copy of all pixels is made."""
    pieces = np.array_split(images, max(1, images.size // 2**20))
    counts = sum(np.bincount(piece.ravel(), minlength=256) for piece in pieces) / max(1, images.size)
    values = np.arange(256) / WHITE
    mean = float(counts @ values)
    return mean, float(counts @ (values - mean) ** 2) ** 0.5


# Reading MNIST's IDX files, plain or gzipped, and finding them in a folder.


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


# The two splits that every source knows.


SPLITS = ("train", "test")


def check_split(split: str) -> None:
    """Refuse a split that is neither "train" nor "test"."""
    if split not in SPLITS:
        raise DataError(f"there is no split {split!r}", code="data.unknown-split", fix=nearest(str(split), SPLITS))
