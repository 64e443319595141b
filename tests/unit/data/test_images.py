"""Image folders: torchvision's labels and order, pixels by hand, keyed augmentation, refusals; with workers as well."""

import io
import pickle
import sys

import numpy as np
import pytest
import torch
from PIL import Image

import shardwise as sw
from refusals import refuses
from shardwise.data.cursor import Slices
from shardwise.data.images import central_square, random_box
from shardwise.data.loaders import IndexLoader

CLASSES = ("ant", "bee", "cat")


def encoded(number, size=(12, 10), mode="RGB", kind="PNG"):
    """Return an image file of pixels that depend on a number."""
    channels = {"RGB": (3,), "L": (), "RGBA": (4,)}[mode]
    pixels = np.random.default_rng(number).integers(0, 256, (size[1], size[0], *channels), np.uint8)
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, kind)
    return content.getvalue()


def make_folder(root, per_class=4):
    """Write images of three classes, two of them in subfolders, and return the folder."""
    for label, name in enumerate(CLASSES):
        (root / name / "inner").mkdir(parents=True)
        for number in range(per_class):
            place = root / name / ("inner" if number < 2 else ".")
            (place / f"{number}.png").write_bytes(encoded(10 * label + number))
    (root / "ant" / "notes.txt").touch()
    (root / ".checkpoints").mkdir()
    return root


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("images"))


def test_labels_are_positions_of_sorted_class_names_and_files_are_sorted(folder):
    dataset = sw.datasets.images(folder, size=8)("train")
    assert dataset.classes == CLASSES
    assert dataset.labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert [str(dataset.path(number).relative_to(folder)) for number in range(4)] == [
        "ant/2.png",
        "ant/3.png",
        "ant/inner/0.png",
        "ant/inner/1.png",
    ]
    image, label = dataset[5]
    assert (image.shape, image.dtype) == ((3, 8, 8), torch.float32)
    assert (label.item(), label.dtype) == (1, torch.int64)
    with pytest.raises(IndexError):
        dataset[12]


def test_pixels_are_resized_cropped_and_standardized_as_by_hand(tmp_path):
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "image.png").write_bytes(encoded(1, (14, 10)))
    image, _ = sw.datasets.images(tmp_path, size=5, mean=(0.1, 0.2, 0.3), std=0.5)("train")[0]
    with Image.open(io.BytesIO(encoded(1, (14, 10)))) as whole:
        resized = torch.from_numpy(np.array(whole.resize((7, 5), Image.Resampling.BILINEAR)))
    expected = (resized[:, 1:6].permute(2, 0, 1) / 255 - torch.tensor([0.1, 0.2, 0.3])[:, None, None]) * 2
    torch.testing.assert_close(image, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("mode", "kind"), [("RGB", "JPEG"), ("RGB", "WEBP"), ("L", "PNG"), ("RGBA", "PNG")])
@pytest.mark.parametrize("channels", [1, 3])
def test_formats_and_modes_become_the_asked_channels(tmp_path, mode, kind, channels):
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / f"image.{kind.lower()}").write_bytes(encoded(1, (9, 9), mode, kind))
    image, _ = sw.datasets.images(tmp_path, size=9, channels=channels, mean=0.0, std=1.0)("train")[0]
    assert image.shape == (channels, 9, 9)
    with Image.open(io.BytesIO(encoded(1, (9, 9), mode, kind))) as whole:
        pixels = torch.from_numpy(np.array(whole.convert("RGB" if channels == 3 else "L"))).reshape(9, 9, channels)
    torch.testing.assert_close(image * 255, pixels.permute(2, 0, 1).float())


# Augmentation.


def batches_of(dataset, dp_rank, dp_size, *, first_step=0, num_workers=0):
    slices = Slices(batch_size=4, accumulation=1, dp_rank=dp_rank, dp_size=dp_size, length=len(dataset))
    loader = IndexLoader(dataset, slices, seed=3, first_step=first_step, num_steps=6, num_workers=num_workers)
    return [step.batches[0] for step in loader.steps()]


def test_augmentation_depends_on_seed_epoch_and_sample_alone(folder):
    data = sw.datasets.images(folder, size=6, augment=True)
    dataset = data("train")
    whole = batches_of(dataset, 0, 1)
    for rank in range(2):  # two ranks, one with a worker, resumed at step 2
        half = batches_of(pickle.loads(pickle.dumps(dataset)), rank, 2, first_step=2, num_workers=rank)
        for step, (images, labels) in enumerate(half, start=2):
            assert torch.equal(images, whole[step][0][rank * 2 : rank * 2 + 2])
            assert torch.equal(labels, whole[step][1][rank * 2 : rank * 2 + 2])
    drawn = {image.numpy().tobytes() for images, _ in whole for image in images}
    assert len(drawn) == 24  # the second epoch has other crops
    plain = sw.datasets.images(folder, test=folder, size=6, augment=True)("test")
    assert torch.equal(plain[0][0], plain[0][0])
    assert torch.equal(plain[0][0], sw.datasets.images(folder, size=6)("train")[0][0])


def test_random_boxes_lie_inside_of_the_image_and_centres_are_squares():
    torch.manual_seed(0)
    for width, height in [(7, 5), (1, 1), (1000, 2)]:
        for _ in range(50):
            left, top, right, bottom = random_box(width, height)
            assert 0 <= left < right <= width
            assert 0 <= top < bottom <= height
    assert central_square(7, 4) == (1.5, 0, 5.5, 4)


def test_a_function_augments_training_images_only(folder):
    dark = sw.datasets.images(
        folder, test=folder, size=6, mean=0, std=1, augment=lambda image: image.point(lambda _: 0)
    )
    assert dark("train")[0][0].abs().sum() == 0
    assert dark("test")[0][0].abs().sum() > 0
    gray = sw.datasets.images(folder, size=6, augment=lambda image: image.convert("L"))
    assert gray("train")[0][0].shape == (3, 6, 6)
    with refuses("data.augment-result-invalid", "Tensor"):
        sw.datasets.images(folder, augment=lambda image: torch.zeros(3))("train")[0]


# Refusals.


def test_invalid_arguments_are_refused_at_once():
    with refuses("data.image-size-invalid", 0):
        sw.datasets.images("a", size=0)
    with refuses("data.image-channels-invalid", 4):
        sw.datasets.images("a", channels=4)
    with refuses("data.image-channels-mismatch", "mean", 2, 3):
        sw.datasets.images("a", mean=(0.5, 0.5))
    with refuses("data.std-invalid", 0):
        sw.datasets.images("a", std=0)
    with refuses("data.augment-invalid", "yes"):
        sw.datasets.images("a", augment="yes")
    with refuses("data.image-folder-remote", "s3://bucket/images", "webdataset"):
        sw.datasets.images("s3://bucket/images")


def test_folders_without_classes_images_or_files_are_refused(tmp_path):
    data = sw.datasets.images(tmp_path / "train", test=tmp_path / "test", size=8)
    with refuses("data.folder-not-found", tmp_path / "train"):
        data("train")
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "image.png").write_bytes(encoded(1))
    with refuses("data.no-class-folders", tmp_path / "train"):
        data("train")
    (tmp_path / "train" / "ant").mkdir()
    with refuses("data.no-images", tmp_path / "train"):
        data("train")
    (tmp_path / "train" / "bee").mkdir()
    (tmp_path / "train" / "bee" / "1.png").write_bytes(encoded(1))
    with refuses("data.class-empty", "ant"):
        data("train")
    (tmp_path / "train" / "ant" / "1.png").write_bytes(encoded(1))
    with refuses("data.folder-not-found", tmp_path / "test"):
        data("test")
    assert sw.datasets.images(tmp_path / "train")("test") is None


def test_a_test_folder_with_other_classes_is_refused(folder, tmp_path):
    data = sw.datasets.images(folder, test=tmp_path, size=8)
    for name in ("bee", "cat"):
        (tmp_path / name).mkdir()
    with refuses("data.classes-differ", tmp_path, "ant"):
        data("test")
    (tmp_path / "ant").mkdir()
    (tmp_path / "cat" / "1.png").write_bytes(encoded(1))
    assert data("test")[0][1] == 2  # empty class folders keep the labels
    (tmp_path / "dog").mkdir()
    with refuses("data.classes-differ", tmp_path, "dog"):
        data("test")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_damaged_and_deep_images_are_named(tmp_path, num_workers):
    (tmp_path / "ant").mkdir()
    for number in range(4):
        (tmp_path / "ant" / f"{number}.png").write_bytes(encoded(number, (64, 64)))
    path = tmp_path / "ant" / "2.png"
    dataset = sw.datasets.images(tmp_path, size=8)("train")
    for content in (encoded(2, (64, 64))[:3000], b"not an image", b""):
        path.write_bytes(content)
        with refuses("data.image-invalid", path):
            batches_of(dataset, 0, 1, num_workers=num_workers)
    Image.fromarray(np.full((8, 8), 60_000, np.uint16)).save(path)
    with refuses("data.image-not-8-bits", path):
        dataset[2]
    path.unlink()
    with refuses("data.read-failed", path):
        dataset[2]


def test_without_pillow_the_extra_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with refuses("extra.images-missing", "shardwise[images]"):
        sw.datasets.images(folder)("train")
