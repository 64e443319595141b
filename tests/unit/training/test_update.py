"""The overflow flag of an update."""

import math

import pytest
import torch

from shardwise.training.step.update import PlainUpdate


@pytest.mark.parametrize(
    ("value", "expected"), [(3.0, 0.0), (1e30, 0.0), (math.inf, 1.0), (-math.inf, 1.0), (math.nan, 1.0)]
)
def test_both_checks_of_gradients_find_values_that_are_not_finite(value, expected):
    weight, bias = torch.nn.Parameter(torch.zeros(4, 4)), torch.nn.Parameter(torch.zeros(4))
    update = PlainUpdate(None, [weight, bias])
    grads = [torch.randn(4, 4), torch.tensor([1.0, value, -2.0, 0.0])]
    before = [gradient.clone() for gradient in grads]
    assert update._unscaled_flag(grads).item() == expected
    assert update._largest_flag(grads).item() == expected
    for gradient, old in zip(grads, before, strict=True):
        torch.testing.assert_close(gradient, old, rtol=0, atol=0, equal_nan=True)
