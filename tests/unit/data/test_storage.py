"""Object storage: every format equals its local copy, faults pass or are named, the cache is bounded, nothing leaks."""

import gzip
import json
import os
import pickle
import time

import numpy as np
import pytest
import tokenizers
from data.s3_server import BUCKET, SECRET, delete, put, s3_server, upload, web_server
from data.test_sources import END, make_documents, write_llm_c, write_megatron, write_npy, write_own, write_raw

import shardwise as sw
from refusals import refuses
from shardwise.data.corpus import Corpus, CorpusRows, MixtureStage
from shardwise.data.corpus_loader import CorpusLoader
from shardwise.data.cursor import Slices
from shardwise.data.mixture import make_mixture
from shardwise.data.sources.open import open_source
from shardwise.data.storage import objects, remote_file
from shardwise.testing import run_ranks

FORMATS = {
    "corpus": (lambda folder, documents: write_own(folder / "corpus", documents), {}),
    "raw.bin": (lambda folder, documents: write_raw(folder / "raw.bin", documents), {"end_id": END}),
    "llm_c.bin": (lambda folder, documents: write_llm_c(folder / "llm_c.bin", documents), {"end_id": END}),
    "array.npy": (lambda folder, documents: write_npy(folder / "array.npy", documents), {"end_id": END}),
    "megatron.bin": (lambda folder, documents: write_megatron(folder / "megatron.bin", documents), {}),
    "folder": (lambda folder, documents: write_folder(folder / "folder", documents), {"end_id": END}),
}


def write_folder(folder, documents):
    folder.mkdir()
    for number in range(3):
        write_raw(folder / f"{number}.bin", documents[number::3])


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with a small source in each format."""
    folder = tmp_path_factory.mktemp("files")
    for write, _ in FORMATS.values():
        write(folder, make_documents())
    return folder


@pytest.fixture(scope="module")
def s3(files):
    """The same files in a bucket, and the endpoint."""
    with s3_server() as endpoint:
        for path in files.iterdir():
            if path.is_dir():
                upload(endpoint, path, path.name)
            else:
                put(endpoint, path.name, path.read_bytes())
        yield endpoint


@pytest.fixture(scope="module")
def web(files):
    with web_server(files) as server:
        yield server


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDWISE_STORAGE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def quick(monkeypatch):
    """Retries without long waits."""
    monkeypatch.setattr(objects, "READING", objects.RetryPolicy(attempts=3, delay_s=0.01, timeout_s=2))
    monkeypatch.setattr(objects.ObjectStore.facts, "__defaults__", (objects.RetryPolicy(2, 0.01, 1),))


@pytest.fixture
def tiny_blocks(monkeypatch):
    """Blocks of 32 bytes: the chunks of small files span several."""
    monkeypatch.setattr(remote_file, "BLOCK_BYTES", 32)


def assert_equal(found, expected):
    assert (found.identity, found.name, found.num_chunks) == (expected.identity, expected.name, expected.num_chunks)
    for chunk in range(expected.num_chunks):
        assert found.lengths(chunk).tolist() == expected.lengths(chunk).tolist()
        assert found.tokens(chunk).tolist() == expected.tokens(chunk).tolist()


# Every format, on S3, on a web server, in memory and as a file:// URL.


@pytest.mark.representative("corpus", "raw.bin")
@pytest.mark.parametrize("name", FORMATS)
def test_a_source_on_s3_equals_the_local_one(name, s3, files, tiny_blocks):
    options = {"chunk_tokens": 16, **FORMATS[name][1]}
    source = open_source(f"s3://{BUCKET}/{name}", **options)
    assert_equal(source, open_source(files / name, **options))
    assert_equal(pickle.loads(pickle.dumps(source)), open_source(files / name, **options))


@pytest.mark.representative("megatron.bin")
@pytest.mark.parametrize("name", [name for name in FORMATS if name != "folder"])
def test_a_source_on_a_web_server_equals_the_local_one(name, web, files, tiny_blocks):
    options = {"chunk_tokens": 16, **FORMATS[name][1]}
    assert_equal(open_source(f"{web.url}/{name}", **options), open_source(files / name, **options))


def test_sources_in_memory_and_file_urls_equal_local_ones(files):
    import fsspec

    fsspec.filesystem("memory").pipe({f"/raw/{path.name}": path.read_bytes() for path in (files / "folder").iterdir()})
    local = open_source(files / "folder", end_id=END, chunk_tokens=16)
    found = open_source("memory://raw", end_id=END, chunk_tokens=16)
    assert (found.num_tokens, found.lengths(3).tolist()) == (local.num_tokens, local.lengths(3).tolist())
    assert_equal(open_source(f"file://{files}/corpus"), open_source(files / "corpus"))


def test_commands_accept_urls(s3, files, tmp_path):
    local = sw.data_inspect(files / "corpus", verify=True)
    found = sw.data_inspect(f"s3://{BUCKET}/corpus", verify=True)
    assert (found.num_tokens, found.histogram, found.samples) == (local.num_tokens, local.histogram, local.samples)
    shares = sw.data_mix([f"a=s3://{BUCKET}/corpus:3", f"b=s3://{BUCKET}/raw.bin:1"], length=8, steps=8).shares
    assert [share.rows for share in shares] == [6, 2]
    assert shares[0].path == f"s3://{BUCKET}/corpus"


def write_documents(folder, pyarrow):
    from pyarrow import parquet

    rows = [{"text": f"document {number} " * (number % 7)} for number in range(300)]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    table = pyarrow.Table.from_pylist(rows)
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(lines)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines))
    parquet.write_table(table, folder / "c.parquet", row_group_size=100)
    with pyarrow.OSFile(str(folder / "d.arrow"), "wb") as file, pyarrow.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    (folder / "e.txt").write_text("a text")


def test_documents_on_s3_make_the_same_corpus(s3, tmp_path, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow")
    monkeypatch.setattr("shardwise.data.prepare.inputs.PIECE_BYTES", 3000)
    write_documents(tmp_path / "documents", pyarrow)
    url = upload(s3, tmp_path / "documents", "documents")
    sw.data_prepare(tmp_path / "documents", out=tmp_path / "local", processes=1)
    sw.data_prepare(url, out=tmp_path / "remote", processes=2)
    for path in (tmp_path / "local").iterdir():
        if path.name != "prepare.jsonl":
            assert (tmp_path / "remote" / path.name).read_bytes() == path.read_bytes()
    assert sw.data_prepare(url, out=tmp_path / "remote").num_kept == 1
    put(s3, "documents/e.txt", b"another text")
    with refuses("data.output-other-corpus"):
        sw.data_prepare(url, out=tmp_path / "remote")


def test_a_tokenizer_on_a_web_server_is_that_of_the_file(web, files, tmp_path):
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "<eos>": 2}, unk_token="a"))
    model.save(str(files / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("b")
    source = sw.datasets.documents(tmp_path / "a.txt", tokenizer=f"{web.url}/tokenizer.json").open("web")
    local = sw.datasets.documents(tmp_path / "a.txt", tokenizer=files / "tokenizer.json").open("web")
    assert (source.tokens(0).tolist(), source.identity) == ([1, 2], local.identity)
    sw.data_prepare(tmp_path / "a.txt", out=tmp_path / "out", tokenizer=f"{web.url}/tokenizer.json", processes=1)
    assert open_source(tmp_path / "out").tokens(0).tolist() == [1, 2]


# Ranges: no more than the blocks of a chunk, once per node, ahead of need.


def test_a_chunk_downloads_its_blocks_only_and_once(web, files, tmp_path):
    tokens = np.arange(3_000_000, dtype="<u4") % 1000
    tokens.tofile(files / "large.bin")
    web.ranges.clear()
    source = open_source(f"{web.url}/large.bin", dtype="uint32")
    found = source.tokens(1)
    assert np.array_equal(found, tokens[2**20 : 2**21])
    # The window, and the block with the start of the file, in which a header would be.
    assert sorted(web.ranges) == [("/large.bin", 0, 2**19), ("/large.bin", 2**22, 2**23)]
    assert np.array_equal(open_source(f"{web.url}/large.bin", dtype="uint32").tokens(1), found)
    assert len(web.ranges) == 2


def test_prefetched_chunks_are_read_from_the_cache(web, files):
    web.ranges.clear()
    source = open_source(f"{web.url}/corpus")
    source.prefetch(range(source.num_chunks))
    deadline = time.monotonic() + 20
    while len(web.ranges) < 7 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(web.ranges) >= 7
    assert_equal(source, open_source(files / "corpus"))
    assert len(web.ranges) == len(set(web.ranges))  # nothing was downloaded again


def read_all(_world, url):
    source = open_source(url)
    return [source.tokens(chunk).tolist() for chunk in range(source.num_chunks)]


def test_forked_ranks_read_what_their_parent_opened_and_share_downloads(web, files):
    url, local = f"{web.url}/corpus", open_source(files / "corpus")
    parent = open_source(url)
    parent.tokens(0)
    web.ranges.clear()
    expected = [local.tokens(chunk).tolist() for chunk in range(local.num_chunks)]
    assert run_ranks(lambda world: read_all(world, url), 3) == [expected] * 3
    assert run_ranks(lambda world: parent.tokens(world.rank + 1).tolist(), 2) == expected[1:3]
    assert len(web.ranges) == len(set(web.ranges))


def make_corpus(path):
    source = open_source(path)
    stages = (MixtureStage(mixture=make_mixture({"web": 1})),)
    return Corpus(sources={"web": source}, stages=stages, length=8, chunks_per_group=2)


def test_loader_workers_read_the_rows_of_the_local_corpus(s3, files):
    slices = Slices(batch_size=4, accumulation=2, dp_rank=0, dp_size=1, length=10**9)
    steps = {}
    for path in (files / "corpus", f"s3://{BUCKET}/corpus"):
        loader = CorpusLoader(make_corpus(path), slices, seed=0, first_step=0, num_steps=12, num_workers=2)
        steps[str(path)] = [[batch[0].tolist() for batch in step.batches] for step in loader.steps()]
    local, remote = steps.values()
    assert remote == local


def test_a_position_of_a_local_corpus_continues_on_s3(s3, files):
    local, remote = make_corpus(files / "corpus"), make_corpus(f"s3://{BUCKET}/corpus")
    rows = CorpusRows(local, seed=0)
    rows.take(np.zeros(9, np.int64))
    resumed = CorpusRows(remote, seed=0, position=rows.position)
    following = np.zeros(20, np.int64)
    assert local.read(rows.take(following))[0].tolist() == remote.read(resumed.take(following))[0].tolist()


# Faults.


def test_two_failed_requests_pass(web, files, quick):
    web.num_failures = 2
    assert_equal(open_source(f"{web.url}/corpus"), open_source(files / "corpus"))
    assert web.num_failures == 0


WEB_FAULTS = {
    "503 forever": ({"num_failures": 10**6}, "data.storage-unreachable"),
    "a server that hangs": ({"hangs": True}, "data.storage-unreachable"),
    "truncated answers": ({"truncates": True}, "data.storage-unreachable"),
    "no ranges": ({"ignores_ranges": True}, "data.ranges-unsupported"),
    "forbidden": ({"status": 403}, "data.access-denied"),
    "gone": ({"status": 410}, "data.path-not-found"),
}


@pytest.mark.parametrize("fault", WEB_FAULTS)
def test_lasting_faults_are_named_soon(fault, web, quick, tiny_blocks, monkeypatch):
    changes, code = WEB_FAULTS[fault]
    for name, value in changes.items():
        monkeypatch.setattr(web, name, value)
    started = time.monotonic()
    with refuses(code, web.url):
        open_source(f"{web.url}/raw.bin").tokens(0)
    assert time.monotonic() - started < 10


def test_an_unreachable_endpoint_is_named_within_seconds(monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, SECRET)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    started = time.monotonic()
    with refuses("data.storage-unreachable", "s3://bucket/corpus") as refused:
        open_source("s3://bucket/corpus")
    assert time.monotonic() - started < 10
    assert SECRET not in str(refused.value)


def test_missing_and_forbidden_buckets_objects_and_credentials_are_named(s3, monkeypatch, tmp_path):
    with refuses("data.path-not-found", f"s3://{BUCKET}/nothing"):
        open_source(f"s3://{BUCKET}/nothing")
    with refuses("data.path-not-found", "s3://no-such-bucket/corpus"):
        sw.data_inspect("s3://no-such-bucket/corpus")
    with refuses("data.path-not-found", f"s3://{BUCKET}/nothing.jsonl"):
        sw.data_prepare(f"s3://{BUCKET}/nothing.jsonl", out=tmp_path / "out")
    monkeypatch.setenv("HOME", str(tmp_path))  # no ~/.aws
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with refuses("data.credentials-missing", f"s3://{BUCKET}/corpus", "AWS_ACCESS_KEY_ID"):
        open_source(f"s3://{BUCKET}/corpus")
    assert not (tmp_path / "out").exists()


def test_anonymous_access_is_a_setting_of_fsspec(s3, monkeypatch, tmp_path):
    import fsspec.config

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setitem(fsspec.config.conf, "s3", {"anon": True})  # as FSSPEC_S3_ANON=true does at the import
    with refuses("data.access-denied", f"s3://{BUCKET}/corpus"):  # the bucket is not public
        open_source(f"s3://{BUCKET}/corpus")


DAMAGES = {
    "missing shard": (lambda s3: delete(s3, "damaged/shard-00001.bin"), "data.shard-missing"),
    "truncated shard": (lambda s3: put(s3, "damaged/shard-00001.bin", b"1234"), "data.size-mismatch"),
    "damaged index": (lambda s3: put(s3, "damaged/index.json", b"{"), "data.index-invalid"),
    "interrupted": (lambda s3: delete(s3, "damaged/index.json"), "data.corpus-incomplete"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_corpora_are_refused_when_they_are_opened(damage, s3, files):
    upload(s3, files / "corpus", "damaged")
    put(s3, "damaged/prepare.jsonl", b"")
    act, code = DAMAGES[damage]
    act(s3)
    with refuses(code, f"s3://{BUCKET}/damaged"):
        open_source(f"s3://{BUCKET}/damaged")


def test_wrong_checksums_are_refused(s3, files):
    url = upload(s3, files / "corpus", "flipped")
    for name, command in (("shard-00000.idx", {}), ("shard-00000.bin", {"verify": True})):
        content = bytearray((files / "corpus" / name).read_bytes())
        content[8] ^= 1
        put(s3, f"flipped/{name}", bytes(content))
        with refuses("data.checksum-mismatch", name):
            sw.data_inspect(url, **command)
        put(s3, f"flipped/{name}", (files / "corpus" / name).read_bytes())


def test_an_object_that_changes_is_never_mixed_with_its_old_blocks(web, files, tiny_blocks):
    path = files / "changing.bin"
    np.full(100, 1, "<u2").tofile(path)
    source = open_source(f"{web.url}/changing.bin", chunk_tokens=20)
    assert set(source.tokens(0).tolist()) == {1}
    np.full(100, 2, "<u2").tofile(path)
    os.utime(path, ns=(1, 1))
    with refuses("data.object-changed", "changing.bin"):
        source.tokens(4)
    again = open_source(f"{web.url}/changing.bin", chunk_tokens=20)
    assert {token for chunk in range(5) for token in again.tokens(chunk).tolist()} == {2}
