"""Image folders with one subfolder per class, and the decoding of images into tensors (`sw.datasets.images`).

Random crops and flips use torch's global generator. The loaders seed it for each sample by (seed, epoch, sample index),
so augmentation needs no state in checkpoints, and depends neither on ranks nor on DataLoader workers.
"""

from __future__ import annotations

import io
import math
import os
import struct
from array import array
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from shardwise.data.storage.files import unreadable
from shardwise.data.storage.locations import locate
from shardwise.errors import DataError, MissingExtraError, some_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    Augment = bool | Callable[[Any], Any]
    """Whether to crop and flip at random, or a function from a PIL image to a PIL image."""
    PerChannel = float | Sequence[float] | None

SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""Those of torchvision's ImageFolder, so that both number the same files."""
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of ImageNet's training images, in pixel values from 0.0 to 1.0."""
_CROP_AREA, _CROP_RATIO, _CROP_TRIES = (0.08, 1.0), (3 / 4, 4 / 3), 10
"""Of random crops, as in Szegedy et al., "Going deeper with convolutions", 2014: share of the area, width to height."""


@dataclass(frozen=True, kw_only=True)
class ImageDecoder:
    """Turns encoded images into standardized float32 tensors [channels, size, size]."""

    size: int
    channels: int
    mean: Tensor
    """[channels, 1, 1], in pixel values from 0 to 255, as `std`."""
    std: Tensor
    augment: Augment

    def decode(self, content: bytes, place: object) -> Tensor:
        """Return an image; raises DataError with its `place` if it is damaged."""
        from PIL import Image, UnidentifiedImageError

        try:
            with Image.open(io.BytesIO(content)) as image:
                if image.mode.startswith(("I", "F")):
                    raise _not_8_bits(place, image.mode)
                pixels = image.convert(self._mode)
        except UnidentifiedImageError:
            raise _invalid(place, "unknown format") from None
        except (OSError, SyntaxError, ValueError, struct.error, Image.DecompressionBombError) as error:
            raise _invalid(place, str(error)) from None
        return self._standardized(self._cropped(pixels))

    @property
    def _mode(self) -> str:
        return "RGB" if self.channels == 3 else "L"

    def _cropped(self, image: Any) -> Any:
        from PIL import Image

        if callable(self.augment):
            image = self.augment(image)
            if not isinstance(image, Image.Image):
                raise DataError(
                    f"the function passed as augment returned a {type(image).__name__}, not a PIL image",
                    code="data.augment-result-invalid",
                    fix="leave the conversion to a tensor and the standardization to size=, mean= and std=",
                )
            image = image.convert(self._mode)
        box = central_square(*image.size)
        if self.augment is True:
            box = random_box(*image.size)
        image = image.resize((self.size, self.size), Image.Resampling.BILINEAR, box=box)
        if self.augment is True and torch.rand(()) < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return image

    def _standardized(self, image: Any) -> Tensor:
        pixels = torch.from_numpy(np.array(image)).reshape(self.size, self.size, self.channels)
        # Rearranged as bytes: half the time of rearranging float32.
        return pixels.permute(2, 0, 1).contiguous().to(torch.float32).sub_(self.mean).div_(self.std)


def central_square(width: int, height: int) -> tuple[float, float, float, float]:
    """Return the box (left, top, right, bottom) of the largest square: resizing it is resizing the shorter side."""
    side = min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def random_box(width: int, height: int) -> tuple[float, float, float, float]:
    """Return a box of random area, ratio and position inside of an image, by torch's generator."""
    low, high = (math.log(ratio) for ratio in _CROP_RATIO)
    for _ in range(_CROP_TRIES):
        area, ratio, across, down = torch.rand(4, dtype=torch.float64).tolist()
        pixels = width * height * (_CROP_AREA[0] + (_CROP_AREA[1] - _CROP_AREA[0]) * area)
        ratio = math.exp(low + (high - low) * ratio)
        box_width, box_height = round(math.sqrt(pixels * ratio)), round(math.sqrt(pixels / ratio))
        if 0 < box_width <= width and 0 < box_height <= height:
            left, top = int(across * (width - box_width + 1)), int(down * (height - box_height + 1))
            return left, top, left + box_width, top + box_height
    return central_square(width, height)


def make_decoder(size: int, channels: int, mean: PerChannel, std: PerChannel, *, augment: Augment) -> ImageDecoder:
    """Return a decoder from the arguments of `images`; raises DataError for invalid ones."""
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise DataError(
            f"size must be a positive integer, got {size!r}", code="data.image-size-invalid", fix="pass size=224"
        )
    if channels not in {1, 3}:
        raise DataError(
            f"channels must be 3 (RGB) or 1 (grayscale), got {channels!r}",
            code="data.image-channels-invalid",
            fix="pass channels=3",
        )
    if not isinstance(augment, bool) and not callable(augment):
        raise DataError(
            f"augment must be True, False or a function of a PIL image, got {augment!r}",
            code="data.augment-invalid",
            fix="pass augment=True",
        )
    means, stds = _per_channel("mean", mean, _MEAN, channels), _per_channel("std", std, _STD, channels)
    if not bool((stds > 0).all()):
        raise DataError(
            f"std must be positive, got {std}", code="data.std-invalid", fix="pass a positive std, or omit it"
        )
    return ImageDecoder(size=size, channels=channels, mean=means, std=stds, augment=augment)


def require_pillow() -> None:
    """Raise MissingExtraError if Pillow is not installed."""
    try:
        import PIL  # noqa: F401
    except ImportError:
        raise MissingExtraError.of("decoding images", "images") from None


def _per_channel(name: str, given: PerChannel, default: Sequence[float], channels: int) -> Tensor:
    """Return a value per channel as [channels, 1, 1], scaled to pixel values from 0 to 255."""
    if given is None:
        given = default if channels == len(default) else sum(default) / len(default)
    values = [given] * channels if isinstance(given, int | float) else list(given)
    if len(values) != channels:
        raise DataError(
            f"{name} has {len(values)} values, but the images have {channels} channels",
            code="data.image-channels-mismatch",
            fix=f"pass {name}= with {channels} values, or one number",
        )
    return torch.tensor(values, dtype=torch.float32).mul(255)[:, None, None]


def _invalid(place: object, problem: str) -> DataError:
    return DataError(
        f"{place} cannot be decoded as an image ({problem})", code="data.image-invalid", fix="replace or remove it"
    )


def _not_8_bits(place: object, mode: str) -> DataError:
    return DataError(
        f"{place} has the pixel format {mode}, whose values 8 bits per channel would clip",
        code="data.image-not-8-bits",
        fix="convert it to 8 bits per channel",
    )


# Folders with one subfolder per class.


class ImageFolder(Dataset[tuple[Tensor, Tensor]]):
    """Images of a folder with one subfolder per class: items are (float32 [channels, size, size], int64 scalar)."""

    def __init__(self, root: Path, classes: tuple[str, ...], decoder: ImageDecoder) -> None:
        """List the images below ROOT/CLASS, sorted by class and path; labels are positions in `classes`."""
        self.classes = classes
        self._root, self._decoder = root, decoder
        paths, ends, per_class = bytearray(), array("q", [0]), []
        for name in classes:
            in_class = _image_paths(root / name)
            for path in in_class:
                paths += os.fsencode(path)
                ends.append(len(paths))
            per_class.append(len(in_class))
        self._paths, self._ends = bytes(paths), np.array(ends)
        """Paths below the class folders, one after the other, and where each ends: no object per image."""
        self.labels: NDArray[np.int64] = np.repeat(np.arange(len(classes)), per_class)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        path = self.path(index)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise unreadable(path, error) from error
        return self._decoder.decode(content, path), torch.tensor(int(self.labels[index]))

    def path(self, index: int) -> Path:
        """Return the path of an image."""
        if not 0 <= index < len(self):
            raise IndexError(f"image {index} is out of range for {len(self)} images")
        start, end = self._ends[index : index + 2].tolist()
        return Path(self._root, self.classes[self.labels[index]], os.fsdecode(self._paths[start:end]))


def images(
    train: str | Path,
    *,
    test: str | Path | None = None,
    size: int = 224,
    channels: int = 3,
    mean: PerChannel = None,
    std: PerChannel = None,
    augment: Augment = False,
) -> Callable[[str], ImageFolder | None]:
    """Return a factory of datasets from folders with one subfolder per class, as torchvision's ImageFolder reads them.

    Labels are positions in the sorted names of the subfolders, in `classes` of the dataset; both splits must have the
    same ones. The shorter side of an image is resized to `size` and its centre cropped; pixel values from 0.0 to 1.0
    are standardized by `mean` and `std`, per channel or one number, which default to those of ImageNet. `augment`
    applies to training images: True crops and flips them at random, and a function changes a PIL image. Requires
    `[images]`.
    """
    decoder = make_decoder(size, channels, mean, std, augment=augment)
    return _FolderData(
        train=_local(train, "train"), test=None if test is None else _local(test, "test"), decoder=decoder
    )


def _local(folder: str | Path, split: str) -> Path:
    location = locate(folder)
    if isinstance(location, Path):
        return location
    raise DataError(
        f"the {split} folder {location} is on object storage, where each image would be a request",
        code="data.image-folder-remote",
        fix="write the images into tar shards and read them by sw.datasets.webdataset, or copy the folder",
    )


@dataclass(frozen=True, kw_only=True)
class _FolderData:
    """Maps a split to its dataset; the arguments of `images`."""

    train: Path
    test: Path | None
    decoder: ImageDecoder

    def __call__(self, split: str) -> ImageFolder | None:
        require_pillow()
        classes = _classes_of(self.train)
        if split == "train":
            dataset = ImageFolder(self.train, classes, self.decoder)
            _check_classes_not_empty(dataset, self.train)
            return dataset
        if self.test is None:
            return None
        _check_same_classes(self.train, classes, self.test)
        dataset = ImageFolder(self.test, classes, replace(self.decoder, augment=False))
        if not len(dataset):
            raise _no_images(self.test)
        return dataset


def _classes_of(folder: Path) -> tuple[str, ...]:
    """Return the sorted names of the subfolders that are not hidden, such as those of notebooks."""
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    except FileNotFoundError:
        raise DataError(
            f"image folder {folder} does not exist",
            code="data.folder-not-found",
            fix="pass a folder with one subfolder per class",
        ) from None
    except OSError as error:
        raise unreadable(folder, error) from error
    if not names:
        raise DataError(
            f"image folder {folder} has no subfolders, whose names are the classes",
            code="data.no-class-folders",
            fix="move the images into one subfolder per class",
        )
    return tuple(names)


def _image_paths(folder: Path) -> list[str]:
    """Return the paths of images below a folder, relative to it, in the order of torchvision's ImageFolder."""

    def refuse(error: OSError) -> None:
        raise unreadable(folder, error) from error

    paths, start = [], len(str(folder)) + 1
    for inner, _, names in sorted(os.walk(folder, onerror=refuse, followlinks=True)):
        paths += [f"{inner}/{name}"[start:] for name in sorted(names) if name.lower().endswith(SUFFIXES)]
    return paths


def _check_classes_not_empty(dataset: ImageFolder, folder: Path) -> None:
    counts = np.bincount(dataset.labels, minlength=len(dataset.classes))
    if not len(dataset):
        raise _no_images(folder)
    empty = [dataset.classes[number] for number in np.flatnonzero(counts == 0)]
    if empty:
        raise DataError(
            f"class folders of {folder} have no image: {some_of(empty)}",
            code="data.class-empty",
            fix="add images, or remove the folders",
        )


def _check_same_classes(train: Path, classes: tuple[str, ...], test: Path) -> None:
    """Raise DataError unless both splits have the same classes: else their labels would differ."""
    found = set(_classes_of(test))
    absent, unknown = sorted(set(classes) - found), sorted(found - set(classes))
    if absent or unknown:
        problem = f"lacks the classes {some_of(absent)}"
        if unknown:
            problem = f"has the classes {some_of(unknown)}, which are not in {train}"
        raise DataError(
            f"test folder {test} {problem}",
            code="data.classes-differ",
            fix="give both folders the same subfolders; those of the test folder may be empty",
        )


def _no_images(folder: Path) -> DataError:
    return DataError(
        f"image folder {folder} contains no images",
        code="data.no-images",
        fix=f"pass a folder whose subfolders have files with one of the suffixes {', '.join(SUFFIXES)}",
    )
