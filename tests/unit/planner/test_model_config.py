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
NEOX = {name: SMALL[name] for name in SMALL if name != "num_key_value_heads"}
MODELS = {
    "llama": ("LlamaConfig", SMALL),
    "llama with biases": ("LlamaConfig", SMALL | {"attention_bias": True, "mlp_bias": True}),
    "llama with a tied head": ("LlamaConfig", SMALL | {"tie_word_embeddings": True}),
    "mistral": ("MistralConfig", SMALL | {"sliding_window": None}),
    "qwen2": ("Qwen2Config", SMALL),
    "phi3": ("Phi3Config", SMALL | {"pad_token_id": 0}),
    "phi3 that rotates a part": ("Phi3Config", SMALL | {"pad_token_id": 0, "partial_rotary_factor": 0.75}),
    "mistral with narrow heads": ("MistralConfig", SMALL | {"sliding_window": None, "head_dim": 8}),
    "qwen3 with wide heads": ("Qwen3Config", SMALL | {"head_dim": 32}),
    "qwen3 with biases and a tied head": (
        "Qwen3Config",
        SMALL | {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "qwen3 whose heads do not divide": ("Qwen3Config", SMALL | {"num_attention_heads": 6, "head_dim": 32}),
    "olmo2": ("Olmo2Config", SMALL),
    "olmo2 with biases and a tied head": ("Olmo2Config", SMALL | {"attention_bias": True, "tie_word_embeddings": True}),
    "gpt_neox": ("GPTNeoXConfig", NEOX),
    "gpt_neox in sequence with a tied head": (
        "GPTNeoXConfig",
        NEOX | {"use_parallel_residual": False, "tie_word_embeddings": True},
    ),
    "gpt_neox without biases of attention": ("GPTNeoXConfig", NEOX | {"attention_bias": False}),
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


FORMS = {
    "qwen3 without head_dim": ({"model_type": "qwen3", **SMALL}, {"head_width": 128, "qk_norm": "head"}),
    "olmo2": ({"model_type": "olmo2", **SMALL}, {"qk_norm": "all", "norm_after": True, "rotary_width": 16}),
    "gpt_neox as transformers 4 wrote it": (
        {"model_type": "gpt_neox", **NEOX, "rotary_pct": 0.5},
        {"rotary_width": 8, "parallel": True},
    ),
    "gpt_neox as transformers 5 writes it": (
        {"model_type": "gpt_neox", **NEOX, "rope_parameters": {"partial_rotary_factor": 1.0}},
        {"rotary_width": 16, "parallel": True},
    ),
    "gpt_neox without rotary fields": (
        {"model_type": "gpt_neox", **NEOX, "use_parallel_residual": False},
        {"rotary_width": 4, "parallel": False},
    ),
}


@pytest.mark.parametrize(("fields", "expected"), FORMS.values(), ids=FORMS)
def test_options_of_the_operators_are_read(tmp_path, fields, expected):
    config = read_decoder(str(written(tmp_path, **fields))).config
    assert {name: getattr(config, name) for name in expected} == expected


def test_tensor_parallelism_is_not_predicted_where_a_norm_reads_all_heads(tmp_path):
    assert shape_of(written(tmp_path, model_type="olmo2", **SMALL)).tp_degrees == (1,)
    report = sw.plan(str(tmp_path), cluster="8xH100", plan="tp2.shard4", batch_size=8, length=64, history=False)
    assert report.asked.code == "plan.tp-not-predicted"
    assert "train refuses it" not in report.to_text()
    assert shape_of(written(tmp_path, model_type="qwen3", **SMALL)).tp_degrees == (1, 2)


REFUSED = {
    "unknown kind": ({"model_type": "bloom"}, ("model.config-not-described", "'bloom'", "llama", "olmo2")),
    "another activation of gpt_neox": (
        {"model_type": "gpt_neox", **NEOX, "hidden_act": "relu"},
        ("model.config-not-described", "hidden_act = 'relu'"),
    ),
    "dropout of gpt_neox": (
        {"model_type": "gpt_neox", **NEOX, "hidden_dropout": 0.1},
        ("model.config-not-described", "hidden_dropout = 0.1"),
    ),
    "an odd rotated part": (
        {"model_type": "gpt_neox", **NEOX, "rotary_pct": 0.2},
        ("model.odd-head-width", 3),
    ),
    "more than all rotated": (
        {"model_type": "gpt_neox", **NEOX, "rotary_pct": 2},
        ("model.config-not-described", 2),
    ),
    "heads of another type": (
        {"model_type": "qwen3", **SMALL, "head_dim": "wide"},
        ("model.setting-not-positive", "'wide'"),
    ),
    "no kind": ({"hidden_size": 64}, ("model.config-field-missing", "model_type")),
    "no layers": (
        {"model_type": "llama"} | {name: SMALL[name] for name in SMALL if name != "num_hidden_layers"},
        ("model.config-field-missing", "num_hidden_layers"),
    ),
    "another activation": (
        {"model_type": "llama", **SMALL, "hidden_act": "gelu"},
        ("model.config-not-described", "hidden_act = 'gelu'"),
    ),
    "rotation of a part": (
        {"model_type": "llama", **SMALL, "rope_parameters": {"partial_rotary_factor": 0.75}},
        ("model.config-not-described", "partial_rotary_factor = 0.75"),
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


EXPERTS = (
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "deepseek_v2",
    "deepseek_v3",
    "olmoe",
    "phimoe",
    "gpt_oss",
    "granitemoe",
)


@pytest.mark.parametrize("kind", EXPERTS)
def test_mixtures_of_experts_are_refused_by_name(tmp_path, kind):
    with refuses("model.config-experts", repr(kind), "mixture of experts"):
        read_decoder(str(written(tmp_path, model_type=kind)))


def test_a_mixture_of_experts_of_an_unknown_kind_is_recognized_by_its_experts(tmp_path):
    with refuses("model.config-experts", "'custom'"):
        read_decoder(str(written(tmp_path, model_type="custom", n_routed_experts=64)))


def test_a_window_shorter_than_the_samples_is_refused(tmp_path):
    decoder = read_decoder(str(written(tmp_path, model_type="mistral", **SMALL, sliding_window=64)))
    assert decoder.length(64) == 64
    with refuses("model.sliding-window", 64, 128, "--length 64"):
        decoder.length(None)
