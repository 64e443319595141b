"""Tar shards: samples equal their files, on S3 too; only headers are read for the index; refusals name the member."""

import io
import json
import pickle
import tarfile

import numpy as np
import pytest
import torch
from data.s3_server import BUCKET, SECRET, put, s3_server
from data.test_images import batches_of, encoded

import shardwise as sw
from refusals import refuses
from shardwise.data import tar_index
from shardwise.data.storage import files, remote_file
from shardwise.data.tar_files import expand_braces
from shardwise.testing import run_ranks

FIELDS = ("jpg;png", "cls", "json", "txt", "npy")


@pytest.fixture(autouse=True)
def _own_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("SHARDWISE_STORAGE_CACHE", str(tmp_path / "blocks"))


def npy(array):
    content = io.BytesIO()
    np.save(content, array)
    return content.getvalue()


def sample_members(number):
    """Return name -> content of the members of one sample."""
    return {
        f"{number:04d}.png": encoded(number),
        f"{number:04d}.cls": str(number % 3).encode(),
        f"{number:04d}.json": json.dumps({"id": number}).encode(),
        f"{number:04d}.txt": f"image {number}".encode(),
        f"{number:04d}.npy": npy(np.arange(number)),
    }


def write_tar(path, members, kind=tarfile.PAX_FORMAT):
    with tarfile.open(path, "w", format=kind) as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def write_shards(folder, num_shards=3, per_shard=4):
    """Write shards with samples 0, 1, 2, ... and return their pattern."""
    for shard in range(num_shards):
        members = {}
        for number in range(shard * per_shard, (shard + 1) * per_shard):
            members |= sample_members(number)
        write_tar(folder / f"shard-{shard:03d}.tar", members)
    return f"{folder}/shard-{{000..{num_shards - 1:03d}}}.tar"


def assert_is_sample(found, number):
    image, label, facts, text, array = found
    assert image.shape == (3, 10, 10)
    assert (label.item(), label.dtype) == (number % 3, torch.int64)
    assert (facts, text, array.tolist()) == ({"id": number}, f"image {number}", list(range(number)))


def test_a_pattern_a_folder_and_a_list_have_the_same_samples(tmp_path):
    pattern = write_shards(tmp_path)
    shards = sorted(tmp_path.glob("*.tar"))
    for given in (pattern, tmp_path, shards, [f"{tmp_path}/shard-{{000..001}}.tar", str(shards[2])]):
        dataset = sw.datasets.webdataset(given, fields=FIELDS, size=10)("train")
        assert len(dataset) == 12
        for number in (11, 0, 4, 7):
            assert_is_sample(dataset[number], number)
    with pytest.raises(IndexError):
        dataset[12]


def test_patterns_are_expanded_with_the_zeros_of_the_first_number():
    assert expand_braces("s-{08..11}.tar") == ["s-08.tar", "s-09.tar", "s-10.tar", "s-11.tar"]
    assert expand_braces("{0..1}/s-{9..10}.tar") == ["0/s-9.tar", "0/s-10.tar", "1/s-9.tar", "1/s-10.tar"]
    with refuses("data.shard-pattern-invalid", "{3..1}"):
        expand_braces("{3..1}.tar")


@pytest.mark.parametrize("kind", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_directories_links_and_other_members_are_understood(tmp_path, kind):
    long = "train/" + "n" * 150
    members = {f"{long}.a.JPG": encoded(1, kind="JPEG"), f"{long}.cls": b" 7\n", "README": b"x", "a/._b.cls": b"x"}
    write_tar(tmp_path / "a.tar", members, kind)
    with tarfile.open(tmp_path / "a.tar", "a", format=kind) as tar:
        for name, member_type in (("folder.cls", tarfile.DIRTYPE), ("link.cls", tarfile.SYMTYPE)):
            info = tarfile.TarInfo(name)
            info.type = member_type
            tar.addfile(info)
    dataset = sw.datasets.webdataset(tmp_path / "a.tar", fields="a.png;a.jpg cls", size=8)("train")
    assert len(dataset) == 1
    assert dataset[0][1].item() == 7


def test_members_of_a_sample_may_lie_apart_and_earlier_suffixes_come_first(tmp_path):
    padding = bytes(200_000)
    members = {"a.png": encoded(1), "b.cls": b"1", "b.big.txt": padding, "b.jpg": encoded(2, kind="JPEG")}
    members |= {"b.png": encoded(3), "a.cls": b"0"}
    write_tar(tmp_path / "a.tar", members)
    jpg, png = (
        sw.datasets.webdataset(tmp_path / "a.tar", fields=(field, "cls"), size=10)("train")
        for field in ("jpg;png", "png;jpg")
    )
    assert [dataset[number][1].item() for dataset in (jpg, png) for number in range(2)] == [0, 1, 0, 1]
    assert torch.equal(jpg[0][0], png[0][0])
    assert not torch.equal(jpg[1][0], png[1][0])


def test_the_index_reads_headers_alone_once(tmp_path, monkeypatch):
    write_tar(tmp_path / "a.tar", {f"{number}.txt": bytes(10**6) for number in range(5)})
    read = []

    class Counted(io.FileIO):
        def readinto(self, buffer):
            read.append(count := super().readinto(buffer))
            return count

    monkeypatch.setattr(tar_index, "open_stream", lambda path: io.BufferedReader(Counted(path)))
    dataset = sw.datasets.webdataset(tmp_path / "a.tar", fields=["txt"])("train")
    assert len(dataset) == 5
    assert 0 < sum(read) < 200_000
    read.clear()
    assert len(sw.datasets.webdataset(tmp_path / "a.tar", fields=["txt"])("train")) == 5
    assert not read
    for path in (tmp_path / "cache" / "shardwise" / "tar").glob("*/*"):
        path.write_bytes(b"damaged")
    assert len(sw.datasets.webdataset(tmp_path / "a.tar", fields=["txt"])("train")) == 5
    assert read


def test_a_sample_is_one_read_of_one_range(tmp_path, monkeypatch):
    dataset = sw.datasets.webdataset(write_shards(tmp_path), fields=FIELDS, size=10)("train")
    ranges = []
    whole_read = files.LocalFile.read
    monkeypatch.setattr(
        files.LocalFile,
        "read",
        lambda self, start, stop: ranges.append(stop - start) or whole_read(self, start, stop),
    )
    assert_is_sample(dataset[6], 6)
    assert len(ranges) == 1
    assert ranges[0] < 6000


def test_shards_are_read_by_ranks_and_workers_in_the_order_of_one_process(tmp_path):
    data = sw.datasets.webdataset(write_shards(tmp_path), fields=("png", "cls"), size=6, augment=True)
    whole = batches_of(data("train"), 0, 1)

    def work(world):
        dataset = data("train")
        dataset[0]  # a file is open when workers fork
        return [
            [part.tolist() for part in batch]
            for batch in batches_of(pickle.loads(pickle.dumps(dataset)), world.rank, 2, first_step=1, num_workers=1)
        ]

    for rank, batches in enumerate(run_ranks(work, 2)):
        for batch, expected in zip(batches, whole[1:], strict=True):
            assert batch == [part[rank * 2 : rank * 2 + 2].tolist() for part in expected]


def test_shards_on_s3_equal_local_ones_and_only_blocks_with_headers_are_read_for_the_index(tmp_path, monkeypatch):
    monkeypatch.setattr(remote_file, "BLOCK_BYTES", 4096)
    write_shards(tmp_path)
    write_tar(tmp_path / "shard-003.tar", {"12.txt": bytes(200_000), "13.txt": b"end"})
    local = sw.datasets.webdataset(tmp_path / "shard-{000..002}.tar", fields=FIELDS, size=10)("train")
    with s3_server() as endpoint:
        for path in tmp_path.glob("*.tar"):
            put(endpoint, f"tar/{path.name}", path.read_bytes())
        for url in (
            f"s3://{BUCKET}/tar/shard-{{000..002}}.tar",
            [f"s3://{BUCKET}/tar/shard-{n:03d}.tar" for n in range(3)],
        ):
            dataset = sw.datasets.webdataset(url, fields=FIELDS, size=10)("train")
            assert len(dataset) == 12
            for number in (3, 8):
                found, expected = dataset[number], local[number]
                assert_is_sample(found, number)
                assert torch.equal(found[0], expected[0])
        before = len(list((tmp_path / "blocks").glob("*/*")))
        texts = sw.datasets.webdataset(f"s3://{BUCKET}/tar/shard-003.tar", fields="txt")("train")
        assert len(list((tmp_path / "blocks").glob("*/*"))) - before <= 5  # of 50
        assert texts[1] == ("end",)
        with refuses("data.field-missing", "shard-003.tar", "12.txt"):
            sw.datasets.webdataset(f"s3://{BUCKET}/tar/", fields="png")("train")


# Refusals.


def test_arguments_that_cannot_be_read_are_refused_at_once(tmp_path):
    with refuses("data.field-unknown", "mp4"):
        sw.datasets.webdataset("a.tar", fields=("mp4", "cls"))
    with refuses("data.field-unknown"):
        sw.datasets.webdataset("a.tar", fields=())
    with refuses("data.no-input"):
        sw.datasets.webdataset([])
    with refuses("data.url-credentials") as refused:
        sw.datasets.webdataset(f"s3://KEY:{SECRET}@bucket/a.tar")
    assert SECRET not in str(refused.value)
    with refuses("data.no-input", tmp_path, "sw.datasets.images"):
        sw.datasets.webdataset(tmp_path)("train")
    with refuses("data.shard-missing", "b.tar"):
        sw.datasets.webdataset(tmp_path / "b.tar")("train")
    write_tar(tmp_path / "b.tar", sample_members(1))
    data = sw.datasets.webdataset(tmp_path / "b.tar", test=tmp_path / "c.tar")
    assert len(data("train")) == 1
    with refuses("data.shard-missing", "c.tar"):
        data("test")
    assert sw.datasets.webdataset(tmp_path / "b.tar")("test") is None


DAMAGE = {
    "inside of the last member": lambda content: content[:4000],
    "inside of a header": lambda content: content[:700],
    "without the end": lambda content: content.rstrip(b"\0")[:-100],
    "a damaged header": lambda content: content.replace(b"0001.json", b"0001.jsox"),
    "empty": lambda content: b"",
    "no tar file": lambda content: b"text " * 500,
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_truncated_or_damaged_shard_is_refused_when_it_is_opened(case, tmp_path):
    path = tmp_path / "a.tar"
    write_tar(path, sample_members(1) | sample_members(2))
    path.write_bytes(DAMAGE[case](path.read_bytes()))
    with refuses("data.tar-damaged", path):
        sw.datasets.webdataset(path, fields="cls")("train")


def test_compressed_empty_repeated_and_incomplete_shards_are_refused(tmp_path):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w:gz"):
        pass
    with refuses("data.tar-compressed", path, "gzip"):
        sw.datasets.webdataset(path)("train")
    write_tar(path, {"README": b"x"})
    with refuses("data.no-samples", path):
        sw.datasets.webdataset(path)("train")
    write_tar(path, {"a/1.cls": b"1", "b/1.cls": b"1", "b/1.CLS": b"1"})
    with refuses("data.tar-member-repeated", path, "b/1.CLS"):
        sw.datasets.webdataset(path)("train")
    write_tar(path, sample_members(1) | {"a/2.cls": b"1", "a/2.png": b""} | {"a/3.txt": b"", "a/3.cls": b"1"})
    with refuses("data.field-missing", path, "a/3.txt", "txt, cls", "jpg;png"):
        sw.datasets.webdataset(path, fields=("jpg;png", "cls"))("train")


@pytest.mark.parametrize(
    ("suffix", "content", "code"),
    [
        ("png", encoded(1)[:200], "data.image-invalid"),
        ("cls", b"cat", "data.field-invalid"),
        ("json", b"{", "data.field-invalid"),
        ("txt", b"\xff", "data.field-invalid"),
        ("npy", b"", "data.field-invalid"),
        ("npy", npy(np.array([None])), "data.field-invalid"),
    ],
)
def test_members_that_cannot_be_decoded_are_named(suffix, content, code, tmp_path):
    write_tar(tmp_path / "a.tar", {"one.x.txt": b"", f"one.{suffix}": content})
    dataset = sw.datasets.webdataset(tmp_path / "a.tar", fields=[suffix])("train")
    with refuses(code, f"one.{suffix}", tmp_path / "a.tar"):
        dataset[0]


def test_a_shard_that_changes_while_it_is_open_or_not_is_refused(tmp_path):
    path = tmp_path / "a.tar"
    write_tar(path, sample_members(1))
    first, second = (sw.datasets.webdataset(path, fields=["png"])("train") for _ in range(2))
    first[0]
    with path.open("r+b") as file:
        file.truncate(600)
    for dataset in (first, second):
        with refuses("data.shard-changed", path):
            dataset[0]
