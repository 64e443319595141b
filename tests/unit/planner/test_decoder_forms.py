"""Blocks of Qwen3, OLMo 2 and GPT-NeoX in closed form, against modules that run for real on small shapes."""

from dataclasses import replace

import pytest
import torch
from planner.test_published import LENGTH, LLAMA, ROWS, FusedNorm, held_by, measure
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from shardwise.models.transformer import Mlp, rotary_tables, rotate
from shardwise.parallel.recompute import recompute_block
from shardwise.planner.model import operators
from shardwise.planner.model.decoder_form import GPT2_BIASES, DecoderForm, form_of
from shardwise.planner.model.decoder_parts import decoder_shape

QWEN3 = replace(form_of(LLAMA), num_kv_heads=2, head_dim=32, qk_norm="head")
OLMO2 = replace(form_of(LLAMA), qk_norm="all", norm_after=True)
NEOX = replace(form_of(LLAMA), family="gpt2", mlp_width=256, rotary_share=0.25, parallel=True, biases=GPT2_BIASES)
FORMS = pytest.mark.parametrize(
    "form",
    [QWEN3, OLMO2, replace(OLMO2, num_kv_heads=2), NEOX, replace(NEOX, parallel=False)],
    ids=["qwen3", "olmo2", "olmo2 with groups", "gpt_neox", "gpt_neox in sequence"],
)
POLICIES = pytest.mark.parametrize("policy", ["none", "selective", "full"])


class RmsNorm(nn.Module):
    """An RMS norm that saves what CUDA's saves, in the dtype that autocast of this torch runs it in."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return FusedNorm.apply(x.float() if operators.rms_norm_is_wide() else x, self.weight)


class Attention(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.form, bias = form, bool(form.biases)
        self.widths = (form.query_width, form.kv_heads * form.head_width)
        self.qkv = nn.Linear(form.width, self.widths[0] + 2 * self.widths[1], bias=bias)
        self.out = nn.Linear(form.query_width, form.width, bias=bias)
        self.norms = nn.ModuleList()
        if form.qk_norm is not None:
            rows = self.widths if form.qk_norm == "all" else [form.head_width] * 2
            self.norms.extend(RmsNorm(row) for row in rows)

    def forward(self, x, rotary):
        rows, (wide, narrow) = self.qkv(x), self.widths
        q, k, v = rows[..., :wide], rows[..., wide : wide + narrow], rows[..., wide + narrow :]
        if self.form.qk_norm == "all":
            q, k = self.norms[0](q), self.norms[1](k)
        q, k, v = (each.unflatten(-1, (-1, self.form.head_width)) for each in (q, k, v))
        if self.form.qk_norm == "head":
            q, k = self.norms[0](q), self.norms[1](k)
        q, k = self.rotated(q, rotary), self.rotated(k, rotary)
        attended = functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=wide > narrow
        )
        return self.out(attended.transpose(1, 2).flatten(2))

    def rotated(self, heads, rotary):
        width = self.form.rotary_width
        if width == self.form.head_width:
            return rotate(heads, rotary)
        return torch.cat((rotate(heads[..., :width], rotary), heads[..., width:]), dim=-1)


class Block(nn.Module):
    def __init__(self, form):
        super().__init__()
        norm = nn.LayerNorm if form.family == "gpt2" else RmsNorm
        self.form, self.attn, self.mlp = form, Attention(form), Mlp(form)
        self.attn_norm, self.mlp_norm = norm(form.width), norm(form.width)

    def forward(self, x, rotary):
        if self.form.parallel:
            attended = self.attn(self.attn_norm(x), rotary)
            change = self.mlp(self.mlp_norm(x))
            return change + attended + x
        if self.form.norm_after:
            x = x + self.attn_norm(self.attn(x, rotary))
            change = self.mlp_norm(self.mlp(x))
            return x + change
        x = x + self.attn(self.attn_norm(x), rotary)
        change = self.mlp(self.mlp_norm(x))
        return x + change


def block_of(form, policy="none"):
    """A block, and the rotary tables of the elements that it rotates."""
    block = Block(form)
    if policy != "none":
        recompute_block(block, selective=policy == "selective")
    rotated = DecoderForm(**vars(form) | {"head_dim": form.rotary_width, "rotary_share": 1.0})
    return block, rotary_tables(rotated, torch.arange(LENGTH), torch.empty(0))


def sample(form):
    return torch.randn(ROWS, LENGTH, form.width, requires_grad=True)


@FORMS
@POLICIES
def test_a_block_saves_what_the_module_saves(form, policy):
    block, tables = block_of(form, policy)
    measured = measure(lambda x: block(x, tables), sample(form), [*block.parameters(), *tables])
    part = decoder_shape("", form, LENGTH, compute="fp32", gathered=False).parts[1]
    assert held_by(part.footprints[policy]) == pytest.approx(measured, rel=0.001)
    assert part.numel == sum(parameter.numel() for parameter in block.parameters())


@FORMS
def test_a_block_saves_under_autocast_what_the_module_saves(form):
    block, tables = block_of(form)
    part = decoder_shape("", form, LENGTH, compute="bf16", gathered=False).parts[1]
    casts = sum(2 * weight.numel for weight in part.weights if weight.cast)
    forward = torch.autocast("cpu", torch.bfloat16)(lambda x: block(x, tables))
    left, _, _ = measure(forward, sample(form), [*block.parameters(), *tables])
    assert part.footprints["none"].saved.at(ROWS) + casts == pytest.approx(left, rel=0.005)


@FORMS
def test_a_block_computes_the_products_of_the_module(form):
    block, tables = block_of(form)
    with FlopCounterMode(display=False) as counter:
        block(sample(form), tables)
    work = decoder_shape("", form, LENGTH, compute="fp32", gathered=False).parts[1].work
    counted = sum(n for operator, n in counter.get_flop_counts()["Global"].items() if "attention" not in str(operator))
    assert ROWS * sum(matmul.flops for matmul in work.matmuls) == counted
    assert work.attentions[0].head_width == form.head_width
