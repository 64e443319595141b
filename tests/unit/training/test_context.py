"""Training on slices of sequences: evaluation, random masks, and what is saved."""

import dataclasses

import pytest
import torch

import shardwise as sw
from jobs import SENTENCES, sentences_job
from refusals import refuses
from shardwise.errors import JobError
from shardwise.layout import Layout
from shardwise.testing import run_ranks
from shardwise.training.build import build_step
from shardwise.training.evaluate import evaluate
from shardwise.training.preflight import ModelRules

RIGHT = sw.Metric(
    sum=lambda output, batch: (output.argmax(-1) == batch[-1]).sum(), count=sw.losses.token_cross_entropy.count
)


def evaluated(world):
    job = sentences_job("llama-tiny", metrics={"right": RIGHT}, steps=1)
    plan = sw.Plan.preset("cp", world.size, batch_size=8)
    step = build_step(job, plan, world)
    return evaluate(step, SENTENCES)


def test_evaluation_on_slices_is_evaluation_of_whole_sequences():
    (whole,) = run_ranks(evaluated, 1)
    for found in run_ranks(evaluated, 2):
        assert found == pytest.approx(whole, rel=1e-6)


def test_slices_draw_masks_of_their_own_and_tensor_peers_the_same():
    def body(world):
        layout = Layout(cp=2, tp=2)
        build_step(sentences_job(), sw.Plan.preset(str(layout), world.size, batch_size=8), world)
        return torch.rand(()).item()

    first, second, third, fourth = run_ranks(body, 4)
    assert first == second != third == fourth


class Uneven(torch.nn.Module):
    """A decoder with a weight that only the first slice uses, as an expert that gets no token of the others."""

    def __init__(self):
        super().__init__()
        self.inner = sw.models.decoder("llama-tiny", vocab_size=50, context=16)
        self.gain = torch.nn.Linear(1, 1, bias=False)

    def forward(self, tokens, position_ids=None):
        logits = self.inner(tokens, position_ids=position_ids)
        return logits if position_ids[0, 0] else logits * self.gain.weight


def test_a_weight_that_some_slices_do_not_use_is_named_on_every_rank():
    def body(world):
        step = build_step(sentences_job(model=Uneven, steps=1), sw.Plan.preset("cp", world.size, batch_size=8), world)
        with refuses("train.unused-parameters", "rank 1: gain.weight"):
            step(next(iter(step.feed)))
        return True

    assert run_ranks(body, 2) == [True, True]


def test_a_weight_that_some_slices_do_not_use_is_noted_where_parameters_are_sharded():
    def body(world):
        plan, notes = dataclasses.replace(sw.Plan.preset("cp", world.size, batch_size=8), zero=3), []
        step = build_step(sentences_job(model=Uneven, steps=1), plan, world, note=notes.append)
        step(next(iter(step.feed)))
        return notes

    assert run_ranks(body, 2) == [["parameters without gradient in the first step: rank 1: gain.weight"]] * 2


def test_parameters_are_sharded_over_slices_too_where_the_plan_shards():
    def body(world):
        step = build_step(sentences_job(), sw.Plan.preset("shard2.cp2", world.size, batch_size=8), world)
        num_local = sum(parameter.to_local().numel() for _, parameter in step.named_parameters())
        return num_local / step.num_parameters

    assert all(share < 0.27 for share in run_ranks(body, 4))


@pytest.mark.parametrize(
    ("changes", "name", "nproc", "refusal"),
    [
        ({}, "cp", 3, ("plan.cp-heads-not-divisible", "cp=3", "4 attention heads")),
        ({"loss": sw.losses.cross_entropy}, "cp", 2, ("support.cp-loss-by-sample",)),
        ({}, "pp2.cp2", 4, ("support.cp-with-pipeline", "pp2.cp2")),
    ],
)
def test_a_plan_that_cannot_split_the_sequences_is_refused_before_any_process_starts(changes, name, nproc, refusal):
    with refuses(*refusal):
        ModelRules(sentences_job(**changes))(sw.Plan.preset(name, nproc, batch_size=24))


def test_sequences_that_do_not_divide_are_refused():
    def body(world):
        job = sentences_job(model=lambda: sw.models.decoder("gpt2-tiny", num_heads=6, width=36, vocab_size=50))
        step = build_step(job, sw.Plan.preset("cp", world.size, batch_size=8), world)
        with refuses("plan.cp-sequence-not-divisible", "8 tokens", "cp=3"):
            next(iter(step.feed))
        return True

    assert run_ranks(body, 3) == [True] * 3


def test_a_loop_of_ones_own_cannot_split_sequences():
    def body(world):
        with refuses("support.own-loop-cp"):
            sw.parallelize(sw.models.decoder("gpt2-tiny"), sw.Plan.preset("cp", world.size), world)
        return True

    assert run_ranks(body, 2) == [True, True]


class Mixing(torch.nn.Module):
    """A decoder after an embedding that looks at other tokens."""

    def __init__(self, mix):
        super().__init__()
        self.decoder, self.mix = sw.models.decoder("llama-tiny", vocab_size=50, context=16), mix
        self.decoder.embed.register_forward_hook(lambda _module, _args, output: self.mix(output))

    def forward(self, tokens, position_ids=None):
        return self.decoder(tokens, position_ids=position_ids)


MIXERS = {
    "shift": lambda x: x + torch.nn.functional.pad(x[:, 1:], (0, 0, 0, 1)),
    "pool": lambda x: x + x.mean(1, keepdim=True),
    "cumulative": lambda x: x.cumsum(1),
}


def first_step(world, name, model):
    step = build_step(sentences_job(model=model, steps=1), sw.Plan.preset(name, world.size, batch_size=8), world)
    try:
        return float(step(next(iter(step.feed))).loss_sum)
    except JobError as error:
        return error.code, str(error)


@pytest.mark.parametrize("mix", MIXERS.values(), ids=MIXERS)
def test_tokens_that_are_mixed_outside_of_attention_are_refused_by_name_on_every_rank(mix):
    found = run_ranks(first_step, 2, "cp", lambda: Mixing(mix))
    assert found[0] == found[1]
    code, sentence = found[0]
    assert code == "support.cp-mixes-tokens"
    assert "decoder.embed" in sentence


def test_mobilebert_whose_embeddings_read_three_tokens_is_refused():
    transformers = pytest.importorskip("transformers")

    def model():
        config = transformers.MobileBertConfig(
            vocab_size=50, hidden_size=16, embedding_size=8, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=16, intra_bottleneck_size=8, num_feedforward_networks=1, max_position_embeddings=16,
        )  # fmt: skip
        return transformers.MobileBertForMaskedLM(config)

    def body(world):
        changes = {"model": model, "forward": lambda module, batch: module(input_ids=batch[0]).logits}
        step = build_step(sentences_job(steps=1, **changes), sw.Plan.preset("cp", world.size, batch_size=8), world)
        with refuses("support.cp-mixes-tokens", "mobilebert.embeddings"):
            step(next(iter(step.feed)))
        return True

    assert run_ranks(body, 2) == [True, True]
