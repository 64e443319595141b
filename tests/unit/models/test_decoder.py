"""The decoder: equal to transformers' GPT-2 and Llama, published sizes, init recipe, clear refusals."""

import copy
import math
import pickle
import re

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize

from refusals import refuses
from shardwise import models
from shardwise.models.transformer import rotary_tables
from shardwise.plans.catalogue import SIZES

PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_count_is_the_published_one(name):
    with torch.device("meta"):
        model = models.decoder(name)
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED[name]


def test_every_size_but_the_tiny_ones_is_checked_against_a_published_count():
    assert set(SIZES) - set(PUBLISHED) == {"gpt2-tiny", "llama-tiny"}


def test_gpt2_shape_equals_transformers_gpt2():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=256, n_positions=128, n_embd=64, n_layer=2, n_head=4, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0
        )
    )
    _shake(theirs)
    ours = models.decoder("gpt2-tiny")
    ours.load_state_dict(_from_gpt2(theirs.state_dict(), ours.config))
    tokens = torch.randint(256, (2, 128))
    _assert_equal_logits(ours(tokens), theirs(tokens).logits)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_llama_shape_equals_transformers_llama(num_kv_heads):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=176,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=num_kv_heads,
            max_position_embeddings=128,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        )
    )
    _shake(theirs)
    ours = models.decoder("llama-tiny", num_kv_heads=num_kv_heads, rope_base=500_000.0)
    ours.load_state_dict(_from_llama(theirs.state_dict(), ours.config))
    tokens = torch.randint(256, (2, 128))
    _assert_equal_logits(ours(tokens), theirs(tokens).logits)


@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-tiny"])
def test_a_later_token_does_not_change_earlier_logits(name):
    model = models.decoder(name)
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-tiny"])
def test_double_model_is_accurate_to_double_precision(name):
    """A part that dropped to fp32 would bend the loss's slope: finite differences see it at 1e-7."""
    torch.manual_seed(0)
    model = models.decoder(name).double()
    tokens = torch.randint(256, (2, 65))

    def loss():
        return cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    loss().backward()
    weight = model.blocks[0].attn.qkv.weight
    direction = normalize(weight.grad.flatten(), dim=0).view_as(weight)
    slope, reach = (weight.grad * direction).sum().item(), 1e-4
    with torch.no_grad():
        weight += reach * direction
        above = loss().item()
        weight -= 2 * reach * direction
        below = loss().item()
    assert (above - below) / (2 * reach) == pytest.approx(slope, rel=1e-6)
    assert model(tokens[:, :-1]).dtype == torch.float64


def test_rotary_positions_are_exact_in_double_and_not_blurred_in_bf16():
    config = SIZES["llama-tiny"]
    sin = rotary_tables(config, torch.arange(100), torch.empty(1, dtype=torch.float64))[1]
    assert sin[99, 0, 1].item() == pytest.approx(math.sin(99 * 10_000 ** (-1 / 8)), rel=1e-13)
    assert rotary_tables(config, torch.arange(100), torch.empty(1, dtype=torch.bfloat16))[1].dtype == torch.float32


def test_bf16_model_gives_bf16_logits_near_those_of_fp32():
    torch.manual_seed(0)
    model = models.decoder("llama-tiny")
    tokens = torch.randint(256, (1, 32))
    exact = model(tokens)
    rounded = model.bfloat16()(tokens)
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), exact, rtol=0.05, atol=0.02)


@pytest.mark.parametrize(("name", "num_kv_heads"), [("gpt2-tiny", 4), ("llama-tiny", 4), ("llama-tiny", 2)])
def test_plain_split_of_qkv_rows_gives_each_rank_whole_heads(name, num_kv_heads):
    torch.manual_seed(0)
    whole = models.decoder(name, num_kv_heads=num_kv_heads).blocks[0].attn
    x = torch.randn(2, 10, 64)
    total = torch.zeros_like(x)
    for rank in range(2):
        part = copy.deepcopy(whole)
        for kind, rows in whole.qkv.named_parameters():
            part.qkv.register_parameter(kind, nn.Parameter(rows.chunk(2)[rank]))
        part.out.register_parameter("weight", nn.Parameter(whole.out.weight.chunk(2, dim=1)[rank]))
        total += part(x)  # the output bias is still zero in a fresh model
    torch.testing.assert_close(total, whole(x))


def test_module_names_are_the_documented_ones():
    names = {name for name, _ in models.decoder("llama-tiny").named_modules()}
    assert {"embed", "blocks.1.attn.qkv", "blocks.1.attn.out", "blocks.1.mlp.down", "norm", "head"} <= names


def test_gpt2_head_is_the_embedding_and_llama_head_is_not():
    gpt2, llama = models.decoder("gpt2-tiny"), models.decoder("llama-tiny")
    assert gpt2.head.weight is gpt2.embed.weight
    assert llama.head.weight is not llama.embed.weight


@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-tiny"])
def test_tensor_rules_name_every_matrix_but_the_positions(name):
    model = models.decoder(name)
    matrices = [path for path, part in model.named_modules() if isinstance(part, nn.Linear | nn.Embedding)]
    named = [path for path in matrices if re.sub(r"\.\d+\.", ".*.", path) in model.tensor_rules()]
    assert set(matrices) - set(named) <= {"positions"}


def test_decoder_has_no_buffers_that_a_meta_build_could_lose():
    assert not list(models.decoder("llama-tiny").buffers())


@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-tiny"])
def test_residual_projections_start_smaller_by_the_square_root_of_their_number(name):
    torch.manual_seed(0)
    block = models.decoder(name, num_layers=8).blocks[3]
    assert block.attn.qkv.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.attn.out.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert block.mlp.down.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)


def test_init_weights_fills_a_model_built_on_meta():
    with torch.device("meta"):
        model = models.decoder("gpt2-tiny")
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(math.nan)
    model.init_weights()
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert model.head.weight is model.embed.weight


def test_overrides_replace_single_fields():
    config = models.decoder("gpt2-tiny", vocab_size=300, num_layers=4).config
    assert (config.vocab_size, config.num_layers, config.width) == (300, 4, 64)


def test_derived_widths_follow_an_override():
    config = models.decoder("gpt2-tiny", width=32, num_heads=2).config
    assert (config.kv_heads, config.hidden_width, config.head_width) == (2, 128, 16)


def test_a_config_builds_the_same_decoder_as_its_name():
    assert models.decoder(SIZES["llama-tiny"], num_layers=1).config == models.decoder("llama-tiny", num_layers=1).config


def test_config_survives_pickling():
    assert pickle.loads(pickle.dumps(SIZES["llama3-8b"])) == SIZES["llama3-8b"]


@pytest.mark.parametrize(
    ("name", "overrides", "refusal"),
    [
        ("gpt-2", {}, ("model.unknown-name", "'gpt2'")),
        ("llama3-8B", {}, ("model.unknown-name", "'llama3-8b'")),
        ("gpt2-tiny", {"num_layer": 3}, ("model.unknown-setting", "'num_layers'")),
        ("gpt2-tiny", {"width": 65}, ("model.width-not-divisible", "width=68")),
        ("gpt2-tiny", {"num_layers": 0}, ("model.setting-not-positive", "num_layers", 0)),
        ("gpt2-tiny", {"vocab_size": 2.5}, ("model.setting-not-positive", "vocab_size", "2.5")),
        ("gpt2-tiny", {"num_kv_heads": 0}, ("model.setting-not-positive", "kv_heads", 0)),
        ("gpt2-tiny", {"family": "lama"}, ("model.unknown-family", "'llama'")),
        ("llama-tiny", {"num_kv_heads": 3}, ("model.heads-not-divisible", 4, 3)),
        ("llama-tiny", {"width": 60, "num_heads": 4}, ("model.odd-head-width", 15)),
    ],
)
def test_bad_shape_is_refused_with_the_fact_and_the_fix(name, overrides, refusal):
    with refuses(*refusal):
        models.decoder(name, **overrides)


def test_sequence_beyond_the_context_is_refused():
    with refuses("model.context-exceeded", 129, 128):
        models.decoder("gpt2-tiny")(torch.zeros(1, 129, dtype=torch.int64))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-tiny"])
@pytest.mark.parametrize("compiled", [False, True])
def test_bf16_on_a_gpu_is_near_double_on_the_cpu(name, compiled):
    torch.manual_seed(0)
    model = models.decoder(name)
    tokens = torch.randint(256, (2, 65))
    exact, grad = _loss_and_grad(copy.deepcopy(model).double(), tokens)
    model.cuda()
    if compiled:
        for block in model.blocks:
            block.compile()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss, gpu_grad = _loss_and_grad(model, tokens.cuda())
    assert loss == pytest.approx(exact, rel=1e-3)
    assert normalize(gpu_grad.double().cpu(), dim=0) @ normalize(grad, dim=0) > 0.99


def _loss_and_grad(model, tokens):
    loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    return loss.item(), model.blocks[0].attn.qkv.weight.grad.flatten()


def _assert_equal_logits(ours, theirs):
    scale = theirs.abs().max().item()
    assert scale > 1, "logits near zero would agree whatever the shape"
    torch.testing.assert_close(ours / scale, theirs / scale, rtol=0, atol=1e-5)


def _shake(model):
    """Give every parameter a spread: a fresh model's biases are zero and its norms one, which hides mistakes."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))


def _grouped(q, k, v, config):
    """Order rows of q, k and v as `Attention.qkv` has them."""
    groups = config.kv_heads
    parts = [part.unflatten(0, (groups, -1)) for part in (q, k, v)]
    return torch.cat(parts, dim=1).flatten(0, 1)


def _from_gpt2(state, config):
    ours = {
        "embed.weight": state["transformer.wte.weight"],
        "positions.weight": state["transformer.wpe.weight"],
        "head.weight": state["lm_head.weight"],
        "norm.weight": state["transformer.ln_f.weight"],
        "norm.bias": state["transformer.ln_f.bias"],
    }
    names = {
        "ln_1": "attn_norm",
        "ln_2": "mlp_norm",
        "attn.c_proj": "attn.out",
        "mlp.c_fc": "mlp.up",
        "mlp.c_proj": "mlp.down",
    }
    for layer in range(config.num_layers):
        theirs, block = f"transformer.h.{layer}", f"blocks.{layer}"
        for old, new in names.items():
            weight = state[f"{theirs}.{old}.weight"]
            ours[f"{block}.{new}.weight"] = weight.T if weight.ndim == 2 else weight
            ours[f"{block}.{new}.bias"] = state[f"{theirs}.{old}.bias"]
        for kind in ("weight", "bias"):
            value = state[f"{theirs}.attn.c_attn.{kind}"]
            ours[f"{block}.attn.qkv.{kind}"] = _grouped(
                *value.T.chunk(3) if value.ndim == 2 else value.chunk(3), config
            )
    return ours


def _from_llama(state, config):
    ours = {
        "embed.weight": state["model.embed_tokens.weight"],
        "head.weight": state["lm_head.weight"],
        "norm.weight": state["model.norm.weight"],
    }
    names = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "mlp_norm",
        "self_attn.o_proj": "attn.out",
        "mlp.gate_proj": "mlp.gate",
        "mlp.up_proj": "mlp.up",
        "mlp.down_proj": "mlp.down",
    }
    for layer in range(config.num_layers):
        theirs, block = f"model.layers.{layer}", f"blocks.{layer}"
        for old, new in names.items():
            ours[f"{block}.{new}.weight"] = state[f"{theirs}.{old}.weight"]
        qkv = (state[f"{theirs}.self_attn.{part}_proj.weight"] for part in "qkv")
        ours[f"{block}.attn.qkv.weight"] = _grouped(*qkv, config)
    return ours
