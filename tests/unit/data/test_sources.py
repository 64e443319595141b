"""Token sources: every format returns each token of each document once, by random access, and refuses damaged files."""

import itertools
import os
import pickle
import struct
import time
import tracemalloc
import zlib

import msgspec
import numpy as np
import pytest

from refusals import refuses
from shardwise.data.corpus import Corpus, CorpusPosition, CorpusRows, MixtureStage, SourcePosition
from shardwise.data.mixture import make_mixture
from shardwise.data.sources import source as sources
from shardwise.data.sources.open import open_source
from shardwise.data.sources.shards import (
    ShardFacts,
    ShardWriter,
    TokenizerName,
    TokenShards,
    open_corpus,
    shard_paths,
    write_index,
)
from shardwise.errors import DataError

END = 99
CHUNK = 16


def make_documents(seed=0, count=60):
    """Return documents of 1 to 40 tokens that end with END: some longer than two chunks, most shorter than one."""
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 12, count)
    lengths[[5, 30]] = 40
    return [np.append(random.integers(0, 90, length - 1), END) for length in lengths]


def write_own(folder, documents, shards=3):
    folder.mkdir()
    facts = []
    for number in range(shards):
        part = documents[number::shards]
        writer = ShardWriter(folder, number, "uint16")
        writer.add(np.concatenate(part), np.array(list(map(len, part))))
        facts.append(writer.close())
    write_index(
        folder,
        facts,
        dtype="uint16",
        tokenizer=TokenizerName(name="bytes"),
        vocab_size=100,
        end_id=END,
        num_empty=0,
        chunk_tokens=CHUNK,
    )
    return [document for number in range(shards) for document in documents[number::shards]]


def write_raw(path, documents):
    np.concatenate(documents).astype("<u2").tofile(path)
    return documents


def write_llm_c(path, documents, magic=20240520, dtype="<u2"):
    tokens = np.concatenate(documents).astype(dtype)
    header = np.zeros(256, "<i4")
    header[:3] = magic, 1, len(tokens)
    path.write_bytes(header.tobytes() + tokens.tobytes())
    return documents


def write_npy(path, documents):
    np.save(path, np.concatenate(documents))
    return documents


def write_megatron(path, documents, per_document=2):
    """Write each document as up to two sequences, as Megatron's IndexedDatasetBuilder does."""
    sequences, first = [], [0]
    for document in documents:
        sequences += [part for part in np.array_split(document, per_document) if len(part)]
        first.append(len(sequences))
    sizes = np.array(list(map(len, sequences)))
    pointers = np.concatenate([[0], np.cumsum(sizes)[:-1]]) * 4
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, len(sizes), len(first))
    arrays = sizes.astype("<i4").tobytes() + pointers.astype("<i8").tobytes() + np.array(first, "<i8").tobytes()
    path.with_suffix(".idx").write_bytes(header + arrays)
    np.concatenate(documents).astype("<i4").tofile(path)
    return documents


def write_folder(path, documents):
    """Write documents into several raw files of a folder."""
    path.mkdir()
    for number in range(4):
        write_raw(path / f"part-{number}.bin", documents[number * 15 : number * 15 + 15])
    return documents


FORMATS = {
    "corpus": write_own,
    "nanogpt.bin": write_raw,
    "gpt2.bin": write_llm_c,
    "llama3.bin": lambda path, documents: write_llm_c(path, documents, 20240801, "<u4"),
    "tokens.npy": write_npy,
    "megatron.bin": write_megatron,
    "parts": write_folder,
}


def read_documents(source):
    """Return the documents of a source, chunk by chunk in reverse order, each read by itself."""
    chunks = []
    for chunk in reversed(range(source.num_chunks)):
        bounds = np.concatenate([[0], np.cumsum(source.lengths(chunk))])
        chunks.append([source.read(chunk, *pair).tolist() for pair in itertools.pairwise(bounds)])
    return [document for documents in reversed(chunks) for document in documents]


@pytest.mark.parametrize("name", FORMATS)
def test_a_source_returns_every_document_once_by_random_access(name, tmp_path):
    written = FORMATS[name](tmp_path / name, make_documents())
    source = open_source(tmp_path / name, end_id=END, chunk_tokens=CHUNK)
    assert read_documents(source) == [document.tolist() for document in written]
    assert source.num_tokens == sum(map(len, written))
    assert source.num_chunks >= source.num_tokens // CHUNK
    copy = pickle.loads(pickle.dumps(source))
    assert copy.read(1, 0, 3).tolist() == source.read(1, 0, 3).tolist()
    with pytest.raises(IndexError):
        source.read(0, 0, 10_000)
    with pytest.raises(IndexError):
        source.lengths(source.num_chunks)


def test_a_stream_without_end_id_has_one_document_per_chunk(tmp_path):
    documents = write_raw(tmp_path / "a.bin", make_documents())
    source = open_source(tmp_path / "a.bin", chunk_tokens=CHUNK)
    lengths = [source.lengths(chunk).tolist() for chunk in range(source.num_chunks)]
    assert lengths[:-1] == [[CHUNK]] * (source.num_chunks - 1)
    assert sum(map(sum, lengths)) == source.num_tokens == sum(map(len, documents))


def test_the_last_document_may_lack_an_end_id(tmp_path):
    write_raw(tmp_path / "a.bin", [np.array([1, 2, END]), np.array([3])])
    source = open_source(tmp_path / "a.bin", end_id=END)
    assert source.lengths(0).tolist() == [3, 1]


def test_vocabulary_size_comes_from_the_index_or_the_magic_number(tmp_path):
    for name in ("corpus", "gpt2.bin", "llama3.bin", "nanogpt.bin"):
        FORMATS[name](tmp_path / name, make_documents())
    found = [open_source(tmp_path / name).vocab_size for name in ("corpus", "gpt2.bin", "llama3.bin", "nanogpt.bin")]
    assert found == [100, 50_257, 128_256, None]


def test_a_source_maps_a_bounded_number_of_files(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "MAX_MAPPED", 2)
    write_folder(tmp_path / "parts", make_documents())
    source = open_source(tmp_path / "parts", end_id=END, chunk_tokens=CHUNK)
    for chunk in range(source.num_chunks):
        source.lengths(chunk)
        assert len(source._mapped) <= 2


def test_an_index_of_a_million_shards_costs_neither_files_nor_objects(tmp_path):
    """The index alone exists: opening it maps no shard, and takes less than 150 bytes per shard."""
    count = 1_000_000
    values = {"tokens": b"1048576", "documents": b"1000", "tokens_crc32": b"4294967295", "starts_crc32": b"4294967295"}
    columns = {name: msgspec.Raw(b"[" + b",".join([value] * count) + b"]") for name, value in values.items()}
    facts = {
        "version": 1,
        "dtype": "uint16",
        "tokenizer": {"name": "bytes"},
        "vocab_size": 257,
        "end_id": 256,
        "chunk_tokens": 2**20,
        "num_shards": count,
        "num_tokens": count * 2**20,
        "num_documents": count * 1000,
        "num_empty": 0,
        "shards": columns,
    }
    (tmp_path / "index.json").write_bytes(msgspec.json.encode(facts))
    del facts, columns
    tracemalloc.start()
    source = open_corpus(tmp_path).source()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert source.num_chunks == count
    assert source.num_tokens == count * 2**20
    assert peak < 150 * count
    with refuses("data.file-missing", shard_paths(tmp_path, 777_777)[0].name, kind=DataError):
        source.lengths(777_777)


@pytest.mark.prove
def test_a_corpus_of_a_million_shards_is_opened_and_resumed_in_one_second(tmp_path, monkeypatch):
    """10^12 tokens in 10^6 shards, of which only those of the groups that are read exist."""
    count, starts = 10**6, (np.arange(1001) * 1000).astype("<i8").tobytes()
    facts = ShardFacts(tokens=10**6, documents=1000, tokens_crc32=1, starts_crc32=zlib.crc32(starts))
    names = {"dtype": "uint16", "tokenizer": TokenizerName(name="bytes"), "vocab_size": 257, "end_id": 256}
    write_index(tmp_path, [facts] * count, num_empty=0, **names)
    open_shard = TokenShards.open_shard

    def make_and_open(shards, number):
        tokens, offsets = shards.paths(number)
        tokens.touch()
        os.truncate(tokens, 2 * 10**6)
        offsets.write_bytes(starts)
        return open_shard(shards, number)

    monkeypatch.setattr(TokenShards, "open_shard", make_and_open)

    def resume():
        source = open_source(tmp_path)
        stages = (MixtureStage(mixture=make_mixture({"web": 7, "code": 3})),)
        corpus = Corpus(sources={"web": source, "code": source}, stages=stages, length=2048)
        places = (SourcePosition(epoch=3, group=41_234, row=77), SourcePosition(group=9, row=5000))
        position = CorpusPosition(row=10**9, sources=places, form=corpus.form)
        rows = CorpusRows(corpus, seed=0, position=position).take(corpus.order(10**6, 1000))
        corpus.read(rows.span(0, 8))
        return source, rows

    started = time.process_time()  # the files are in memory, so waiting is that for other processes
    source, rows = resume()
    assert time.process_time() - started < 1
    assert source.num_tokens == 10**12
    assert abs(int((rows.sources == 0).sum()) - 700) <= 1
    assert len(list(tmp_path.glob("*.bin"))) == 32
    del source, rows
    tracemalloc.start()
    resume()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 200 * 10**6


def shorten(path):
    path.write_bytes(path.read_bytes()[:-1])


def edit_index(folder, old, new):
    path = folder / "index.json"
    path.write_bytes(path.read_bytes().replace(old, new))


DAMAGES = {
    "missing shard": ("corpus", lambda p: (p / "shard-00001.bin").unlink(), "data.shard-missing", "shard-00001.bin"),
    "missing starts": ("corpus", lambda p: (p / "shard-00001.idx").unlink(), "data.shard-missing", "shard-00001.idx"),
    "truncated shard": ("corpus", lambda p: shorten(p / "shard-00002.bin"), "data.size-mismatch", "shard-00002.bin"),
    "other version": ("corpus", lambda p: edit_index(p, b'"version":1', b'"version":7'), "data.index-version", 7),
    "no JSON": ("corpus", lambda p: shorten(p / "index.json") or shorten(p / "index.json"), "data.index-invalid", ""),
    "column too short": ("corpus", lambda p: edit_index(p, b'"tokens":[', b'"tokens":[7,'), "data.index-invalid", 4),
    "column of text": (
        "corpus",
        lambda p: edit_index(p, b'"documents":[', b'"documents":["a",'),
        "data.index-invalid",
        "",
    ),
    "wrong totals": ("corpus", lambda p: edit_index(p, b'"num_tokens":', b'"num_tokens":1'), "data.index-invalid", ""),
    "odd number of bytes": ("nanogpt.bin", shorten, "data.size-mismatch", "nanogpt.bin"),
    "truncated llm.c": ("gpt2.bin", shorten, "data.size-mismatch", "gpt2.bin"),
    "truncated npy": ("tokens.npy", shorten, "data.size-mismatch", "tokens.npy"),
    "npy of floats": ("tokens.npy", lambda p: np.save(p, np.zeros(3)), "data.header-invalid", "float64"),
    "no npy": ("tokens.npy", lambda p: p.write_bytes(b"garbage"), "data.header-invalid", "tokens.npy"),
    "truncated megatron": ("megatron.bin", shorten, "data.size-mismatch", "megatron.bin"),
    "truncated index": ("megatron.bin", lambda p: shorten(p.with_suffix(".idx")), "data.size-mismatch", "megatron.idx"),
    "empty file": ("nanogpt.bin", lambda p: p.write_bytes(b""), "data.no-tokens", "nanogpt.bin"),
    "missing path": ("nanogpt.bin", lambda p: p.unlink(), "data.path-not-found", "nanogpt.bin"),
    "unknown suffix": (
        "nanogpt.bin",
        lambda p: p.rename(p.with_suffix(".pt")).rename(p.mkdir() or p / "a.pt"),
        "data.unknown-format",
        "",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_source_is_refused_when_it_is_opened(damage, tmp_path):
    name, harm, code, value = DAMAGES[damage]
    FORMATS[name](tmp_path / name, make_documents())
    harm(tmp_path / name)
    with refuses(code, value, kind=DataError):
        open_source(tmp_path / name, end_id=END, chunk_tokens=CHUNK)


def test_damage_that_only_reading_finds_is_named(tmp_path):
    write_own(tmp_path / "corpus", make_documents())
    path = tmp_path / "corpus" / "shard-00001.bin"
    content = bytearray(path.read_bytes())
    content[3] ^= 1
    path.write_bytes(content)
    with refuses("data.checksum-mismatch", "shard-00001.bin", kind=DataError):
        open_corpus(tmp_path / "corpus").check_checksums()
    write_folder(tmp_path / "parts", make_documents())
    write_llm_c(tmp_path / "parts" / "part-1.bin", make_documents(count=31))
    source = open_source(tmp_path / "parts", chunk_tokens=CHUNK)
    with refuses("data.formats-differ", "part-1.bin", kind=DataError):
        read_documents(source)
    write_megatron(tmp_path / "swapped.bin", make_documents())
    index = tmp_path / "swapped.idx"
    content = bytearray(index.read_bytes())
    count = struct.unpack_from("<Q", content, 9 + 9)[0]
    pointer = 9 + 25 + count * 4 + 8 * 20
    content[pointer : pointer + 8], content[pointer + 8 : pointer + 16] = (
        content[pointer + 8 : pointer + 16],
        content[pointer : pointer + 8],
    )
    index.write_bytes(content)
    with refuses("data.sequences-not-contiguous", kind=DataError):
        read_documents(open_source(tmp_path / "swapped.bin", chunk_tokens=10_000))
