"""A described job whose model is an mlx.nn.Module: a small network that classifies scanned handwritten digits."""

from mlx import nn

import shardwise as sw


# <model>
class DigitClassifier(nn.Module):
    """Two convolutions with batch norm, two linear layers."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, kernel_size=3, padding=1)
        self.norm1 = nn.BatchNorm(16)  # over all processes' rows, as in torch
        self.conv2 = nn.Conv2d(16, 32, kernel_size=3, stride=2, padding=1)
        self.norm2 = nn.BatchNorm(32)
        self.hidden = nn.Linear(32 * 4 * 4, 64)
        self.head = nn.Linear(64, 10)

    def __call__(self, images):
        """Return the logits [batch, 10] of images [batch, 1, 8, 8], as the dataset gives them to torch, too."""
        x = images.transpose(0, 2, 3, 1)  # MLX has channels last
        x = nn.relu(self.norm1(self.conv1(x)))
        x = nn.relu(self.norm2(self.conv2(x)))
        return self.head(nn.relu(self.hidden(x.flatten(1))))
        # </model>


# <job>
job = sw.Job(
    engine="mlx",
    model=DigitClassifier,
    data=sw.datasets.digits,
    loss=sw.losses.cross_entropy,
    optimizer=sw.adamw(lr=2e-3),
    schedule=sw.schedules.Cosine(warmup=0.1),
    batch_size=128,  # the GLOBAL batch, on one process as on two
    epochs=12,
    metrics={"accuracy": sw.metrics.accuracy},
)
# </job>
