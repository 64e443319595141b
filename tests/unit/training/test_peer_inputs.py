"""Ranks that hold one model together are fed one batch, or every one of them refuses."""

import msgspec
import pytest
import torch
from training.test_strategies import check_equal, trained

import shardwise as sw
from jobs import sentences_job
from refusals import refuses
from shardwise.errors import JobError
from shardwise.testing import run_ranks
from shardwise.training.build import build_step


def own_loop(world, change):
    """Train a tensor-parallel model in a loop of its own; `change(tokens, labels, rank)` is what each rank is fed."""
    torch.manual_seed(0)
    model = sw.parallelize(sw.models.decoder("gpt2-tiny", vocab_size=50), sw.Plan.preset("tp", world.size), world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(5):
        tokens, labels = change(*torch.randint(0, 50, (2, 4, 8), generator=generator), world.rank)
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def refused(world, change, code):
    with refuses(code, "rank 1", "rank 0"):
        own_loop(world, change)
    return True


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda tokens, labels, rank: (tokens + rank, labels), "data.peer-inputs-differ"),
        (lambda tokens, labels, rank: (tokens.roll(rank, 0), labels), "data.peer-inputs-differ"),
        (lambda tokens, labels, rank: (tokens[rank:], labels[rank:]), "data.peer-inputs-differ"),
        (lambda tokens, labels, rank: (tokens, labels.roll(rank, 0)), "data.peer-labels-differ"),
    ],
    ids=["tokens", "order", "rows", "labels"],
)
def test_tensor_parallel_ranks_fed_different_batches_all_refuse(change, code):
    assert run_ranks(refused, 2, change, code) == [True, True]


def test_tensor_parallel_ranks_fed_one_batch_train_alike():
    first, second = run_ranks(own_loop, 2, lambda tokens, labels, _: (tokens, labels))
    assert first == second


class Curved(torch.nn.Module):
    """A learned activation between column and row: the gradient of its weight is partial on each rank."""

    def __init__(self):
        super().__init__()
        self.embed, self.up, self.down = torch.nn.Embedding(50, 8), torch.nn.Linear(8, 16), torch.nn.Linear(16, 50)
        self.curve, self.norm = torch.nn.PReLU(), torch.nn.LayerNorm(8)

    def tensor_rules(self):
        return {"up": "column", "down": "row"}

    def forward(self, tokens):
        return self.down(self.curve(self.up(self.norm(self.embed(tokens)))))


def test_partial_gradients_of_whole_parameters_are_refused_with_the_rule_that_sums_them():
    def body(world):
        with refuses("support.tp-unequal-gradients", "curve.weight", '"curve": "summed"'):
            trained(world, sentences_job(model=Curved), "tp", {})
        loss = sw.parallelize(Curved(), sw.Plan.preset("tp", world.size), world)(torch.arange(6)[None]).square().sum()
        with refuses("support.tp-unequal-gradients", "curve.weight"):
            loss.backward()
        return True

    assert run_ranks(body, 2) == [True, True]
    check_equal(sentences_job(model=Curved, tensor_rules={**Curved().tensor_rules(), "curve": "summed"}), 2, "tp", {})


def test_replicas_of_split_weights_are_refused_in_a_loop_of_ones_own():
    def body(world):
        with refuses("support.own-loop-split-replicas", "shard2.tp2"):
            sw.parallelize(Curved(), sw.Plan.preset("replicate2.tp2", world.size), world)
        return True

    assert run_ranks(body, 4) == [True] * 4


def stepped(world, name, change):
    """Train by a step on batches of its own; all ranks refuse or none."""
    plan = sw.Plan.preset(name, world.size, batch_size=8)
    step = build_step(sentences_job("llama-tiny", steps=2), plan, world)
    try:
        for batch in step.feed:
            step(
                msgspec.structs.replace(batch, micro_batches=[change(each, world.rank) for each in batch.micro_batches])
            )
    except JobError as error:
        return error.code, str(error)
    return "trained"


def rolled(micro_batch, rank):
    """Give rank 1 the tokens in another order."""
    change = {key: roll(getattr(micro_batch, key), rank) for key in ("batch", "whole")}
    return msgspec.structs.replace(micro_batch, **change)


def roll(batch, rank):
    return None if batch is None else tuple(tensor.roll(rank, -1) for tensor in batch)


def unsliced(micro_batch, _):
    """Feed whole rows to the ranks of a context-parallel group."""
    return msgspec.structs.replace(micro_batch, batch=micro_batch.unsharded, whole=None)


def kept(micro_batch, _):
    return micro_batch


@pytest.mark.parametrize("name", ["tp", "cp", "pp"])
def test_peers_of_a_step_fed_different_batches_all_refuse(name):
    found = run_ranks(stepped, 2, name, rolled)
    assert found[0] == found[1]
    code, sentence = found[0]
    assert code == "data.peer-batches-differ"
    assert sentence.startswith("rank 1 ")
    assert "rank 0" in sentence


def test_context_parallel_ranks_are_fed_their_slices():
    found = run_ranks(stepped, 2, "cp", unsliced)
    assert found[0] == found[1]
    code, sentence = found[0]
    assert code == "data.peer-tokens-unsliced"
    assert sentence.startswith("ranks 0, 1 ")


@pytest.mark.representative("pp2.shard2", "replicate2.tp2")
@pytest.mark.parametrize("name", ["cp2.tp2", "replicate2.tp2", "pp2.shard2"])
def test_peers_fed_what_the_feed_gives_train(name):
    assert run_ranks(stepped, 4, name, kept) == ["trained"] * 4


def test_data_that_is_random_by_rank_is_refused():
    class Augmented(torch.utils.data.Dataset):
        """Draws from a generator of its own, which no seed of the job or of a sample sets."""

        def __init__(self, rank):
            self.generator = torch.Generator().manual_seed(rank)

        def __len__(self):
            return 16

        def __getitem__(self, index):
            tokens = torch.randint(0, 50, (9,), generator=self.generator)
            return tokens[:-1], tokens[1:]

    def body(world):
        data = Augmented(world.rank)
        job = sentences_job(steps=1, data=lambda split: data if split == "train" else None)
        step = build_step(job, sw.Plan.preset("tp", world.size, batch_size=8), world)
        with refuses("data.peer-batches-differ", "rank 0"):
            step(next(iter(step.feed)))
        return True

    assert run_ranks(body, 2) == [True, True]
