"""Blocks that run forward again: same gradients, and running statistics that move once."""

import copy
import functools

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd

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


class FeedForward(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 4), nn.GELU())

    def forward(self, rows):
        return super().forward(rows)


def compiled_step(recompute):
    """Return the gradients of a compiled block, and the matrix products in its graphs of forward and of backward."""
    products = {"forward": 0, "backward": 0}

    def count(direction, module, _):
        products[direction] += sum("mm.default" in str(node.target) for node in module.graph.nodes)
        return make_boxed_func(module)

    torch.manual_seed(0)
    module = FeedForward()
    if recompute != "none":
        recompute_block(module, selective=recompute == "selective")
    backend = aot_autograd(
        fw_compiler=functools.partial(count, "forward"),
        bw_compiler=functools.partial(count, "backward"),
        partition_fn=min_cut_rematerialization_partition,
    )
    module.compile(backend=backend)
    module(torch.ones(2, 4)).sum().backward()
    return [parameter.grad for parameter in module.parameters()], products["forward"], products["backward"]


def test_recomputed_blocks_are_compiled(caplog):
    grads, forward, backward = compiled_step("none")
    for recompute, repeated in (("selective", 0), ("full", 2)):
        found, *products = compiled_step(recompute)
        torch.testing.assert_close(found, grads)
        assert products == [forward, backward + repeated]
    assert forward == 2
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_the_first_blocks_are_recomputed_and_all_by_default():
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.TransformerEncoderLayer(4, 1) for _ in range(3)])})
    blocks = list(model["layers"])
    assert recomputed_blocks(model, 2) == blocks[:2]
    assert recomputed_blocks(model, 0) == recomputed_blocks(model, 9) == blocks
    assert recomputed_blocks(nn.Linear(2, 2), 0)[0].in_features == 2
