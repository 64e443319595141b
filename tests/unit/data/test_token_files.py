"""Token files as data of a job: their documents must be known to be packed, and a changed file is another source."""

import numpy as np
import pytest
from data.test_sources import END, FORMATS, make_documents

import shardwise as sw
from refusals import refuses

STREAMS = ("nanogpt.bin", "gpt2.bin", "tokens.npy", "parts")


def write(folder, name):
    FORMATS[name](folder / name, make_documents())
    return folder / name


@pytest.mark.parametrize("name", STREAMS)
def test_files_without_documents_are_not_packed(name, tmp_path):
    path = write(tmp_path, name)
    data = sw.datasets.tokens({"web": path}, length=8, packed=True, test=path)
    for split in ("train", "test"):
        with refuses("data.packed-without-documents", "web" if split == "train" else "test", "end_id"):
            data(split)
    sw.datasets.tokens({"web": path}, length=8)("train")
    with refuses("data.packed-without-documents", "web", "--end-id"):
        sw.data_mix([f"web={path}"], length=8, packed=True)


@pytest.mark.parametrize("name", STREAMS)
def test_end_id_makes_the_documents_of_token_files_known(name, tmp_path):
    files = sw.datasets.token_files(write(tmp_path, name), end_id=END)
    data = sw.datasets.tokens({"web": files}, length=64, packed=True, test=files)
    sizes = sorted(map(len, make_documents()))
    rows = [data("test")[index] for index in range(len(data("test")))]
    assert sorted(size for row in rows for size in document_sizes(row)) == sizes
    mixed = sw.data_mix([f"web={tmp_path / name}"], length=64, packed=True, end_id=END)
    assert mixed.shares[0].fill == pytest.approx(sum(sizes) / (64 * len(rows)))


def document_sizes(row):
    """Return the number of tokens of each document of a packed row, without its padding."""
    _, _, numbers, targets = (values.numpy() for values in row)
    counted = {number: int((targets[numbers == number] >= 0).sum()) for number in np.unique(numbers)}
    if row[0][-1] == 0 and not counted[numbers[-1]]:
        del counted[numbers[-1]]
    return [1 + count for count in counted.values()]


def test_dtype_is_that_of_files_without_a_header(tmp_path):
    np.concatenate(make_documents()).astype("<u4").tofile(tmp_path / "a.bin")
    files = sw.datasets.token_files(tmp_path / "a.bin", dtype="uint32")
    num_tokens = sum(map(len, make_documents()))
    assert sw.datasets.tokens(files, length=8)("train").sources["tokens"].num_tokens == num_tokens
    assert sw.data_mix([f"web={tmp_path / 'a.bin'}"], dtype="uint32").shares[0].num_tokens == num_tokens
    with refuses("data.dtype-unknown", "uint64"):
        sw.datasets.token_files(tmp_path / "a.bin", dtype="uint64")
    for end_id in (-1, True, "end"):
        with refuses("data.end-id-invalid", end_id):
            sw.datasets.token_files(tmp_path / "a.bin", end_id=end_id)
    with refuses("data.end-id-invalid", 65_536, "uint16"):
        sw.datasets.tokens(sw.datasets.token_files(tmp_path / "a.bin", end_id=65_536), length=8)("train")
