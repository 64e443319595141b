"""Low precision on a GPU: compiled updates with stochastic rounding, captured steps, and float8 layers."""

import dataclasses

import pytest
import torch
from torch.utils.data import TensorDataset

import shardwise as sw
from shardwise.job import losses
from shardwise.parallel.mixed_adamw import Counter, Shard, adamw_update, adamw_update_rows
from shardwise.plans import Float8, Plan, Precision
from shardwise.torch_private.dynamo import graph_breaks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

STEPS = 8
MASTERS = Precision(parameter="bf16", compute="bf16", reduce="bf16", optimizer="bf16")


def rows(split):
    tokens = torch.randint(0, 64, (64, 65), generator=torch.Generator().manual_seed(0))
    return TensorDataset(tokens[:, :-1], tokens[:, 1:]) if split == "train" else None


def job(**changes):
    sizes = {"width": 1024, "num_heads": 8, "num_kv_heads": 1, "mlp_width": 2048, "num_layers": 2, "vocab_size": 64}
    return sw.Job(
        model=lambda: sw.models.decoder("llama-tiny", **{**sizes, "context": 64, **changes}),
        data=rows,
        loss=sw.losses.token_cross_entropy,
        optimizer=sw.adamw(lr=1e-3),
        batch_size=8,
        steps=STEPS,
    )


def losses_of(plan, optimizer="", **changes):
    """Train, and return the losses and the notes; `optimizer` is the class that must have updated the parameters."""
    notes = []
    with sw.world() as world:
        step = sw.build_step(job(**changes), plan, world, note=notes.append)
        assert optimizer in {"", type(step.optimizer).__name__}
        reports = [step(batch) for batch in step.feed]
        return [float(report.loss_share) for report in reports], " ".join(notes)


@pytest.mark.parametrize("has_master", [True, False])
@pytest.mark.parametrize("update", [adamw_update, adamw_update_rows])
def test_compiled_update_rounds_like_the_eager_one(update, has_master):
    generator = torch.Generator("cuda").manual_seed(0)
    values = torch.randn(300, 40, generator=generator, device="cuda")
    moments = [values.square().bfloat16(), values.square().bfloat16()]
    shard = Shard(values.bfloat16(), (values * 1e-2).bfloat16(), *moments, values.clone() if has_master else None)
    twin = Shard(*[None if each is None else each.clone() for each in shard])
    key = torch.tensor([5, -9], dtype=torch.int32, device="cuda")
    place = [[7, 3], [50, 1]]
    if update is adamw_update_rows:
        place = [[0, 353], [16, 1]]
        shard, twin = shard.viewed((-1, 16)), twin.viewed((-1, 16))
    counter = Counter(key, torch.tensor(place, device="cuda"), torch.tensor(3.0, device="cuda"))
    factors = torch.tensor([1e-3, 1e-5, 1.5, 0.0], device="cuda")
    torch.compile(update, dynamic=True)(shard, counter, factors, betas=(0.9, 0.99), eps=1e-8)
    adamw_update(twin, counter, factors, betas=(0.9, 0.99), eps=1e-8)
    for found, expected in zip(shard, twin, strict=True):
        if found is None:
            continue
        if found.dtype == torch.float32:
            torch.testing.assert_close(found, expected)
            continue
        # A fused multiply-add may round an fp32 value differently, and with it a few of many bf16 values.
        assert (found == expected).float().mean() > 0.99
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("capture", ["none", "step"])
def test_masters_and_bf16_moments_train_in_the_band_captured_and_not(capture):
    exact, _ = losses_of(Plan(micro_batch=8, precision=Precision(compute="bf16")))
    losses.token_sum._clear_cache()  # as in a new process
    num_breaks = len(graph_breaks())
    found, notes = losses_of(Plan(micro_batch=8, precision=MASTERS, compile="model", capture=capture))
    assert found == pytest.approx(exact, rel=0.03)
    broken_at = [frame.filename for each in graph_breaks()[num_breaks:] for frame in each.frames]
    assert not [file for file in broken_at if file.endswith(("losses.py", "functools.py"))]
    assert ("one CUDA graph" in notes) == (capture == "step")


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_float8_layers_train_in_the_band(recipe):
    pytest.importorskip("torchao")
    exact, _ = losses_of(Plan(micro_batch=8, precision=Precision(compute="bf16")))
    names = tuple(f"blocks.{block}.mlp.{part}" for block in (0, 1) for part in ("gate", "up", "down"))
    plan = Plan(
        micro_batch=8,
        precision=dataclasses.replace(MASTERS, compute="float8"),
        float8=Float8(recipe=recipe, modules=names),
        compile="model",
        capture="step",
    )
    found, notes = losses_of(plan)
    assert found == pytest.approx(exact, rel=0.03)
    assert "one CUDA graph" in notes


@pytest.mark.parametrize(("width", "optimizer"), [(4096, "MixedAdamW"), (256, "AdamW")])
def test_a_captured_step_updates_large_fp32_parameters_by_compiled_kernels(width, optimizer):
    sizes = {"width": width, "mlp_width": 2 * width}
    exact, _ = losses_of(Plan(micro_batch=8), "AdamW", **sizes)
    found, notes = losses_of(Plan(micro_batch=8, compile="model", capture="step"), optimizer, **sizes)
    assert found == pytest.approx(exact, rel=1e-4)
    assert "one CUDA graph" in notes


@pytest.mark.parametrize("capture", ["none", "step"])
def test_a_padded_vocabulary_trains_like_an_eager_step(capture):
    exact, _ = losses_of(Plan(micro_batch=8), vocab_size=4097)
    found, _ = losses_of(Plan(micro_batch=8, compile="model", capture=capture), vocab_size=4097)
    assert found == pytest.approx(exact, rel=1e-4)
