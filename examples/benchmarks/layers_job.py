"""The Transformer layers of `distributed_benchmarks.py` as a described job, for `shardwise bench step`.

shardwise bench step layers_job.py --plan fsdp --nproc 2
"""

import torch
from distributed_benchmarks import network
from torch.utils.data import Dataset

import shardwise as sw

WIDTH, TOKENS = 128, 32


class Noise(Dataset):
    """Random inputs [TOKENS, WIDTH]: a benchmark needs shapes, not meaning."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(index))


job = sw.Job(
    model=lambda: network(WIDTH, layers=4),
    data=lambda split: Noise() if split == "train" else None,
    forward=lambda model, batch: model(batch),
    loss=sw.Loss(sum=lambda output, _: output.square().mean((1, 2)).sum(), count=len),
    optimizer=sw.adamw(lr=1e-3),
    batch_size=16,
    steps=20,
)
