"""The leak check of `verify`: four planted leaks are named, and sound jobs pass, from a corpus or a user's dataset."""

from functools import partial

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import shardwise as sw
from jobs import sentences_job
from shardwise.data.packed_batches import packed_batch, separate
from shardwise.data.sources.iterables import ShardedIterable
from shardwise.parity import documents
from shardwise.parity.verify import verify
from shardwise.plans.catalogue import decoder_config

LENGTHS = (5, 4, 7)


class Leaking(sw.models.Decoder):
    """A decoder with absolute positions and, unless `leak` is empty, a mistake on packed rows."""

    def __init__(self, leak):
        super().__init__(decoder_config("gpt2-tiny", vocab_size=50, context=16))
        self.leak = leak

    def forward(self, tokens, position_ids=None, document_ids=None):
        if self.leak == "no mask":
            document_ids = None
        if self.leak == "positions":
            position_ids = None
        if self.leak in {"first token", "last token"}:
            document_ids = document_ids.roll(1 if self.leak == "first token" else -1, dims=1)
        return super().forward(tokens, position_ids, document_ids)


def packed_rows(*, crossing=False, reset=True):
    """Return packed rows as a user makes them, map-style."""
    numbers = torch.arange(3).repeat_interleave(torch.tensor(LENGTHS)).expand(40, -1)
    positions = torch.cat([torch.arange(length) for length in LENGTHS]).expand(40, -1)
    tokens = torch.randint(50, (40, 16), generator=torch.Generator().manual_seed(0))
    targets = tokens.roll(-1, dims=1)
    ends = torch.tensor(LENGTHS).cumsum(0) - 1
    targets[:, ends[-1:] if crossing else ends] = -100
    return TensorDataset(tokens, positions if reset else torch.arange(16).expand(40, -1), numbers, targets)


def job_of(leak="", **rows):
    data = {"train": packed_rows(**rows)}.get
    return sentences_job("gpt2-tiny", model=partial(Leaking, leak), data=data, steps=4)


def verdict_on(job):
    report = verify(job, ["ddp"], nproc=1, steps=2)
    assert report.verdicts[0].plan == documents.NAME
    return report, report.verdicts[0]


def test_sound_job_passes_with_bit_equal_logits():
    report, verdict = verdict_on(job_of())
    assert verdict.status == "passed", verdict
    assert "bit-equal" in verdict.measure
    assert report.exit_code == 0


@pytest.mark.parametrize(
    ("leak", "rows", "cause"),
    [
        ("no mask", {}, documents.NO_MASK),
        ("first token", {}, documents.OFF_BY_ONE),
        ("last token", {}, documents.OFF_BY_ONE),
        ("positions", {}, documents.NOT_RESET),
        ("", {"reset": False}, documents.NOT_RESET),
        ("", {"crossing": True}, documents.CROSSING),
    ],
)
def test_planted_leak_is_named(leak, rows, cause):
    report, verdict = verdict_on(job_of(leak, **rows))
    assert verdict.status == "failed"
    assert [finding.cause for finding in verdict.findings] == [cause]
    assert report.exit_code == 3
    assert cause in report.to_text()


@pytest.mark.parametrize(("leak", "cause"), [("no mask", documents.NO_MASK), ("positions", documents.NOT_RESET)])
def test_leak_is_named_even_if_every_row_has_one_document(leak, cause):
    source = ShardedIterable("long", lambda shard: np.random.default_rng(shard).integers(0, 50, (12, 32)), 2)
    data = sw.datasets.tokens(source, length=16, packed=True)
    _, verdict = verdict_on(sentences_job("gpt2-tiny", model=partial(Leaking, leak), data=data, steps=4))
    assert [finding.cause for finding in verdict.findings] == [cause]


def test_rows_of_a_user_with_one_document_each_are_not_examined():
    rows = packed_rows(reset=False).tensors
    data = {"train": TensorDataset(*rows[:2], torch.zeros_like(rows[2]), rows[3])}.get
    _, verdict = verdict_on(sentences_job("gpt2-tiny", model=partial(Leaking, "no mask"), data=data, steps=4))
    assert verdict.status == "does not apply"
    assert "no row of the first 2 steps has two documents" in verdict.measure


def test_loss_that_adds_what_documents_alone_do_not_have_is_named():
    plain = sw.losses.token_cross_entropy
    loss = sw.Loss(sum=lambda output, batch: plain.sum(output, batch) + batch[2].max(), count=plain.count)
    _, verdict = verdict_on(
        sentences_job("gpt2-tiny", model=partial(Leaking, ""), data={"train": packed_rows()}.get, steps=4, loss=loss)
    )
    assert [finding.cause for finding in verdict.findings] == [documents.OTHER_LOSS]


def test_documents_in_rows_of_their_own_are_those_of_the_packed_rows():
    packed = packed_batch(list(packed_rows(crossing=True)[:2]))
    found, rows, places = separate(packed)
    assert found.tokens[rows, places].equal(packed.tokens)
    assert (found.document_ids == 0).sum(dim=1).tolist() == [*LENGTHS, *LENGTHS]
    assert found.position_ids[rows, places].equal(packed.position_ids)
    sound = packed_batch(list(packed_rows()[:2]))
    assert found.targets[rows, places].equal(sound.targets)  # without those that cross
    assert int((found.targets != -100).sum()) == int((sound.targets != -100).sum())
