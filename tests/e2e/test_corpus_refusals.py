"""`shardwise train` on a corpus that cannot be trained on: one sentence, exit code 2, and nothing is written."""

import json
import shutil

import numpy as np
import pytest

import shardwise as sw
from e2e.processes import shardwise
from refusals import assert_refused

JOB = """
import shardwise as sw

job = sw.Job(
    model=lambda: sw.models.decoder("llama-tiny", vocab_size=257, context=32, width=16, num_layers=1),
    data=sw.datasets.tokens({"web": "corpus"}, length=32, packed=True),
    loss=sw.losses.token_cross_entropy,
    optimizer=sw.adamw(lr=1e-3),
    batch_size=2,
    steps=2,
)
"""
OWN_MODEL = """
import torch

class Own(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(256, 8), torch.nn.Linear(8, 256)

    def forward(self, tokens, position_ids, document_ids):
        return self.head(self.embed(tokens))
"""


def replaced(old, new):
    """Return a change of the job file."""

    def change(folder):
        text = (folder / "job.py").read_text()
        assert old in text
        (folder / "job.py").write_text(text.replace(old, new))

    return change


def without(name):
    return lambda folder: (folder / "corpus" / name).unlink()


def shortened(name):
    def change(folder):
        path = folder / "corpus" / name
        path.write_bytes(path.read_bytes()[:-8])

    return change


def flipped(name):
    def change(folder):
        path = folder / "corpus" / name
        content = bytearray(path.read_bytes())
        content[40] ^= 1
        path.write_bytes(content)

    return change


def own_model(folder):
    model = 'lambda: sw.models.decoder("llama-tiny", vocab_size=257, context=32, width=16, num_layers=1)'
    replaced(model, "Own")(folder)
    (folder / "job.py").write_text(OWN_MODEL + (folder / "job.py").read_text())


def one_token(folder):
    np.save(folder / "corpus.npy", np.zeros(1, np.uint16))
    replaced('"corpus"}, length=32, packed=True', '"corpus.npy"}, length=32')(folder)


def other_test(tokens):
    """Return a change that evaluates on a file of token ids of a larger vocabulary."""

    def change(folder):
        np.save(folder / "test.npy", np.array(tokens, np.int32))
        replaced('"corpus"}, length=32, packed=True', '"corpus"}, length=32, test="test.npy"')(folder)

    return change


def no_documents(folder):
    np.save(folder / "corpus.npy", np.arange(100, dtype=np.uint16))
    replaced('"corpus"}', '"corpus.npy"}')(folder)


PACKED = "packed=True"
BAD = {
    "missing shard": (without("shard-00000.bin"), "data.shard-missing", ["shard-00000.bin"]),
    "missing starts": (without("shard-00000.idx"), "data.shard-missing", ["shard-00000.idx"]),
    "truncated shard": (shortened("shard-00000.bin"), "data.size-mismatch", ["shard-00000.bin"]),
    "truncated starts": (shortened("shard-00000.idx"), "data.size-mismatch", ["shard-00000.idx"]),
    "changed byte": (flipped("shard-00000.bin"), "data.checksum-mismatch", ["shard-00000.bin"]),
    "changed starts": (flipped("shard-00000.idx"), "data.checksum-mismatch", ["shard-00000.idx"]),
    "interrupted prepare": (without("index.json"), "data.corpus-incomplete", ["index.json"]),
    "damaged index": (shortened("index.json"), "data.index-invalid", ["index.json"]),
    "missing path": (replaced('"corpus"', '"nowhere"'), "data.path-not-found", ["nowhere"]),
    "missing test": (replaced(PACKED, 'packed=True, test="nowhere"'), "data.path-not-found", ["nowhere"]),
    "unknown format": (replaced('"corpus"', '"."'), "data.unknown-format", []),
    "negative proportion": (replaced(PACKED, 'proportions={"web": -1}'), "data.proportion-invalid", ["web", "-1"]),
    "only zeros": (replaced(PACKED, 'proportions={"web": 0}'), "data.proportions-zero", []),
    "unknown source": (replaced(PACKED, 'proportions={"wbe": 1}'), "data.source-unknown", ["wbe"]),
    "small vocabulary": (replaced("257", "256"), "data.vocabulary-too-large", ["web", 257, 256]),
    "small embedding": (own_model, "data.vocabulary-too-large", ["web", 257, 256]),
    "test ids": (other_test([*range(64), 300]), "data.token-outside-vocabulary", ["test", 300, 257]),
    "negative test ids": (other_test([*range(64), -1]), "data.token-outside-vocabulary", ["test", -1]),
    "empty test": (other_test([]), "data.no-tokens", ["test.npy"]),
    "short test": (other_test([5]), "data.source-empty", ["test", 32]),
    "no documents": (no_documents, "data.packed-without-documents", ["web", "end_id"]),
    "no tokens": (one_token, "data.source-empty", ["web"]),
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    rows = (json.dumps({"text": f"document {number} " * 5}) for number in range(20))
    (folder / "documents.jsonl").write_text("\n".join(rows))
    sw.data_prepare([folder / "documents.jsonl"], out=folder / "corpus", processes=1)
    return folder / "corpus"


@pytest.mark.representative("missing shard", "small vocabulary", "no tokens")
@pytest.mark.parametrize("case", BAD)
def test_a_bad_corpus_is_refused_before_the_first_step_and_nothing_is_written(case, corpus, tmp_path):
    change, code, values = BAD[case]
    shutil.copytree(corpus, tmp_path / "corpus")
    (tmp_path / "job.py").write_text(JOB)
    change(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    done = shardwise(tmp_path, "train", "job.py", PYTHONDONTWRITEBYTECODE="1")
    assert done.returncode == 2, done.stderr
    assert_refused(done.stderr, code, *values)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
