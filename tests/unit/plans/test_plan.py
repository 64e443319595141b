import dataclasses

import pytest

from refusals import refuses
from shardwise.layout import Layout
from shardwise.plans import Communication, Plan, Precision
from shardwise.plans.plan import PRESETS
from shardwise.plans.toml import plan_from_toml, plan_to_toml


@pytest.mark.parametrize("name", [*PRESETS, "pp2.shard2.tp2"])
def test_every_preset_fills_the_world(name):
    plan = Plan.preset(name, 8)
    assert plan.layout.world_size == 8
    assert plan.source("layout") == f"preset {name}"


@pytest.mark.parametrize(("name", "zero"), [("ddp", 0), ("zero1", 1), ("zero2", 2), ("zero3", 3), ("fsdp", 3)])
def test_zero_stage_follows_the_preset(name, zero):
    assert Plan.preset(name, 4).zero == zero


def test_any_preset_of_one_rank_is_one_process():
    assert {Plan.preset(name, 1).layout for name in PRESETS} == {Layout()}


def test_unknown_preset_names_the_nearest():
    with refuses("plan.unknown-preset", "'fsdp'"):
        Plan.preset("fspd", 4)


def test_product_for_another_world_is_refused_with_the_count():
    with refuses("layout.world-size-mismatch", 8, 4):
        Plan.preset("pp2.shard2.tp2", 4)


def test_zero_without_shards_contradicts_itself():
    with refuses("plan.zero-shard-mismatch", "zero = 3", "shard = 1"):
        Plan(layout=Layout(replicate=2), zero=3)


def test_toml_round_trip_keeps_every_value():
    plan = Plan(
        layout=Layout(pp=2, shard=2),
        zero=2,
        micro_batch=4,
        accumulation=3,
        gradient_sync="every",
        precision=Precision(compute="bf16"),
        communication=Communication(bucket_mb=50, static_graph=True),
        sources={"micro_batch": "--set"},
    )
    text = plan_to_toml(plan)
    assert plan_from_toml(text, "plan.toml") == plan
    assert "micro_batch = 4 # --set" in text


def test_toml_covers_every_field():
    text = plan_to_toml(Plan())
    for field in dataclasses.fields(Plan):
        assert field.name == "sources" or field.name in text


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("version = 1\nmicro_bach = 2", ("plan.unknown-key", "micro_batch")),
        ("version = 1\n[precision]\ncompte = 'bf16'", ("plan.unknown-key", "'compute'")),
        ("version = 1\n[precision]\ncompute = 'bf61'", ("plan.unknown-choice", "'bf16'")),
        ("version = 1\nmicro_batch = 'four'", ("plan.wrong-type", "micro_batch")),
        ("version = 1\nmicro_batch = true", ("plan.wrong-type", "micro_batch")),
        ("version = 2", ("plan.version-unknown", "version = 1")),
        ("micro_batch = 2", ("plan.version-missing",)),
        ("version = ", ("plan.not-toml",)),
        ("version = 1\nprecision = 3", ("plan.not-a-section", "[precision]")),
    ],
)
def test_bad_toml_is_refused_naming_the_fix(text, refusal):
    with refuses(*refusal):
        plan_from_toml(text, "plan.toml")


def test_refit_keeps_the_global_batch_and_the_model_axes():
    plan = Plan.preset("shard4.tp2", 8, batch_size=64)
    for world_size in (2, 4, 8, 16, 32):
        refitted = plan.refit(world_size)
        assert refitted.batch_size == 64
        assert refitted.layout.tp == 2
        assert refitted.layout.world_size == world_size
        assert refitted.micro_batch <= plan.micro_batch


def test_refit_to_one_data_parallel_rank_drops_zero():
    assert Plan.preset("fsdp", 4, batch_size=8).refit(1).zero == 0


def test_refit_of_a_hybrid_keeps_its_shards():
    assert Plan.preset("hsdp", 8, batch_size=64).refit(16).layout == Layout(replicate=4, shard=4)


def test_refit_to_ranks_that_do_not_divide_is_refused():
    with refuses("plan.world-not-divisible", 2):
        Plan.preset("tp2", 2).refit(3)
    with refuses("plan.batch-not-divisible", 63, 66):
        Plan.preset("ddp", 4, batch_size=64).refit(3)
