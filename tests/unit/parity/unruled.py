"""Jobs without tensor rules whose models look as if they could be sharded: job names sly, borrowed and encoder."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import shardwise as sw

WIDTH = 8


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x):
        return self.two(self.one(x).relu())


class Sly(Mlp):
    """Normalises over what would be sharded, and only while it trains."""

    def forward(self, x):
        inner = self.one(x).relu()
        return self.two(inner / (1 + inner.norm(dim=-1, keepdim=True)) if self.training else inner)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.sly, self.plain = Sly(), Mlp()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x):
        x = self.norm(x + self.sly(x))
        return self.out(self.norm(x + self.plain(x)))


class Borrowed(nn.Module):
    """Reads the parameter of another module."""

    def __init__(self):
        super().__init__()
        self.mlp, self.out = Mlp(), nn.Linear(WIDTH, 4)

    def forward(self, x):
        return nn.functional.linear(self.mlp(x), self.out.weight)


class Encoder(nn.Module):
    """torch's own layers, whose attention reads the parameters of its projection itself."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.layers, self.out = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(WIDTH, 4)

    def forward(self, x):
        return self.out(self.layers(torch.stack([x, x.flip(-1), x * 2], 1)).mean(1))


def points(split):
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(16, WIDTH, generator=generator), torch.arange(16) % 4)


def make_job(model):
    return sw.Job(
        model=model, data=points, loss=sw.losses.cross_entropy, optimizer=sw.adamw(lr=1e-2), batch_size=8, steps=2
    )


sly, borrowed, encoder = make_job(Net), make_job(Borrowed), make_job(Encoder)
