"""Ready-made losses for models of transformers: sums and counts, whatever is padding."""

from types import SimpleNamespace

import pytest
import torch

import shardwise as sw
from refusals import refuses
from shardwise.job.losses import next_labels

LABELS = torch.tensor([[5, 1, 2, 3], [6, 4, -100, -100]])


@pytest.fixture
def logits():
    return torch.randn(2, 4, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def by_hand(logits, pairs):
    return -sum(logits[row, place].log_softmax(-1)[label] for row, place, label in pairs)


def test_labels_are_compared_where_they_stand_and_ignored_ones_count_for_nothing(logits):
    pairs = [(0, 0, 5), (0, 1, 1), (0, 2, 2), (0, 3, 3), (1, 0, 6), (1, 1, 4)]
    total = sw.losses.labels.sum(SimpleNamespace(logits=logits), {"labels": LABELS})
    assert total == pytest.approx(by_hand(logits, pairs))
    assert sw.losses.labels.count({"labels": LABELS}) == len(pairs)


def test_next_token_compares_each_place_with_the_label_behind_it(logits):
    pairs = [(0, 0, 1), (0, 1, 2), (0, 2, 3), (1, 0, 4)]
    total = sw.losses.next_token.sum({"logits": logits}, {"labels": LABELS})
    assert total == pytest.approx(by_hand(logits, pairs))
    assert sw.losses.next_token.count({"labels": LABELS}) == len(pairs)
    used, labels = next_labels(logits, {"labels": LABELS})
    assert used is logits  # a slice would be copied, forward and backward
    assert labels.shape == logits.shape[:2]
    sliced = sw.losses.next_token.sum(logits[:, :2], {"labels": LABELS[:, :3]})  # a context-parallel slice
    assert sliced == pytest.approx(by_hand(logits, [pair for pair in pairs if pair[1] < 2]))


def test_one_label_per_row_is_a_class(logits):
    total = sw.losses.labels.sum(SimpleNamespace(logits=logits[:, 0]), {"labels": LABELS[:, 1]})
    assert total == pytest.approx(by_hand(logits, [(0, 0, 1), (1, 0, 4)]))


def test_output_without_logits_is_refused():
    with refuses("loss.model-without-logits", "AutoModelForCausalLM"):
        sw.losses.labels.sum(SimpleNamespace(last_hidden_state=LABELS, logits=None), {"labels": LABELS})


def test_the_loss_of_transformers_weighs_tokens_alike_however_rows_are_grouped():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=7, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config).double().requires_grad_(False)
    rows = {"input_ids": LABELS.clamp(min=0), "labels": LABELS}
    returned = sw.losses.returned_by_model(sw.losses.count_next_labels)
    total = sw.losses.next_token.sum(sw.losses.without_labels(model, rows), rows)
    assert returned.sum(model(**rows), rows) == pytest.approx(total)
    apart = [{name: value[row : row + 1] for name, value in rows.items()} for row in (0, 1)]
    assert sum(returned.sum(model(**row), row) for row in apart) == pytest.approx(total)
    theirs = model(**rows, num_items_in_batch=returned.count(rows)).loss
    assert theirs * returned.count(rows) == pytest.approx(total)


def test_metrics_of_dict_batches_count_as_the_losses_do(logits):
    output, batch = SimpleNamespace(logits=logits), {"labels": LABELS}
    guessed = logits.argmax(-1)
    in_place, shifted = sw.metrics.label_accuracy, sw.metrics.next_token_accuracy
    output.logits = torch.nn.functional.one_hot(LABELS.clamp(min=0), 7)  # right in every position that counts
    assert in_place.sum(output, batch) == in_place.count(batch) == sw.losses.labels.count(batch) == 6
    assert shifted.sum(output, batch) == 0
    assert shifted.sum(output.logits.roll(-1, 1), batch) == shifted.count(batch) == sw.losses.next_token.count(batch)
    classes = SimpleNamespace(logits=logits[:, 0])
    assert sw.metrics.accuracy.sum(classes, {"labels": guessed[:, 0]}) == 2
    assert sw.metrics.accuracy.sum(logits[:, 0], (None, guessed[:, 0])) == 2
    with refuses("loss.labels-per-token", [2, 4], "next_token_accuracy"):
        sw.metrics.accuracy.sum(output, batch)
    for function in (sw.metrics.token_accuracy.count, lambda batch: sw.metrics.token_accuracy.sum(logits, batch)):
        with refuses("loss.batch-is-dict", "token_accuracy", "sw.metrics.next_token_accuracy"):
            function(batch)
