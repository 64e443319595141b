"""The decoder in MLX: GPT-2's or Llama's shape, weight for weight the one in torch."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx import nn

from shardwise.errors import JobError
from shardwise.models.decoder import INIT_STD
from shardwise.plans.catalogue import DecoderConfig, decoder_config, override


def decoder(name_or_config: str | DecoderConfig, **overrides: object) -> MlxDecoder:
    """Return a fresh decoder of a published size or of a config, with single fields replaced."""
    if isinstance(name_or_config, DecoderConfig):
        return MlxDecoder(override(name_or_config, **overrides))
    return MlxDecoder(decoder_config(name_or_config, **overrides))


class MlxDecoder(nn.Module):  # type: ignore[misc]  # mlx is not followed
    """Tokens, integers [batch, tokens], to logits [batch, tokens, vocab_size]; no dropout.

    A tied head is the embedding itself and has no weight of its own, as among torch's parameters.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.width)
        if config.family == "gpt2":
            self.positions = nn.Embedding(config.context, config.width)
        self.blocks = [MlxBlock(config) for _ in range(config.num_layers)]
        self.norm = _norm(config)
        if not config.tie_head:
            self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self._init_weights()

    def _init_weights(self) -> None:
        """Draw every matrix by the GPT-2 recipe, from mx.random; biases begin as zero."""
        residual_std = INIT_STD / (2 * self.config.num_layers) ** 0.5
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                std = residual_std if name.endswith(("attn.out", "mlp.down")) else INIT_STD
                module.weight = mx.random.normal(module.weight.shape, scale=std)
                if "bias" in module:
                    module.bias = mx.zeros_like(module.bias)

    def __call__(self, tokens: Any) -> Any:
        """Return the logits [batch, tokens, vocab_size] of tokens [batch, tokens]."""
        num_tokens = tokens.shape[1]
        if num_tokens > self.config.context:
            raise JobError(
                f"sequences have {num_tokens} tokens, the decoder's context is {self.config.context}",
                code="model.context-exceeded",
                fix=f"use context={num_tokens} or shorter sequences",
            )
        x = self.embed(tokens)
        if self.config.family == "gpt2":
            x = x + self.positions(mx.arange(num_tokens))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.embed.as_linear(x) if self.config.tie_head else self.head(x)


class MlxBlock(nn.Module):  # type: ignore[misc]  # mlx is not followed
    """Attention, then a feed-forward part; each reads a normed x and adds to it."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attn_norm = _norm(config)
        self.attn = MlxAttention(config)
        self.mlp_norm = _norm(config)
        self.mlp = MlxMlp(config)

    def __call__(self, x: Any) -> Any:
        """Return x [batch, tokens, width] after both parts."""
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class MlxAttention(nn.Module):  # type: ignore[misc]  # mlx is not followed
    """Causal attention; the rows of `qkv` are ordered by group: its query heads, its key head, its value head."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_width = config.head_width
        self.queries_per_group = config.num_heads // config.kv_heads
        self.rope_base = config.rope_base if config.family == "llama" else None
        rows = (config.num_heads + 2 * config.kv_heads) * config.head_width
        bias = config.family == "gpt2"
        self.qkv = nn.Linear(config.width, rows, bias=bias)
        self.out = nn.Linear(config.width, config.width, bias=bias)

    def __call__(self, x: Any) -> Any:
        """Return x [batch, tokens, width] mixed over the tokens before each."""
        batch, num_tokens, _ = x.shape
        groups = self.qkv(x).reshape(batch, num_tokens, -1, self.queries_per_group + 2, self.head_width)
        q = groups[..., :-2, :].reshape(batch, num_tokens, -1, self.head_width)
        q, k, v = (heads.swapaxes(1, 2) for heads in (q, groups[..., -2, :], groups[..., -1, :]))
        if self.rope_base is not None:
            q, k = self._rotate(q), self._rotate(k)
        mixed = mx.fast.scaled_dot_product_attention(q, k, v, scale=self.head_width**-0.5, mask="causal")
        return self.out(mixed.swapaxes(1, 2).reshape(batch, num_tokens, -1))

    def _rotate(self, heads: Any) -> Any:
        """Turn each pair (i, i + half) of [batch, heads, tokens, head_width] by its position's angle."""
        return mx.fast.rope(heads, self.head_width, traditional=False, base=self.rope_base, scale=1.0, offset=0)


class MlxMlp(nn.Module):  # type: ignore[misc]  # mlx is not followed
    """down(gelu(up(x))) in GPT-2's shape, down(silu(gate(x)) * up(x)) in Llama's."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        bias = config.family == "gpt2"
        if config.family == "llama":
            self.gate = nn.Linear(config.width, config.hidden_width, bias=False)
        self.up = nn.Linear(config.width, config.hidden_width, bias=bias)
        self.down = nn.Linear(config.hidden_width, config.width, bias=bias)

    def __call__(self, x: Any) -> Any:
        """Return x [batch, tokens, width] transformed token by token."""
        up = self.up(x)
        return self.down(nn.silu(self.gate(x)) * up if "gate" in self else nn.gelu_approx(up))


def _norm(config: DecoderConfig) -> Any:
    norm = nn.LayerNorm if config.family == "gpt2" else nn.RMSNorm
    return norm(config.width, eps=config.norm_eps)
