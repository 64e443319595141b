"""Plain PyTorch models that bring no tensor rules: job names net, packed, mixer, recurrent."""

import torch
from torch import nn
from torch.nn.functional import gelu, scaled_dot_product_attention, silu
from torch.utils.data import Dataset
from windows import windows

import shardwise as sw

WIDTH, HEADS, TOKENS = 16, 4, 16


class Attention(nn.Module):
    """Heads are counted in an attribute, as most code does."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.head_dim = HEADS, WIDTH // HEADS
        self.wq, self.wk, self.wv = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        """[rows, tokens, width], as is what it returns."""
        rows, tokens, _ = x.shape
        heads = [each(x).view(rows, tokens, self.num_heads, self.head_dim) for each in (self.wq, self.wk, self.wv)]
        y = scaled_dot_product_attention(*(each.transpose(1, 2) for each in heads), is_causal=True)
        return self.mix(y.transpose(1, 2).reshape(rows, tokens, -1))


class PackedAttention(nn.Module):
    """Queries, keys and values from one matrix, one after the other: half of its rows are not half of the heads."""

    def __init__(self):
        super().__init__()
        self.num_heads = HEADS
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        """[rows, tokens, width], as is what it returns."""
        heads = [each.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1)]
        return self.proj(scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))


class Gated(nn.Module):
    """One matrix opens what another lets through."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = nn.Linear(WIDTH, 32), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x):
        """[rows, tokens, width], as is what it returns."""
        return self.three(silu(self.one(x)) * self.two(x))


class Block(nn.Module):
    """Attention, then the gated MLP, each beside the stream."""

    def __init__(self, attention):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention, self.mlp = attention(), Gated()

    def forward(self, x):
        """[rows, tokens, width], as is what it returns."""
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Net(nn.Module):
    """Bytes in, scores of the next byte out."""

    def __init__(self, attention):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(257, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block(attention) for _ in range(2))
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 257, bias=False)

    def forward(self, tokens):
        """[rows, tokens] to [rows, tokens, 257]."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.out(self.norm(x))


class Mixing(nn.Module):
    """Patches are mixed by one pair of matrices, channels by another."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.patches = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
        self.channels = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x):
        """[rows, tokens, width], as is what it returns."""
        x = x + self.patches(self.norms[0](x).mT).mT
        return x + self.channels(self.norms[1](x))


class Mixer(nn.Module):
    """Images of 8 x 8 in four patches, scores of ten classes out."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Conv2d(1, WIDTH, 4, stride=4)
        self.blocks = nn.Sequential(*(Mixing() for _ in range(2)))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, images):
        """[rows, 1, 8, 8] to [rows, 10]."""
        return self.head(gelu(self.blocks(self.embed(images).flatten(2).mT)).mean(1))


class Recurrent(nn.Module):
    """One recurrent layer: what every step reads is all of the step before."""

    def __init__(self):
        super().__init__()
        self.cells, self.head = nn.LSTM(8, WIDTH, batch_first=True), nn.Linear(WIDTH, 10)

    def forward(self, images):
        """[rows, 1, 8, 8] to [rows, 10]."""
        return self.head(self.cells(images.flatten(1, 2))[0][:, -1])


class Noise(Dataset):
    """Images of 8 x 8 and a class."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.randn(1, 8, 8, generator=torch.Generator().manual_seed(index)), index % 10


def text_job(attention):
    return sw.Job(
        model=lambda: Net(attention),
        data=windows,
        loss=sw.losses.token_cross_entropy,
        optimizer=sw.adamw(lr=1e-2),
        clip_norm=0.5,
        batch_size=8,
        steps=3,
    )


def image_job(model):
    return sw.Job(
        model=model,
        data=lambda split: Noise() if split == "train" else None,
        loss=sw.losses.cross_entropy,
        optimizer=sw.adamw(lr=1e-2),
        batch_size=8,
        steps=3,
    )


net, packed = text_job(Attention), text_job(PackedAttention)
mixer, recurrent = image_job(Mixer), image_job(Recurrent)
