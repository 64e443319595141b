"""Float8 layers: which ones a plan has, their losses and all-gathers under strategies, compiled, and after resume."""

import contextlib
import dataclasses
import functools
import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from training.test_precision import FLOAT8, LAYOUTS, MASTERS, SAVED, STEPS, alone, make_job, plan_of, trained

from jobs import points_job
from refusals import refuses
from shardwise.hardware.calibration import MatmulPoint, default_calibration
from shardwise.hardware.cluster import parse_cluster
from shardwise.job import Lora
from shardwise.models import decoder
from shardwise.parallel.float8 import Float8Layers, float8_note, select_linears, without_float8
from shardwise.parallel.tensor_rules import find_rules
from shardwise.planner.cost.compute import float8_least_width
from shardwise.planner.settle import check_model_fits
from shardwise.plans import Float8, Plan, Precision
from shardwise.plans.rules import FLOAT8_LEAST_WIDTH
from shardwise.testing import run_ranks
from shardwise.torch_private.dynamo import num_compiled
from shardwise.training.build import build_step


@pytest.fixture(scope="module", autouse=True)
def torchao():
    """Import torchao before ranks are forked; otherwise every rank imports it."""
    return pytest.importorskip("torchao.float8")


LAYERS = Float8(modules=("blocks.0.mlp.up", "blocks.0.mlp.down", "blocks.1.attn.qkv"))


def multiplied(world, name, precision, **options):
    """Train; return the losses, the final state, and the number of products that this rank computed in float8."""
    from torchao.float8 import float8_linear

    product = mock.Mock(apply=mock.Mock(side_effect=float8_linear.matmul_with_hp_or_float8_args.apply))
    with mock.patch.object(float8_linear, "matmul_with_hp_or_float8_args", product):
        losses, state = trained(world, name, precision, **options)
    return losses, state, product.apply.call_count


@pytest.mark.parametrize(
    ("name", "recipe"),
    [*itertools.product(("ddp", "fsdp", "tp", "cp", "pp"), ("tensorwise",)), ("tp", "rowwise")],
)
def test_float8_layers_keep_the_loss_band_under_strategies(name, recipe):
    exact, _ = alone(Precision(compute="bf16"))
    results = run_ranks(multiplied, LAYOUTS[name], name, FLOAT8, float8=dataclasses.replace(LAYERS, recipe=recipe))
    found, state, _ = results[0]
    assert {value.dtype for value in state.values()} == {torch.float32}
    assert found == pytest.approx(exact, rel=0.03)
    assert found != exact
    assert all(number >= STEPS for *_, number in results)


def test_float8_layers_keep_their_adapters():
    job = make_job(lora=Lora(rank=4, targets=("qkv", "up", "down")))
    exact, expected = run_ranks(trained, 1, "one", Precision(compute="bf16"), job=job)[0]
    for name in ("one", "tp"):
        found, state, number = run_ranks(multiplied, LAYOUTS[name], name, FLOAT8, job=job, float8=LAYERS)[0]
        assert number >= STEPS
        assert found == pytest.approx(exact, rel=0.03)
        assert state.keys() == expected.keys()
        assert state["blocks.1.attn.qkv.lora_B.weight"].any()


def logits_around(world, precision):
    """Return the logits of a tensor-parallel model before, in and after a context without float8."""
    step = build_step(make_job(), plan_of("tp", precision, float8=LAYERS), world)
    tokens, found = next(iter(step.feed)).micro_batches[0].batch[0], []
    with torch.autocast("cpu", torch.bfloat16):
        for context in (contextlib.nullcontext(), without_float8(step.model), contextlib.nullcontext()):
            with context:
                found.append(step.model(tokens).detach())
    return found


def test_a_context_without_float8_keeps_the_communication_of_tensor_parallel_layers():
    exact, *_ = run_ranks(logits_around, 2, Precision(compute="bf16"))[0]
    before, inside, after = run_ranks(logits_around, 2, FLOAT8)[0]
    assert torch.equal(inside, exact)
    assert torch.equal(after, before)
    assert not torch.equal(before, exact)


def gathered(world, precision, **options):
    """Train under FSDP; return the losses and the bytes that this rank contributed to each all-gather."""
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"  # of torch 2.11
    with mock.patch.object(dist, name, wraps=getattr(dist, name)) as gathers:
        losses, _ = trained(world, "fsdp", precision, float8=LAYERS, **options)
    return losses, [call.args[1].nbytes for call in gathers.call_args_list]


@pytest.mark.parametrize("precision", [FLOAT8, dataclasses.replace(MASTERS, compute="float8")], ids=["fp32", "bf16"])
def test_fsdp_gathers_float8_weights_in_one_byte_per_element_and_resumes_bit_for_bit(precision, tmp_path):
    model = decoder("llama-tiny", vocab_size=61)
    sizes = {name: model.get_submodule(name).weight.numel() for name in LAYERS.modules}
    losses, low = run_ranks(gathered, 2, precision, saves_to=tmp_path)[0]
    _, high = run_ranks(gathered, 2, dataclasses.replace(precision, compute="bf16"))[0]
    first = sizes["blocks.0.mlp.up"] + sizes["blocks.0.mlp.down"]
    saved = {wide - narrow for wide, narrow in zip(high, low, strict=True)}
    assert saved == {0, first // 2, sizes["blocks.1.attn.qkv"] // 2}  # each of two ranks contributes half of the rows
    resumed, again = run_ranks(gathered, 2, precision, resumes_from=tmp_path)[0]
    assert resumed == {number: loss for number, loss in losses.items() if number >= SAVED}
    assert set(again) == set(low)


def gathered_weight(world):
    """Return the weight of a float8 layer of 160 rows, gathered from three uneven shards: values, scale and bytes."""
    found = []
    plan = dataclasses.replace(Plan.preset("zero3", 3, batch_size=9), precision=FLOAT8, float8=LAYERS)
    step = build_step(make_job(batch_size=9), plan, world)
    layer = step.model.get_submodule("blocks.0.mlp.up")
    weight = layer.weight.full_tensor().detach().clone()

    def observe(module, *_):
        found.append((module.weight._scale, module.weight._data.view(torch.uint8).clone()))

    layer.register_forward_hook(observe)
    step(next(iter(step.feed)))
    return weight, *found[0]


def test_weights_gathered_in_float8_equal_the_cast_of_the_full_weight():
    scaling = pytest.importorskip("torchao.float8.float8_scaling_utils")
    for weight, scale, data in run_ranks(gathered_weight, 3):
        assert weight.shape[0] % 3
        expected = scaling.hp_tensor_to_float8_dynamic(weight, torch.float8_e4m3fn, None)
        assert torch.equal(scale, expected._scale)
        assert torch.equal(data, expected._data.view(torch.uint8))


class Branch(torch.nn.Module):
    """A block with two float8 layers, of which rank 1 uses only the first."""

    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)

    def forward(self, x):
        hidden = torch.relu(self.up(x))
        return x + (hidden[..., :16] if dist.get_rank() == 1 else self.down(hidden))


def branches():
    return torch.nn.Sequential(torch.nn.Linear(6, 16), Branch(), Branch(), torch.nn.Linear(16, 3))


def test_a_float8_weight_that_one_rank_does_not_use_trains_under_fsdp():
    names = ("1.up", "1.down", "2.up", "2.down")
    job = points_job(branches, steps=STEPS)
    _, state = run_ranks(trained, 2, "fsdp", FLOAT8, job=job, float8=Float8(modules=names))[0]
    _, exact = run_ranks(trained, 2, "fsdp", Precision(compute="bf16"), job=job)[0]
    for key in ("1.down.weight", "2.down.weight"):
        torch.testing.assert_close(state[key], exact[key], rtol=0.1, atol=0.02)


@pytest.mark.parametrize(
    ("float8", "code", "named"),
    [
        (Float8(), "support.float8-no-layer", "1024"),
        (Float8(modules=("blocks.0.mlp.upp",)), "support.float8-module-unknown", "blocks.0.mlp.upp"),
        (Float8(modules=("head",)), "support.float8-dimensions", "head"),
    ],
)
def test_float8_names_the_layers_that_it_cannot_compute(float8, code, named):
    with refuses(code, named):
        select_linears(decoder("llama-tiny", vocab_size=61), Plan(precision=FLOAT8, float8=float8))


def test_a_note_counts_float8_layers_and_names_what_makes_them_slow():
    plan, layers = Plan(precision=FLOAT8), Float8Layers(frozenset({"a", "b"}))
    assert "2 linear layers" in float8_note(layers, plan, torch.device("cpu"))
    assert "compile=model" in float8_note(layers, plan, torch.device("cuda"))
    assert "compile=" not in float8_note(layers, dataclasses.replace(plan, compile="blocks"), torch.device("cuda"))


def test_small_layers_and_the_head_stay_in_bf16():
    model = decoder(
        "llama-tiny", width=1024, num_heads=8, num_kv_heads=1, mlp_width=2048, num_layers=1, vocab_size=1024
    )
    assert select_linears(model, Plan(precision=FLOAT8)).names == {
        "blocks.0.attn.qkv",
        "blocks.0.attn.out",
        "blocks.0.mlp.gate",
        "blocks.0.mlp.up",
        "blocks.0.mlp.down",
    }
    assert "head" in select_linears(model, Plan(precision=FLOAT8, float8=Float8(head=True))).names
    with refuses("support.float8-no-layer", "2048"):
        select_linears(model, Plan(precision=FLOAT8, float8=Float8(recipe="rowwise")))


def uneven_job(**changes):
    """Return a job whose mlp layers have 48 hidden units: two tensor-parallel shards of 24, no multiple of 16."""
    return make_job(model=lambda: decoder("llama-tiny", vocab_size=50, context=16, mlp_width=48), **changes)


def test_layers_whose_tensor_parallel_shards_are_odd_stay_in_bf16_and_are_named():
    model = uneven_job().model()
    names = ("blocks.0.mlp.up", "blocks.0.mlp.down", "blocks.0.attn.qkv")
    plan = Plan.preset("tp", 2, batch_size=8, precision=FLOAT8, float8=Float8(modules=names))
    assert select_linears(model, dataclasses.replace(plan, layout=Plan().layout)).names == set(names)
    layers = select_linears(model, plan, find_rules(model, None))
    assert layers == Float8Layers(frozenset({"blocks.0.attn.qkv"}), ("blocks.0.mlp.down", "blocks.0.mlp.up"))
    assert "blocks.0.mlp.down" in float8_note(layers, plan, torch.device("cpu"))
    with refuses("support.float8-no-layer", "24"):
        only = dataclasses.replace(plan, float8=Float8(modules=names[:2]))
        select_linears(model, only, find_rules(model, None))


def test_the_width_of_a_tensor_parallel_shard_decides():
    model = decoder("llama-tiny", width=1024, num_heads=8, mlp_width=4096, num_layers=1, vocab_size=1024)
    for tp, expected in ((1, 5), (2, 3)):  # with tp, a shard of qkv has 768 rows, and one of out 512 columns
        plan = Plan.preset("tp", tp, batch_size=8, precision=FLOAT8)
        assert len(select_linears(model, plan, find_rules(model, None) if tp > 1 else None).names) == expected, tp


@pytest.mark.parametrize(("micro_batch", "is_refused"), [(1, True), (2, False), (3, True), (8, False)])
def test_a_micro_batch_whose_tokens_are_no_multiple_of_16_is_refused_before_ranks_start(micro_batch, is_refused):
    job = make_job(batch_size=micro_batch)  # 8 tokens per sample
    plan = Plan(micro_batch=micro_batch, precision=FLOAT8, float8=LAYERS)
    if not is_refused:
        check_model_fits(job, plan)
        return
    with refuses("support.float8-tokens", str(8 * micro_batch), "micro_batch"):
        check_model_fits(job, plan)
    rowwise = dataclasses.replace(LAYERS, recipe="rowwise")  # its weight gradients are not in float8
    check_model_fits(job, dataclasses.replace(plan, float8=rowwise))


def test_a_model_without_float8_layers_is_refused_before_ranks_start():
    with refuses("support.float8-no-layer"):
        check_model_fits(make_job(), Plan(micro_batch=8, precision=FLOAT8))


def calibrated(rates):
    """Return a calibration with measured rates of square layers: width -> float8's rate relative to bf16's."""
    node = parse_cluster("1xH100").node
    points = []
    for width, ratio in rates.items():
        for m, k in ((16_384, width), (width, 16_384)):
            for dtype, rate in (("bf16", 2e14), ("fp8", ratio * 2e14)):
                points.append(MatmulPoint(m=m, n=width, k=k, dtype=dtype, flops=rate))
    return dataclasses.replace(default_calibration(node), matmuls=tuple(points))


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ({}, 1024),
        ({512: 0.8, 1024: 1.0, 2048: 1.9}, 2048),
        ({768: 0.8, 1536: 5.0, 4096: 1.9}, 1536),
        ({512: 9.0, 1024: 4.0}, 512),
        ({2048: 1.9, 4096: 1.9}, 1024),  # all measured layers are faster, and narrower ones were not measured
        ({512: 0.8, 1024: 0.9}, 2048),  # none is
    ],
)
def test_the_least_width_is_that_from_which_the_calibration_measured_float8_faster(rates, expected):
    assert float8_least_width(calibrated(rates), "tensorwise") == expected
    assert float8_least_width(calibrated(rates), "rowwise") == FLOAT8_LEAST_WIDTH["rowwise"]


class Bottleneck(torch.nn.Module):
    """A block whose inner layer is wider than its others."""

    def __init__(self):
        super().__init__()
        self.up, self.inner, self.down = torch.nn.Linear(16, 32), torch.nn.Linear(32, 32), torch.nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(torch.relu(self.inner(torch.relu(self.up(x)))))


def bottlenecks():
    return torch.nn.Sequential(torch.nn.Linear(6, 16), Bottleneck(), Bottleneck(), torch.nn.Linear(16, 3))


def noted(world, name, **options):
    """Train and return the losses, and the names of the layers that are in float8."""
    names = []
    real = build_step

    def observe(*arguments, **keywords):
        step = real(*arguments, **keywords)
        names.extend(step.source.plan.float8.modules)
        return step

    with mock.patch("training.test_precision.build_step", observe):
        losses, _ = trained(world, name, FLOAT8, **options)
    return losses, names


def test_a_resumed_run_keeps_its_float8_layers_although_the_least_width_changes(monkeypatch, tmp_path):
    monkeypatch.setitem(FLOAT8_LEAST_WIDTH, "tensorwise", 16)
    job = points_job(bottlenecks, steps=STEPS)
    whole, first = run_ranks(noted, 1, "one", job=job, saves_to=tmp_path)[0]
    monkeypatch.setitem(FLOAT8_LEAST_WIDTH, "tensorwise", 32)
    resumed, again = run_ranks(noted, 1, "one", job=job, resumes_from=tmp_path)[0]
    _, fresh = run_ranks(noted, 1, "one", job=job)[0]
    assert len(first) == 6
    assert again == first
    assert fresh == ["1.inner", "2.inner"]
    assert resumed == {number: loss for number, loss in whole.items() if number >= SAVED}


def counted(world, name, **options):
    """Train; return the losses, and the numbers of compiled graphs and of graph breaks, without those of the parent."""
    before = num_compiled()
    losses, _ = trained(world, name, FLOAT8, **options)
    return losses, [after - earlier for after, earlier in zip(num_compiled(), before, strict=True)]


@pytest.mark.representative("fsdp")
@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_compiled_float8_layers_train_with_the_losses_of_eager_ones(monkeypatch, name):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))  # generates no C++
    options = {"job": points_job(bottlenecks, steps=2), "float8": Float8(modules=("1.up", "1.inner", "2.down"))}
    eager, _ = run_ranks(trained, 2, name, FLOAT8, **options)[0]
    found, (num_graphs, num_breaks) = run_ranks(counted, 2, name, compile="blocks", **options)[0]
    assert found == pytest.approx(eager, rel=1e-5)
    assert num_graphs >= 2  # blocks, and the loss
    assert num_breaks == 0
