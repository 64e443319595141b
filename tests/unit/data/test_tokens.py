"""Slices of sequences: what each rank gets of a batch, and which batches and losses are refused."""

import pytest
import torch

import shardwise as sw
from jobs import sentences_job
from refusals import refuses
from shardwise.data.rows import TokenShard, check_token_loss

TOKENS = torch.arange(24).reshape(2, 12)


def slices(batch, loss, size=3, metrics=None):
    return [TokenShard(index=index, size=size, loss=loss, metrics=metrics or {})(batch) for index in range(size)]


def test_slices_together_are_the_whole_batch():
    parts = slices((TOKENS, torch.tensor([5, 6]), TOKENS + 1), sw.losses.token_cross_entropy)
    assert torch.equal(torch.cat([inputs for inputs, _, _ in parts], dim=1), TOKENS)
    assert torch.equal(torch.cat([targets for _, _, targets in parts], dim=1), TOKENS + 1)
    assert all(torch.equal(by_row, torch.tensor([5, 6])) for _, by_row, _ in parts)


def test_labels_that_a_loss_shifts_reach_one_token_further():
    labels = TOKENS.masked_fill(TOKENS % 5 == 0, -100)
    parts = slices({"input_ids": TOKENS, "labels": labels}, sw.losses.next_token)
    logits = torch.randn(2, 12, 24, generator=torch.Generator().manual_seed(0))
    whole = sw.losses.next_token.sum(logits, {"labels": labels})
    shares = [sw.losses.next_token.sum(logits[:, 4 * i : 4 * i + 4], part) for i, part in enumerate(parts)]
    torch.testing.assert_close(sum(shares), whole)
    assert sum(map(sw.losses.next_token.count, parts)) == sw.losses.next_token.count({"labels": labels})


def test_a_model_with_a_loss_of_its_own_receives_its_share_of_the_mean():
    parts = slices({"input_ids": TOKENS, "labels": TOKENS}, sw.losses.returned_by_model(sw.losses.count_next_labels))
    following = torch.cat([part["shift_labels"] for part in parts], dim=1)
    assert torch.equal(following[:, :-1], TOKENS[:, 1:])
    assert (following[:, -1] == -100).all()
    assert {int(part["num_items_in_batch"]) for part in parts} == {22}


REFUSED = {
    "sequences that do not divide": (
        (TOKENS[:, :11],),
        {},
        ("plan.cp-sequence-not-divisible", 11, "cp=3", 12),
    ),
    "slices of one token": ((TOKENS[:, :3],), {}, ("plan.cp-sequence-not-divisible", 3, "cp=3")),
    "lengths that differ": ((TOKENS, TOKENS[:, :6]), {}, ("data.cp-unequal-lengths", "[6, 12]")),
    "no sequences": ((torch.tensor([1, 2]),), {}, ("data.cp-unequal-lengths", "[]")),
    "masked tokens": (
        {"input_ids": TOKENS, "attention_mask": TOKENS % 7},
        {},
        ("support.cp-attention-mask", "attention_mask"),
    ),
    "a loss that shifts": (
        (TOKENS,),
        {"count": lambda batch: batch[0][:, 1:].numel()},
        ("support.cp-loss-whole-sequences",),
    ),
    "a loss of the model without labels": ((TOKENS,), {"by_row": False}, ("support.cp-loss-without-labels",)),
    "a loss of the model from labels by row": (
        {"input_ids": TOKENS, "labels": torch.tensor([1, 0])},
        {"by_row": False},
        ("support.cp-loss-without-labels",),
    ),
    "labels by row": (
        {"input_ids": TOKENS, "labels": torch.tensor([1, 0])},
        {"count": sw.losses.count_labels},
        ("support.cp-loss-whole-sequences",),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_split_correctly_is_refused(case):
    batch, changes, refusal = REFUSED[case]
    loss = sw.Loss(**{"sum": lambda *_: 0, "count": lambda _: 0, **changes})
    with refuses(*refusal):
        slices(batch, loss)


def test_a_metric_over_whole_sequences_is_refused():
    metric = sw.Metric(sum=lambda *_: 0, count=lambda batch: len(batch[0]))
    with refuses("support.cp-metric-whole-sequences", "exact"):
        slices((TOKENS, TOKENS), sw.losses.token_cross_entropy, metrics={"exact": metric})


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"loss": sw.losses.cross_entropy}, ("support.cp-loss-by-sample", "the job's loss")),
        ({"metrics": {"hits": sw.Metric(sum=lambda *_: 0)}}, ("support.cp-loss-by-sample", "hits")),
        ({"masks": "keyed"}, ("support.cp-keyed-masks",)),
    ],
)
def test_a_job_that_is_not_by_token_is_refused(changes, refusal):
    with refuses(*refusal):
        check_token_loss(sentences_job(**changes))
