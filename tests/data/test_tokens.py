"""Slices of sequences: what each rank gets of a batch, and which batches and losses are refused."""

import pytest
import torch

import shardwise as sw
from shardwise.data.tokens import TokenCut, check_token_loss
from shardwise.errors import InputError, JobError
from train.sentences import sentences_job

TOKENS = torch.arange(24).reshape(2, 12)


def slices(batch, loss, size=3, metrics=None):
    return [TokenCut(index=index, size=size, loss=loss, metrics=metrics or {})(batch) for index in range(size)]


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


def test_a_model_with_a_loss_of_its_own_is_told_its_share_of_the_mean():
    parts = slices({"input_ids": TOKENS, "labels": TOKENS}, sw.losses.returned_by_model(sw.losses.count_next_labels))
    following = torch.cat([part["shift_labels"] for part in parts], dim=1)
    assert torch.equal(following[:, :-1], TOKENS[:, 1:])
    assert (following[:, -1] == -100).all()
    assert {int(part["num_items_in_batch"]) for part in parts} == {22}


REFUSED = {
    "sequences that do not divide": (
        (TOKENS[:, :11],),
        {},
        "11 tokens do not give cp=3 equal slices.*: use .* 12 tokens",
    ),
    "slices of one token": ((TOKENS[:, :3],), {}, "3 tokens do not give cp=3 equal slices of at least 2"),
    "lengths that differ": ((TOKENS, TOKENS[:, :6]), {}, r"sizes there are \[6, 12\]"),
    "no sequences": ((torch.tensor([1, 2]),), {}, r"sizes there are \[\]"),
    "masked tokens": ({"input_ids": TOKENS, "attention_mask": TOKENS % 7}, {}, "masks tokens by attention_mask"),
    "a loss that shifts": (
        (TOKENS,),
        {"count": lambda batch: batch[0][:, 1:].numel()},
        "the loss counts more on whole",
    ),
    "a loss of the model without labels": ((TOKENS,), {"by_row": False}, "from no labels"),
    "a loss of the model from labels by row": (
        {"input_ids": TOKENS, "labels": torch.tensor([1, 0])},
        {"by_row": False},
        "from no labels by token",
    ),
    "labels by row": (
        {"input_ids": TOKENS, "labels": torch.tensor([1, 0])},
        {"count": sw.losses.count_labels},
        "give a target for each token",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_cut_rightly_is_refused(case):
    batch, changes, words = REFUSED[case]
    loss = sw.Loss(**{"sum": lambda *_: 0, "count": lambda _: 0, **changes})
    with pytest.raises(InputError, match=words):
        slices(batch, loss)


def test_a_metric_over_whole_sequences_is_refused():
    metric = sw.Metric(sum=lambda *_: 0, count=lambda batch: len(batch[0]))
    with pytest.raises(JobError, match="metric exact counts more"):
        slices((TOKENS, TOKENS), sw.losses.token_cross_entropy, metrics={"exact": metric})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loss": sw.losses.cross_entropy}, "the job's loss counts samples, not tokens"),
        ({"metrics": {"hits": sw.Metric(sum=lambda *_: 0)}}, "the job's hits counts samples"),
        ({"masks": "keyed"}, "keyed masks know no slices"),
    ],
)
def test_a_job_that_is_not_by_token_is_refused(changes, words):
    with pytest.raises(InputError, match=words):
        check_token_loss(sentences_job(**changes))
