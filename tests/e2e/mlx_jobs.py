"""Jobs in MLX for e2e tests: digits by convolutions, and points whose rows are logged when they are trained."""

DIGITS = """
from mlx import nn

import shardwise as sw


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.first_norm = nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm(16)
        self.second, self.second_norm = nn.Conv2d(16, 32, 3, padding=1, stride=2), nn.BatchNorm(32)
        self.head = nn.Linear(32 * 16, 10)

    def __call__(self, images):
        x = nn.relu(self.first_norm(self.first(images.transpose(0, 2, 3, 1))))
        return self.head(nn.relu(self.second_norm(self.second(x))).flatten(1))


job = sw.Job(
    engine="mlx",
    model=Net,
    data=sw.datasets.digits,
    loss=sw.losses.cross_entropy,
    optimizer=sw.adamw(lr=3e-3),
    batch_size=64,
    epochs=4,
    metrics={"accuracy": sw.metrics.accuracy},
)
"""

LAZY = """
import shardwise as sw

job = sw.Job(
    engine="mlx",
    model=lambda: sw.models.mlx.resnet18(num_classes=10, in_channels=1),
    data=sw.datasets.digits,
    loss=sw.losses.cross_entropy,
    optimizer=sw.adamw(lr=1e-3),
    batch_size=64,
    steps=1,
)
"""

ROWS, BATCH, EPOCHS = 46, 8, 3
STEPS_PER_EPOCH = -(-ROWS // BATCH)

POINTS = f"""
import os, signal
from pathlib import Path

import torch
from mlx import nn

import shardwise as sw

SIGNALS = {{"kill": signal.SIGKILL, "stop": signal.SIGSTOP}}


class Points(torch.utils.data.Dataset):
    def __len__(self):
        return {ROWS}

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(8, generator=generator), torch.tensor(index), torch.tensor(index % 3)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = [nn.Linear(8, 16), nn.BatchNorm(16), nn.Linear(16, 3)]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


seen = set()


def loss_sum(output, batch):
    if "MLX_DISABLE_COMPILE" in os.environ:  # else this runs once, without values
        seen.update(batch[1].tolist())
    return nn.losses.cross_entropy(output, batch[-1], reduction="sum")


def on_step(context):
    with Path(f"{{os.environ['LOG']}}-{{os.getpid()}}").open("a") as file:
        file.write(f"{{context.report.number}} {{' '.join(map(str, seen))}}\\n")
    seen.clear()
    order = Path("order")
    if context.step == 10 and os.environ.get("RANK") == "1" and order.exists():
        os.kill(os.getpid(), SIGNALS[order.read_text()])


job = sw.Job(
    engine="mlx",
    model=Net,
    data=lambda split: Points() if split == "train" else None,
    loss=sw.Loss(sum=loss_sum),
    optimizer=sw.adamw(lr=1e-2),
    batch_size={BATCH},
    epochs={EPOCHS},
    forward=lambda model, batch: model(batch[0]),
    on_step=on_step,
)
"""
