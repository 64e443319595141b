"""URLs of object storage are handled like paths and refused with secrets; the cache on disk is bounded and shared."""

import os
import pickle
import sys

import numpy as np
import pytest
from data.s3_server import SECRET

import shardwise as sw
from refusals import refuses
from shardwise.data.sources.open import open_source
from shardwise.data.storage import objects
from shardwise.data.storage.block_cache import BlockCache
from shardwise.data.storage.locations import RemotePath, locate
from shardwise.environment import storage_cache
from shardwise.errors import InputError
from shardwise.testing import run_ranks

SECRET_URLS = [
    f"s3://KEY:{SECRET}@bucket/corpus",
    f"s3://KEY:{SECRET}/corpus",
    f"https://user:{SECRET}@host/corpus",
    f"https://{SECRET.replace('/', '')}@host/corpus",
    f"https://host/corpus.bin?X-Amz-Signature={SECRET}",
]


@pytest.mark.parametrize("url", SECRET_URLS)
def test_urls_with_secrets_are_refused_without_their_secrets(url, tmp_path):
    calls = [
        lambda: open_source(url),
        lambda: sw.datasets.tokens({"web": url}, length=8),
        lambda: sw.data_inspect(url),
        lambda: sw.data_mix([f"web={url}"]),
        lambda: sw.data_prepare(url, out=tmp_path / "out"),
        lambda: sw.datasets.documents(url),
        lambda: sw.datasets.documents("web.jsonl", tokenizer=url),
        lambda: sw.datasets.webdataset(url + "/{3..1}.tar"),
    ]
    for call in calls:
        with refuses("data.url-credentials") as refused:
            call()
        assert "secret+that" not in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_commands_are_refused_without_their_arguments():
    command = f"pipe:curl -H 'Authorization: Bearer {SECRET}' https://host/{{3..1}}.tar"
    for call in (sw.datasets.webdataset, sw.datasets.images, sw.datasets.documents, open_source):
        with refuses("data.url-command", "pipe:") as refused:
            call(command)
        assert "secret+that" not in str(refused.value)
        assert "curl" not in str(refused.value)


def test_unknown_schemes_and_missing_packages_are_named(monkeypatch):
    with refuses("data.scheme-unknown", "nothing://"):
        open_source("nothing://bucket/corpus")
    with refuses("data.url-incomplete", "s3://"):
        open_source("s3://")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with refuses("extra.storage-missing", "shardwise[storage]"):
        open_source("s3://bucket/corpus")


def test_errors_of_libraries_lose_query_strings_and_user_names():
    error = OSError("GET https://user:pass@host/a?X-Amz-Signature=abc failed, see 'http://host/b?token=t'")
    text = objects._redacted(error)
    assert text == "GET https://***@host/a?*** failed, see 'http://host/b?***'"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("s3://bucket/a/b.bin", "s3://bucket/a/b.idx"), ("http://host:80/b.bin", "http://host:80/b.idx")],
)
def test_remote_paths_are_handled_like_local_ones(text, expected):
    path = locate(text)
    assert isinstance(path, RemotePath)
    assert (str(path), path.name, path.stem) == (text, "b.bin", "b")
    assert str(path.with_suffix(".idx")) == str(path.parent / "b.idx") == expected
    assert pickle.loads(pickle.dumps(path)) == path


# The cache.


def test_the_cache_is_bounded_and_keeps_what_was_used_last(tmp_path):
    cache = BlockCache(tmp_path, 1000, num_sets=1)
    for number in range(30):
        cache.put(f"key-{number}", bytes([number]) * 96)  # 100 with the checksum
        os.utime(tmp_path / "00" / f"key-{number}", ns=(number, number))
        assert cache.get("key-0") is not None or number == 0  # its use keeps it
    names = {path.name for path in (tmp_path / "00").iterdir()}
    assert len(names) == 10
    assert {"key-0", "key-29"} <= names
    assert cache.get("key-1") is None
    assert cache.get("key-29") == bytes([29]) * 96


def test_many_processes_share_a_cache_without_torn_blocks(tmp_path):
    def work(world):
        cache = BlockCache(tmp_path, 20_000, num_sets=4)
        random = np.random.default_rng(world.rank)
        for number in random.integers(0, 100, 400).tolist():
            found = cache.get(f"key-{number}")
            assert found is None or found == bytes([number]) * 500
            cache.put(f"key-{number}", bytes([number]) * 500)

    run_ranks(work, 4)
    paths = [path for path in tmp_path.glob("*/*") if not path.name.startswith(".")]
    assert sum(path.stat().st_size for path in paths) <= 20_000
    assert not list(tmp_path.glob("*/.tmp-*"))


def test_a_damaged_block_and_an_unwritable_folder_are_misses(tmp_path):
    cache = BlockCache(tmp_path, 10**6, num_sets=1)
    cache.put("key", b"content")
    (tmp_path / "00" / "key").write_bytes(b"half")
    assert cache.get("key") is None
    (tmp_path / "file").touch()
    nowhere = BlockCache(tmp_path / "file", 10**6)
    nowhere.put("key", b"content")
    assert nowhere.get("key") is None
    with nowhere.claim("key", wait=True) as is_ours:
        assert is_ours


def test_a_claim_excludes_others_until_it_ends(tmp_path):
    cache = BlockCache(tmp_path, 10**6)
    with cache.claim("key", wait=True) as first, cache.claim("key", wait=False) as second:
        assert (first, second) == (True, False)
    with cache.claim("key", wait=False) as third:
        assert third
    assert not list(tmp_path.glob("*/.lock-*"))


def test_the_size_of_the_cache_is_a_variable():
    assert storage_cache({"HOME": "/h"})[1] == 16 * 10**9
    assert storage_cache({"SHARDWISE_STORAGE_CACHE": "/c", "SHARDWISE_STORAGE_CACHE_GB": "2"})[1] == 2 * 10**9
    with refuses("env.storage-cache-too-small", kind=InputError):
        storage_cache({"SHARDWISE_STORAGE_CACHE_GB": "0"})
