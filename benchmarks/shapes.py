"""The models that benchmarks of whole steps train."""

import dataclasses

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
GPT2 = DecoderConfig(
    family="gpt2",
    width=768,
    num_layers=12,
    num_heads=12,
    num_kv_heads=12,
    mlp_width=3072,
    vocab_size=50_257,
    context=1024,
)
LLAMA_3B = dataclasses.replace(LLAMA_1B, width=3072, num_layers=24, num_heads=24, num_kv_heads=8, mlp_width=8192)
WIDE = dataclasses.replace(
    LLAMA_1B, width=4096, num_layers=8, num_heads=32, num_kv_heads=8, mlp_width=14_336, context=4096
)
QWEN = dataclasses.replace(
    LLAMA_1B,
    width=1024,
    num_layers=16,
    num_heads=16,
    num_kv_heads=8,
    mlp_width=2816,
    vocab_size=151_936,
    context=1024,
    tie_head=True,
)
