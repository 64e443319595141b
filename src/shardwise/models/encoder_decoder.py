"""T5 and ByT5 of the published sizes, built by transformers (extra [hf]) with fresh weights, no download."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwise.errors import JobError, MissingExtraError, nearest

if TYPE_CHECKING:
    from transformers import T5ForConditionalGeneration

T5_SIZES: dict[str, dict[str, Any]] = {
    "t5-tiny": {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 256},
    "t5-small": {"d_model": 512, "d_ff": 2048, "num_layers": 6, "num_heads": 8},
    "t5-base": {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12},
    "t5-large": {"d_model": 1024, "d_ff": 4096, "num_layers": 24, "num_heads": 16},
}
"""Raffel et al. 2020; as many decoder layers as encoder layers."""

BYT5_SIZES: dict[str, dict[str, Any]] = {
    "byt5-tiny": {
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 128,
        "num_layers": 3,
        "num_decoder_layers": 1,
        "num_heads": 4,
    },
    "byt5-small": {"d_model": 1472, "d_ff": 3584, "num_layers": 12, "num_decoder_layers": 4, "num_heads": 6},
    "byt5-base": {"d_model": 1536, "d_ff": 3968, "num_layers": 18, "num_decoder_layers": 6, "num_heads": 12},
    "byt5-large": {
        "d_model": 1536,
        "d_ff": 3840,
        "num_layers": 36,
        "num_decoder_layers": 12,
        "num_heads": 16,
    },
}
"""Xue et al. 2022: three encoder layers to each decoder layer, because byte sequences are long."""

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


def t5(name: str = "t5-small", **overrides: Any) -> T5ForConditionalGeneration:
    """Return a fresh T5 of a published size, with single fields of its T5Config replaced.

    Given `input_ids` and `labels` (-100 = ignored), its output carries the mean `loss` over the labels.
    """
    return _build("t5", name, T5_SIZES, T5_COMMON, overrides)


def byt5(name: str = "byt5-small", **overrides: Any) -> T5ForConditionalGeneration:
    """Return a fresh ByT5 of a published size, with single fields of its T5Config replaced.

    Its tokens are bytes + 3 (0 pads, 1 ends a text, 2 is unknown); `labels` and `loss` are those of `t5`.
    """
    return _build("byt5", name, BYT5_SIZES, BYT5_COMMON, overrides)


def _build(
    kind: str, name: str, sizes: dict[str, dict[str, Any]], common: dict[str, Any], overrides: dict[str, Any]
) -> T5ForConditionalGeneration:
    if name not in sizes:
        raise JobError(f"there is no {kind} {name!r}", fix=nearest(str(name), sizes))
    settings = common | sizes[name]
    for key in overrides:
        if key not in settings:
            raise JobError(f"{kind} has no {key!r}", fix=nearest(key, settings))
    try:
        from transformers import T5Config, T5ForConditionalGeneration
    except ImportError as error:
        raise MissingExtraError.of(f"models.{kind}", "hf") from error
    return T5ForConditionalGeneration(T5Config(**settings | overrides))
