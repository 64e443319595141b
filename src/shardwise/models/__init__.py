"""Models to train: residual networks, decoders of published sizes, encoder-decoders through transformers."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shardwise.models.decoder import Decoder, decoder
from shardwise.models.encoder_decoder import byt5, t5
from shardwise.models.resnet import ResNet, resnet18, resnet34, resnet50
from shardwise.plans.catalogue import DecoderConfig

if TYPE_CHECKING:
    from shardwise.models import mlx as mlx

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


def __getattr__(name: str) -> Any:
    if name == "mlx":  # at first use: mlx is an extra, and a process that will fork must not have it
        return importlib.import_module("shardwise.models.mlx")
    raise AttributeError(f"module 'shardwise.models' has no attribute {name!r}")
