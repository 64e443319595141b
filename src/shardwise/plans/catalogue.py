"""Configurations of published models by name: decoders, encoder-decoders and residual networks, without torch."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from shardwise.errors import JobError, nearest

FAMILIES = ("gpt2", "llama")


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Architecture of a decoder-only transformer."""

    family: Literal["gpt2", "llama"]
    """gpt2: learned positions, LayerNorm, GELU, biases. llama: rotary positions, RMSNorm, SwiGLU, no biases."""
    vocab_size: int
    context: int
    """Maximum sequence length in tokens."""
    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int | None = None
    """Number of key and value heads, each shared by a group of query heads. None means num_heads."""
    mlp_width: int | None = None
    """Hidden width of the MLP. None means 4 x width."""
    tie_head: bool = False
    """Whether the output projection shares the weight of the token embedding."""
    norm_eps: float = 1e-5
    rope_base: float = 10_000.0
    """Base of the rotary position embeddings (llama only)."""

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise JobError(
                f"decoder family {self.family!r} is unknown",
                code="model.unknown-family",
                fix=nearest(str(self.family), FAMILIES),
            )
        for name in ("vocab_size", "context", "width", "num_layers", "num_heads", "kv_heads", "hidden_width"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise JobError(
                    f"decoder {name} must be a positive integer, got {value!r}",
                    code="model.setting-not-positive",
                    fix="use an integer of at least 1",
                )
        if self.divides_width and self.width % self.num_heads:
            raise JobError(
                f"decoder width {self.width} is not divisible by num_heads {self.num_heads}",
                code="model.width-not-divisible",
                fix=f"use width={-(-self.width // self.num_heads) * self.num_heads}",
            )
        if self.num_heads % self.kv_heads:
            raise JobError(
                f"decoder num_heads {self.num_heads} is not divisible by num_kv_heads {self.kv_heads}",
                code="model.heads-not-divisible",
                fix="use a num_kv_heads that divides num_heads",
            )
        if self.family == "llama" and self.head_width % 2:
            raise JobError(
                f"rotary positions require an even head dimension, got {self.head_width}",
                code="model.odd-head-width",
                fix="use an even width / num_heads",
            )

    @property
    def head_width(self) -> int:
        """Width of one attention head."""
        return self.width // self.num_heads

    @property
    def divides_width(self) -> bool:
        """Whether the heads must divide the width."""
        return True

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def hidden_width(self) -> int:
        """Hidden width of the MLP."""
        return 4 * self.width if self.mlp_width is None else self.mlp_width


def decoder_config(name: str, **overrides: object) -> DecoderConfig:
    """Return the config of a published size by name; `overrides` replace fields."""
    if name not in SIZES:
        raise JobError(f"decoder {name!r} is unknown", code="model.unknown-name", fix=nearest(str(name), SIZES))
    return override(SIZES[name], **overrides)


def override(config: DecoderConfig, **overrides: object) -> DecoderConfig:
    """Return the config with some fields replaced; raises JobError for unknown fields."""
    known = [field.name for field in fields(DecoderConfig)]
    for key in overrides:
        if key not in known:
            raise JobError(f"decoder setting {key!r} is unknown", code="model.unknown-setting", fix=nearest(key, known))
    return replace(config, **overrides)  # type: ignore[arg-type]  # __post_init__ checks the values


def _gpt2(
    num_layers: int, width: int, num_heads: int, *, vocab_size: int = 50_257, context: int = 1024
) -> DecoderConfig:
    return DecoderConfig(
        family="gpt2",
        vocab_size=vocab_size,
        context=context,
        width=width,
        num_layers=num_layers,
        num_heads=num_heads,
        tie_head=True,
    )


def _llama2(num_layers: int, width: int, num_heads: int, num_kv_heads: int, mlp_width: int) -> DecoderConfig:
    return DecoderConfig(
        family="llama",
        vocab_size=32_000,
        context=4096,
        width=width,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        mlp_width=mlp_width,
    )


def _llama3(num_layers: int, width: int, num_heads: int, mlp_width: int) -> DecoderConfig:
    return DecoderConfig(
        family="llama",
        vocab_size=128_256,
        context=8192,  # context of pre-training; Llama 3.1 extends it to 131,072 afterwards by scaling the positions
        width=width,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=8,
        mlp_width=mlp_width,
        rope_base=500_000.0,
    )


# Sources: Radford et al. 2019 (GPT-2), Touvron et al. 2023 (Llama 2), Llama team 2024 (Llama 3), and the
# configurations published with the weights.
SIZES: dict[str, DecoderConfig] = {
    "gpt2-tiny": _gpt2(2, 64, 4, vocab_size=256, context=128),
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "llama-tiny": replace(_llama2(2, 64, 4, 2, 176), vocab_size=256, context=128),
    "llama-7b": _llama2(32, 4096, 32, 32, 11_008),
    "llama-13b": _llama2(40, 5120, 40, 40, 13_824),
    "llama-70b": _llama2(80, 8192, 64, 8, 28_672),
    "llama3-8b": _llama3(32, 4096, 32, 14_336),
    "llama3-70b": _llama3(80, 8192, 64, 28_672),
    "llama3-405b": _llama3(126, 16_384, 128, 53_248),
}

T5_SIZES: dict[str, dict[str, Any]] = {
    "t5-tiny": {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 256},
    "t5-small": {"d_model": 512, "d_ff": 2048, "num_layers": 6, "num_heads": 8},
    "t5-base": {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12},
    "t5-large": {"d_model": 1024, "d_ff": 4096, "num_layers": 24, "num_heads": 16},
    "t5-3b": {"d_model": 1024, "d_kv": 128, "d_ff": 16_384, "num_layers": 24, "num_heads": 32},
    "t5-11b": {"d_model": 1024, "d_kv": 128, "d_ff": 65_536, "num_layers": 24, "num_heads": 128},
}
"""Sizes of Raffel et al. 2020, with as many decoder layers as encoder layers."""

BYT5_SIZES: dict[str, dict[str, Any]] = {
    "byt5-tiny": {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 3, "num_decoder_layers": 1, "num_heads": 4},
    "byt5-small": {"d_model": 1472, "d_ff": 3584, "num_layers": 12, "num_decoder_layers": 4, "num_heads": 6},
    "byt5-base": {"d_model": 1536, "d_ff": 3968, "num_layers": 18, "num_decoder_layers": 6, "num_heads": 12},
    "byt5-large": {"d_model": 1536, "d_ff": 3840, "num_layers": 36, "num_decoder_layers": 12, "num_heads": 16},
    "byt5-xl": {"d_model": 2560, "d_ff": 6720, "num_layers": 36, "num_decoder_layers": 12, "num_heads": 32},
    "byt5-xxl": {"d_model": 4672, "d_ff": 12_352, "num_layers": 36, "num_decoder_layers": 12, "num_heads": 64},
}
"""Sizes of Xue et al. 2022, with three encoder layers per decoder layer because byte sequences are long."""

T5_COMMON: dict[str, Any] = {
    "vocab_size": 32_128,
    "d_kv": 64,
    "num_decoder_layers": None,  # as many as num_layers
    "feed_forward_proj": "relu",
    "tie_word_embeddings": True,
    "dropout_rate": 0.1,
    "decoder_start_token_id": 0,
}
BYT5_COMMON: dict[str, Any] = T5_COMMON | {
    "vocab_size": 384,  # 3 special tokens, 256 bytes (id = byte + 3), 125 sentinels
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
}

RESNETS: dict[str, tuple[bool, tuple[int, int, int, int]]] = {
    "resnet-18": (False, (2, 2, 2, 2)),
    "resnet-34": (False, (3, 4, 6, 3)),
    "resnet-50": (True, (3, 4, 6, 3)),
    "resnet-101": (True, (3, 4, 23, 3)),
    "resnet-152": (True, (3, 8, 36, 3)),
}
"""Name -> whether the blocks are bottlenecks, and the number of blocks of each stage (He et al. 2015)."""
