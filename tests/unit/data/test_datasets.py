"""Datasets: the shipped digits, folders of IDX images, bytes of text."""

import gzip
import hashlib
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from refusals import refuses
from shardwise.data import datasets
from shardwise.data.datasets import DIGITS


def write_idx(path, values):
    content = struct.pack(f">{1 + values.ndim}I", 0x0800 | values.ndim, *values.shape) + values.tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


@pytest.fixture
def folder(tmp_path):
    """Six training and three test images of 4 x 5 pixels, some files plain and some gzipped."""
    numbers = np.random.default_rng(0)
    for prefix, count, end in (("train", 6, ""), ("t10k", 3, ".gz")):
        write_idx(tmp_path / f"{prefix}-images-idx3-ubyte{end}", numbers.integers(0, 256, (count, 4, 5), np.uint8))
        write_idx(tmp_path / f"{prefix}-labels.idx1-ubyte", np.arange(count, dtype=np.uint8))
    return tmp_path


def test_digits_are_the_1797_of_uci_split_by_every_fifth():
    train, test = datasets.digits("train"), datasets.digits("test")
    assert (len(train), len(test)) == (1438, 359)
    classes = torch.cat((train.labels, test.labels)).bincount()
    assert classes.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert int(train.images.max()) == 16


def test_digits_item_is_a_standardised_image_and_its_label():
    image, label = datasets.digits("test")[0]
    assert (image.shape, image.dtype) == ((1, 8, 8), torch.float32)
    assert (label.shape, label.dtype) == ((), torch.int64)


def test_no_test_digit_is_among_the_training_digits():
    train, test = (datasets.digits(split).images.flatten(1).tolist() for split in ("train", "test"))
    assert not {tuple(image) for image in train} & {tuple(image) for image in test}


def test_training_digits_have_mean_zero_and_std_one():
    train = datasets.digits("train")
    images = torch.stack([image for image, _ in train]).double()
    assert images.mean().item() == pytest.approx(0, abs=1e-6)
    assert images.std(correction=0).item() == pytest.approx(1, abs=1e-6)


def test_shipped_digits_carry_no_time_of_packing_and_their_licence():
    for path in DIGITS.glob("*.gz"):
        assert path.read_bytes()[4:8] == bytes(4), path.name  # gzip's mtime
    assert "10.24432/C50P49" in (DIGITS / "LICENCE.md").read_text()


def test_test_images_are_standardised_with_the_training_images_figures(folder):
    pixels = np.frombuffer((folder / "train-images-idx3-ubyte").read_bytes()[16:], np.uint8).astype(np.float64)
    raw = np.frombuffer(gzip.decompress((folder / "t10k-images-idx3-ubyte.gz").read_bytes())[16:], np.uint8).reshape(
        3, 1, 4, 5
    )
    test = datasets.idx_folder(folder)("test")
    expected = torch.from_numpy((raw - pixels.mean()) / pixels.std()).float()
    torch.testing.assert_close(torch.stack([test[index][0] for index in range(3)]), expected)


def test_mean_and_std_given_count_white_as_one(folder):
    image = datasets.idx_folder(folder, mean=0.5, std=0.25)("train")
    torch.testing.assert_close(image[0][0], (image.images[0].float() / 255 - 0.5) / 0.25)


def test_mean_and_std_given_need_no_training_images(folder):
    (folder / "train-images-idx3-ubyte").unlink()
    assert len(datasets.idx_folder(folder, mean=0.5, std=0.25)("test")) == 3
    with refuses("data.idx-file-missing", "train-images"):
        datasets.idx_folder(folder)("test")


def test_images_and_labels_of_different_count_are_refused(folder):
    write_idx(folder / "train-labels.idx1-ubyte", np.arange(5, dtype=np.uint8))
    with refuses("data.image-label-mismatch", 6, "train-images-idx3-ubyte", 5, "train-labels"):
        datasets.idx_folder(folder)("train")


def test_empty_and_constant_images_are_refused(folder):
    write_idx(folder / "train-images-idx3-ubyte", np.full((6, 4, 5), 9, np.uint8))
    with refuses("data.images-constant"):
        datasets.idx_folder(folder)("train")
    write_idx(folder / "train-images-idx3-ubyte", np.zeros((0, 4, 5), np.uint8))
    write_idx(folder / "train-labels.idx1-ubyte", np.zeros(0, np.uint8))
    with refuses("data.no-images", "train"):
        datasets.idx_folder(folder)("train")


@pytest.mark.parametrize("std", [0.0, -1.0, float("nan")])
def test_std_that_is_not_above_zero_is_refused(folder, std):
    with refuses("data.std-invalid", "std"):
        datasets.idx_folder(folder, std=std)


@pytest.mark.parametrize(("source", "place"), [(datasets.mnist, "mnist"), (datasets.fashion_mnist, "fashion_mnist")])
def test_missing_download_names_make_data(source, place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with refuses("data.folder-not-found", f"data/{place}", "make data"):
        source("train")


@pytest.mark.parametrize(("source", "place"), [(datasets.mnist, "mnist"), (datasets.fashion_mnist, "fashion_mnist")])
def test_named_sets_are_read_from_the_current_directory(source, place, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    Path("data", place).symlink_to(folder)
    assert [len(source("train")), len(source("test"))] == [6, 3]


@pytest.mark.parametrize("source", [datasets.digits, datasets.idx_folder("x"), datasets.text()])
def test_unknown_split_names_the_nearest(source):
    with refuses("data.unknown-split", "'tests'", "'test'"):
        source("tests")


def test_text_windows_follow_each_other_without_overlap(tmp_path):
    (tmp_path / "a").write_bytes(bytes(range(100)))
    (tmp_path / "b").write_bytes(bytes(range(100, 200)))
    train = datasets.text(length=8, files=[tmp_path / "a", tmp_path / "b"])("train")
    inputs = torch.cat([window for window, _ in train])
    targets = torch.cat([following for _, following in train])
    assert len(train) == 22  # (180 - 1) // 8
    assert (inputs.dtype, targets.dtype) == (torch.int64, torch.int64)
    assert inputs.tolist() == list(range(176))
    assert targets.tolist() == list(range(1, 177))


def test_text_test_split_is_the_last_tenth(tmp_path):
    (tmp_path / "a").write_bytes(bytes(range(200)))
    test = datasets.text(length=19, files=[tmp_path / "a"])("test")
    assert len(test) == 1
    assert test[0][0].tolist() == list(range(180, 199))
    assert test[0][1].tolist() == list(range(181, 200))


def test_default_text_is_two_megabytes_of_python_the_same_each_time():
    train, again = (datasets.text()("train") for _ in range(2))
    assert len(train.content) == 1_800_000
    assert hashlib.sha256(train.content.numpy()).digest() == hashlib.sha256(again.content.numpy()).digest()
    assert b"def " in train.content.numpy().tobytes()


def test_negative_index_counts_from_the_end_and_one_beyond_is_refused():
    train = datasets.text(length=100_000)("train")
    assert torch.equal(train[-1][0], train[len(train) - 1][0])
    with pytest.raises(IndexError):
        train[len(train)]


def test_text_too_short_for_one_window_is_refused(tmp_path):
    (tmp_path / "a").write_bytes(bytes(100))
    with refuses("data.text-too-short", "test", 10):
        datasets.text(length=10, files=[tmp_path / "a"])("test")


def test_a_single_text_file_needs_no_list(tmp_path):
    file = tmp_path / "text.txt"
    file.write_bytes(bytes(range(200)))
    alone, listed = (datasets.text(length=8, files=files)("train") for files in (str(file), [file]))
    assert len(alone) == len(listed) > 0
    assert torch.equal(alone[0][0], listed[0][0])


def test_missing_text_file_is_named(tmp_path):
    with refuses("data.read-failed", "gone.txt"):
        datasets.text(files=[tmp_path / "gone.txt"])("train")


@pytest.mark.parametrize("length", [0, -5, 1.5, True])
def test_window_length_must_be_a_positive_whole_number(length):
    with refuses("data.window-length-invalid"):
        datasets.text(length=length)


@pytest.mark.parametrize("source", [datasets.digits, datasets.text(length=4096)])
def test_source_and_dataset_survive_pickling(source):
    dataset = pickle.loads(pickle.dumps(source))("test")
    copy = pickle.loads(pickle.dumps(dataset))
    assert len(copy) == len(dataset)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(dataset[3], copy[3], strict=True))


def test_data_loader_workers_read_every_digit_once():
    loader = DataLoader(datasets.digits("test"), batch_size=50, num_workers=2)
    labels = torch.cat([labels for _, labels in loader])
    assert torch.equal(labels, datasets.digits("test").labels)
