"""Fingerprints see every bit and its place, on the host and as a GPU takes them."""

import pytest
import torch

from shardwise.recorder.fingerprint import combined, fingerprints, mixed_sum, position_factors

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


def by_sums(tensor, block=8):
    """Return the fingerprint that a GPU would take, in blocks of so many elements."""
    return int(mixed_sum(tensor.view(torch.int32), position_factors(block, tensor.device)))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64], ids=str)
def test_equal_bits_have_equal_fingerprints_in_every_dtype(dtype):
    tensor = torch.arange(12).reshape(3, 4).to(dtype)
    one, same, other = fingerprints([tensor, tensor.clone(), tensor.flip(0)])
    assert one == same != other


def test_shapes_without_elements_or_dimensions_have_one_too():
    assert len(set(fingerprints([torch.tensor(1.0), torch.tensor(2.0), torch.zeros(0, 3)]))) == 3


def test_views_are_read_in_the_order_of_their_elements():
    tensor = torch.arange(6.0).reshape(2, 3)
    assert fingerprints([tensor.t()]) == fingerprints([tensor.t().contiguous()]) != fingerprints([tensor])


@pytest.mark.parametrize("take", [by_sums, lambda tensor: fingerprints([tensor])[0]], ids=["device", "host"])
def test_every_element_and_every_exchange_of_two_shows(take):
    tensor = torch.randn(20, generator=torch.Generator().manual_seed(0))
    seen = {take(tensor)}
    for place in range(20):
        changed = tensor.clone()
        changed[place] = -changed[place]
        exchanged = tensor.clone()
        exchanged[[place, place - 1]] = tensor[[place - 1, place]]
        seen |= {take(changed), take(exchanged)}
    assert len(seen) == 41


def test_many_fingerprints_are_one_in_their_order():
    assert combined([1, -2]) != combined([-2, 1])
    assert combined([]) == combined([])
