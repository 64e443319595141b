"""Models to train: residual networks, decoders of published sizes, encoder-decoders through transformers."""

from shardwise.models.decoder import Decoder, decoder
from shardwise.models.encoder_decoder import byt5, t5
from shardwise.models.resnet import ResNet, resnet18, resnet34, resnet50
from shardwise.plan.model.sizes import DecoderConfig

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
