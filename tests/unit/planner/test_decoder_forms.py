"""Blocks in closed form against the layers of transformers that they describe, run for real on small shapes."""

import pytest
import torch
from planner.test_published import LENGTH, ROWS, FusedNorm, measure, saved_by
from torch.utils.flop_counter import FlopCounterMode

from shardwise.parallel.recompute import recompute_block
from shardwise.planner.model import operators
from shardwise.planner.model_config import read_decoder

WIDTH = 64
SMALL = {
    "vocab_size": 512,
    "hidden_size": WIDTH,
    "intermediate_size": 176,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": LENGTH,
    "eos_token_id": 2,
}
LAYERS = {
    "qwen3": ("Qwen3Config", {"num_key_value_heads": 4, "head_dim": 32}),
    "qwen3 with groups": ("Qwen3Config", {"num_key_value_heads": 2, "head_dim": 8, "attention_bias": True}),
    "olmo2": ("Olmo2Config", {}),
    "gpt_neox": ("GPTNeoXConfig", {}),
    "gpt_neox in sequence": ("GPTNeoXConfig", {"use_parallel_residual": False, "rotary_pct": 0.5}),
}
FAMILIES = pytest.mark.parametrize(("kind", "fields"), LAYERS.values(), ids=LAYERS)
POLICIES = pytest.mark.parametrize("policy", ["none", "selective", "full"])


def described(folder, kind, fields, *, compute="fp32"):
    """A layer of transformers with CUDA's fused norm, its rotary tables, and its description."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, kind)(**SMALL | fields)
    config.save_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").base_model
    layer = model.layers[0]
    for norm in layer.modules():
        if type(norm).__name__.endswith("RMSNorm"):
            norm.forward = lambda x, norm=norm: FusedNorm.apply(
                x.float() if operators.rms_norm_is_wide() else x, norm.weight
            )
    tables = model.rotary_emb(torch.empty(1), torch.arange(LENGTH)[None])
    shape = read_decoder(str(folder)).shape(compute=compute, gathered=False, length=LENGTH, lora=0)
    return layer, tables, shape.parts[1]


def forward_of(layer, tables):
    return lambda x: layer(x, position_embeddings=tables, attention_mask=None)


def sample():
    return torch.randn(ROWS, LENGTH, WIDTH, requires_grad=True)


@FAMILIES
@POLICIES
def test_a_block_saves_what_the_layer_saves(tmp_path, kind, fields, policy):
    layer, tables, part = described(tmp_path, kind, fields)
    if policy != "none":
        recompute_block(layer, selective=policy == "selective")
    measured = measure(forward_of(layer, tables), sample(), [*layer.parameters(), *tables])
    predicted = saved_by(part.footprints[policy])
    # Where little is saved, forward peaks in the rotation, whose temporaries transformers allocates in another order.
    compared = slice(None) if policy == "none" else slice(None, None, 2)
    assert predicted[compared] == pytest.approx(measured[compared], rel=0.001)
    assert part.numel == sum(parameter.numel() for parameter in layer.parameters())


@FAMILIES
def test_a_block_saves_under_autocast_what_the_layer_saves(tmp_path, kind, fields):
    layer, tables, part = described(tmp_path, kind, fields, compute="bf16")
    casts = sum(2 * weight.numel for weight in part.weights if weight.cast)
    forward = torch.autocast("cpu", torch.bfloat16)(forward_of(layer, tables))
    x = sample().clone()  # autocast would share one copy of a leaf
    left, _, _ = measure(forward, x, [*layer.parameters(), *tables])
    assert part.footprints["none"].saved.at(ROWS) + casts == pytest.approx(left, rel=0.005)


@FAMILIES
def test_a_block_computes_the_products_of_the_layer(tmp_path, kind, fields):
    layer, tables, part = described(tmp_path, kind, fields)
    with FlopCounterMode(display=False) as counter:
        forward_of(layer, tables)(sample())
    counts = counter.get_flop_counts()["Global"]
    counted = sum(flops for operator, flops in counts.items() if "attention" not in str(operator))
    assert ROWS * sum(matmul.flops for matmul in part.work.matmuls) == counted
    assert part.work.attentions[0].head_width == fields.get("head_dim", WIDTH // SMALL["num_attention_heads"])


def test_a_smaller_rotated_part_moves_fewer_bytes(tmp_path):
    quarter, half = (
        described(tmp_path, "GPTNeoXConfig", {"rotary_pct": share})[2].work.moved.at(ROWS) for share in (0.25, 0.5)
    )
    assert quarter < half
