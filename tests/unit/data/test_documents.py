"""Documents that are tokenized during training: every document once, from files and from Hugging Face datasets."""

import itertools
import json

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from datasets.distributed import split_dataset_by_node
from pyarrow import parquet

import shardwise as sw
from refusals import refuses
from shardwise.data import documents as module
from shardwise.data.corpus import CorpusRows
from shardwise.data.prepare import inputs
from shardwise.data.sources import iterables
from shardwise.data.sources.iterables import ShardedIterable

TEXTS = [f"document {number} " + "x" * (number % 17) for number in range(300)]
ROWS = [{"text": text, "number": number} for number, text in enumerate(TEXTS)]


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    """Split the documents into several shards."""
    monkeypatch.setattr(inputs, "PIECE_BYTES", 1000)
    monkeypatch.setattr(module, "_ROWS_PER_SHARD", 64)
    monkeypatch.setattr(module, "_ROWS_PER_CALL", 7)


def rows_of(numbers):
    for number in numbers:
        yield from ROWS[number * 30 : (number + 1) * 30]


def stream():
    """Return an IterableDataset with ten shards."""
    return datasets.IterableDataset.from_generator(rows_of, gen_kwargs={"numbers": list(range(10))})


def data_of(kind, folder):
    if kind == "jsonl":
        path = folder / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        return path
    if kind == "parquet":
        path = folder / "rows.parquet"
        parquet.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=50)
        return path
    rows = datasets.Dataset.from_list(ROWS)
    if kind == "on disk":
        rows.save_to_disk(folder / "rows")
        return folder / "rows"
    return {"map-style": rows, "iterable": stream()}.get(kind)


def texts_of(source):
    found = []
    for chunk in range(source.num_chunks):
        ends = np.cumsum(source.lengths(chunk))
        for document in np.split(source.tokens(chunk), ends)[:-1]:
            assert document[-1] == 256
            found.append(bytes(document[:-1].astype(np.uint8)).decode())
    return found


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "on disk", "map-style", "iterable"])
def test_every_document_is_in_one_shard(kind, tmp_path):
    source = sw.datasets.documents(data_of(kind, tmp_path)).open("web")
    assert source.num_chunks > 1 or kind == "on disk"
    assert sorted(texts_of(source)) == sorted(TEXTS)
    assert source.vocab_size == 257


@pytest.mark.parametrize("kind", ["jsonl", "iterable"])
def test_corpus_of_documents_continues_at_a_position_in_another_process(kind, tmp_path):
    """A new object stands for a new process: it has read nothing."""
    make = sw.datasets.tokens({"web": sw.datasets.documents(data_of(kind, tmp_path))}, length=32, packed=True)
    whole, position = CorpusRows(make("train"), seed=0), None
    expected = []
    whole_corpus = make("train")
    order = np.zeros(200, dtype=np.int64)
    for number, chunk in enumerate(np.split(order, 10)):
        if number == 4:
            position = whole.position
        taken = whole.take(chunk)
        if position is not None:
            expected.append(torch.stack(whole_corpus.read(taken)))
    assert position.sources[0].digest
    found = make("train")
    rows = CorpusRows(found, seed=0, position=position).take(order[:120])
    assert torch.equal(torch.stack(found.read(rows)), torch.cat(expected, dim=1))


@pytest.mark.parametrize("kind", ["parquet", "on disk", "map-style"])
def test_shards_with_too_many_tokens_are_divided_by_rows(kind, tmp_path, monkeypatch):
    """Long documents have fewer rows per shard; shards that earlier versions accepted stay the same."""
    data = data_of(kind, tmp_path)
    whole = sw.datasets.documents(data).open("web")
    largest = max(chunk_tokens(whole))
    monkeypatch.setattr(module, "_SHARD_TOKENS", 2 * largest)
    assert sw.datasets.documents(data).open("web").identity == whole.identity
    monkeypatch.setattr(module, "_SHARD_TOKENS", largest // 4)
    monkeypatch.setattr(iterables, "MAX_SHARD_TOKENS", largest // 3)
    source = sw.datasets.documents(data).open("web")
    assert source.num_chunks > 3 * whole.num_chunks
    assert sorted(texts_of(source)) == sorted(TEXTS)
    assert sw.datasets.documents(data).open("web").identity == source.identity
    monkeypatch.setattr(iterables, "MAX_SHARD_TOKENS", 20)
    with refuses("data.shard-too-large", "rows 0 to" if kind == "map-style" else tmp_path, "web", 20):
        source = sw.datasets.documents(data).open("web")
        source.lengths(0)


@pytest.mark.parametrize("form", ["pandas", "arrow", "numpy"])
def test_formats_of_datasets_do_not_change_their_documents(form):
    rows = datasets.Dataset.from_list(ROWS)
    for data in (rows.with_format(form), rows.to_iterable_dataset(num_shards=3).with_format(form)):
        assert texts_of(sw.datasets.documents(data).open("web")) == TEXTS
    transformed = rows.with_transform(lambda batch: {"text": [text + "!" for text in batch["text"]]})
    assert texts_of(sw.datasets.documents(transformed).open("web")) == [text + "!" for text in TEXTS]


@pytest.mark.parametrize(("values", "kind"), [([0, 2], "int64"), ([False], "bool"), ([[]], "list<"), ([None], "null")])
def test_columns_without_text_are_refused_by_their_type(values, kind, tmp_path):
    parquet.write_table(pa.table({"text": values}), tmp_path / "rows.parquet")
    with refuses("data.text-field-invalid", "text", kind, "row group 0"):
        sw.datasets.documents(tmp_path / "rows.parquet").open("web").lengths(0)


def test_null_is_refused_in_every_input(tmp_path):
    rows = {"text": ["a", None]}
    parquet.write_table(pa.table(rows), tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n{"text": null}\n')
    data = datasets.Dataset.from_dict(rows)
    for given, code in (
        (tmp_path / "rows.parquet", "data.text-field-invalid"),
        (tmp_path / "rows.jsonl", "data.json-invalid"),
        (data, "data.text-field-invalid"),
        (data.to_iterable_dataset(), "data.text-field-invalid"),
    ):
        with refuses(code, "text"):
            sw.datasets.documents(given).open("web").lengths(0)


def test_datasets_of_token_ids_need_no_tokenizer():
    ids = [[1, 2, 3], [], [4, 5]]
    rows = datasets.Dataset.from_dict({"input_ids": ids})
    make = sw.datasets.documents
    source = make(rows, tokenizer=None, text_field="input_ids", vocab_size=6).open("web")
    assert source.tokens(0).tolist() == [1, 2, 3, 4, 5]
    assert source.lengths(0).tolist() == [3, 2]
    with refuses("data.token-outside-vocabulary", 5, "web"):
        make(rows, tokenizer=None, text_field="input_ids", vocab_size=5).open("web").tokens(0)


def test_shards_that_change_are_refused_also_after_a_resume():
    def source(shift):
        return ShardedIterable("web", lambda shard: [range(shard + shift, shard + shift + 50)], 4)

    make = sw.datasets.tokens(source(0), length=8)
    rows = CorpusRows(make("train"), seed=0)
    rows.take(np.zeros(3, dtype=np.int64))
    changed = sw.datasets.tokens(source(1), length=8)
    with refuses("data.shard-changed", "tokens"):
        CorpusRows(changed("train"), seed=0, position=rows.position)


def endless():
    for number in itertools.count():
        yield {"text": f"document {number}"}


def test_what_cannot_be_exact_is_refused(tmp_path, monkeypatch):
    with refuses("data.iterable-shuffled", "web"):
        sw.datasets.documents(stream().shuffle(seed=0)).open("web")
    monkeypatch.setattr(iterables, "MAX_SHARD_TOKENS", 1000)
    infinite = sw.datasets.documents(datasets.IterableDataset.from_generator(endless)).open("web")
    with refuses("data.shard-too-large", 0, "web", 1000):
        infinite.lengths(0)
    compressed = tmp_path / "rows.jsonl.gz"
    compressed.write_bytes(b"")
    with refuses("data.documents-compressed", compressed):
        sw.datasets.documents(compressed).open("web")


def test_interleaved_datasets_are_refused_unless_every_row_is_read_once():
    """A shard of interleaved datasets ends when one of them ends in it: shards have other rows than the whole."""
    one, other = (datasets.Dataset.from_dict({"text": texts}) for texts in (TEXTS[:120], TEXTS[120:239]))
    streams = [each.to_iterable_dataset(num_shards=4) for each in (one, other)]
    interleaved = datasets.interleave_datasets(streams)
    for stream in (interleaved, interleaved.map(dict), datasets.concatenate_datasets([streams[0], interleaved])):
        with refuses("data.iterable-interleaved", "web", "first_exhausted", "proportions="):
            sw.datasets.documents(stream).open("web")
    with refuses("data.iterable-shuffled", "web"):
        shuffled = streams[0].shuffle(seed=0, buffer_size=4)
        sw.datasets.documents(datasets.concatenate_datasets([shuffled, streams[1]])).open("web")
    whole = datasets.interleave_datasets(streams, stopping_strategy="all_exhausted_without_replacement")
    for stream in (whole, datasets.concatenate_datasets(streams)):
        assert len(texts_of(sw.datasets.documents(stream).open("web"))) == 239


def test_rows_taken_or_skipped_of_several_shards_are_refused():
    """A shard takes its part of the number from its own start: take(2) of four shards has rows of two shards."""
    rows = datasets.Dataset.from_dict({"text": TEXTS[:120]})
    stream = rows.to_iterable_dataset(num_shards=4)
    for part in (stream.take(2), stream.skip(2).map(dict)):
        with refuses("data.iterable-limited", "web", 4):
            sw.datasets.documents(part).open("web")
    with refuses("data.iterable-indexed", "web", 4):
        even = stream.filter(lambda _, index: index % 2 == 0, with_indices=True)
        sw.datasets.documents(even).open("web")
    with refuses("data.stream-split", "web", "part 1 of 2"):
        sw.datasets.documents(split_dataset_by_node(stream, 1, 2)).open("web")
    one = rows.to_iterable_dataset().skip(2)
    assert texts_of(sw.datasets.documents(one).open("web")) == TEXTS[2:120]


def test_bad_documents_are_refused(tmp_path):
    make, rows = sw.datasets.documents, datasets.Dataset.from_list(ROWS)
    with refuses("data.text-field-missing", "texts", "did you mean 'text'?"):
        make(rows, text_field="texts").open("web").lengths(0)
    with refuses("data.text-field-invalid", "number", "int"):
        make(rows, text_field="number").open("web").lengths(0)
    with refuses("data.several-splits", "train, test"):
        make(datasets.DatasetDict(train=rows, test=rows))
    with refuses("data.source-empty", "web"):
        make(rows.select([])).open("web")
    with refuses("data.source-empty", "web"):
        empty = tmp_path / "empty.jsonl"
        empty.touch()
        make(empty).open("web")
    with refuses("data.tokenizer-missing", "web"):
        make(data_of("jsonl", tmp_path), tokenizer=None).open("web")
    with refuses("data.source-invalid", "web", "object"):
        make(object()).open("web")
    with refuses("data.source-invalid", "tokens", "Dataset"):
        sw.datasets.tokens(rows, length=8)("train")
    with refuses("data.proportions-missing", "web"):
        sw.datasets.tokens({"web": make(rows), "more": make(rows)}, length=8)("train")
    with refuses("data.source-empty", "blank"):
        blank = sw.datasets.tokens({"blank": ShardedIterable("blank", lambda _: [[], []], 3)}, length=8)("train")
        CorpusRows(blank, seed=0).take(np.zeros(1, dtype=np.int64))
    with refuses("data.document-invalid", "float64"):
        ShardedIterable("web", lambda _: [[0.5]], 1).lengths(0)


def test_test_split_may_be_documents(tmp_path):
    path = data_of("jsonl", tmp_path)
    make = sw.datasets.documents
    test = sw.datasets.tokens(make(path), test=make(path), length=32)("test")
    assert len(test) == sum(-(-(int(source) - 1) // 32) for source in chunk_tokens(make(path).open("test")))


def chunk_tokens(source):
    return [source.lengths(chunk).sum() for chunk in range(source.num_chunks)]
