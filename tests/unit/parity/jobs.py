"""Jobs small enough to be verified in a fraction of a second, with counts that differ between rows."""

import dataclasses
import os

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.data import Dataset

import shardwise as sw


class Tokens(Dataset):
    def __len__(self):
        return 101

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, 32, (9,), generator=generator)
        return tokens[:-1], tokens[1:].masked_fill(torch.arange(8) > index % 8, -100)


class Points(Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        point = torch.randn(6, generator=torch.Generator().manual_seed(index))
        return point, torch.tensor(index % 3)


def decoder(**changes):
    size = {"vocab_size": 32, "width": 16, "num_layers": 2, "num_heads": 4, "context": 8}
    fields = {
        "model": lambda: sw.models.decoder("gpt2-tiny", **size),
        "data": lambda split: Tokens() if split == "train" else None,
        "loss": sw.losses.token_cross_entropy,
    }
    return make(**{**fields, **changes})


def points(model, **changes):
    return make(
        model=model,
        data=lambda split: Points() if split == "train" else None,
        loss=sw.losses.cross_entropy,
        **changes,
    )


def make(**fields):
    return sw.Job(**{"optimizer": sw.adamw(lr=1e-2), "clip_norm": 0.1, "batch_size": 40, "steps": 3, **fields})


def normed():
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 3))


class Noisy(torch.nn.Linear):
    """Draws random numbers that no dropout attribute stops."""

    def forward(self, x):
        return super().forward(torch.nn.functional.dropout(x, 0.5))


class Attending(torch.nn.Module):
    """Attention whose rate of dropout nobody can see from outside, and stochastic depth by sample."""

    def __init__(self):
        super().__init__()
        self.rate = 0.3
        self.up, self.head = torch.nn.Linear(6, 6), torch.nn.Linear(6, 3)

    def forward(self, x):
        rows = x[:, None]
        mixed = torch.nn.functional.scaled_dot_product_attention(rows, rows, rows, dropout_p=self.rate)
        kept = torch.empty(len(x), 1).bernoulli_(0.7)
        return self.head(x + kept * self.up(mixed[:, 0] + 0.1 * torch.randn_like(x)))


class Restless(torch.nn.Linear):
    """Gives other numbers each time it is run, whatever the seed."""

    def forward(self, x):
        return super().forward(x) * (1 + torch.rand((), generator=torch.Generator().manual_seed(fresh_seed())))


class RunningMean(torch.nn.Module):
    """Subtracts a running mean, which each rank updates from its own rows."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        centered = x - self.mean
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.5)
        return centered


class SinglePrecisionWeight(torch.nn.Linear):
    """Multiplies by a copy of its weight in fp32, so gradients are rounded to fp32 before ranks sum them."""

    def forward(self, x):
        rounded = torch.empty_like(self.weight, dtype=torch.float32).copy_(self.weight)
        return torch.nn.functional.linear(x, rounded.type_as(x), self.bias)


class SinglePrecisionTable(torch.nn.Linear):
    """Adds rows into a table of fp32, which torch refuses to do with rows of fp64."""

    def forward(self, x):
        table = torch.zeros(len(x), 3, dtype=torch.float32)
        return table.index_add(0, torch.arange(len(x)), super().forward(x))


class SinglePrecisionOutput(torch.nn.Linear):
    """Returns fp32 whatever it computes in."""

    def forward(self, x):
        output = super().forward(x)
        return torch.empty_like(output, dtype=torch.float32).copy_(output)


def fresh_seed():
    return int.from_bytes(os.urandom(4))


job = decoder()
untied = decoder(
    model=lambda: sw.models.decoder(
        "llama-tiny", vocab_size=32, width=16, num_layers=4, num_heads=4, num_kv_heads=2, mlp_width=32, context=8
    )
)
batch_norm = points(normed)


def biased():
    """Biases before batch normalization, whose exact gradient is zero."""
    parts = [torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU()]
    parts += [torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU()]
    return torch.nn.Sequential(*parts, torch.nn.Linear(8, 3))


divisible = points(lambda: torch.nn.Linear(6, 3), batch_size=10)
evaluated = dataclasses.replace(
    batch_norm,
    data=lambda split: Points() if split in {"train", "test"} else None,
    metrics={"accuracy": sw.metrics.accuracy},
)
amplified = points(biased, optimizer=sw.adamw(lr=1e-2, eps=1e-15))
noisy = points(lambda: Noisy(6, 3))
attending = points(lambda: torch.nn.Sequential(Attending()))
restless = points(lambda: Restless(6, 3))

local_statistics = points(lambda: torch.nn.Sequential(RunningMean(), torch.nn.Linear(6, 3)))
rounding = points(lambda: SinglePrecisionWeight(6, 3))
single_table = points(lambda: SinglePrecisionTable(6, 3))
single_output = points(lambda: SinglePrecisionOutput(6, 3))


def dropping():
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 3))


with_dropout = points(dropping)
keyed_dropout = points(dropping, masks="keyed")
keyed_draws = points(lambda: torch.nn.Sequential(Attending()), masks="keyed")


broken = points(lambda: torch.nn.Linear(7, 3))


class DroppingBlock(torch.nn.Module):
    """Drops hidden units, which tensor parallelism shards, and outputs, which it does not."""

    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(6, 8), torch.nn.Linear(8, 6)
        self.inner, self.outer = torch.nn.Dropout(0.5), torch.nn.Dropout(0.5)

    def forward(self, x):
        return x + self.outer(self.down(self.inner(torch.relu(self.up(x)))))


tensor_dropout = points(
    lambda: torch.nn.Sequential(DroppingBlock(), DroppingBlock(), torch.nn.Linear(6, 3)),
    tensor_rules={"0.up": "column", "0.down": "row", "1.up": "column", "1.down": "row"},
)


class DroppingAttention(torch.nn.Module):
    """Self-attention over three tokens with dropout inside of `attend`; tensor parallelism splits its heads."""

    def __init__(self, attend):
        super().__init__()
        self.dropout, self.attend = 0.5, attend
        self.query, self.key, self.value = (torch.nn.Linear(2, 8) for _ in range(3))
        self.out = torch.nn.Linear(8, 2)

    def forward(self, x):
        tokens = x.view(len(x), 3, 2)
        projected = [project(tokens) for project in (self.query, self.key, self.value)]
        heads = [each.unflatten(-1, (-1, 4)).transpose(1, 2) for each in projected]
        mixed = self.attend(*heads, dropout_p=self.dropout if self.training else 0.0)
        return x + self.out(mixed.transpose(1, 2).flatten(2)).flatten(1)


class TorchAttention(torch.nn.MultiheadAttention):
    """torch's attention layer over three tokens."""

    def __init__(self):
        super().__init__(2, 2, dropout=0.5, batch_first=True)

    def forward(self, x):
        tokens = x.view(len(x), 3, 2)
        return super().forward(tokens, tokens, tokens, need_weights=False)[0].flatten(1)


class DropPath(torch.nn.Module):
    """Stochastic depth as transformers writes it: a comparison of uniform numbers, one for each sample."""

    def __init__(self):
        super().__init__()
        self.drop_prob = 0.5

    def forward(self, x):
        if not self.training or not self.drop_prob:
            return x
        kept = (1 - self.drop_prob + torch.rand(len(x), 1, dtype=x.dtype)).floor_()
        return x.div(1 - self.drop_prob) * kept


def with_attention(attention, **changes):
    return points(lambda: torch.nn.Sequential(attention(), torch.nn.Linear(6, 3)), **changes)


torch_attention = with_attention(TorchAttention)
drop_path = with_attention(DropPath)
attention_dropout = with_attention(
    lambda: DroppingAttention(scaled_dot_product_attention),
    tensor_rules={"0.query": "column", "0.key": "column", "0.value": "column", "0.out": "row"},
)


class Counting(torch.nn.Linear):
    """Warms up over forward passes, which it counts."""

    def __init__(self):
        super().__init__(6, 3)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * min(1.0, self.calls / 20)


class CountedLayer(torch.nn.Linear):
    """Counts its forward passes in a buffer that nothing reads."""

    def __init__(self):
        super().__init__(6, 6)
        self.register_buffer("passes", torch.tensor(3.0))

    def forward(self, x):
        self.passes += self.training
        return super().forward(x)


class CountedLayers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = torch.nn.ModuleList([CountedLayer(), CountedLayer()]), torch.nn.Linear(6, 3)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def with_table(samples):
    """Rows between a table of as many entries as two ranks have rows in a micro-batch."""
    points, labels = torch.utils.data.default_collate(samples)
    return points, torch.arange(20.0), labels


class Centered(torch.nn.Linear):
    """Takes the mean over the micro-batch off its rows."""

    def forward(self, x):
        output = super().forward(x)
        return output - output.mean(0)


def _contrast(output, batch):
    return torch.nn.functional.cross_entropy(output @ output.T, torch.arange(len(batch[1])), reduction="sum")


counting = points(Counting)
tabled = dataclasses.replace(
    points(lambda: torch.nn.Linear(6, 3), collate=with_table, forward=lambda model, batch: model(batch[0])),
    loss=sw.Loss(sum=lambda output, batch: torch.nn.functional.cross_entropy(output, batch[2], reduction="sum")),
)
counted_layers = points(CountedLayers, layers="layers")
centered = points(lambda: Centered(6, 3))
contrastive = dataclasses.replace(points(lambda: torch.nn.Linear(6, 3)), loss=sw.Loss(sum=_contrast))
averaged = dataclasses.replace(
    points(lambda: torch.nn.Linear(6, 3)),
    loss=sw.Loss(sum=lambda output, batch: torch.nn.functional.cross_entropy(output, batch[-1])),
)
uncounted = dataclasses.replace(
    points(lambda: torch.nn.Linear(6, 3)), loss=dataclasses.replace(sw.losses.cross_entropy, count=lambda _: 0)
)


class Pruned(torch.nn.Sequential):
    """A mask on a gradient, and a permutation of the inputs that no state dict has."""

    def __init__(self):
        super().__init__(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
        mask = torch.rand(8, 6) > 0.5
        self[0].weight.register_hook(lambda gradient: gradient * mask)
        self.order = torch.randperm(6)

    def forward(self, x):
        return super().forward(x[:, self.order])


pruned = points(Pruned)
