"""Auxiliary losses that layers leave on modules: sent from stage to stage, or refused by name under a pipeline."""

import pytest
import torch
from torch import nn
from training.test_strategies import check_equal, trained

from jobs import Points, points_job
from shardwise.errors import JobError
from shardwise.testing import run_ranks

PP = {"accumulation": "2"}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.aux, self.width = nn.Linear(6, 6), 0.0, 6

    def forward(self, x):
        y = torch.tanh(self.inner(x))
        self.leave((y * y).mean())
        return x + y

    def leave(self, value):
        self.aux = value


class Net(nn.Module):
    """Adds to its output what its blocks left."""

    block = Block

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(self.block() for _ in range(4))
        self.head = nn.Linear(6, 3)
        self.prepare()

    def prepare(self):
        pass

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x) + self.collected()

    def collected(self):
        return sum(block.aux for block in self.blocks)


class Unset(Block):
    """Has the attribute only after its first forward pass."""

    def __init__(self):
        super().__init__()
        del self.aux


class OnlyAfterForward(Net):
    block = Unset


class Inner(Block):
    """Leaves the value on a part of itself, in a buffer."""

    def __init__(self):
        super().__init__()
        self.inner.register_buffer("seen", torch.zeros(()), persistent=False)

    def leave(self, value):
        self.inner.seen = value


class OnParts(Net):
    block = Inner

    def collected(self):
        return sum(block.inner.seen for block in self.blocks)


class Sharing(Block):
    def leave(self, value):
        self.shared.append(value)


class InOneList(Net):
    """All blocks append to a list of the model, which begins each pass with a new one."""

    block = Sharing

    def prepare(self):
        self.collection = {"losses": []}

    def forward(self, x):
        self.collection["losses"] = []
        for block in self.blocks:
            block.shared = self.collection["losses"]
        return super().forward(x)

    def collected(self):
        return sum(self.collection["losses"])


class Counting(Block):
    def leave(self, value):
        self.root[0].aux = self.root[0].aux + value


class OnRoot(Net):
    """Blocks add to an attribute of the model, which the job's forward reads when the model is done."""

    block = Counting

    def prepare(self):
        self.aux = torch.zeros(())
        for block in self.blocks:
            block.root = [self]  # in a list: not a child

    def forward(self, x):
        self.aux = torch.zeros(())
        return super().forward(x)

    def collected(self):
        return 0.0


def stages_job(model, **changes):
    return points_job(model, Points(16, 4), **{"steps": 2, **changes})


@pytest.mark.parametrize(
    ("model", "where", "changes"),
    [
        (Net, r"blocks\.0\.aux", {}),
        (OnlyAfterForward, r"blocks\.0\.aux", {}),
        (OnParts, r"blocks\.0\.inner\.seen", {}),
        (InOneList, "collection", {}),
        (OnRoot, "aux", {"forward": lambda model, batch: model(batch[0]) + model.aux}),
    ],
    ids=["attribute", "unset", "buffer", "list", "root"],
)
def test_values_that_another_stage_reads_are_refused_by_name(model, where, changes):
    with pytest.raises(JobError, match=rf"set {where} in forward and another stage reads it") as caught:
        run_ranks(trained, 2, stages_job(model, **changes), "pp", PP)
    assert caught.value.code == "support.stage-side-value"


class Harmless(Net):
    """Blocks leave values that nobody reads, and the model reads settings of its blocks that nobody changes."""

    def prepare(self):
        self.maps = []
        for block in self.blocks:
            block.register_forward_hook(lambda _, __, output: self.maps.append(output.detach()))

    def collected(self):
        assert all(isinstance(block, Block) and type(block).__name__ == "Block" for block in self.blocks)
        return sum(block.width for block in self.blocks) * self.head.bias.mean()


class Returning(Block):
    def forward(self, x, total):
        y = torch.tanh(self.inner(x))
        return x + y, total + (y * y).sum(dim=1, keepdim=True)


class Sent(Net):
    """Does what the refusal advises: the layers return what they add up, by row."""

    block = Returning

    def forward(self, x):
        x, total = self.stem(x), torch.zeros(len(x), 1, dtype=x.dtype)
        for block in self.blocks:
            x, total = block(x, total)
        return self.head(x) + total


def in_a_row():
    """A model that is the list of its layers."""
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


def test_model_that_is_a_sequential_is_split_along_its_own_layers():
    check_equal(stages_job(in_a_row, layers=""), 2, "pp", PP)


@pytest.mark.parametrize("model", [Harmless, Sent])
def test_values_that_are_sent_or_not_read_by_another_stage_equal_one_process(model):
    check_equal(stages_job(model), 2, "pp", PP)
