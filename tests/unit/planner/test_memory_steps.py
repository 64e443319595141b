"""Predicted memory beside the live tensors of a step of rank 0, for models and plans with rules of their own."""

import contextlib
import dataclasses

import pytest
import torch

import shardwise as sw
from shardwise.errors import JobError
from shardwise.hardware.calibration import default_calibration
from shardwise.hardware.cluster import parse_cluster
from shardwise.measurement.memory import LiveBytes
from shardwise.measurement.step import settle_gradients
from shardwise.parallel.float8 import select_linears
from shardwise.parallel.tensor_rules import find_rules
from shardwise.planner.cost.compute import float8_weights
from shardwise.planner.cost.memory import ADAMW, SGD, predict_memory
from shardwise.planner.cost.time import predict_time
from shardwise.planner.model import forms
from shardwise.planner.model.decoder_parts import published
from shardwise.planner.model.forms import Model
from shardwise.planner.trace.trace import describe
from shardwise.plans import Plan, Precision
from shardwise.plans.sections import Float8
from shardwise.testing import fake_world, run_forked

BF16 = Precision(compute="bf16")


class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, index):
        return torch.zeros(3, 64, 64), index % 10


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, index):
        row = torch.arange(33) + index
        return row[:-1], row[1:]


def image_job(batch_size):
    return sw.Job(
        model=sw.models.resnet18,
        data=lambda split: Images() if split == "train" else None,
        loss=sw.losses.cross_entropy,
        optimizer=sw.sgd(lr=1e-4),
        batch_size=batch_size,
        steps=3,
    )


def token_job(batch_size):
    return sw.Job(
        model=lambda: sw.models.decoder("llama-tiny", vocab_size=4096),
        data=lambda split: Tokens() if split == "train" else None,
        loss=sw.losses.token_cross_entropy,
        optimizer=sw.adamw(lr=1e-4),
        batch_size=batch_size,
        steps=3,
    )


def compared(job, plan, optimizer=ADAMW):
    """Return predicted memory, the bytes of live tensors, and those of gradients before the update."""

    def body(_):
        torch.set_num_threads(1)
        predicted = predict_memory(describe(job, "bf16").for_plan(plan), plan, optimizer=optimizer, context=0.0)
        made, gradients = [], []

        def settle():
            gradients.append(sum(each.grad.nbytes for _, each in made[0].named_parameters()))
            settle_gradients(made[0])

        with fake_world(plan.layout.world_size, device="cpu") as world:
            made.append(sw.build_step(job, plan, world, before_update=settle))
            with torch.compiler.set_stance("force_eager"), LiveBytes("cpu") as live:
                live.watch("parameters", [parameter for _, parameter in made[0].named_parameters()])
                for batch in made[0].feed:
                    if made[0](batch).number == 0:
                        live.reset_peak()
        return predicted, live.peak_bytes, gradients[-1]

    return run_forked(body, 1, timeout_s=100)[0]


def test_no_moment_of_a_part_has_gradients_of_other_parts():
    """Tensors that are freed after backward, when all gradients exist, belong to no part."""
    for part in describe(token_job(8), "bf16").gathered.parts:
        for moment in part.footprints["none"].backward:
            assert moment.gradients <= part.numel


@pytest.mark.prove
@pytest.mark.parametrize(("name", "ranks", "recompute"), [("zero2", 4, "full"), ("zero1", 2, "selective")])
def test_memory_of_a_bf16_resnet_is_what_a_step_holds(name, ranks, recompute):
    """Autocast keeps no tensor of convolutions and batch norms that the trace does not see."""
    plan = Plan.preset(name, ranks, batch_size=ranks * 8, accumulation=2)
    plan = dataclasses.replace(plan, precision=BF16, recompute=recompute, batch_norm="local")
    predicted, live, _ = compared(image_job(plan.batch_size), plan, SGD)
    assert predicted.peak == pytest.approx(live, rel=0.03)


@pytest.mark.representative("16")
@pytest.mark.parametrize("micro_batch", [1, 16])
def test_a_head_that_is_compiled_with_the_loss_keeps_the_root_gathered(micro_batch, monkeypatch):
    monkeypatch.setattr(forms, "compile_loss", lambda shape, _: shape)  # a step that is counted runs eagerly
    plan = Plan.preset("zero3", 4, batch_size=4 * micro_batch)
    plan = dataclasses.replace(plan, precision=BF16, compile="blocks", recompute="full")
    predicted, live, _ = compared(token_job(plan.batch_size), plan)
    assert predicted.peak == pytest.approx(live, rel=0.04)


def test_accumulated_gradients_of_bf16_parameters_are_in_fp32_and_summed_after_backward():
    precision = Precision(compute="bf16", parameter="bf16", optimizer="fp32")
    plan = dataclasses.replace(Plan.preset("ddp", 2, batch_size=8, accumulation=2), precision=precision)
    predicted, _, gradients = compared(token_job(8), plan)
    assert predicted.at_peak["gradients"] == gradients
    cluster = parse_cluster("2xA100-80GB")
    shape = described().for_plan(plan)
    time = predict_time(shape, plan, cluster, default_calibration(cluster.node))
    assert time.parts["sum"] > 0
    assert "reduce" not in time.parts or time.parts["reduce"] == 0


def described(name="gpt2-xl"):
    plain, gathered = (published(name, compute="bf16", gathered=each) for each in (False, True))
    return Model(plain=plain, gathered=gathered)


def test_compiled_float8_layers_save_no_inputs_of_their_products_with_tensorwise_scales():
    model, activations = described("llama-7b"), {}
    tensorwise = Precision(compute="float8")
    base = dataclasses.replace(Plan.preset("ddp", 8, batch_size=8), compile="blocks", precision=tensorwise)
    rowwise = dataclasses.replace(base, float8=Float8(recipe="rowwise"))
    wide = dataclasses.replace(base, precision=BF16)
    for name, plan in {"tensorwise": base, "rowwise": rowwise, "bf16": wide}.items():
        activations[name] = predict_memory(model.for_plan(plan), plan).at_peak["activations"]
    per_token = 2 * 4096 + 11_008  # two norms, and the product of gate and up
    assert activations["rowwise"] == activations["bf16"]
    assert activations["bf16"] - activations["tensorwise"] == pytest.approx(32 * 4096 * 2 * per_token, rel=0.001)


def test_compiled_blocks_keep_casts_of_weights_only_without_recompute():
    model, casts = described("llama-7b"), {}
    for recompute in ("none", "full"):
        plan = Plan(precision=BF16, compile="blocks", recompute=recompute)
        casts[recompute] = predict_memory(model.for_plan(plan), plan).at_peak["casts"]
    block = 2 * (4 * 4096**2 + 3 * 4096 * 11_008)
    assert casts["none"] >= 32 * block
    assert casts["full"] < 2 * block


@pytest.mark.parametrize("layout", ["ddp", "replicate4.tp2", "replicate2.tp4", "tp8", "shard4.tp2"])
@pytest.mark.parametrize("modules", [(), ("blocks.0.attn.qkv", "blocks.1.mlp.down")], ids=["chosen", "named"])
def test_predictions_take_those_layers_in_float8_that_training_takes(layout, modules):
    (block,) = (part for part in published("llama-7b", compute="bf16", gathered=False).parts if part.kind == "block")
    with torch.device("meta"):
        module = sw.models.decoder("llama-7b", num_layers=2)
    plan = Plan.preset(layout, 8, batch_size=8)
    plan = dataclasses.replace(plan, precision=Precision(compute="float8"), float8=Float8(modules=modules))
    trained = frozenset()
    with contextlib.suppress(JobError):  # no layer is large enough
        trained = select_linears(module, plan, find_rules(module, None)).names
    assert float8_weights(block, plan) == {f"{name.split('.', 2)[2]}.weight" for name in trained}


@pytest.mark.parametrize("precision", [BF16, Precision(compute="float8")], ids=["bf16", "float8"])
def test_each_compiled_block_that_is_recomputed_saves_memory(precision):
    model, peaks = described("llama-7b"), []
    for number in range(0, 33, 4):
        changes = {"recompute": "full", "recompute_blocks": number} if number else {}
        plan = dataclasses.replace(Plan.preset("ddp", 8, batch_size=64), compile="blocks", precision=precision)
        plan = dataclasses.replace(plan, **changes)
        peaks.append(predict_memory(model.for_plan(plan), plan).peak)
    assert peaks == sorted(peaks, reverse=True)


def test_the_gradient_of_a_tied_head_is_counted_once():
    job = dataclasses.replace(
        token_job(4), model=lambda: sw.models.decoder("gpt2-tiny", vocab_size=16_384, tie_head=True)
    )
    plan = dataclasses.replace(Plan.preset("zero3", 4, batch_size=4), precision=BF16)
    predicted, live, _ = compared(job, plan)
    assert predicted.peak == pytest.approx(live, rel=0.03)


def test_bf16_parameters_have_bf16_activations_under_every_strategy():
    model = described("llama-7b")
    stored = Precision(compute="bf16", parameter="bf16", reduce="bf16")
    saved = {}
    for name, precision in {"ddp": stored, "zero3": BF16}.items():
        plan = dataclasses.replace(Plan.preset(name, 8, batch_size=8), precision=precision)
        saved[name] = predict_memory(model.for_plan(plan), plan).at_peak["activations"]
    assert saved["ddp"] == saved["zero3"]


def test_fsdp_gathers_float8_weights_in_one_byte():
    low = dataclasses.replace(Plan.preset("zero2", 8, batch_size=8), precision=Precision(compute="float8"))
    rows = dataclasses.replace(low, float8=Float8(recipe="rowwise"))
    high = dataclasses.replace(low, precision=BF16)
    model, cluster = described("llama-7b"), parse_cluster("8xH100")
    gathered = {}
    for key, plan in {"float8": low, "rowwise": rows, "bf16": high}.items():
        gathered[key] = predict_memory(model.for_plan(plan), plan).at_peak["gathered"]
    matrices = 4 * 4096**2 + 3 * 4096 * 11008
    # All 32 blocks, the buffer of one all-gather, and the block before it, which is not yet freed.
    assert gathered["bf16"] - gathered["float8"] == pytest.approx(34 * matrices, rel=1e-4)
    assert gathered["rowwise"] == gathered["bf16"]
    calibration = default_calibration(cluster.node)
    parts = [predict_time(model.for_plan(plan), plan, cluster, calibration).seconds for plan in (low, rows)]
    assert parts[0] < parts[1]
