"""Models to train: residual networks, decoders of published sizes, encoder-decoders through transformers."""

from __future__ import annotations

import importlib
from typing import Any

from shardwise.models.decoder import Decoder, decoder
from shardwise.models.encoder_decoder import byt5, t5
from shardwise.models.resnet import ResNet, resnet18, resnet34, resnet50
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

_OF_ENGINES = {"mlx": "shardwise.engines.mlx.models"}
"""Models in other frameworks, imported at first use: those are extras, and do not survive a fork."""


def __getattr__(name: str) -> Any:
    if name in _OF_ENGINES:
        return importlib.import_module(_OF_ENGINES[name])
    raise AttributeError(f"module 'shardwise.models' has no attribute {name!r}")
