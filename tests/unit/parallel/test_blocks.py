"""Repeated blocks and the units made from them."""

import torch
from torch import nn

import shardwise as sw
from shardwise.parallel.meta_model import find_units
from shardwise.parallel.recompute import find_blocks


def test_layers_of_a_decoder_are_blocks():
    assert list(find_blocks(sw.models.decoder("gpt2-tiny"))) == ["blocks.0", "blocks.1"]


def test_residual_blocks_are_found_through_nested_sequentials():
    names = list(find_blocks(sw.models.resnet18(num_classes=10)))
    assert len(names) == 8
    assert names[0] == "stages.0.0"


def test_a_plain_stack_of_linears_has_no_blocks():
    assert find_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))) == {}


def test_every_parameter_is_in_exactly_one_unit():
    model = sw.models.decoder("llama-tiny")
    names = [name for unit in find_units(model) for name, _ in unit.parameters]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())


def test_a_block_that_shares_a_weight_with_others_is_not_a_unit():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(3))
            self.head = nn.Linear(2, 2)
            self.head.weight = self.blocks[1].inner.weight

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x):
            return self.inner(x)

    assert [unit.name for unit in find_units(Tied())] == ["blocks.0", "blocks.2", ""]


def test_blocks_are_found_in_holders_without_a_forward():
    def layer():
        return nn.ModuleDict({"mix": nn.Sequential(*(nn.Sequential(nn.Linear(2, 2)) for _ in range(2)))})

    model = nn.Module()
    model.layers = nn.ModuleList(layer() for _ in range(2))
    assert find_blocks(model) == {}
    model.layers = nn.ModuleList(
        nn.ModuleDict({"all": nn.ModuleList([nn.TransformerEncoderLayer(2, 1, 2)])}) for _ in "ab"
    )
    assert list(find_blocks(model)) == ["layers.0.all.0", "layers.1.all.0"]


def test_units_hold_shapes_and_no_memory():
    assert all(
        spec.device == torch.device("meta") for unit in find_units(nn.Linear(2, 2)) for _, spec in unit.parameters
    )
