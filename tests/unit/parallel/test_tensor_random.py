"""Dropout under tensor parallelism: own masks where activations are sharded, equal masks elsewhere, also recomputed."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from shardwise import Lora, models
from shardwise.parallel.lora import add_adapters
from shardwise.parallel.tensor import tensor_parallel
from shardwise.parallel.tensor_gradients import uses_dropout
from shardwise.parallel.tensor_rules import find_rules
from shardwise.testing import run_ranks

RULES = {"blocks.*.norm": "sequence", "blocks.*.up": "column", "blocks.*.down": "row"}


class Watched(nn.Dropout):
    """Remembers what it dropped."""

    def __init__(self, p):
        super().__init__(p)
        self.dropped = []

    def forward(self, x):
        self.dropped.append(super().forward(torch.ones_like(x)) == 0)
        return x * ~self.dropped[-1]


class Block(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.inside, self.outside = Watched(p), Watched(p)

    def forward(self, x):
        return x + self.outside(self.down(self.inside(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self, p=0.5):
        super().__init__()
        self.before = Watched(p)
        self.blocks = nn.ModuleList(Block(p) for _ in range(2))

    def forward(self, x):
        x = self.before(x)
        for block in self.blocks:
            x = block(x)
        return x


def masks_and_grads(*, sequence=False, recompute=False, training=True):
    """Run forward and backward on two tp ranks; return per rank masks by dropout, gradients and generator state."""

    def body(world):
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        net = tensor_parallel(Net().train(training), mesh, RULES, sequence=sequence)
        if recompute:
            for block in net.blocks:
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        net(torch.randn(2, 4, 8)).sum().backward()
        masks = {name: part.dropped for name, part in net.named_modules() if isinstance(part, Watched)}
        grads = {name: p.grad.full_tensor() for name, p in net.named_parameters()}
        return masks, grads, torch.get_rng_state()

    return run_ranks(body, 2)


def equal_masks(ranks):
    (first, *_), (second, *_) = ranks
    return {name: torch.equal(mask[0], second[name][0]) for name, mask in first.items()}


def test_masks_differ_inside_the_sharded_region_and_are_equal_outside():
    assert equal_masks(masks_and_grads()) == {
        "before": True,
        "blocks.0.inside": False,
        "blocks.0.outside": True,
        "blocks.1.inside": False,
        "blocks.1.outside": True,
    }


def test_masks_differ_on_a_stream_that_is_split_by_tokens():
    equal = equal_masks(masks_and_grads(sequence=True))
    assert equal.pop("before")
    assert not any(equal.values())


def test_an_adapter_drops_of_its_own_where_a_row_takes_its_part_of_a_whole_input():
    def body(world):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 4), Watched(0.5))
        add_adapters(net, Lora(rank=2, targets=("0",), dropout=0.5))
        net[0].lora_dropout = Watched(0.5)
        mesh = init_device_mesh("cpu", (world.size,))
        tensor_parallel(net, mesh, find_rules(net, {"0": "row_split"}), sequence=False).to_empty(device="cpu")
        net(torch.ones(2, 64))
        return net[0].lora_dropout.dropped[0], net[1].dropped[0]

    (first, first_after), (second, second_after) = run_ranks(body, 2)
    assert first.shape == second.shape == (2, 32)
    assert not torch.equal(first, second)
    assert torch.equal(first_after, second_after)


def test_regions_draw_different_masks():
    masks = masks_and_grads()[0][0]
    assert not torch.equal(masks["blocks.0.inside"][0], masks["blocks.1.inside"][0])


@pytest.mark.parametrize("sequence", [False, True])
def test_recomputed_regions_draw_the_same_masks(sequence):
    for kept, again in zip(
        masks_and_grads(sequence=sequence), masks_and_grads(sequence=sequence, recompute=True), strict=True
    ):
        for name, grad in kept[1].items():
            torch.testing.assert_close(again[1][name], grad)
        first, second = again[0]["blocks.0.inside"]
        assert torch.equal(first, second)


@pytest.mark.parametrize("recompute", [False, True])
def test_generators_are_equal_on_all_ranks_afterwards(recompute):
    first, second = masks_and_grads(recompute=recompute)
    assert torch.equal(first[2], second[2])


def test_evaluation_draws_no_random_numbers():
    before = run_ranks(_state_before_forward, 1)[0]
    assert torch.equal(masks_and_grads(training=False)[0][2], before)


def _state_before_forward(world):
    torch.manual_seed(0)
    Net()
    torch.randn(2, 4, 8)
    return torch.get_rng_state()


def test_models_without_dropout_are_left_alone():
    assert not uses_dropout(models.decoder("gpt2-tiny"))
    assert not uses_dropout(Net(p=0.0))


def test_a_rate_in_a_config_counts_as_dropout():
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    with torch.device("meta"):
        assert uses_dropout(transformers.LlamaModel(transformers.LlamaConfig(**shape, attention_dropout=0.1)))
        assert not uses_dropout(transformers.LlamaModel(transformers.LlamaConfig(**shape)))
