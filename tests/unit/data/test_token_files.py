"""Token files as data of a job: their documents must be known to be packed, and a changed file is another source."""

import os
import struct

import numpy as np
import pytest
from data.test_sources import END, FORMATS, make_documents, write_megatron, write_raw

import shardwise as sw
from refusals import refuses
from shardwise.data.corpus import CorpusRows
from shardwise.data.packing import pack
from shardwise.data.sources import token_files
from shardwise.data.sources.open import open_source
from shardwise.data.storage.files import open_bytes

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
    num_rows = pack(np.array(sizes), 64).num_rows  # a shuffle group packs the documents of all files together
    assert mixed.shares[0].fill == pytest.approx(sum(sizes) / (64 * num_rows))


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


# The identity of token files, which a checkpoint stores.


def resumed(folder, before, after, change=None):
    """Resume a corpus on files that changed in between."""
    first = sw.datasets.tokens(sw.datasets.token_files(folder, end_id=before), length=8)("train")
    rows = CorpusRows(first, seed=0)
    rows.take(first.order(0, 3))
    if change is not None:
        change()
    now = sw.datasets.tokens(sw.datasets.token_files(folder, end_id=after), length=8)("train")
    return CorpusRows(now, seed=0, position=rows.position)


@pytest.mark.parametrize("name", STREAMS)
def test_another_end_id_is_another_corpus(name, tmp_path):
    path = write(tmp_path, name)
    resumed(path, END, END, lambda: [os.utime(file) for file in (path, *path.glob("*"))])  # a copy is the same data
    for before, after in ((END, END - 1), (END, None), (None, END)):
        with refuses("data.corpus-changed", "sources"):
            resumed(path, before, after)


@pytest.mark.parametrize("name", [*STREAMS, "megatron.bin"])
def test_files_of_equal_size_with_other_tokens_are_another_corpus(name, tmp_path):
    path = write(tmp_path, name)

    def rewrite():
        file = path / "part-2.bin" if path.is_dir() else path
        content = bytearray(file.read_bytes())
        content[-2] ^= 1
        file.write_bytes(content)

    with refuses("data.corpus-changed", "sources"):
        resumed(path, END, END, rewrite)


def test_another_megatron_index_is_another_corpus(tmp_path):
    path = tmp_path / "a.bin"
    write_megatron(path, make_documents())
    tokens = path.read_bytes()

    def split_elsewhere():
        """Move the first document's end by one token; both files keep their sizes."""
        first, second, *others = make_documents()
        whole = np.concatenate([first, second])
        write_megatron(path, [whole[: len(first) + 1], whole[len(first) + 1 :], *others])
        assert path.read_bytes() == tokens

    with refuses("data.corpus-changed", "sources"):
        resumed(path, None, None, split_elsewhere)


def test_identity_of_many_or_large_files_reads_a_few_blocks(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr(token_files, "open_bytes", lambda path: opened.append(path) or open_bytes(path))
    (tmp_path / "parts").mkdir()
    for number in range(200):
        write_raw(tmp_path / "parts" / f"{number:03}.bin", make_documents(count=31))
    assert "tokens in chunks" in open_source(tmp_path / "parts").identity
    assert {tmp_path / "parts" / name for name in ("000.bin", "199.bin")} < set(opened)
    assert len(opened) <= 65
    np.zeros(10**7, "<u2").tofile(tmp_path / "large.bin")
    found = []
    for place in (0, 5 * 10**6, 10**7 - 1):
        content = np.zeros(10**7, "<u2")
        content[place : place + 2**20] = 1
        content.tofile(tmp_path / "large.bin")
        found.append(open_source(tmp_path / "large.bin").identity)
    assert len(set(found)) == 3


# Damage that is known when files are opened.


def test_size_of_every_file_of_a_folder_is_checked_when_it_is_opened(tmp_path):
    folder = write(tmp_path, "parts")
    content = (folder / "part-1.bin").read_bytes()
    (folder / "part-1.bin").write_bytes(content[:-1])
    with refuses("data.size-mismatch", "part-1.bin", len(content) - 1, len(content)):
        sw.data_mix([f"web={folder}"])
    (folder / "part-1.bin").write_bytes(b"")
    with refuses("data.no-tokens", "part-1.bin"):
        open_source(folder)
    (tmp_path / "npy").mkdir()
    for number in range(3):
        np.save(tmp_path / "npy" / f"{number}.npy", np.arange(5 + number))
    (tmp_path / "npy" / "2.npy").write_bytes((tmp_path / "npy" / "2.npy").read_bytes()[:100])
    with refuses("data.size-mismatch", "2.npy", 100):
        open_source(tmp_path / "npy")


def test_megatron_dataset_without_tokens_is_refused(tmp_path):
    (tmp_path / "a.bin").touch()
    (tmp_path / "a.idx").write_bytes(b"MMIDIDX\x00\x00" + struct.pack("<QBQQq", 1, 4, 0, 1, 0))
    for use in (open_source, sw.data_inspect, lambda path: sw.datasets.tokens(path, length=8)("train")):
        with refuses("data.no-tokens", "a.bin"):
            use(tmp_path / "a.bin")
