"""`data prepare`: every document once, the same bytes at any number of processes and after a kill, clear refusals."""

import errno
import gzip
import json
import multiprocessing
import os
import signal
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import tokenizers

import shardwise as sw
from refusals import assert_refused, refuses
from shardwise.cli.main import main
from shardwise.data.prepare import inputs as prepare_inputs
from shardwise.data.prepare.prepare import prepare_corpus
from shardwise.data.prepare.spec import DataPrepareSpec
from shardwise.data.sources.open import open_source
from shardwise.data.sources.shards import ShardWriter
from shardwise.errors import DataError, RankFailedError

END = 256


def make_texts(count=120, seed=0):
    """Return texts of 0 to 200 characters, some of two or three bytes; every seventh is empty."""
    random = np.random.default_rng(seed)
    texts = []
    for number in range(count):
        letters = random.choice(list('abc def\n"é漢'), random.integers(1, 200))
        texts.append("" if number % 7 == 3 else f"{number} " + "".join(letters))
    return texts


def write_jsonl(path, texts, field="text"):
    """Write rows with other fields before and after the text, and a blank line after every tenth row."""
    lines = []
    for number, text in enumerate(texts):
        lines.append(json.dumps({"id": number, field: text, "tags": [1, {"text": "no"}]}, ensure_ascii=number % 2 == 0))
        if number % 10 == 9:
            lines.append("")
    path.write_text("\n".join(lines) + "\n" * (len(texts) % 2))
    return path


def write_gzip(path, texts):
    plain = write_jsonl(path.with_suffix(".tmp"), texts)
    path.write_bytes(gzip.compress(plain.read_bytes()))
    return path


def write_parquet(path, texts):
    table = pa.table({"id": range(len(texts)), "text": texts})
    pyarrow.parquet.write_table(table, path, row_group_size=11)
    return path


def write_dataset(path, texts):
    """Write what Hugging Face datasets writes with save_to_disk: Arrow streams and a list of them."""
    path.mkdir()
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for name, part in zip(names, (texts[:50], texts[50:]), strict=True):
        table = pa.table({"text": part})
        with pa.OSFile(str(path / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table, max_chunksize=7)
    state = {"_data_files": [{"filename": name} for name in names], "_indices_data_files": None}
    (path / "state.json").write_text(json.dumps(state))
    return path


def write_arrow_file(path, texts):
    """Write the Arrow format of files, with random access, which is not that of datasets."""
    table = pa.table({"text": texts})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    return path


def write_text_files(path, texts):
    path.mkdir()
    for number, text in enumerate(texts):
        (path / f"{number:05d}.txt").write_text(text)
    return path


INPUTS = {
    "a.jsonl": write_jsonl,
    "a.jsonl.gz": write_gzip,
    "a.parquet": write_parquet,
    "dataset": write_dataset,
    "a.arrow": write_arrow_file,
    "files": write_text_files,
}


@pytest.fixture
def small_pieces(monkeypatch):
    """Make pieces so small that lines are longer than some of them."""
    monkeypatch.setattr(prepare_inputs, "PIECE_BYTES", 150)


def read_corpus(folder):
    """Return the documents of a corpus as lists of ids."""
    source = open_source(folder)
    documents = []
    for chunk in range(source.num_chunks):
        tokens = source.read(chunk, 0, int(source.lengths(chunk).sum()))
        documents += [part.tolist() for part in np.split(tokens, np.cumsum(source.lengths(chunk))[:-1])]
    return documents


def contents(folder):
    """Return the bytes of a corpus by file name, without the journal, which records times of the inputs."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "prepare.jsonl"}


def as_bytes(texts):
    return [[*text.encode(), END] for text in texts if text]


@pytest.mark.parametrize("name", INPUTS)
def test_every_document_is_in_the_corpus_once_and_in_order(name, tmp_path, small_pieces):
    texts = make_texts()
    path = INPUTS[name](tmp_path / name, texts)
    report = sw.data_prepare(path, out=tmp_path / "out", processes=2, shard_tokens=3000)
    assert read_corpus(tmp_path / "out") == as_bytes(texts)
    assert report.num_documents == len(as_bytes(texts))
    assert report.num_empty == texts.count("") > 0
    assert report.num_tokens == sum(map(len, as_bytes(texts)))
    assert report.num_shards > 3


def test_the_corpus_has_the_same_bytes_with_any_number_of_processes_and_inputs_in_order(tmp_path, small_pieces):
    paths = [write_jsonl(tmp_path / "b.jsonl", make_texts(seed=1)), write_gzip(tmp_path / "a.jsonl.gz", make_texts())]
    found = []
    for processes in (1, 2, 4):
        out = tmp_path / f"out-{processes}"
        sw.data_prepare(paths, out=out, processes=processes, shard_tokens=6000)
        found.append(contents(out))
    assert found[0] == found[1] == found[2]
    assert read_corpus(tmp_path / "out-4") == as_bytes(make_texts(seed=1) + make_texts())


def test_what_a_folder_has_besides_inputs_is_reported(tmp_path):
    folder = tmp_path / "data"
    (folder / "en").mkdir(parents=True)
    for name in ("a.jsonl", "b.jsonl.zst", ".hidden", "en/web.jsonl"):
        write_jsonl(folder / name, ["text"])
    report = sw.data_prepare(folder, out=tmp_path / "out", processes=1)
    assert report.num_documents == 1
    assert report.ignored == (f"{folder}/b.jsonl.zst", f"{folder}/en/")
    assert f"{folder}/en/" in report.to_text()
    again = sw.data_prepare(folder, out=tmp_path / "out")
    assert again.ignored == report.ignored
    alone = sw.data_prepare(folder / "a.jsonl", out=tmp_path / "alone", processes=1)
    assert (alone.ignored, "ignored" in alone.to_text()) == ((), False)


def test_a_document_longer_than_a_shard_has_a_shard_of_its_own(tmp_path):
    texts = ["a" * 10, "b" * 500, "c" * 10, "d" * 10]
    sw.data_prepare([write_jsonl(tmp_path / "a.jsonl", texts)], out=tmp_path / "out", shard_tokens=30, processes=1)
    assert read_corpus(tmp_path / "out") == as_bytes(texts)
    sizes = [path.stat().st_size // 2 for path in sorted((tmp_path / "out").glob("*.bin"))]
    assert sizes == [11, 501, 22]


def kill_after(spec, num_pieces):
    """Prepare in a fork of this process, which is killed after some pieces; return whether it was."""
    seen = []

    def count(_progress):
        seen.append(None)
        if len(seen) == num_pieces:
            os.kill(os.getpid(), signal.SIGKILL)

    process = multiprocessing.get_context("fork").Process(
        target=prepare_corpus, args=(spec,), kwargs={"on_progress": count}
    )
    process.start()
    process.join()
    return process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_a_killed_run_continues_after_its_last_complete_shard_with_the_same_bytes(name, tmp_path, small_pieces):
    path = INPUTS[name](tmp_path / name, make_texts(60))
    spec = DataPrepareSpec(inputs=(path,), out=tmp_path / "whole", processes=1, shard_tokens=1500)
    expected = prepare_corpus(spec)
    total = len(list(prepare_inputs.list_pieces(prepare_inputs.find_inputs([path])[0], path)))
    kept = []
    for num_pieces in (1, total // 2, total - 1):
        out = tmp_path / f"out-{num_pieces}"
        assert kill_after(spec.replace(out=out), num_pieces)
        assert not (out / "index.json").exists()
        (out / ".tmp-shard-00099.bin-0").touch()
        report = prepare_corpus(spec.replace(out=out, processes=2))
        assert contents(out) == contents(tmp_path / "whole")
        assert (report.num_empty, report.num_tokens) == (expected.num_empty, expected.num_tokens)
        kept.append(report.num_kept)
    assert kept == sorted(kept)
    assert 0 < kept[-1] < expected.num_shards


def test_empty_documents_of_a_piece_that_begins_a_shard_are_counted_once_after_a_kill(tmp_path, small_pieces):
    # A shard has one document, so that the shard before a piece is completed after the piece was counted.
    path = write_jsonl(tmp_path / "documents.jsonl", ["", "x" * 60] * 20)
    spec = DataPrepareSpec(inputs=(path,), out=tmp_path / "whole", processes=1, shard_tokens=100)
    assert prepare_corpus(spec).num_empty == 20
    for num_pieces in (4, 7, 10):
        out = tmp_path / f"out-{num_pieces}"
        assert kill_after(spec.replace(out=out), num_pieces)
        report = prepare_corpus(spec.replace(out=out))
        assert (report.num_kept > 0, report.num_empty) == (True, 20)
        assert contents(out) == contents(tmp_path / "whole")


def damage(out):
    (out / "shard-00001.bin").write_bytes(b"12")


def change_second_input(out):
    write_jsonl(out.parent / "b.jsonl", make_texts(40, seed=9))


def add_input(out):
    write_jsonl(out.parent / "c.jsonl", make_texts(10, seed=3))


CHANGES = {
    # What happens after the kill, other settings, and how many of the complete shards are kept.
    "nothing": (lambda out: None, {}, "all"),
    "other shard size": (lambda out: None, {"shard_tokens": 1600}, "none"),
    "damaged shard": (damage, {}, "one"),
    "first input changed": (lambda out: write_jsonl(out.parent / "a.jsonl", make_texts(40, seed=5)), {}, "none"),
    "second input changed": (change_second_input, {}, "some"),
    "one more input": (add_input, {}, "all"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_complete_shards_are_kept_only_if_inputs_and_settings_are_unchanged(change, tmp_path, small_pieces):
    act, settings, expected = CHANGES[change]
    for name, seed in (("a", 1), ("b", 2)):
        write_jsonl(tmp_path / f"{name}.jsonl", make_texts(40, seed=seed))
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    spec = DataPrepareSpec(inputs=tuple(paths), out=tmp_path / "out", processes=1, shard_tokens=1500)
    files = zip(prepare_inputs.find_inputs(paths), paths, strict=True)
    num_pieces = sum(len(list(prepare_inputs.list_pieces(*each))) for each in files)
    assert kill_after(spec, num_pieces)
    num_complete = len(list((tmp_path / "out").glob("shard-*.bin")))
    act(tmp_path / "out")
    if change == "one more input":
        paths.append(tmp_path / "c.jsonl")
    spec = spec.replace(inputs=tuple(paths), **settings)
    report = prepare_corpus(spec)
    prepare_corpus(spec.replace(out=tmp_path / "fresh"))
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")
    assert {"all": report.num_kept == num_complete, "none": report.num_kept == 0, "one": report.num_kept == 1}.get(
        expected, 0 < report.num_kept < num_complete
    )


def test_a_repeated_command_does_nothing(tmp_path):
    spec = DataPrepareSpec(inputs=(write_jsonl(tmp_path / "a.jsonl", make_texts()),), out=tmp_path / "out", processes=1)
    prepare_corpus(spec)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert prepare_corpus(spec).tokens_per_s is None
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before


@pytest.fixture
def tokenizer_file(tmp_path):
    """A byte-level BPE tokenizer that adds a special token to single texts, which a corpus must not contain."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    model.train_from_iterator(make_texts(seed=7), trainer)
    model.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    model.enable_truncation(5)
    model.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_a_tokenizer_file_encodes_whole_documents_and_is_copied_into_the_corpus(tmp_path, tokenizer_file):
    texts = make_texts()
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    report = sw.data_prepare([path], out=tmp_path / "out", tokenizer=str(tokenizer_file), processes=2)
    model = tokenizers.Tokenizer.from_file(str(tokenizer_file))
    model.no_truncation()
    expected = [[*model.encode(text, add_special_tokens=False).ids, 0] for text in texts if text]
    assert read_corpus(tmp_path / "out") == expected
    assert (report.vocab_size, report.end_id) == (300, 0)
    tokenizer_file.unlink()
    sample = sw.data_inspect(tmp_path / "out", samples=2).samples[1]
    assert sample.text == texts[1]


def test_a_dead_worker_ends_the_command_and_leaves_complete_shards(tmp_path, small_pieces, monkeypatch):
    def read_or_die(file, path, piece, text_field, read=prepare_inputs.read_texts):
        if piece.start > 6000:
            os.kill(os.getpid(), signal.SIGKILL)
        return read(file, path, piece, text_field)

    path = write_jsonl(tmp_path / "a.jsonl", make_texts())
    spec = DataPrepareSpec(inputs=(path,), out=tmp_path / "out", processes=2, shard_tokens=1500)
    with monkeypatch.context() as patch:
        patch.setattr("shardwise.data.prepare.prepare.read_texts", read_or_die)
        with refuses("data.worker-died", "SIGKILL", kind=RankFailedError):
            prepare_corpus(spec)
    assert prepare_corpus(spec).num_kept > 0
    assert read_corpus(tmp_path / "out") == as_bytes(make_texts())


def test_a_full_disk_keeps_complete_shards(tmp_path, small_pieces, monkeypatch):
    """The second shard cannot be flushed: the error names the folder, and the next command continues."""
    path = write_jsonl(tmp_path / "a.jsonl", make_texts())
    spec = DataPrepareSpec(inputs=(path,), out=tmp_path / "out", processes=2, shard_tokens=3000)

    def fail(writer, close=ShardWriter.close):
        if "00001" in writer._paths[0].name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return close(writer)

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "close", fail)
        with refuses("data.write-failed", "out", os.strerror(errno.ENOSPC), kind=DataError):
            prepare_corpus(spec)
    assert not list((tmp_path / "out").glob(".tmp-*"))
    assert prepare_corpus(spec).num_kept == 1
    assert read_corpus(tmp_path / "out") == as_bytes(make_texts())


# Bad inputs: one sentence, exit code 2, nothing written.


def lines(path, *rows):
    path.write_text("\n".join(rows) + "\n")


GOOD = '{"text": "a"}'


def two_splits(folder):
    (folder / "a" / "train").mkdir(parents=True)
    (folder / "a" / "train" / "state.json").write_text("{}")
    (folder / "a" / "dataset_dict.json").write_text("{}")


def selected_rows(folder):
    write_dataset(folder / "a", make_texts())
    state = {"_data_files": [], "_indices_data_files": [{"filename": "indices.arrow"}]}
    (folder / "a" / "state.json").write_text(json.dumps(state))


def truncated_gzip(folder):
    write_gzip(folder / "a.jsonl.gz", make_texts())
    (folder / "a.jsonl.gz").write_bytes((folder / "a.jsonl.gz").read_bytes()[:-30])


def other_corpus(folder):
    write_jsonl(folder / "a.jsonl", make_texts())
    sw.data_prepare([folder / "a.jsonl"], out=folder / "out", shard_tokens=777, processes=1)


def numbers(folder):
    pyarrow.parquet.write_table(pa.table({"text": [1, 2]}), folder / "a.parquet")


def without_end_token(folder):
    lines(folder / "a.jsonl", GOOD)
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).save(str(folder / "t.json"))


BAD = {
    # name -> how the folder is made, arguments, code, values that the sentence must name
    "missing input": (lambda f: None, ["a.jsonl"], "data.path-not-found", ["a.jsonl"]),
    "empty folder": (lambda f: (f / "a").mkdir(), ["a"], "data.no-input", ["a"]),
    "unknown format": (lambda f: lines(f / "a.csv", "text"), ["a.csv"], "data.unknown-format", ["a.csv", ".jsonl"]),
    "unreadable": (
        lambda f: (f / "a.jsonl").symlink_to("/proc/self/mem"),
        ["a.jsonl"],
        "data.read-failed",
        ["a.jsonl"],
    ),
    "empty file": (lambda f: (f / "a.jsonl").touch(), ["a.jsonl"], "data.no-documents", [0]),
    "only empty documents": (lambda f: lines(f / "a.jsonl", '{"text": ""}'), ["a.jsonl"], "data.no-documents", [1]),
    "invalid JSON": (
        lambda f: lines(f / "a.jsonl", GOOD, "", "{'text'"),
        ["a.jsonl"],
        "data.json-invalid",
        ["a.jsonl:3"],
    ),
    "no object": (lambda f: lines(f / "a.jsonl", GOOD, "[1]"), ["a.jsonl"], "data.json-invalid", ["a.jsonl:2"]),
    "no text": (lambda f: lines(f / "a.jsonl", '{"text": 3}'), ["a.jsonl"], "data.json-invalid", ["a.jsonl:1", "int"]),
    "missing field": (
        lambda f: lines(f / "a.jsonl", GOOD, '{"body": ""}'),
        ["a.jsonl"],
        "data.text-field-missing",
        ["a.jsonl:2", "text"],
    ),
    "missing column": (
        lambda f: write_parquet(f / "a.parquet", ["a"]),
        ["a.parquet", "--text-field", "body"],
        "data.text-field-missing",
        ["body", "id, text"],
    ),
    "column of numbers": (numbers, ["a.parquet"], "data.text-field-invalid", ["int64"]),
    "no parquet": (lambda f: lines(f / "a.parquet", "x"), ["a.parquet"], "data.read-failed", ["a.parquet"]),
    "no arrow": (lambda f: lines(f / "a.arrow", "x"), ["a.arrow"], "data.read-failed", ["a.arrow"]),
    "truncated gzip": (truncated_gzip, ["a.jsonl.gz"], "data.read-failed", ["a.jsonl.gz"]),
    "not UTF-8": (lambda f: (f / "a.txt").write_bytes(b"abc\xff"), ["a.txt"], "data.text-not-utf8", [3]),
    "several splits": (two_splits, ["a"], "data.several-splits", ["train"]),
    "selected rows": (selected_rows, ["a"], "data.dataset-indices", ["a"]),
    "invalid state": (
        lambda f: (f / "a").mkdir() or lines(f / "a" / "state.json", "{}"),
        ["a"],
        "data.dataset-invalid",
        ["state.json"],
    ),
    "missing tokenizer": (
        lambda f: lines(f / "a.jsonl", GOOD),
        ["a.jsonl", "--tokenizer", "t.json"],
        "data.tokenizer-missing",
        ["t.json"],
    ),
    "no tokenizer": (
        lambda f: lines(f / "a.jsonl", GOOD) or lines(f / "t.json", "{}"),
        ["a.jsonl", "--tokenizer", "t.json"],
        "data.tokenizer-invalid",
        ["t.json"],
    ),
    "end token of bytes": (
        lambda f: lines(f / "a.jsonl", GOOD),
        ["a.jsonl", "--end-token", "x"],
        "data.end-token-of-bytes",
        ["x", 256],
    ),
    "no end token": (without_end_token, ["a.jsonl", "--tokenizer", "t.json"], "data.end-token-missing", ["t.json"]),
    "unknown end token": (
        without_end_token,
        ["a.jsonl", "--tokenizer", "t.json", "--end-token", "b"],
        "data.end-token-missing",
        ["b"],
    ),
    "small vocabulary": (
        lambda f: lines(f / "a.jsonl", GOOD),
        ["a.jsonl", "--vocab-size", "256"],
        "data.tokenizer-too-large",
        [257, 256],
    ),
    "output not empty": (
        lambda f: lines(f / "a.jsonl", GOOD) or (f / "out").mkdir() or lines(f / "out" / "x", ""),
        ["a.jsonl"],
        "data.output-not-empty",
        ["out"],
    ),
    "a corpus as input": (other_corpus, ["out"], "data.input-is-corpus", ["out"]),
    "other corpus": (other_corpus, ["a.jsonl"], "data.output-other-corpus", ["out"]),
    "no parent of the output": (
        lambda f: lines(f / "a.jsonl", GOOD),
        ["a.jsonl", "--out", "x/out"],
        "data.output-not-created",
        ["x/out"],
    ),
}


def snapshot(folder):
    return {path: path.read_bytes() if path.is_file() and not path.is_symlink() else None for path in folder.rglob("*")}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_with_one_sentence_and_nothing_is_written(case, tmp_path, monkeypatch, capsys):
    make, arguments, code, values = BAD[case]
    monkeypatch.chdir(tmp_path)
    make(tmp_path)
    before = snapshot(tmp_path)
    assert main(["data", "prepare", "--out", "out", "--processes", "2", *arguments]) == 2
    written = capsys.readouterr().err
    assert_refused(written, code, *values)
    assert len(written.strip().splitlines()) == 1
    assert snapshot(tmp_path) == before


def test_the_line_of_invalid_json_is_counted_in_any_piece(tmp_path, small_pieces):
    texts = make_texts(80)
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    content = path.read_text().splitlines()
    for kind in ("a.jsonl", "a.jsonl.gz"):
        for number in (0, 41, len(content) - 1):
            broken = [*content[:number], "{oops", *content[number + 1 :]]
            data = "\n".join(broken).encode()
            (tmp_path / kind).write_bytes(gzip.compress(data) if kind.endswith("gz") else data)
            with refuses("data.json-invalid", f"{kind}:{number + 1} ", kind=DataError):
                sw.data_prepare([tmp_path / kind], out=tmp_path / "out", processes=2, shard_tokens=10**6)
            assert not (tmp_path / "out").exists()


def test_a_missing_extra_is_named(tmp_path, monkeypatch, tokenizer_file):
    for package in ("pyarrow", "tokenizers"):
        monkeypatch.setitem(sys.modules, package, None)
    with refuses("extra.data-missing", "shardwise[data]"):
        sw.data_prepare([write_parquet(tmp_path / "a.parquet", ["a"])], out=tmp_path / "out", processes=1)
    with refuses("extra.hf-missing", "shardwise[hf]"):
        sw.data_prepare([tmp_path / "a.parquet"], out=tmp_path / "out", tokenizer=str(tokenizer_file))


def test_two_commands_do_not_prepare_the_same_folder(tmp_path, small_pieces):
    path = write_jsonl(tmp_path / "a.jsonl", make_texts())
    spec = DataPrepareSpec(inputs=(path,), out=tmp_path / "out", processes=1, shard_tokens=500)
    refused = multiprocessing.get_context("fork").Queue()

    def second():
        try:
            prepare_corpus(spec)
        except DataError as error:
            refused.put(error.code)
        else:
            refused.put("")

    def start_second(_progress):
        if not started:
            started.append(multiprocessing.get_context("fork").Process(target=second))
            started[0].start()
            started[0].join()

    started = []
    prepare_corpus(spec, on_progress=start_second)
    assert refused.get(timeout=10) == "data.prepare-running"
