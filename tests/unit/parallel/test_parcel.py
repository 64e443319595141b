"""What travels between pipeline stages."""

import pickle

import pytest
import torch

from refusals import refuses
from shardwise.parallel.stage_gate import pack, receive, unpack


def test_output_comes_back_as_it_was():
    output = (torch.ones(2), None, {"kept": [torch.zeros(3), 7]})
    tensors, structure = pack(output, "layer")
    again = unpack(tensors, pickle.loads(pickle.dumps(structure)))
    assert isinstance(again, tuple)
    assert torch.equal(again[0], output[0])
    assert again[1] is None
    assert torch.equal(again[2]["kept"][0], output[2]["kept"][0])
    assert again[2]["kept"][1] == 7


def test_tensor_that_nobody_uses_gets_a_gradient_of_zeros():
    used, unused = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    first, _ = receive((used, unused))
    first.sum().backward()
    assert torch.equal(unused.grad, torch.zeros(3))
    assert torch.equal(used.grad, torch.ones(2))


def test_frozen_output_can_take_a_gradient():
    (tensor,), _ = pack(torch.ones(2), "layer")
    assert tensor.requires_grad


@pytest.mark.parametrize("output", [torch.ones(2, dtype=torch.int64), (torch.ones(2), object())])
def test_output_that_cannot_travel_is_refused_with_the_layer(output):
    with refuses("support.pipeline-layer-output", "blocks.1"):
        pack(output, "blocks.1")
