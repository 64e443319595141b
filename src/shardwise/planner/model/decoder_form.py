"""The form of a decoder that `plan` describes: those that shardwise builds, and their relatives in transformers.

The idea: a family (GPT-2 or Llama) fixes the norms and the MLP; the fields here are what else differs between published
decoders. `DecoderConfig` does not have them, because shardwise's own decoder does not build them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwise.errors import JobError
from shardwise.plans.catalogue import DecoderConfig

QKV, OUT, UP, DOWN, GATE = "attn.qkv", "attn.out", "mlp.up", "mlp.down", "mlp.gate"
"""Projections of a block."""
GPT2_BIASES = (QKV, OUT, UP, DOWN)


@dataclass(frozen=True, kw_only=True)
class DecoderForm(DecoderConfig):
    """A decoder with the options of transformers; the defaults are those of Llama."""

    head_dim: int | None = None
    """Width of one attention head. None means width / num_heads."""
    rotary_share: float = 1.0
    """Share of each head that is rotated by its position; 0 means learned positions."""
    qk_norm: Literal["head", "all"] | None = None
    """RMS norms of queries and keys before rotation: of each head (Qwen3), or of all heads together (OLMo 2)."""
    norm_after: bool = False
    """Whether a block normalizes the outputs of attention and MLP instead of their inputs (OLMo 2)."""
    parallel: bool = False
    """Whether attention and MLP of a block read the same input, so that both are added to it at once (GPT-NeoX)."""
    biases: tuple[str, ...] = ()
    """Projections with a bias."""

    def __post_init__(self) -> None:
        if self.head_dim is not None and (type(self.head_dim) is not int or self.head_dim < 1):
            raise JobError(
                f"decoder head_dim must be a positive integer, got {self.head_dim!r}",
                code="model.setting-not-positive",
                fix="use an integer of at least 1",
            )
        super().__post_init__()
        if self.rotary_width % 2:
            raise JobError(
                f"rotary positions require an even number of rotated elements, got {self.rotary_width} per head",
                code="model.odd-head-width",
                fix="use an even head_dim and rotated share",
            )

    @property
    def head_width(self) -> int:
        """Width of one attention head."""
        return super().head_width if self.head_dim is None else self.head_dim

    @property
    def divides_width(self) -> bool:
        """Whether the heads must divide the width."""
        return self.head_dim is None

    @property
    def query_width(self) -> int:
        """Width of the queries of all heads."""
        return self.num_heads * self.head_width

    @property
    def rotary_width(self) -> int:
        """Elements of each head that are rotated; 0 if positions are learned."""
        return int(self.head_width * self.rotary_share)


def form_of(config: DecoderConfig) -> DecoderForm:
    """Return the form of a decoder that shardwise builds; a form is returned as it is."""
    if isinstance(config, DecoderForm):
        return config
    if config.family == "gpt2":
        return DecoderForm(**vars(config), rotary_share=0.0, biases=GPT2_BIASES)
    return DecoderForm(**vars(config))
