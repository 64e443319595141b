"""What engine mlx cannot do is refused in a sentence with the reason and the fix."""

import dataclasses

import pytest

from jobs import FP64
from refusals import refuses
from shardwise.engines.engine import engine_named, require_supported
from shardwise.planner.settle import settle
from shardwise.plans import Communication, Offload, Plan, Precision

DDP = dataclasses.replace(Plan.preset("ddp", 2, batch_size=8), engine="mlx")
MLX = engine_named("mlx").local_device(None)


@pytest.mark.parametrize("precision", [Precision(), Precision(compute="bf16"), FP64], ids=str)
@pytest.mark.parametrize("changes", [{}, {"accumulation": 4}, {"batch_norm": "local"}], ids=str)
def test_replicas_in_three_precisions_are_trained(precision, changes):
    require_supported(dataclasses.replace(DDP, precision=precision, **changes))


@pytest.mark.parametrize(
    ("spec", "axis"), [("zero1", "shard"), ("zero3", "shard"), ("pp", "pp"), ("tp", "tp"), ("cp", "cp")]
)
def test_layouts_other_than_replicas_are_refused_and_ddp_is_named(spec, axis):
    plan = settle(spec, batch_size=8, world_size=2, device=MLX)
    with refuses("support.mlx-axis", f"axis {axis}", "--plan ddp"):
        require_supported(plan)


@pytest.mark.parametrize(
    ("code", "changes"),
    [
        ("support.mlx-option", {"gradient_sync": "every"}),
        ("support.mlx-option", {"recompute": "full"}),
        ("support.mlx-option", {"compile": "blocks"}),
        ("support.mlx-option", {"capture": "step"}),
        ("support.mlx-option", {"fused_loss": True}),
        ("support.mlx-option", {"offload": Offload(optimizer="cpu")}),
        ("support.mlx-option", {"offload": Offload(parameters="nvme", optimizer="nvme", folder="x")}),
        ("support.mlx-option", {"communication": Communication(compression="bf16")}),
        ("support.mlx-option", {"communication": Communication(find_unused_parameters=True)}),
        ("support.mlx-option", {"communication": Communication(static_graph=True)}),
        ("support.mlx-option", {"communication": Communication(broadcast_buffers=True)}),
        ("support.mlx-option", {"communication": Communication(sync_every=4)}),
        ("support.mlx-fp16", {"precision": Precision(compute="fp16")}),
        ("support.fp64-mix", {"precision": Precision(compute="fp64")}),
        ("support.mlx-precision", {"precision": Precision(reduce="bf16")}),
        ("support.fp64-mix", {"precision": dataclasses.replace(FP64, compute="fp32")}),
    ],
    ids=str,
)
def test_what_would_be_done_otherwise_than_asked_is_refused(code, changes):
    with refuses(code):
        require_supported(dataclasses.replace(DDP, **changes))


def test_auto_is_replicas_in_fp32_with_the_engine_and_its_reason():
    plan = settle("auto", batch_size=8, world_size=2, device=MLX)
    require_supported(plan)
    assert (plan.engine, str(plan.layout), plan.precision.compute) == ("mlx", "replicate2", "fp32")
    assert plan.source("engine") == "the job's engine"
    assert plan.source("precision") == "auto: MLX computes in fp32"


def test_an_engine_that_somebody_named_stays():
    plan = settle("ddp", batch_size=8, world_size=2, device=MLX, overrides={"engine": "torch"})
    assert plan.engine == "torch"
