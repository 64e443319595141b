"""data mix: rows, tokens and epochs of each source."""

import numpy as np
import pytest

import shardwise as sw
from refusals import refuses
from shardwise.data.corpus import Corpus, CorpusRows, MixtureStage
from shardwise.data.mixture import make_mixture
from shardwise.data.sources.open import open_source


@pytest.fixture
def paths(tmp_path):
    for name, size in (("web", 9000), ("code", 1000)):
        np.save(tmp_path / f"{name}.npy", np.zeros(size, np.uint16))
    return {name: tmp_path / f"{name}.npy" for name in ("web", "code")}


def test_proportions_become_rows_and_epochs(paths):
    report = sw.data_mix([f"web={paths['web']}:0.6", f"code={paths['code']}:0.4"], length=10, batch_size=5, steps=100)
    assert (report.period, report.num_rows, report.num_tokens) == (5, 500, 3000 + 2 * 999)  # targets
    assert [(share.rows, share.epochs) for share in report.shares] == [(300, pytest.approx(1 / 3)), (200, 2.0)]
    assert "code" in report.to_text()


def test_without_proportions_and_length_every_source_is_read_once(paths):
    report = sw.data_mix([f"{name}={path}" for name, path in paths.items()], length=10)
    assert [share.epochs for share in report.shares] == [1.0, 1.0]
    packed = sw.data_mix([f"web={paths['web']}"], length=700, tokens=9000, packed=True, end_id=1)
    (share,) = packed.shares
    assert share.fill == pytest.approx(9000 / (13 * 700))
    assert packed.num_rows == 13
    assert share.epochs == pytest.approx(1.0)


def test_packed_rows_count_padding_as_no_tokens_and_long_documents_as_such(tmp_path):
    """Ten documents of 30 tokens and one of 100, in rows of 40."""
    lengths = [30] * 10 + [100]
    np.save(tmp_path / "web.npy", np.concatenate([np.append(np.zeros(size - 1), 1) for size in lengths]).astype("<u2"))
    web = f"web={tmp_path / 'web.npy'}"
    report = sw.data_mix([web], length=40, packed=True, end_id=1)
    assert (report.num_rows, report.num_tokens) == (13, 400)
    assert report.shares[0].long_documents == pytest.approx(1 / 11)
    assert "9.09% of the documents of web are longer than a row" in report.to_text()
    assert "longer" not in sw.data_mix([web], length=100, packed=True, end_id=1).to_text()
    windows = sw.data_mix([web], length=40)
    assert (windows.num_tokens, windows.shares[0].long_documents) == (399, None)
    # As the steps of a job with this number of tokens, which counts rows with their padding.
    assert sw.data_mix([web], length=40, packed=True, end_id=1, tokens=4000).num_rows == 100


def test_a_source_of_less_than_a_row_has_one_row_per_epoch(tmp_path):
    np.save(tmp_path / "web.npy", np.zeros(300, np.uint16))
    report = sw.data_mix([f"web={tmp_path / 'web.npy'}"], length=2048, steps=5)
    assert (report.shares[0].epochs, report.num_tokens) == (5.0, 5 * 299)
    np.save(tmp_path / "one.npy", np.zeros(1, np.uint16))
    with refuses("data.source-empty", "web"):
        sw.data_mix([f"web={tmp_path / 'one.npy'}"])
    report = sw.data_mix([f"web={tmp_path / 'web.npy'}:1", f"one={tmp_path / 'one.npy'}:0"], steps=5)
    assert [share.epochs for share in report.shares] == [5.0, 0.0]


@pytest.mark.parametrize("packed", [False, True])
def test_an_epoch_has_the_rows_that_training_reads(packed, tmp_path):
    """40 files are 40 chunks, three shuffle groups, each of which ends with a row that is not full."""
    random = np.random.default_rng(0)
    for number in range(40):
        np.save(tmp_path / f"{number}.npy", random.integers(0, 9, random.integers(1, 90)).astype(np.uint16))
    source = open_source(tmp_path, end_id=1)
    mixture = MixtureStage(mixture=make_mixture({"web": 1}))
    rows = CorpusRows(
        Corpus(sources={"web": source}, stages=(mixture,), length=50, packed={"web"} if packed else set()), seed=0
    )
    num_rows = 0
    while rows.position.sources[0].epoch == 0:
        rows.take(np.zeros(1, dtype=np.int64))
        num_rows += 1
    report = sw.data_mix([f"web={tmp_path}"], length=50, steps=num_rows, packed=packed, end_id=1)
    assert report.shares[0].epochs == 1.0
    assert report.num_tokens == source.num_tokens - (0 if packed else 3)


def test_invalid_sources_are_refused(paths):
    web = paths["web"]
    for sources, code in (
        (["web"], "data.source-invalid"),
        ([f"web={web}", f"web={web}"], "data.source-repeated"),
        ([f"web={web}:1", f"code={web}"], "data.proportion-missing"),
        ([f"web={web}:-1"], "data.proportion-invalid"),
        ([f"web={web}:0"], "data.proportions-zero"),
        (["web=/does/not/exist:1"], "data.path-not-found"),
    ):
        with refuses(code):
            sw.data_mix(sources)
    with refuses("data.mix-two-lengths", 1, 2):
        sw.data_mix([f"web={web}"], steps=1, tokens=2)
