"""Seeding: every generator that a model's construction, its layers or its data may draw from."""

from __future__ import annotations

import random
import sys

import torch


def seed_generators(seed: int) -> None:
    """Seed the global generators of torch, on every device, of Python and, where it is imported, of NumPy."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)  # it takes 32 bits
