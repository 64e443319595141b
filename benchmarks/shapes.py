"""The model that benchmarks of whole steps train: a Llama shape of 1.2 billion parameters."""

from shardwise.models import DecoderConfig

LLAMA_1B = DecoderConfig(
    family="llama",
    width=2048,
    num_layers=24,
    num_heads=32,
    num_kv_heads=4,
    mlp_width=5632,
    vocab_size=32_000,
    context=2048,
)
