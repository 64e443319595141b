"""Compressed gradients: every rank gets the same ones, whichever comes first to a bucket."""

import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardwise.parallel.replicated import compress
from shardwise.plans import Communication
from shardwise.testing import run_ranks


def test_powersgd_sums_several_buckets_in_one_order_on_all_ranks():
    # Its callbacks send again: left to themselves they come between other buckets, on each rank between others.
    def body(world):
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)]), bucket_cap_mb=0.01)
        compress(model, Communication(compression="powersgd"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        torch.manual_seed(world.rank)
        for step in range(24):
            if world.rank == step % 2:
                time.sleep(0.003)
            model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach() for parameter in model.parameters()]

    first, second = run_ranks(body, 2, timeout_s=60)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
