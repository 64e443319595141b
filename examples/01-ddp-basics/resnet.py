"""ResNet-18 and ResNet-50 in one page: residual blocks between a stem and a linear layer."""

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


class Bottleneck(nn.Module):
    """A 1x1, a 3x3 and a 1x1 convolution and a shortcut; the output has four times the channels of the 3x3 one."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            nn.Conv2d(channels_in, channels, 1, bias=False),
            batch_norm(channels),
            nn.ReLU(inplace=True),
            Convolution(channels, channels, 3, stride, padding=1, bias=False),
            batch_norm(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, 4 * channels, 1, bias=False),
            batch_norm(4 * channels),
        )
        self.shortcut = nn.Identity()
        if stride != 1 or channels_in != 4 * channels:
            convolution = nn.Conv2d(channels_in, 4 * channels, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, batch_norm(4 * channels))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map [N, channels_in, H, W] to [N, 4 * channels, H / stride, W / stride]."""
        return torch.relu(self.residual(images) + self.shortcut(images))


def resnet18(num_classes: int = 10, in_channels: int = 1) -> nn.Module:
    """Return an untrained ResNet-18, [N, in_channels, H, W] to [N, num_classes]; 11.2 million weights."""
    return resnet(Block, (2, 2, 2, 2), 1, num_classes, in_channels)


def resnet50(num_classes: int = 10, in_channels: int = 1) -> nn.Module:
    """Return an untrained ResNet-50, [N, in_channels, H, W] to [N, num_classes]; 23.5 million weights."""
    return resnet(Bottleneck, (3, 4, 6, 3), 4, num_classes, in_channels)


def resnet(
    block: type[nn.Module], depths: tuple[int, ...], expansion: int, num_classes: int, in_channels: int
) -> nn.Module:
    """Return a network of four stages; each has `depths` blocks, of 64 to 512 channels times `expansion`."""
    stem = [
        nn.Conv2d(in_channels, 64, 7, stride=2, padding=3, bias=False),
        batch_norm(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, padding=1),
    ]
    blocks, channels_in = [], 64
    for channels, depth in zip((64, 128, 256, 512), depths, strict=True):
        for number in range(depth):
            stride = 2 if number == 0 and channels != 64 else 1  # the first block of a stage halves the image
            blocks.append(block(channels_in, channels, stride))
            channels_in = expansion * channels
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels_in, num_classes)]
    return nn.Sequential(*stem, *blocks, *head)
