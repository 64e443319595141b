"""Jobs in MLX that verify is tried on: uneven batches, counted tokens, batch norm, dropout, a convolution."""

import mlx.core as mx
import torch
from mlx import nn

import shardwise as sw

ROWS, LENGTH, VOCABULARY = 22, 6, 11


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(8, generator=generator), torch.tensor(index % 3)


class Tokens(torch.utils.data.Dataset):
    """Sequences of which each has another number of targets that count."""

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, VOCABULARY, (LENGTH + 1,), generator=generator)
        targets = tokens[1:].clone()
        targets[: index % LENGTH] = -100
        return tokens[:-1], targets


class Net(nn.Module):
    """A net that any change of rows, of their weights or of statistics shows in."""

    def __init__(self):
        super().__init__()
        self.layers = [nn.Linear(8, 16, bias=False), nn.BatchNorm(16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 3)]

    def __call__(self, rows):
        for layer in self.layers:
            rows = layer(rows)
        return rows


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, 12), nn.Linear(12, VOCABULARY)

    def __call__(self, tokens):
        return self.head(mx.cumsum(self.embedding(tokens), axis=1))


class Convolution(nn.Module):
    """By groups of channels, which MLX has no fp64 for."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(2, 4, 2, groups=2), nn.Linear(4, 3)

    def __call__(self, rows):
        return self.head(self.conv(rows.reshape(-1, 2, 2, 2)).flatten(1))


def make(**changes):
    fields = {
        "model": Net,
        "data": lambda split: Rows() if split == "train" else None,
        "loss": sw.losses.cross_entropy,
        "optimizer": sw.adamw(lr=1e-2),
        "batch_size": 8,
        "steps": 1,
        "engine": "mlx",
    }
    return sw.Job(**{**fields, **changes})


job = make(clip_norm=0.5)
tokens = make(
    model=LanguageModel, data=lambda split: Tokens() if split == "train" else None, loss=sw.losses.token_cross_entropy
)
convolution = make(model=Convolution)
