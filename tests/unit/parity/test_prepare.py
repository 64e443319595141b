"""The job as verify trains it: no dropout anywhere, and small in width and depth if asked."""

from pathlib import Path

import pytest
import torch

import shardwise as sw
from refusals import refuses
from shardwise.job import refer
from shardwise.parity.prepare import Preparation, dropouts, plain_experts, prepare_job, shrunk

JOBS = Path(__file__).parent / "jobs.py"


def test_dropout_is_off_unless_asked_for():
    preparation = Preparation(source=refer(f"{JOBS}:with_dropout", {}), steps=2)
    job = prepare_job(preparation)
    assert job.steps == 2
    assert job.model()[1].p == 0
    kept = prepare_job(Preparation(source=preparation.source, steps=2, dropout=True))
    assert kept.model()[1].p == 0.5


@pytest.mark.parametrize(("batch_size", "rows"), [(2, 3), (3, 4), (8, 13), (10, 15), (40, 61)])
@pytest.mark.parametrize("steps", [2, 3])
def test_the_second_step_is_short_and_an_evaluation_ends_unevenly(batch_size, rows, steps):
    job = prepare_job(Preparation(source=refer(f"{JOBS}:evaluated", {"batch_size": str(batch_size)}), steps=steps))
    assert (len(job.data("train")), len(job.data("test"))) == (rows, rows)
    assert rows % batch_size
    assert job.data("other") is None


def test_a_dataset_that_ends_sooner_stays_as_it_is():
    job = prepare_job(Preparation(source=refer(f"{JOBS}:evaluated", {}), steps=9))
    assert len(job.data("train")) == 100


def test_keyed_dropout_stays_on():
    job = prepare_job(Preparation(source=refer(f"{JOBS}:keyed_dropout", {}), steps=2))
    assert job.model()[1].p == 0.5


def test_dropout_of_transformers_is_found_in_modules_and_configs():
    pytest.importorskip("transformers")
    model = sw.models.byt5("byt5-tiny")
    names = {name for _, name in dropouts(model)}
    assert {"p", "dropout_rate"} <= names
    for owner, name in dropouts(model):
        setattr(owner, name, 0.0)
    assert list(dropouts(model)) == []


def test_experts_are_multiplied_one_by_one():
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(vocab_size=8, hidden_size=64, intermediate_size=8, num_hidden_layers=1)
    model = transformers.MixtralModel(config)
    assert model.config._experts_implementation == "grouped_mm"
    plain_experts(model)
    assert model.config._experts_implementation == "eager"


def test_dropout_of_attention_and_recurrent_layers_is_found():
    model = torch.nn.ModuleList(
        [torch.nn.MultiheadAttention(8, 2, dropout=0.1), torch.nn.LSTM(4, 4, num_layers=2, dropout=0.2)]
    )
    assert sorted(getattr(owner, name) for owner, name in dropouts(model)) == [0.1, 0.2]


def test_a_shrunk_decoder_keeps_its_structure():
    small = shrunk(lambda: sw.models.decoder("llama3-8b")).config
    assert (small.family, small.vocab_size, small.context, small.rope_base) == ("llama", 128_256, 8192, 500_000.0)
    assert small.num_heads // small.kv_heads == 4
    assert (small.num_layers, small.width) == (8, 128)


def test_a_shrunk_transformer_keeps_its_structure():
    pytest.importorskip("transformers")
    small = shrunk(lambda: sw.models.byt5("byt5-small"))
    assert (small.config.num_layers, small.config.num_decoder_layers, small.config.feed_forward_proj) == (
        8,
        4,
        "gated-gelu",
    )
    assert sum(p.numel() for p in small.parameters()) < 1_000_000
    ids = torch.randint(3, 200, (2, 5))
    assert small(input_ids=ids, labels=ids).loss.isfinite()


def test_a_model_without_config_cannot_be_shrunk():
    with refuses("verify.shrink-unsupported", "Linear"):
        shrunk(lambda: torch.nn.Linear(2, 2))
