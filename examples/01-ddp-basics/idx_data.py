"""Images in MNIST's own file format as tensors: MNIST where it is, the packaged digits where it is not."""

import gzip
import importlib.util
import struct
from pathlib import Path
from typing import NamedTuple

import torch
from torch.utils.data import TensorDataset


class Images(NamedTuple):
    """Two splits of (image [1, height, width] float, label int64), and a line that describes them."""

    train: TensorDataset
    test: TensorDataset
    note: str


def load_images(folder: str, limit: int | None = None) -> Images:
    """Load the IDX files of `folder`, else the packaged digits; `limit` truncates the training split."""
    place = find_folder(folder)
    source = place or packaged_digits(folder)
    train_images, train_labels = read_split(source, "train")
    test_images, test_labels = read_split(source, "t10k")
    # The test images are scaled by the training set's numbers: nothing may be learned from the test set.
    mean, spread = train_images.mean(), train_images.std()
    height, width = train_images.shape[-2:]
    note = f"{len(train_labels[:limit])} training and {len(test_labels)} test images of {height} x {width}"
    if place is None:
        note = f"no MNIST in {folder} (make data fetches it), so the packaged digits: {note}"
    return Images(
        train=TensorDataset(((train_images - mean) / spread)[:limit], train_labels[:limit]),
        test=TensorDataset((test_images - mean) / spread, test_labels),
        note=note,
    )


def find_folder(folder: str) -> Path | None:
    """Return `folder` relative to the working directory, else to a parent of this file; None without images."""
    places = (Path(folder), *(parent / folder for parent in Path(__file__).resolve().parents))
    return next((place for place in places if any(place.glob("train-images*"))), None)


def packaged_digits(folder: str) -> Path:
    """Return the folder of the digits that come with shardwise, also from a copy of this file elsewhere."""
    package = importlib.util.find_spec("shardwise")  # finds it without importing it
    if package is None or package.origin is None:
        raise SystemExit(f"no MNIST in {folder}, and no packaged digits: pip install shardwise, or fetch MNIST")
    return Path(package.origin).parent / "data/files/digits"


def read_split(folder: Path, split: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Read one split ("train" or "t10k"); a plain file wins over its gzipped twin."""
    images = read_idx(min(folder.glob(f"{split}-images?idx3-ubyte*")))
    labels = read_idx(min(folder.glob(f"{split}-labels?idx1-ubyte*")))
    return images.unsqueeze(1).float(), labels.long()


def read_idx(path: Path) -> torch.Tensor:
    """Read one IDX file: two zero bytes, a type, a count, that many big-endian sizes, then the data."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        content = bytearray(file.read())
    if content[:3] != b"\0\0\x08":  # 8 is the format's code for unsigned bytes
        raise SystemExit(f"{path} is not an IDX file of unsigned bytes")
    start = 4 + 4 * content[3]
    sizes = struct.unpack(f">{content[3]}I", content[4:start])
    return torch.frombuffer(content, dtype=torch.uint8, offset=start).reshape(sizes)
