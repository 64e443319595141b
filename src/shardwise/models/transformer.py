"""Transformers: decoders with the architecture of GPT-2 or Llama, and T5 and ByT5 (extra [hf])."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812  torch's own custom
from torch import Tensor, nn

from shardwise.errors import JobError, MissingExtraError, nearest
from shardwise.models.documents import attend, restrict
from shardwise.plans.catalogue import (
    BYT5_COMMON,
    BYT5_SIZES,
    T5_COMMON,
    T5_SIZES,
    DecoderConfig,
    decoder_config,
    override,
)
from shardwise.torch_private.dynamo import graph_break

if TYPE_CHECKING:
    from transformers import T5ForConditionalGeneration

    from shardwise.models.documents import Documents


INIT_STD = 0.02
"""Standard deviation of initial weights in GPT-2; residual projections use it divided by sqrt(2 x layers)."""

Rotary = tuple[Tensor, Tensor]
"""Cosines and sines of rotary position embeddings, each [tokens, 1, head_width / 2] or [batch, tokens, 1, ...]."""


def decoder(name_or_config: str | DecoderConfig, **overrides: object) -> Decoder:
    """Return a newly initialized decoder of a published size or a config; `overrides` replace fields of the config."""
    if isinstance(name_or_config, DecoderConfig):
        return Decoder(override(name_or_config, **overrides))
    return Decoder(decoder_config(name_or_config, **overrides))


class Decoder(nn.Module):
    """Maps int64 tokens [batch, tokens] to logits [batch, tokens, vocab_size]. It has no dropout."""

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
        """Initialize all weights as GPT-2 does, and tie the output projection to the embedding if configured."""
        if self.config.tie_head:
            # Tied here rather than in __init__, because `to_empty` unties the weights of a meta model.
            self.head.weight = self.embed.weight
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
        """Return the tensor-parallel rules: attention is split by groups of heads, the MLP by hidden units."""
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

    def forward(self, tokens: Tensor, position_ids: Tensor | None = None, document_ids: Tensor | None = None) -> Tensor:
        """Return the logits [batch, tokens, vocab_size] of tokens [batch, tokens].

        `position_ids`, int64 [1 or batch, tokens], are the positions of the tokens in the full sequence or in their
        document; None means 0 to tokens - 1. `document_ids`, int64 [batch, tokens], restrict attention in packed rows
        to tokens of the same document, whose tokens are adjacent; under context parallelism they are those of all
        slices.
        """
        num_tokens = tokens.shape[1]
        if num_tokens > self.config.context:
            raise JobError(
                f"sequences have {num_tokens} tokens, but the decoder's context length is {self.config.context}",
                code="model.context-exceeded",
                fix=f"set context={num_tokens}, or use shorter sequences",
            )
        x = self.embed(tokens)
        positions = torch.arange(num_tokens, device=x.device)
        if position_ids is not None:
            positions = position_ids[0] if position_ids.shape[0] == 1 else position_ids
        documents = None if document_ids is None else restrict(document_ids, x)
        rotary = None
        if self.positions is None:
            rotary = rotary_tables(self.config, positions, x)
            if torch.compiler.is_compiling():
                # In the same graph as the layers, inductor would fuse the tables into the kernels of every layer, which
                # recompute the cosines: 30 of the 273 ms of a compiled step of a 1.2-billion-parameter model (H200).
                graph_break()
        else:
            x = x + self.positions(positions)
        for block in self.blocks:
            x = block(x, rotary, documents)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Block(nn.Module):
    """Pre-norm transformer block: attention and an MLP, each with a residual connection."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attn_norm = _norm(config)
        self.attn = Attention(config)
        self.mlp_norm = _norm(config)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor, rotary: Rotary | None = None, documents: Documents | None = None) -> Tensor:
        """Return the output of the block for x [batch, tokens, width], in the same shape."""
        x = x + self.attn(self.attn_norm(x), rotary, documents)
        residual: Tensor = self.mlp(self.mlp_norm(x))
        return x + residual


class Attention(nn.Module):
    """Causal grouped-query attention.

    The rows of `qkv` are ordered by group: query heads, key head, value head. Therefore tensor parallelism can shard
    the rows evenly and every rank has whole groups. The number of groups is inferred from the tensor.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_width = config.head_width
        self.queries_per_group = config.num_heads // config.kv_heads
        rows = (config.num_heads + 2 * config.kv_heads) * config.head_width
        bias = config.family == "gpt2"
        self.qkv = nn.Linear(config.width, rows, bias=bias)
        self.out = nn.Linear(config.width, config.width, bias=bias)

    def forward(self, x: Tensor, rotary: Rotary | None = None, documents: Documents | None = None) -> Tensor:
        """Return the attention output [batch, tokens, width] of x [batch, tokens, width].

        `documents` restrict attention to pairs of tokens in the same document; None means that all tokens are one.
        """
        rows = self.qkv(x)
        groups = rows.view(*rows.shape[:-1], -1, self.queries_per_group + 2, self.head_width)
        q = groups[..., :-2, :].flatten(2, 3)
        k, v = groups[..., -2, :], groups[..., -1, :]
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        attended = attend(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), documents, enable_gqa=self.queries_per_group > 1
        )
        out: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return out


class Mlp(nn.Module):
    """Feed-forward network: down(gelu(up(x))) for GPT-2, down(silu(gate(x)) * up(x)) for Llama."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        bias = config.family == "gpt2"
        self.gate = nn.Linear(config.width, config.hidden_width, bias=False) if config.family == "llama" else None
        self.up = nn.Linear(config.width, config.hidden_width, bias=bias)
        self.down = nn.Linear(config.hidden_width, config.width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output [batch, tokens, width] of x [batch, tokens, width]."""
        up = self.up(x)
        hidden = F.gelu(up, approximate="tanh") if self.gate is None else F.silu(self.gate(x)) * up
        out: Tensor = self.down(hidden)
        return out


def rotary_tables(config: DecoderConfig, positions: Tensor, like: Tensor) -> Rotary:
    """Return the rotary tables of positions [..., tokens], on the device of `like` and in fp32 or wider.

    They are recomputed in each forward pass, which takes microseconds. A buffer would be uninitialized after the model
    is materialized from the meta device, and a cast to bf16 would lose precision at large positions.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    half = config.head_width // 2
    powers = torch.arange(half, device=like.device, dtype=dtype) / half
    angles = positions.to(like.device, dtype)[..., None, None] * config.rope_base**-powers
    return angles.cos(), angles.sin()


def rotate(heads: Tensor, rotary: Rotary) -> Tensor:
    """Rotate each pair (i, i + head_width / 2) of [batch, tokens, heads, head_width] by the angle of its position."""
    cos, sin = rotary
    first, second = heads.chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(heads.dtype)


def _norm(config: DecoderConfig) -> nn.Module:
    if config.family == "gpt2":
        return nn.LayerNorm(config.width, eps=config.norm_eps)
    return nn.RMSNorm(config.width, eps=config.norm_eps)


def t5(name: str = "t5-small", **overrides: Any) -> T5ForConditionalGeneration:
    """Return a newly initialized T5 of a published size; `overrides` replace fields of its T5Config.

    With `input_ids` and `labels` (-100 is ignored) as inputs, the `loss` of its output is the mean over the labels.
    """
    return _build("t5", name, T5_SIZES, T5_COMMON, overrides)


def byt5(name: str = "byt5-small", **overrides: Any) -> T5ForConditionalGeneration:
    """Return a newly initialized ByT5 of a published size; `overrides` replace fields of its T5Config.

    A token is a byte + 3; 0 is padding, 1 the end of sequence and 2 unknown. `labels` and `loss` are as in `t5`.
    """
    return _build("byt5", name, BYT5_SIZES, BYT5_COMMON, overrides)


def _build(
    kind: str, name: str, sizes: dict[str, dict[str, Any]], common: dict[str, Any], overrides: dict[str, Any]
) -> T5ForConditionalGeneration:
    if name not in sizes:
        raise JobError(f"{kind} {name!r} is unknown", code="model.unknown-name", fix=nearest(str(name), sizes))
    settings = common | sizes[name]
    for key in overrides:
        if key not in settings:
            raise JobError(
                f"{kind} setting {key!r} is unknown", code="model.unknown-setting", fix=nearest(key, settings)
            )
    try:
        from transformers import T5Config, T5ForConditionalGeneration
    except ImportError as error:
        raise MissingExtraError.of(f"models.{kind}", "hf") from error
    return T5ForConditionalGeneration(T5Config(**settings | overrides))
