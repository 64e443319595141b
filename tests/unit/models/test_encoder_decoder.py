"""T5 and ByT5 through transformers: published sizes, own mean loss, clear refusals."""

import sys

import pytest
import torch

from refusals import refuses
from shardwise import models


@pytest.mark.parametrize(
    ("build", "name", "count"),
    [
        (models.t5, "t5-small", 60_506_624),
        (models.t5, "t5-base", 222_903_552),
        (models.t5, "t5-large", 737_668_096),
        # ByT5's published head is a weight of its own; transformers 5 ties it, hence vocabulary x width fewer.
        (models.byt5, "byt5-small", 299_637_760 - 384 * 1472),
        (models.byt5, "byt5-base", 581_653_248 - 384 * 1536),
        (models.byt5, "byt5-large", 1_228_183_552 - 384 * 1536),
    ],
)
def test_parameter_count_is_the_published_one(build, name, count):
    pytest.importorskip("transformers")
    with torch.device("meta"):
        model = build(name)
    assert sum(parameter.numel() for parameter in model.parameters()) == count


@pytest.mark.parametrize(("build", "name"), [(models.t5, "t5-tiny"), (models.byt5, "byt5-tiny")])
def test_loss_is_the_mean_over_the_labels_that_count(build, name):
    pytest.importorskip("transformers")
    model = build(name, dropout_rate=0.0)
    ids = torch.randint(3, 200, (2, 12))
    labels = ids[:, :6].clone()
    labels[1, 2:] = -100
    output = model(input_ids=ids, labels=labels)
    expected = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(output.loss, expected)


def test_byte_vocabulary_covers_every_byte():
    pytest.importorskip("transformers")
    model = models.byt5("byt5-tiny")
    every_byte = torch.arange(256)[None] + 3
    assert model(input_ids=every_byte, labels=every_byte).loss.isfinite()


def test_overrides_replace_single_fields():
    pytest.importorskip("transformers")
    config = models.byt5("byt5-tiny", num_layers=1, dropout_rate=0.0).config
    assert (config.num_layers, config.num_decoder_layers, config.d_model, config.dropout_rate) == (1, 1, 64, 0.0)


@pytest.mark.parametrize(
    ("build", "name", "overrides", "refusal"),
    [
        (models.t5, "t5-smal", {}, ("model.unknown-name", "'t5-small'")),
        (models.byt5, "byt5_base", {}, ("model.unknown-name", "'byt5-base'")),
        (models.t5, "t5-tiny", {"num_layer": 1}, ("model.unknown-setting", "'num_layers'")),
    ],
)
def test_unknown_size_or_field_names_the_nearest(build, name, overrides, refusal):
    with refuses(*refusal):
        build(name, **overrides)


def test_without_transformers_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)  # what Python leaves for a missing module
    with refuses("extra.hf-missing", "models.t5", "pip install 'shardwise[hf]'"):
        models.t5("t5-tiny")
