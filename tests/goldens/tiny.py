"""The job of the recorded checkpoints, runs and outputs: a decoder of width 16 on numbers that count upward."""

import torch
from torch.utils.data import Dataset

import shardwise as sw


class Counting(Dataset):
    """Row i counts upward from i in steps of 1 + i modulo 3, by 16."""

    def __len__(self):
        return 50

    def __getitem__(self, index):
        row = (index + (1 + index % 3) * torch.arange(9)) % 16
        return row[:-1], row[1:]


job = sw.Job(
    model=lambda: sw.models.decoder(
        "llama-tiny", width=16, num_layers=2, num_heads=2, num_kv_heads=2, mlp_width=16, vocab_size=16, context=8
    ),
    data=lambda split: Counting() if split == "train" else None,
    loss=sw.losses.token_cross_entropy,
    optimizer=sw.adamw(lr=1e-2),
    schedule=sw.schedules.Cosine(warmup=1),
    clip_norm=1.0,
    batch_size=8,
    steps=6,
    seed=3,
)
