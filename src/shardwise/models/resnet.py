"""Residual networks of 18, 34 and 50 layers (He et al. 2015), with batch or group normalization and two stems."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import TYPE_CHECKING, Literal

import torch.nn.functional as F  # noqa: N812  torch's own custom
from torch import Tensor, nn

from shardwise.errors import JobError, nearest

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTHS = (64, 128, 256, 512)
NORMS: dict[str, Callable[[int], nn.Module]] = {
    "batch": nn.BatchNorm2d,
    "group": lambda channels: nn.GroupNorm(math.gcd(32, channels), channels),
}
STEMS = ("imagenet", "small")

Norm = Literal["batch", "group"]
Stem = Literal["imagenet", "small"]


def resnet18(*, num_classes: int = 1000, in_channels: int = 3, norm: Norm = "batch", stem: Stem = "imagenet") -> ResNet:
    """Return a ResNet-18, which has 11,689,512 parameters with the default arguments."""
    return ResNet((2, 2, 2, 2), _basic, num_classes=num_classes, in_channels=in_channels, norm=norm, stem=stem)


def resnet34(*, num_classes: int = 1000, in_channels: int = 3, norm: Norm = "batch", stem: Stem = "imagenet") -> ResNet:
    """Return a ResNet-34, which has 21,797,672 parameters with the default arguments."""
    return ResNet((3, 4, 6, 3), _basic, num_classes=num_classes, in_channels=in_channels, norm=norm, stem=stem)


def resnet50(*, num_classes: int = 1000, in_channels: int = 3, norm: Norm = "batch", stem: Stem = "imagenet") -> ResNet:
    """Return a ResNet-50 (v1.5, stride in the 3x3 convolution), which has 25,557,032 parameters by default."""
    return ResNet((3, 4, 6, 3), _bottleneck, num_classes=num_classes, in_channels=in_channels, norm=norm, stem=stem)


class ResNet(nn.Module):
    """Maps images [batch, channels, height, width] to logits [batch, num_classes].

    The stem "imagenet" downsamples by a factor of 4; "small" keeps the size, for images of about 8 to 64 pixels.
    """

    def __init__(
        self,
        num_blocks: tuple[int, ...],
        body: Callable[[int, int, int, str], nn.Sequential],
        *,
        num_classes: int,
        in_channels: int,
        norm: str,
        stem: str,
    ) -> None:
        super().__init__()
        if norm not in NORMS:
            raise JobError(f"resnet norm {norm!r} is unknown", code="model.unknown-norm", fix=nearest(str(norm), NORMS))
        if stem not in STEMS:
            raise JobError(f"resnet stem {stem!r} is unknown", code="model.unknown-stem", fix=nearest(str(stem), STEMS))
        self.stem = _stem(in_channels, norm, stem)
        self.stages = nn.Sequential()
        channels = WIDTHS[0]
        for width, count in zip(WIDTHS, num_blocks, strict=True):
            stage = nn.Sequential()
            for index in range(count):
                stride = 2 if index == 0 and width > WIDTHS[0] else 1
                block = Residual(channels, stride, body(channels, width, stride, norm), norm)
                stage.append(block)
                channels = block.out_channels
            self.stages.append(stage)
        self.head = nn.Linear(channels, num_classes)
        self.init_weights()

    def init_weights(self) -> None:
        """Initialize all weights and buffers; each block's last norm weight is zero, so blocks start as identity."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, nn.BatchNorm2d | nn.GroupNorm | nn.Linear):
                module.reset_parameters()
        for module in self.modules():
            if isinstance(module, Residual):
                module.init_as_identity()

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits [batch, num_classes] of images [batch, channels, height, width]."""
        features = self.stages(self.stem(images))
        logits: Tensor = self.head(features.mean(dim=(2, 3)))
        return logits


class Residual(nn.Module):
    """Residual block, relu(body(x) + shortcut(x)); the shortcut is a projection only if the shape changes."""

    def __init__(self, channels: int, stride: int, body: nn.Sequential, norm: str) -> None:
        super().__init__()
        self.out_channels = [part for part in body if isinstance(part, nn.Conv2d)][-1].out_channels
        self.body = body
        self.shortcut = nn.Sequential()
        if stride > 1 or channels != self.out_channels:
            self.shortcut = _sequence(
                conv=_conv(channels, self.out_channels, 1, stride), norm=NORMS[norm](self.out_channels)
            )

    def init_as_identity(self) -> None:
        """Set the weight of the body's last norm to zero, so that the block initially returns its shortcut."""
        nn.init.zeros_(self.body[-1].get_parameter("weight"))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the block, whose height and width are divided by the stride."""
        return F.relu(self.body(x) + self.shortcut(x), inplace=True)


def _stem(in_channels: int, norm: str, stem: str) -> nn.Sequential:
    if stem == "small":
        return _sequence(conv=_conv(in_channels, WIDTHS[0], 3), norm=NORMS[norm](WIDTHS[0]), relu=_relu())
    return _sequence(
        conv=_conv(in_channels, WIDTHS[0], 7, 2),
        norm=NORMS[norm](WIDTHS[0]),
        relu=_relu(),
        pool=nn.MaxPool2d(3, stride=2, padding=1),
    )


def _basic(channels: int, width: int, stride: int, norm: str) -> nn.Sequential:
    """Return two 3x3 convolutions with `width` output channels."""
    return _sequence(
        conv1=_conv(channels, width, 3, stride),
        norm1=NORMS[norm](width),
        relu1=_relu(),
        conv2=_conv(width, width, 3),
        norm2=NORMS[norm](width),
    )


def _bottleneck(channels: int, width: int, stride: int, norm: str) -> nn.Sequential:
    """Return a bottleneck of 1x1, 3x3 and 1x1 convolutions with 4 x `width` output channels."""
    return _sequence(
        conv1=_conv(channels, width, 1),
        norm1=NORMS[norm](width),
        relu1=_relu(),
        conv2=_conv(width, width, 3, stride),
        norm2=NORMS[norm](width),
        relu2=_relu(),
        conv3=_conv(width, 4 * width, 1),
        norm3=NORMS[norm](4 * width),
    )


def _sequence(**modules: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(modules))


def _conv(channels: int, out_channels: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels, out_channels, size, stride, padding=size // 2, bias=False)


def _relu() -> nn.ReLU:
    return nn.ReLU(inplace=True)
