"""Updates that are skipped because a gradient is not finite."""

import math

import pytest
import torch

from shardwise.layout import Layout
from shardwise.parallel.gradsync import GradNorm
from shardwise.training.step.update import NormedUpdate, PlainUpdate


@pytest.mark.parametrize(
    ("value", "expected"), [(3.0, 0.0), (1e15, 0.0), (math.inf, 1.0), (-math.inf, 1.0), (math.nan, 1.0)]
)
@pytest.mark.parametrize("kind", [PlainUpdate, NormedUpdate])
def test_a_gradient_that_is_not_finite_skips_the_update_and_stays(kind, value, expected):
    weight, bias = torch.nn.Parameter(torch.zeros(4, 4)), torch.nn.Parameter(torch.zeros(4))
    weight.grad, bias.grad = torch.ones(4, 4), torch.tensor([1.0, value, -2.0, 0.0])
    before = bias.grad.clone()
    norm = GradNorm([weight, bias], layout=Layout(), sharded_axes=(), group=None, device=weight.device)
    update = PlainUpdate(norm, [weight, bias]) if kind is PlainUpdate else NormedUpdate(norm, None)
    optimizer = torch.optim.SGD([weight, bias], lr=1.0)
    assert float(update(optimizer).skipped) == expected
    assert weight[0, 0].item() == expected - 1
    torch.testing.assert_close(bias.grad, before, rtol=0, atol=0, equal_nan=True)
