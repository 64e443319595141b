"""Adapters in a model: where they go, what they compute, what is refused before anything is wrapped."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

import shardwise as sw
from refusals import refuses
from shardwise.parallel.lora import adapt_meta_model, adapted, add_adapters
from shardwise.parallel.meta_model import job_meta_model
from shardwise.parallel.parameter_rules import check_dtypes
from shardwise.parallel.recompute import find_blocks
from shardwise.parallel.tensor_rules import find_rules, split_dim, styles_by_name
from shardwise.parallel.weights import fill_parameters
from shardwise.plans import Plan, Precision

LORA = sw.Lora(rank=2, alpha=6, targets=("qkv", "out"))


def decoder():
    return sw.models.decoder("llama-tiny", vocab_size=32, width=16, num_layers=2, num_heads=4, context=8)


def meta_model(make=decoder, lora=LORA, seed=0):
    drawn = job_meta_model(make, seed=seed, weights=None, rank=0, size=1, dtype=torch.float32)
    return adapt_meta_model(drawn, lora, seed=seed)


def filled(plan):
    for unit in plan.units:
        fill_parameters(plan.module, unit.parameters, plan.weights, torch.device("cpu"))
    return plan.module


def test_only_adapters_are_trained_and_no_other_name_changes():
    module = meta_model().module
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    own = {name for name, _ in decoder().named_parameters()}
    assert {name for name, _ in module.named_parameters()} == own | trained
    assert trained == {
        f"blocks.{layer}.attn.{part}.{factor}.weight"
        for layer in (0, 1)
        for part in ("qkv", "out")
        for factor in ("lora_A", "lora_B")
    }


def test_adapters_start_at_nothing_and_differ_from_each_other():
    tokens = torch.arange(8)[None]
    plain = filled(job_meta_model(decoder, seed=0, weights=None, rank=0, size=1, dtype=torch.float32))
    module = filled(meta_model())
    assert torch.equal(module(tokens), plain(tokens))
    downs = [part.lora_A.weight for _, part in adapted(module)]
    assert not torch.equal(downs[0], downs[2])  # seeded by name
    assert all(down.abs().max() <= 16**-0.5 for down in downs)


@pytest.mark.parametrize("kind", ["linear", "conv1d"])
def test_an_adapter_adds_its_scaled_product(kind):
    from transformers.pytorch_utils import Conv1D

    module = nn.ModuleDict({"part": nn.Linear(3, 5) if kind == "linear" else Conv1D(5, 3)})
    before = copy.deepcopy(module)
    add_adapters(module, sw.Lora(rank=2, alpha=6, targets=("part",)))
    part = module["part"].to_empty(device="cpu")
    part.load_state_dict(before["part"].state_dict(), strict=False)
    nn.init.normal_(part.lora_A.weight)
    nn.init.normal_(part.lora_B.weight)
    x = torch.randn(4, 3)
    expected = before["part"](x) + 3 * x @ part.lora_A.weight.T @ part.lora_B.weight.T
    torch.testing.assert_close(part(x), expected)
    torch.testing.assert_close(copy.deepcopy(module)["part"](x), expected)


def test_a_copied_module_uses_its_own_adapter():
    module = nn.Sequential(nn.Linear(3, 3))
    add_adapters(module, sw.Lora(rank=2, targets=("0",)))
    module.to_empty(device="cpu")
    other = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in [*module.parameters(), *other.parameters()]:
            parameter.fill_(1.0)
        other[0].lora_B.weight.zero_()
    x = torch.ones(1, 3)
    assert not torch.equal(module(x), other(x))


def test_adapters_make_no_blocks_of_linear_modules():
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    add_adapters(module, sw.Lora(rank=2, targets=("0", "1")))
    assert find_blocks(module) == {}


def test_factors_are_sharded_as_the_matrix_beside_them():
    module = meta_model().module
    styles = styles_by_name(module, find_rules(module, None))
    dims = {
        name: split_dim(module.get_submodule(f"blocks.0.attn.{name}"), styles[f"blocks.0.attn.{name}"], "weight")
        for name in ("qkv", "qkv.lora_A", "qkv.lora_B", "out", "out.lora_A", "out.lora_B")
    }
    assert dims == {"qkv": 0, "qkv.lora_A": None, "qkv.lora_B": 0, "out": 1, "out.lora_A": 1, "out.lora_B": None}


class Fancy(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 1


@pytest.mark.parametrize(
    ("module", "target", "refusal"),
    [
        (nn.ModuleDict({"a": Fancy(2, 2)}), "a", ("job.lora-target-not-linear", "a Fancy")),
        (nn.ModuleDict({"a": nn.MultiheadAttention(2, 1)}), "out_proj", ("job.lora-target-not-called", "out_proj")),
        (nn.ModuleDict({"a": nn.TransformerEncoderLayer(2, 1)}), "linear1", ("job.lora-target-not-called", "linear1")),
        (nn.ModuleDict({"a": nn.Embedding(2, 2)}), "a", ("job.lora-target-unmatched", "'a'")),
    ],
)
def test_a_module_that_adapters_would_not_reach_is_refused(module, target, refusal):
    with refuses(*refusal):
        add_adapters(module, sw.Lora(targets=(target,)))


def test_a_target_that_shares_its_weight_is_refused():
    module = sw.models.decoder("gpt2-tiny", vocab_size=32)
    with refuses("job.lora-target-tied", "head", "embed", "tie_head=False"):
        add_adapters(module, sw.Lora(targets=("head",)))
    add_adapters(module, sw.Lora(targets=("qkv",)))


def test_adapters_are_added_once():
    module = nn.ModuleDict({"a": nn.Linear(2, 2)})
    add_adapters(module, sw.Lora(targets=("a",)))
    with refuses("job.lora-target-adapted"):
        add_adapters(module, sw.Lora(targets=("a",)))


def test_frozen_weights_may_be_in_the_compute_dtype_and_in_no_other():
    module = meta_model(lambda: decoder().bfloat16()).module
    assert {part.lora_A.weight.dtype for _, part in adapted(module)} == {torch.float32}
    check_dtypes(module, Plan(precision=Precision(compute="bf16")), adapted=True)
    with refuses("model.frozen-dtype-mismatch", "embed.weight (bfloat16)"):
        check_dtypes(module, Plan(), adapted=True)


def test_trained_weights_of_another_dtype_are_named_before_sharding():
    model = nn.Sequential(nn.Linear(2, 2).bfloat16(), nn.Linear(2, 2))
    plan = dataclasses.replace(Plan.preset("zero3", 2), precision=Precision(compute="bf16"))
    with refuses("model.trained-dtype-mismatch", "0.weight (bfloat16), 0.bias (bfloat16)"):
        check_dtypes(model, plan, adapted=False)
    check_dtypes(model, dataclasses.replace(plan, engine="deepspeed"), adapted=False)  # which casts by itself
    model[0].requires_grad_(False)
    check_dtypes(model, plan, adapted=False)
