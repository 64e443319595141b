"""Blocks that run forward again: same gradients, and running statistics that move once."""

import copy

import pytest
import torch
from torch import nn

from shardwise.parallel.batch_norm import replace_batch_norms
from shardwise.parallel.recompute import recompute_block, recomputed_blocks


def block():
    torch.manual_seed(0)
    return replace_batch_norms(
        nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3)), None
    ).double()


def step(model):
    """Return output, gradients and buffers after one pass."""
    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    out = model(x)
    out.square().sum().backward()
    return out, [parameter.grad for parameter in model.parameters()], list(model.buffers())


@pytest.mark.parametrize("selective", [False, True])
def test_batch_norms_recompute_without_moving_their_statistics_again(selective):
    plain = block()
    recomputed = copy.deepcopy(plain)
    recompute_block(recomputed, selective=selective)
    for _ in range(2):
        torch.testing.assert_close(step(recomputed), step(plain), rtol=1e-12, atol=1e-12)
    assert plain[1].num_batches_tracked == 2


def test_the_first_blocks_are_recomputed_and_all_by_default():
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.TransformerEncoderLayer(4, 1) for _ in range(3)])})
    blocks = list(model["layers"])
    assert recomputed_blocks(model, 2) == blocks[:2]
    assert recomputed_blocks(model, 0) == recomputed_blocks(model, 9) == blocks
    assert recomputed_blocks(nn.Linear(2, 2), 0)[0].in_features == 2
