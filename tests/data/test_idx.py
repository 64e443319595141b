"""Reading IDX files: plain and gzipped, both spellings, and every way a file can be wrong."""

import gzip
import struct

import numpy as np
import pytest

from shardwise.data.datasets.idx import find_idx, read_idx
from shardwise.errors import DataError


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


def test_missing_folder_says_make_data(tmp_path):
    with pytest.raises(DataError, match=r"no data folder .*/nowhere: run `make data`"):
        find_idx(tmp_path / "nowhere", "train-images", num_dims=3)


def test_folder_without_the_file_names_it(tmp_path):
    with pytest.raises(DataError, match=r"has no t10k-labels-idx1-ubyte, plain or \.gz: run `make data`"):
        find_idx(tmp_path, "t10k-labels", num_dims=1)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("x", b"", "truncated: 0 bytes"),
        ("x", idx_bytes(VALUES)[:10], "truncated: 10 bytes"),
        ("x", idx_bytes(VALUES)[:-1], "truncated: 23 bytes of values where its header says 24"),
        ("x", idx_bytes(VALUES) + b"!", "too long: 25 bytes of values where its header says 24"),
        ("x", struct.pack(">4I", 0x0803, 2**32 - 1, 2**32 - 1, 2**32 - 1), "truncated: 0 bytes of values"),
        ("x", idx_bytes(VALUES.ravel()), "magic number 0x00000801, not 0x00000803"),
        ("x", PACKED, "magic number 0x1f8b"),
        ("x.gz", idx_bytes(VALUES), "cannot be read"),
        ("x.gz", PACKED[:-9], "cannot be read"),
        ("x.gz", PACKED[:12] + b"\xff" * 20, "cannot be read"),
    ],
)
def test_damaged_file_is_refused_by_name(tmp_path, name, content, words):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=words) as caught:
        read_idx(path, num_dims=3)
    assert str(path) in caught.value.fact


def test_a_directory_in_place_of_a_file_is_refused(tmp_path):
    (tmp_path / "train-images-idx3-ubyte").mkdir()
    with pytest.raises(DataError, match="train-images-idx3-ubyte cannot be read"):
        read_idx(tmp_path / "train-images-idx3-ubyte", num_dims=3)
