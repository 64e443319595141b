"""Keyed draws on a CUDA device: dropout is one operator there, and attention drops inside of fused kernels."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from refusals import refuses
from shardwise.parallel.counter_dropout import CounterMasks, replace_dropouts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
KEYS = np.random.default_rng(0).integers(0, 2**63, 8).astype(np.uint64)


class Stochastic(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(64, 64)

    def forward(self, x):
        y = self.enter(x)
        heads = y.view(len(x), 16, 2, 32).transpose(1, 2)
        mixed = nn.functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.2)
        y = nn.functional.dropout(mixed.transpose(1, 2).flatten(2), 0.3) + 0.1 * torch.randn_like(y)
        return y * y.new_empty(len(x), 1, 1).bernoulli_(0.7) + torch.normal(y, 0.1)


def outputs(num_parts):
    """Return output and gradient of eight rows, in so many micro-batches."""
    torch.manual_seed(0)
    model = Stochastic().cuda().double()
    replace_dropouts(model, staged=False)
    masks, size = CounterMasks(model, "cuda"), 8 // num_parts
    rows = torch.randn(8, 16, 64, dtype=torch.float64).cuda()
    found = []
    for start in range(0, 8, size):
        with masks.of(model, KEYS[start : start + size].copy(), size):
            found.append(model(rows[start : start + size]))
    torch.cat(found).sum().backward()
    return torch.cat(found).detach(), model.enter.weight.grad


def test_what_a_model_draws_is_the_same_in_any_micro_batch():
    with sdpa_kernel(SDPBackend.MATH):
        (whole, gradient), (parts, summed) = outputs(1), outputs(4)
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(summed, gradient, rtol=1e-9, atol=1e-9)


def test_a_fused_kernel_that_drops_is_refused_with_the_kernel_that_does_not():
    model = Stochastic().cuda()
    replace_dropouts(model, staged=False)
    rows = torch.randn(8, 16, 64).cuda()
    with (
        sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION),
        refuses("support.keyed-draws-operator", "_scaled_dot_product_", "SDPBackend.MATH"),
        CounterMasks(model, "cuda").of(model, KEYS, 8),
    ):
        model(rows)
