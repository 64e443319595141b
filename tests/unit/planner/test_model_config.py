"""A transformers config.json is described with exactly the parameters of its model, or refused by name."""

import json

import pytest
import torch

import shardwise as sw
from refusals import refuses
from shardwise.planner.model_config import USUAL_LENGTH, read_decoder

SMALL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
GPT2 = {"vocab_size": 512, "n_positions": 128, "n_embd": 64, "n_layer": 2, "n_head": 4}
MODELS = {
    "llama": ("LlamaConfig", SMALL),
    "llama with biases": ("LlamaConfig", SMALL | {"attention_bias": True, "mlp_bias": True}),
    "llama with a tied head": ("LlamaConfig", SMALL | {"tie_word_embeddings": True}),
    "mistral": ("MistralConfig", SMALL | {"sliding_window": None}),
    "qwen2": ("Qwen2Config", SMALL),
    "phi3": ("Phi3Config", SMALL | {"pad_token_id": 0}),
    "gpt2": ("GPT2Config", GPT2),
    "gpt2 with a narrow MLP": ("GPT2Config", GPT2 | {"n_inner": 96}),
}


def written(folder, **fields):
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def shape_of(folder, **options):
    decoder = read_decoder(str(folder))
    return decoder.shape(**{"compute": "bf16", "gathered": False, "length": 16, "lora": 0} | options)


@pytest.mark.parametrize(("kind", "fields"), MODELS.values(), ids=MODELS)
def test_the_parameters_are_those_of_the_transformers_model(tmp_path, kind, fields):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, kind)(**fields)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert shape_of(tmp_path).numel == sum(parameter.numel() for parameter in model.parameters())


def test_a_file_and_its_folder_are_planned_alike_and_named_by_the_folder(tmp_path):
    folder = written(tmp_path, model_type="llama", **SMALL)
    reports = [sw.plan(str(path), cluster="2xH100", batch_size=8) for path in (folder, folder / "config.json")]
    assert reports[0].best == reports[1].best
    assert {report.answer.question.model.plain.name for report in reports} == {tmp_path.name}
    assert reports[0].answer.question.model.plain.tokens_per_sample == 128


def test_biases_are_frozen_with_their_matrices_under_lora(tmp_path):
    parts = shape_of(written(tmp_path, model_type="qwen2", **SMALL), lora=4).parts
    (bias,) = (weight for part in parts for weight in part.weights if weight.name == "attn.qkv.bias")
    assert (bias.trained, bias.narrow, bias.numel) == (False, True, (4 + 2 * 2) * 16)


def test_a_long_context_is_not_the_default_length(tmp_path):
    decoder = read_decoder(str(written(tmp_path, model_type="llama", **SMALL | {"max_position_embeddings": 131_072})))
    assert decoder.length(None) == USUAL_LENGTH
    assert decoder.length(65_536) == 65_536


REFUSED = {
    "norms of queries": ({"model_type": "qwen3"}, ("model.config-not-described", "'qwen3'", "llama")),
    "experts": ({"model_type": "mixtral"}, ("model.config-not-described", "'mixtral'")),
    "no kind": ({"hidden_size": 64}, ("model.config-field-missing", "model_type")),
    "no layers": (
        {"model_type": "llama"} | {name: SMALL[name] for name in SMALL if name != "num_hidden_layers"},
        ("model.config-field-missing", "num_hidden_layers"),
    ),
    "wide heads": (
        {"model_type": "llama", **SMALL, "head_dim": 32},
        ("model.config-not-described", "head_dim = 32", 16),
    ),
    "another activation": (
        {"model_type": "llama", **SMALL, "hidden_act": "gelu"},
        ("model.config-not-described", "hidden_act = 'gelu'"),
    ),
    "rotation of a part": (
        {"model_type": "phi3", **SMALL, "partial_rotary_factor": 0.75},
        ("model.config-not-described", "partial_rotary_factor"),
    ),
    "heads that do not divide": (
        {"model_type": "llama", **SMALL, "num_attention_heads": 5},
        ("model.width-not-divisible", 64, 5),
    ),
    "quantized": (
        {"model_type": "llama", **SMALL, "quantization_config": {}},
        ("model.config-not-described", "quantized"),
    ),
    "a list": ([1, 2], ("model.config-not-json", "list")),
}


@pytest.mark.parametrize(("fields", "refusal"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_described_exactly_is_refused(tmp_path, fields, refusal):
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with refuses(*refusal):
        read_decoder(str(tmp_path))


def test_a_window_shorter_than_the_samples_is_refused(tmp_path):
    decoder = read_decoder(str(written(tmp_path, model_type="mistral", **SMALL, sliding_window=64)))
    assert decoder.length(64) == 64
    with refuses("model.sliding-window", 64, 128, "--length 64"):
        decoder.length(None)
