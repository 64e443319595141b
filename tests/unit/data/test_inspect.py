"""`data inspect`: exact counts, percentiles and duplicates, decoded samples, and refusals of damaged files."""

import json
from collections import Counter

import numpy as np
import pytest
import tokenizers
from data.test_sources import make_documents, write_llm_c

import shardwise as sw
from refusals import assert_refused, refuses
from shardwise.cli.main import main
from shardwise.data.inspect import histogram, percentiles
from shardwise.errors import DataError

TEXTS = ["hello world", "", "a", "hello world", "déjà vu", "a", "a", "x" * 300, "stop \x1b[31mred"]


@pytest.fixture
def corpus(tmp_path):
    rows = "\n".join(json.dumps({"text": text}) for text in TEXTS)
    (tmp_path / "a.jsonl").write_text(rows)
    sw.data_prepare([tmp_path / "a.jsonl"], out=tmp_path / "corpus", shard_tokens=40, processes=1)
    return tmp_path / "corpus"


def test_counts_lengths_duplicates_and_samples_of_a_corpus(corpus):
    report = sw.data_inspect(corpus, verify=True, samples=2)
    lengths = [len(text.encode()) + 1 for text in TEXTS if text]
    assert (report.num_documents, report.num_tokens) == (8, sum(lengths))
    assert report.num_duplicates == 3
    assert (report.smallest_id, report.largest_id) == (27, 256)
    assert (report.length_percentiles["0"], report.length_percentiles["100"]) == (2, 301)
    assert sum(each.num_documents for each in report.histogram) == 8
    assert [sample.text for sample in report.samples] == [TEXTS[0], TEXTS[-1]]
    assert report.is_verified
    assert report.verified == ("checksums", "vocabulary")
    assert json.loads(report.to_json())["num_duplicates"] == 3
    assert "\x1b" not in sw.data_inspect(corpus, samples=8).to_text()
    assert sw.data_inspect(corpus, duplicates=False, samples=0).num_duplicates is None


def test_verify_claims_no_more_than_a_format_stores(tmp_path):
    np.save(tmp_path / "a.npy", np.array([7, 3, 5], np.uint16))
    write_llm_c(tmp_path / "b.bin", make_documents())
    arrays, llm_c = (sw.data_inspect(tmp_path / name, verify=True) for name in ("a.npy", "b.bin"))
    assert (arrays.is_verified, arrays.verified, arrays.smallest_id, arrays.largest_id) == (True, (), 3, 7)
    assert "neither checksums nor a vocabulary" in arrays.to_text()
    assert llm_c.verified == ("vocabulary",)
    assert "no checksums" in llm_c.to_text()


def test_negative_ids_are_refused_by_verify_and_shown_without_it(tmp_path):
    np.save(tmp_path / "a.npy", np.array([1, 2, -3, 4], np.int32))
    np.save(tmp_path / "b.npy", np.array([-3, -2], np.int16))
    with refuses("data.id-outside-vocabulary", "a.npy", "-3"):
        sw.data_inspect(tmp_path / "a.npy", verify=True)
    report = sw.data_inspect(tmp_path / "b.npy", tokenizer="bytes")
    assert (report.smallest_id, report.largest_id, report.is_verified) == (-3, -2, False)


def test_percentiles_and_histogram_equal_those_of_a_list_of_lengths():
    lengths = np.random.default_rng(0).integers(1, 3000, 1001)
    counted = Counter(lengths.tolist())
    expected = {str(p): int(np.percentile(lengths, p, method="inverted_cdf")) for p in (0, 5, 25, 50, 75, 95, 99, 100)}
    assert percentiles(counted) == expected
    for each in histogram(counted):
        assert each.num_documents == np.sum((lengths >= each.low) & (lengths < each.high))
    assert percentiles(Counter()) == {}
    assert histogram(Counter()) == ()


def test_a_token_file_is_split_at_the_end_id_and_decoded_if_asked(tmp_path, capsys):
    tokens = np.array([*b"one", 256, *b"two!", 256, *b"one", 256], "<u2")
    tokens.tofile(tmp_path / "a.bin")
    report = sw.data_inspect(tmp_path / "a.bin", end_id=256, tokenizer="bytes")
    assert (report.num_documents, report.num_duplicates, report.vocab_size) == (3, 1, None)
    assert [sample.text for sample in report.samples] == ["one", "two!", "one"]
    assert sw.data_inspect(tmp_path / "a.bin").samples[0].text is None
    assert main(["data", "inspect", str(tmp_path / "a.bin"), "--end-id", "256", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_documents"] == 3


def test_the_tokenizer_of_a_corpus_needs_no_usual_end_token_and_may_not_change(tmp_path):
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "stop": 2}, unk_token="a"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model.save(str(tmp_path / "vocab.json"))
    (tmp_path / "a.jsonl").write_text('{"text": "b a b"}')
    out = tmp_path / "corpus"
    sw.data_prepare(tmp_path / "a.jsonl", out=out, tokenizer=str(tmp_path / "vocab.json"), end_token="stop")
    report = sw.data_inspect(out)
    assert (report.samples[0].ids, report.samples[0].text) == ((1, 0, 1, 2), "b a b stop")
    assert report.tokenizer.name == "vocab.json"
    (out / "tokenizer.json").write_text((out / "tokenizer.json").read_text() + " ")
    with refuses("data.tokenizer-changed", "tokenizer.json", kind=DataError):
        sw.data_inspect(out)


def flip_byte(path):
    content = bytearray(path.read_bytes())
    content[2] ^= 1
    path.write_bytes(content)


def shrink_vocabulary(corpus):
    index = corpus / "index.json"
    index.write_text(index.read_text().replace('"vocab_size":257', '"vocab_size":200'))


DAMAGES = {
    "checksum": (lambda corpus: flip_byte(corpus / "shard-00001.bin"), "data.checksum-mismatch", "shard-00001.bin"),
    "vocabulary": (shrink_vocabulary, "data.id-outside-vocabulary", 256),
    "missing shard": (lambda corpus: (corpus / "shard-00002.bin").unlink(), "data.shard-missing", "shard-00002.bin"),
    "no corpus": (lambda corpus: (corpus / "index.json").unlink(), "data.corpus-incomplete", "index.json"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_corpus_is_refused_with_one_sentence(damage, corpus, capsys):
    harm, code, value = DAMAGES[damage]
    harm(corpus)
    assert main(["data", "inspect", str(corpus), "--verify"]) == 2
    assert_refused(capsys.readouterr().err, code, value)
