"""Few short texts for tiny jobs: the third step is short and uneven, and targets are partly ignored."""

import torch
from torch.utils.data import Dataset

import shardwise as sw

COUNT = 101  # a prime: with batches of 40, the third step has 21 rows, fewer than 4 ranks x 2 micro-batches can share


class Windows(Dataset):
    """Bytes and the byte after each; the targets of window i end early, so that ranks count different numbers."""

    def __init__(self, length):
        self.windows = sw.datasets.text(length=length)("train")

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        tokens, target = self.windows[index]
        return tokens, target.masked_fill(torch.arange(len(target)) > 2 + index % len(target), -100)


class Gaps(Dataset):
    """Bytes to read and bytes to write for an encoder-decoder, as the dict that transformers takes."""

    def __init__(self, length):
        self.windows = Windows(length)

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        tokens, target = self.windows[index]
        labels = target[: len(target) // 2]
        return {"input_ids": tokens + 3, "labels": torch.where(labels < 0, labels, labels + 3)}


def windows(split):
    return Windows(16) if split == "train" else None


def gaps(split):
    return Gaps(16) if split == "train" else None
