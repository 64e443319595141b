"""Global batches of published models when the user names none: what they were trained with, in samples per step."""

from __future__ import annotations

import math

TOKENS = {
    "gpt2": 2**19,  # Brown et al. 2020, table 2.1: half a million tokens for models of this size
    "llama3-405b": 2**24,  # Llama team 2024: 4M tokens at first, 16M for most of the training
    "llama": 2**22,  # Touvron et al. 2023: 4M tokens
    "byt5": 2**20,  # Xue et al. 2022: 2^20 tokens
    "t5": 2**16,  # Raffel et al. 2020: 128 sequences of 512 tokens
}
"""Beginning of a model's name -> tokens per step; the first that matches."""
SAMPLES_PER_DEVICE = 32
"""Where samples are no sequences: Goyal et al. 2017 trained ResNet-50 with 32 images a GPU."""
FINE_TUNING = 128
"""Samples per step with LoRA: Hu et al. 2021 used 128 for GPT-3."""


def usual_batch(name: str, tokens_per_sample: int | None, num_devices: int, *, lora: bool) -> int:
    """Return the global batch of a published model, filled up so that all devices can share it evenly."""
    if tokens_per_sample is None:
        return SAMPLES_PER_DEVICE * num_devices
    tokens = next((tokens for start, tokens in TOKENS.items() if name.startswith(start)), TOKENS["llama"])
    samples = FINE_TUNING if lora else max(1, tokens // tokens_per_sample)
    # More devices than samples leave some to tensor and pipeline parallelism, by powers of two.
    shared = num_devices if num_devices <= samples else num_devices // (num_devices & -num_devices)
    return math.ceil(samples / shared) * shared
