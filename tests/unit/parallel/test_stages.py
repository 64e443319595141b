"""Models taken apart into pipeline stages."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from refusals import refuses
from shardwise.models import decoder
from shardwise.parallel.stage_gate import pack
from shardwise.parallel.stages import find_layers, split_stages
from shardwise.plans.catalogue import DecoderConfig
from shardwise.plans.pipeline import StageSplit

CPU = torch.device("cpu")
TWO = StageSplit(bounds=(0, 2, 4), ranks=(0, 1))


def small_decoder(**changes):
    config = {"family": "llama", "vocab_size": 11, "context": 8, "width": 8, "num_layers": 4, "num_heads": 2}
    return decoder(DecoderConfig(**(config | changes)))


def halves(module, layers="blocks", split=TWO):
    return [split_stages(copy.deepcopy(module), split, rank, layers=layers, device=CPU)[0] for rank in (0, 1)]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x)


class Twins(nn.Module):
    def __init__(self, first=2, second=2):
        super().__init__()
        self.encoder = nn.ModuleList(Block() for _ in range(first))
        self.decoder = nn.ModuleList(Block() for _ in range(second))


def test_layers_are_the_repeated_blocks_with_most_parameters():
    assert find_layers(small_decoder()) == "blocks"
    assert find_layers(Twins(8, 1)) == "encoder"
    assert find_layers(nn.Sequential(Block(), Block())) == ""


def test_two_lists_of_like_size_are_refused_by_both_names():
    with refuses("support.pipeline-several-lists", "encoder, decoder", "Job(layers='encoder')"):
        find_layers(Twins())


def test_layers_named_by_the_job_are_taken():
    assert find_layers(Twins(), "decoder") == "decoder"


def test_layers_the_model_has_not_are_refused_with_the_nearest():
    with refuses("job.layers-not-found", "encodr", "'encoder'"):
        find_layers(Twins(), "encodr")


def test_model_without_repeated_blocks_is_refused():
    with refuses("support.pipeline-no-blocks"):
        find_layers(nn.Linear(2, 2))


def test_stages_own_every_parameter_once_under_its_own_name():
    model = small_decoder(family="gpt2")
    first, last = ({name for name, _ in stage.named_parameters()} for stage in halves(model))
    assert first | last == {name for name, _ in model.named_parameters()}
    assert not first & last
    assert {"embed.weight", "positions.weight", "blocks.1.attn.out.weight"} <= first
    assert {"blocks.2.attn.out.weight", "norm.weight", "head.weight"} <= last


def test_several_stages_of_a_rank_share_nothing():
    split = StageSplit(bounds=(0, 1, 2, 3, 4), ranks=(0, 1, 0, 1))
    stages = split_stages(small_decoder(), split, 1, layers="blocks", device=CPU)
    assert [stage.index for stage in stages] == [1, 3]
    names = [[name for name, _ in stage.named_parameters()] for stage in stages]
    assert all(name.startswith("blocks.1.") for name in names[0])
    assert not set(names[0]) & set(names[1])


def test_meta_model_stays_there_and_what_is_elsewhere_takes_no_memory():
    with torch.device("meta"):
        model = small_decoder(vocab_size=1_000_000, width=1024)
    last = split_stages(model, TWO, 1, layers="blocks", device=CPU)[0]
    assert all(parameter.is_meta for parameter in last.parameters())
    elsewhere = last.user_module.embed.weight
    assert elsewhere.shape == (1_000_000, 1024)
    assert elsewhere.untyped_storage().nbytes() == 4
    assert elsewhere.isnan()[0, 0]


def test_stub_is_still_of_its_class_with_its_plain_attributes():
    class Numbered(Block):
        def __init__(self, number):
            super().__init__()
            self.number = number

    model = nn.Sequential(*(Numbered(i) for i in range(4)))
    last = halves(model, layers="")[1]
    stub = last.user_module[1]
    assert isinstance(stub, Numbered)
    assert stub.number == 1
    assert not list(stub.parameters())


def test_stub_shows_its_parts_without_owning_them():
    (_, second) = halves(nn.Sequential(*(Block() for _ in range(4))), layers="")
    stub = second.user_module[0]
    assert stub.inner.weight.shape == (4, 4)
    assert stub.inner.weight.isnan().all()
    assert {name.partition(".")[0] for name, _ in second.named_parameters()} == {"2", "3"}


def test_training_mode_of_a_stage_is_that_of_the_users_module():
    first, _ = halves(small_decoder().eval())
    assert not first.training
    first.train()
    assert first.user_module.training
    assert first.user_module.blocks[0].training


def test_tied_embedding_and_head_are_on_both_ends_under_the_first_name():
    model = small_decoder(tie_head=True)
    first, last = halves(model)
    assert "embed.weight" in dict(first.named_parameters())
    assert dict(last.named_parameters())["embed.weight"] is last.user_module.head.weight
    assert {name for stage in (first, last) for name, _ in stage.named_parameters()} == {
        name for name, _ in model.named_parameters()
    }
    assert last.user_module.embed.weight.isnan().all()


def test_module_that_stands_before_and_after_the_layers_is_on_both_ends():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.layers = nn.ModuleList(Block() for _ in range(4))
            self.last = self.first

    first, last = halves(Shared(), layers="layers")
    assert {"first.weight", "first.bias"} <= dict(first.named_parameters()).keys()
    assert {"first.weight", "first.bias"} <= dict(last.named_parameters()).keys()


def test_layers_that_share_a_parameter_are_refused_by_both_names():
    layers = nn.Sequential(*(Block() for _ in range(4)))
    layers[3].inner.weight = layers[0].inner.weight
    both = "0.inner.weight and 3.inner.weight"
    with refuses("support.pipeline-tied-weights", both, "stages 0 and 1", "pp=1"):
        halves(layers, layers="")


def test_stages_in_a_row_compute_what_the_whole_does():
    torch.manual_seed(0)
    model, tokens = small_decoder(), torch.randint(0, 11, (2, 5))
    first, last = halves(model)
    first.connect()
    first.program = last.program = lambda module: module(tokens)
    sent = first()
    last.incoming = first.outgoing
    torch.testing.assert_close(last(*sent), model(tokens))


class Unusual(nn.Module):
    """Runs its layers in a way of its own."""

    def __init__(self, order):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.order = order

    def forward(self, x):
        for number in self.order:
            x = self.layers[number](x)
        return x


@pytest.mark.parametrize(("order", "layer"), [([0, 1, 0, 1, 2, 3], "layers.0"), ([1, 2, 3], "layers.3")])
def test_layers_out_of_order_are_refused(order, layer):
    _, last = halves(Unusual(order), layers="layers")
    received, last.incoming = pack(torch.ones(4), "layers.1")
    last.program = lambda module: module(torch.ones(4))
    with refuses("support.pipeline-layer-order", layer):
        last(*received)


def test_forward_that_misses_its_last_layer_is_refused():
    first, _ = halves(Unusual([0]), layers="layers")
    first.connect()
    first.program = lambda module: module(torch.ones(4))
    with refuses("support.pipeline-layer-skipped", "layers.1"):
        first()


def test_part_registered_before_the_layers_and_used_after_is_refused_by_name():
    class Early(nn.Module):
        def __init__(self):
            super().__init__()
            self.final = nn.Linear(4, 4)
            self.layers = nn.ModuleList(Block() for _ in range(4))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return self.final(x)

    first, last = halves(Early(), layers="layers")
    first.connect()
    first.program = last.program = lambda module: module(torch.ones(4))
    sent = first()
    last.incoming = first.outgoing
    with refuses("support.pipeline-registration-order", "final"):
        last(*sent)


class Layered(nn.Module):
    """Runs each layer by `run` and multiplies the output with `factor(model)`."""

    def __init__(self, run=lambda layer, x: layer(x), factor=lambda _: 1.0):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.run, self.factor = run, factor

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = self.run(layer, x)
        return x * self.factor(self)


def through_both(model):
    """Return the output of two stages in a row, and the output of the whole model."""
    value = torch.linspace(-1, 1, 8).view(2, 4)
    first, last = halves(model, layers="layers")
    first.connect()
    first.program = last.program = lambda module: module(value)
    sent = first()
    last.incoming = first.outgoing
    return last(*sent), model(value)


def reentrant(layer, x):
    return checkpoint(layer, x, use_reentrant=True)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_boundary_of_stages_inside_reentrant_checkpointing_is_refused():
    with refuses("support.pipeline-reentrant-checkpoint", "layers.1", "use_reentrant=False"):
        through_both(Layered(reentrant))
    _, last = halves(Layered(reentrant), layers="layers")
    received, last.incoming = pack(torch.ones(2, 4, requires_grad=True), "layers.1")
    last.program = lambda module: module(torch.ones(2, 4))
    with refuses("support.pipeline-reentrant-checkpoint", "layers.1"):
        last(*received)


def weight_decay(model):
    return sum(parameter.square().sum() for parameter in model.parameters())


def linear_decay(model):
    return sum(part.weight.square().sum() for part in model.layers.modules() if isinstance(part, nn.Linear))


@pytest.mark.parametrize(("factor", "name"), [(weight_decay, "the model"), (linear_decay, "layers")])
def test_forward_that_iterates_over_parts_of_other_stages_is_refused(factor, name):
    with refuses("support.pipeline-iterates-modules", name):
        through_both(Layered(factor=factor))


def test_forward_that_looks_at_one_parameter_and_checkpoints_without_reentry_is_right():
    run = partial(checkpoint, use_reentrant=False)
    found, expected = through_both(Layered(run, lambda model: next(model.parameters()).element_size()))
    torch.testing.assert_close(found, expected)
    assert found.requires_grad
