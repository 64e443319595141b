"""Models: residual networks, decoder-only transformers of published sizes, and T5 from transformers."""

from __future__ import annotations

import importlib
from typing import Any

from shardwise.models.resnet import ResNet, resnet18, resnet34, resnet50
from shardwise.models.transformer import Decoder, byt5, decoder, t5
from shardwise.plans.catalogue import DecoderConfig

__all__ = [
    "Decoder",
    "DecoderConfig",
    "ResNet",
    "byt5",
    "decoder",
    "resnet18",
    "resnet34",
    "resnet50",
    "t5",
]

_ENGINE_MODELS = {"mlx": "shardwise.engines.mlx.models"}
"""Modules with models of other frameworks. They are imported on first use, because the frameworks are optional and do
not survive a fork."""


def __getattr__(name: str) -> Any:
    if name in _ENGINE_MODELS:
        return importlib.import_module(_ENGINE_MODELS[name])
    raise AttributeError(f"module 'shardwise.models' has no attribute {name!r}")
