"""The decoder: one small class that takes GPT-2's or Llama's shape."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  torch's own custom
from torch import Tensor, nn

from shardwise.errors import JobError
from shardwise.plans.catalogue import DecoderConfig, decoder_config, override
from shardwise.torch_private.runtime import graph_break

INIT_STD = 0.02
"""Spread of fresh weights in the GPT-2 recipe; residual projections get it over sqrt(2 x layers)."""

Rotary = tuple[Tensor, Tensor]
"""Cosines and sines, each [tokens, 1, head_width / 2]."""


def decoder(name_or_config: str | DecoderConfig, **overrides: object) -> Decoder:
    """Return a fresh decoder of a published size or of a config, with single fields replaced."""
    if isinstance(name_or_config, DecoderConfig):
        return Decoder(override(name_or_config, **overrides))
    return Decoder(decoder_config(name_or_config, **overrides))


class Decoder(nn.Module):
    """Tokens int64 [batch, tokens] to logits [batch, tokens, vocab_size]; no dropout."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.context, config.width) if config.family == "gpt2" else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = _norm(config)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.init_weights()

    def init_weights(self) -> None:
        """Set every weight anew by the GPT-2 recipe and tie the head; there are no buffers."""
        if self.config.tie_head:
            self.head.weight = self.embed.weight  # here, because `to_empty` after a meta-device build unties it
        residual_std = INIT_STD / (2 * self.config.num_layers) ** 0.5
        for name, module in self.named_modules():
            if isinstance(module, nn.LayerNorm | nn.RMSNorm):
                module.reset_parameters()
            elif isinstance(module, nn.Linear | nn.Embedding):
                std = residual_std if name.endswith(("attn.out", "mlp.down")) else INIT_STD
                nn.init.normal_(module.weight, std=std)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)

    def tensor_rules(self) -> dict[str, str]:
        """Return how tensor parallelism cuts this decoder: whole groups of heads, hidden units, and the vocabulary."""
        gate = {"blocks.*.mlp.gate": "column"} if self.config.family == "llama" else {}
        return {
            "embed": "vocab",
            "blocks.*.attn_norm": "sequence",
            "blocks.*.attn.qkv": "column",
            "blocks.*.attn.out": "row",
            "blocks.*.mlp_norm": "sequence",
            **gate,
            "blocks.*.mlp.up": "column",
            "blocks.*.mlp.down": "row",
            "head": "column_gathered",
        }

    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Return the logits [batch, tokens, vocab_size] of tokens [batch, tokens].

        `position_ids`, int64 [1, tokens], says where in longer sequences the tokens stand; None: at their beginning.
        """
        num_tokens = tokens.shape[1]
        if num_tokens > self.config.context:
            raise JobError(
                f"sequences have {num_tokens} tokens, the decoder's context is {self.config.context}",
                code="model.context-exceeded",
                fix=f"use context={num_tokens} or shorter sequences",
            )
        x = self.embed(tokens)
        places = torch.arange(num_tokens, device=x.device) if position_ids is None else position_ids[0]
        rotary = None
        if self.positions is None:
            rotary = rotary_tables(self.config, places, x)
            if torch.compiler.is_compiling():
                # In one graph with the layers, every layer's kernels would compute the tables anew, cosines and all:
                # 30 of the 273 ms that a compiled step of a 1.2-billion-parameter model takes (H200).
                graph_break()
        else:
            x = x + self.positions(places)
        for block in self.blocks:
            x = block(x, rotary)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Block(nn.Module):
    """Attention, then a feed-forward part; each reads a normed x and adds to it."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attn_norm = _norm(config)
        self.attn = Attention(config)
        self.mlp_norm = _norm(config)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor, rotary: Rotary | None = None) -> Tensor:
        """Return x [batch, tokens, width] after both parts."""
        x = x + self.attn(self.attn_norm(x), rotary)
        change: Tensor = self.mlp(self.mlp_norm(x))
        return x + change


class Attention(nn.Module):
    """Causal attention in which each key and value head serves a group of query heads.

    The rows of `qkv` are ordered by group: its query heads, its key head, its value head. So a plain cut of
    the rows by ranks gives each rank whole groups; their number is read from the tensor.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_width = config.head_width
        self.queries_per_group = config.num_heads // config.kv_heads
        rows = (config.num_heads + 2 * config.kv_heads) * config.head_width
        bias = config.family == "gpt2"
        self.qkv = nn.Linear(config.width, rows, bias=bias)
        self.out = nn.Linear(config.width, config.width, bias=bias)

    def forward(self, x: Tensor, rotary: Rotary | None = None) -> Tensor:
        """Return x [batch, tokens, width] mixed over the tokens before each."""
        rows = self.qkv(x)
        groups = rows.view(*rows.shape[:-1], -1, self.queries_per_group + 2, self.head_width)
        q = groups[..., :-2, :].flatten(2, 3)
        k, v = groups[..., -2, :], groups[..., -1, :]
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        mixed = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=True,
            enable_gqa=self.queries_per_group > 1,
        )
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Mlp(nn.Module):
    """down(gelu(up(x))) in GPT-2's shape, down(silu(gate(x)) * up(x)) in Llama's."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        bias = config.family == "gpt2"
        self.gate = nn.Linear(config.width, config.hidden_width, bias=False) if config.family == "llama" else None
        self.up = nn.Linear(config.width, config.hidden_width, bias=bias)
        self.down = nn.Linear(config.hidden_width, config.width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return x [batch, tokens, width] transformed token by token."""
        up = self.up(x)
        hidden = F.gelu(up, approximate="tanh") if self.gate is None else F.silu(self.gate(x)) * up
        out: Tensor = self.down(hidden)
        return out


def rotary_tables(config: DecoderConfig, places: Tensor, like: Tensor) -> Rotary:
    """Return the cosines and sines of positions [tokens], on the device of `like` and at least in fp32.

    Made anew in each forward pass (some microseconds) instead of kept in a buffer, which a meta-device build
    would leave as garbage and a cast to bf16 would blur at far positions.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    half = config.head_width // 2
    powers = torch.arange(half, device=like.device, dtype=dtype) / half
    angles = places.to(like.device, dtype)[:, None, None] * config.rope_base**-powers
    return angles.cos(), angles.sin()


def rotate(heads: Tensor, rotary: Rotary) -> Tensor:
    """Turn each pair (i, i + half) of [batch, tokens, heads, head_width] by its position's angle."""
    cos, sin = rotary
    first, second = heads.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(heads.dtype)


def _norm(config: DecoderConfig) -> nn.Module:
    if config.family == "gpt2":
        return nn.LayerNorm(config.width, eps=config.norm_eps)
    return nn.RMSNorm(config.width, eps=config.norm_eps)
