"""Reading IDX files: plain and gzipped, both spellings, and every way a file can be wrong."""

import gzip
import struct

import numpy as np
import pytest

from refusals import refuses
from shardwise.data.datasets import find_idx, read_idx


def idx_bytes(values):
    return struct.pack(f">{1 + values.ndim}I", 0x0800 | values.ndim, *values.shape) + values.tobytes()


VALUES = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)
PACKED = gzip.compress(idx_bytes(VALUES), mtime=0)  # no clock in it: tests are named after their values


def test_plain_and_gzipped_files_read_the_same(tmp_path):
    (tmp_path / "plain").write_bytes(idx_bytes(VALUES))
    (tmp_path / "packed.gz").write_bytes(PACKED)
    assert np.array_equal(read_idx(tmp_path / "plain", num_dims=3), VALUES)
    assert np.array_equal(read_idx(tmp_path / "packed.gz", num_dims=3), VALUES)


@pytest.mark.parametrize(
    "name",
    [
        "train-images-idx3-ubyte",
        "train-images.idx3-ubyte",
        "train-images-idx3-ubyte.gz",
        "train-images.idx3-ubyte.gz",
    ],
)
def test_both_spellings_are_found_plain_and_gzipped(tmp_path, name):
    (tmp_path / name).touch()
    assert find_idx(tmp_path, "train-images", num_dims=3) == tmp_path / name


def test_missing_folder_names_make_data(tmp_path):
    with refuses("data.folder-not-found", "/nowhere", "make data"):
        find_idx(tmp_path / "nowhere", "train-images", num_dims=3)


def test_folder_without_the_file_names_it(tmp_path):
    with refuses("data.idx-file-missing", "t10k-labels-idx1-ubyte", "make data"):
        find_idx(tmp_path, "t10k-labels", num_dims=1)


@pytest.mark.parametrize(
    ("name", "content", "refusal"),
    [
        ("x", b"", ("data.idx-size-mismatch", "truncated", 0)),
        ("x", idx_bytes(VALUES)[:10], ("data.idx-size-mismatch", "truncated", 10)),
        ("x", idx_bytes(VALUES)[:-1], ("data.idx-size-mismatch", "truncated", 23, 24)),
        ("x", idx_bytes(VALUES) + b"!", ("data.idx-size-mismatch", "too long", 25, 24)),
        ("x", struct.pack(">4I", 0x0803, 2**32 - 1, 2**32 - 1, 2**32 - 1), ("data.idx-size-mismatch", "truncated", 0)),
        ("x", idx_bytes(VALUES.ravel()), ("data.idx-wrong-magic", "0x00000801", "0x00000803")),
        ("x", PACKED, ("data.idx-wrong-magic", "0x1f8b")),
        ("x.gz", idx_bytes(VALUES), ("data.read-failed",)),
        ("x.gz", PACKED[:-9], ("data.read-failed",)),
        ("x.gz", PACKED[:12] + b"\xff" * 20, ("data.read-failed",)),
    ],
)
def test_damaged_file_is_refused_by_name(tmp_path, name, content, refusal):
    path = tmp_path / name
    path.write_bytes(content)
    with refuses(*refusal) as caught:
        read_idx(path, num_dims=3)
    assert str(path) in caught.value.fact


def test_a_directory_in_place_of_a_file_is_refused(tmp_path):
    (tmp_path / "train-images-idx3-ubyte").mkdir()
    with refuses("data.read-failed", "train-images-idx3-ubyte"):
        read_idx(tmp_path / "train-images-idx3-ubyte", num_dims=3)
