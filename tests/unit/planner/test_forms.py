"""Forms of a model: slices of its tokens, and a loss fused with its head."""

import dataclasses

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.layout import Layout
from shardwise.measurement.memory import LiveBytes
from shardwise.parallel import linear_cross_entropy as real
from shardwise.planner.cost.memory import predict_memory
from shardwise.planner.cost.time import training_flops
from shardwise.planner.model import forms as fused
from shardwise.planner.model.decoder_parts import decoder_shape, published
from shardwise.planner.model.forms import Model, split_context
from shardwise.planner.trace.trace import trace
from shardwise.plans import Plan, Precision
from shardwise.plans.catalogue import DecoderConfig
from shardwise.plans.sections import Offload

GPT2 = DecoderConfig(family="gpt2", vocab_size=999, context=64, width=64, num_layers=2, num_heads=4, tie_head=True)
BF16 = Precision(compute="bf16")


def llama(length=32_768, **options):
    plain, gathered = (
        published("llama3-8b", compute="bf16", gathered=gathered, length=length, **options)
        for gathered in (False, True)
    )
    return Model(plain=plain, gathered=gathered)


@pytest.mark.parametrize("policy", ["none", "selective", "full"])
def test_activations_of_a_slice_are_a_share_of_the_whole(policy):
    whole = llama().plain.parts[1].footprints[policy]
    slices = [split_context(llama().plain, cp, 1).parts[1].footprints[policy] for cp in (2, 4, 8)]
    for cp, part in zip((2, 4, 8), slices, strict=True):
        assert part.saved.at(1) == pytest.approx(whole.saved.at(1) / cp, rel=0.12)
    assert slices[0].saved.at(1) == pytest.approx(4 * slices[2].saved.at(1))


def test_slices_share_the_work():
    shape = llama().plain
    for before, after in zip(shape.parts, split_context(shape, 4, 1).parts, strict=True):
        assert 4 * training_flops(after) == pytest.approx(training_flops(before))
        assert [(item.queries, item.keys) for item in after.work.attentions] == [
            (item.queries, item.keys) for item in before.work.attentions
        ]


@pytest.mark.parametrize(("cp", "tp", "kv_heads"), [(4, 1, 8), (8, 1, 8), (16, 1, 16), (4, 4, 16)])
def test_one_rank_sends_its_queries_keys_values_and_results(cp, tp, kv_heads):
    """With fewer heads of keys than slices they are repeated: 8 heads split by tp 4 leave 2, which 4 slices share."""
    block = split_context(llama().plain, cp, tp).parts[1]
    token = 2 * (2 * 4096 + 2 * kv_heads * 128)
    assert block.cp_exchanged.at(1) == pytest.approx(32_768 * token / cp)
    assert block.num_cp_exchanges == 2


def test_a_form_is_made_once_and_forms_do_not_get_in_each_others_way():
    model = llama()
    sliced = Plan(layout=Layout(cp=2), precision=BF16)
    both = Plan(layout=Layout(cp=2), precision=BF16, fused_loss=True, micro_batch=2)
    merged = Plan(precision=BF16, fused_loss=True, micro_batch=2)
    forms = [model.for_plan(plan) for plan in (sliced, both, merged)]
    assert [id(model.for_plan(plan)) for plan in (sliced, both, merged)] == [id(form) for form in forms]
    rows = [form.parts[1].work.matmuls[0].rows for form in forms]
    assert rows == [16_384, 16_384, 32_768]
    assert model.for_plan(Plan(precision=BF16)) is model.plain


def test_weights_are_sharded_over_slices_as_over_shards():
    model = llama()
    cp = Plan(layout=Layout(cp=8), zero=3, precision=BF16)
    shard = Plan(layout=Layout(shard=8), zero=3, precision=BF16)
    resident = [predict_memory(model.for_plan(plan), plan).at_peak for plan in (cp, shard)]
    for name in ("parameters", "optimizer states"):
        assert resident[0][name] == resident[1][name]
    assert resident[0]["activations"] < 0.15 * resident[1]["activations"]


@pytest.mark.parametrize("elements", [2**28, 2**17])
def test_a_fused_head_holds_what_the_loss_holds(elements, monkeypatch):
    monkeypatch.setattr(fused, "CHUNK_ELEMENTS", elements)
    rows, length = 8, 64
    norm, head = nn.LayerNorm(GPT2.width), nn.Linear(GPT2.width, GPT2.vocab_size, bias=False)
    x = torch.randn(rows, length, GPT2.width, requires_grad=True)
    targets = torch.zeros(rows, length, dtype=torch.long)
    with LiveBytes("cpu") as live:
        live.watch("before", [x, targets, head.weight, *norm.parameters()])
        before = live.current_bytes
        live.reset_peak()
        loss = real.linear_cross_entropy(norm(x), head.weight, None, targets, ignore=-100)
        left, highest = live.current_bytes - before, live.peak_bytes - before
        live.reset_peak()
        loss.backward()
        backward = live.peak_bytes - before
    shape = decoder_shape("", GPT2, length, compute="fp32", gathered=False)
    part = fused.fuse_loss(shape, rows, 1).parts[-1].footprints["none"]
    moments = max(moment.resident.at(rows) + 4 * moment.gradients for moment in part.backward)
    assert (part.saved.at(rows), part.forward.at(rows), moments) == pytest.approx((left, highest, backward), rel=0.02)


def test_a_fused_loss_spares_most_of_a_large_vocabulary():
    model = llama(8192)
    plan = Plan(layout=Layout(shard=64), zero=3, precision=BF16, recompute="full", micro_batch=4)
    plain, lean = (
        predict_memory(model.for_plan(each), each).peak for each in (plan, dataclasses.replace(plan, fused_loss=True))
    )
    logits = 4 * 8192 * 128_256
    assert plain - lean > 6 * logits


def test_a_model_without_a_known_head_is_left_as_it_is():
    shape = published("t5-small", compute="bf16", gathered=False)
    assert Model(plain=shape, gathered=shape).for_plan(Plan(precision=BF16, fused_loss=True)) is shape


@pytest.mark.parametrize("sync", ["last", "every"])
def test_shards_of_gradients_are_on_the_host_alone_where_parameters_are(sync):
    def memory(**changes):
        plan = Plan(layout=Layout(shard=8), zero=3, precision=BF16, accumulation=4, gradient_sync=sync, **changes)
        return predict_memory(published("llama-7b", compute="bf16", gathered=True), plan), plan

    shards = 4 * published("llama-7b", compute="bf16", gathered=True).numel / 8
    (on_device, plan), (offloaded, _) = memory(), memory(offload=Offload(parameters="cpu", optimizer="cpu"))
    if sync == "last":  # FSDP2 adds whole gradients up on the device until the last micro-batch
        assert offloaded.at_peak["gradients"] == on_device.at_peak["gradients"] == pytest.approx(8 * shards, rel=0.01)
    else:
        assert on_device.at_peak["gradients"] == pytest.approx(shards, rel=0.01)
        assert "gradients" not in offloaded.at_peak
    assert offloaded.host == pytest.approx(4 * shards, rel=0.01)  # parameter, gradient and two moments
    assert plan.gradient_sync == sync


def test_sharded_weights_are_not_yet_gathered_in_the_backward_pass_of_the_loss():
    plan = Plan(layout=Layout(shard=8), zero=3, micro_batch=8, recompute="full", precision=Precision(compute="bf16"))
    for lora in (0, 16):  # adapters freeze the head, whose backward has no gradient of its own
        memory = predict_memory(published("llama-7b", compute="bf16", gathered=True, lora=lora), plan)
        assert (memory.phase, "gathered" in memory.at_peak) == ("backward", False)


def test_frozen_weights_beside_adapters_are_stored_in_the_compute_dtype():
    def parameters(compute):
        shape = published("gpt2", compute=compute, gathered=False, lora=8)
        frozen = sum(w.numel * part.count for part in shape.parts for w in part.weights if not (w.trained or w.tied))
        memory = predict_memory(shape, Plan(precision=Precision(compute=compute)))
        return frozen, memory.at_peak["parameters"] - 4 * (shape.numel - frozen), memory

    frozen, resident, memory = parameters("bf16")
    assert resident == 2 * frozen
    assert memory.at_peak["casts"] < 0.02 * resident  # of the adapters, which autocast casts
    assert parameters("fp32")[1] == 4 * frozen


def test_adapters_beside_a_base_in_bf16_hold_what_a_job_of_them_holds():
    sample = (torch.arange(1024), torch.arange(1024))
    job = sw.Job(
        model=lambda: sw.models.decoder("gpt2").bfloat16(),
        data=lambda split: [sample] * 8,
        loss=sw.losses.token_cross_entropy,
        optimizer=sw.adamw(lr=1e-3),
        batch_size=4,
        steps=1,
        lora=sw.Lora(targets=("qkv", "attn.out", "up", "down"), rank=8),
    )
    plan = Plan(precision=BF16, micro_batch=4)
    traced = predict_memory(trace(job, compute="bf16", gathered=False), plan)
    closed = predict_memory(published("gpt2", compute="bf16", gathered=False, lora=8), plan)
    assert closed.at_peak["parameters"] == pytest.approx(traced.at_peak["parameters"], rel=1e-3)
    assert closed.at_peak["activations"] == pytest.approx(traced.at_peak["activations"], rel=0.03)
    assert closed.at_peak["casts"] == pytest.approx(traced.at_peak["casts"], rel=0.01)
