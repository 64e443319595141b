from dataclasses import replace

import pytest

from refusals import refuses
from shardwise.planner.settle import LocalDevice, settle
from shardwise.plans import Plan
from shardwise.plans.pipeline import BatchSplit, refit_batch, split_batch
from shardwise.plans.toml import plan_to_toml

H200 = LocalDevice(kind="cuda", has_bf16=True, name="H200")
V100 = LocalDevice(kind="cuda", has_bf16=False, name="V100")


def settled(spec="auto", *, batch_size=12, world_size=2, device=None, choose=None, **overrides):
    return settle(
        spec,
        batch_size=batch_size,
        world_size=world_size,
        device=device or LocalDevice(),
        overrides=overrides,
        choose=choose,
    )


def sharded(_, world_size):
    plan = Plan.preset("zero3", world_size, batch_size=12, accumulation=3)
    return replace(plan, sources={"layout": "auto: zero3 of 7 plans"}), ""


def test_auto_on_a_cpu_is_ddp_without_a_search_and_reports_it():
    plan = settled(choose=lambda *_: pytest.fail("searched"))
    assert plan.layout.replicate == 2
    assert plan.source("layout") == "auto: the simplest, on a CPU"


def test_auto_on_gpus_is_what_the_search_chose():
    plan = settled(device=H200, choose=sharded)
    assert (plan.zero, plan.layout.shard, plan.micro_batch, plan.accumulation) == (3, 2, 2, 3)
    assert plan.source("layout") == "auto: zero3 of 7 plans"


def test_auto_without_a_found_plan_is_ddp_and_names_the_reason():
    plan = settled(device=H200, choose=lambda *_: (None, "could not be searched (it has no model)"))
    assert plan.zero == 0
    assert plan.source("layout") == "auto: ddp, since a plan could not be searched (it has no model)"


def test_a_searched_plan_gives_way_to_the_command_line():
    plan = settled(device=H200, choose=sharded, micro_batch="1", recompute="full")
    assert (plan.micro_batch, plan.accumulation, plan.recompute) == (1, 6, "full")
    assert plan.source("recompute") == "--set"


def test_the_search_knows_what_the_command_line_gives():
    found = []

    def choose(fixed, world_size):
        found.append(fixed)
        return sharded(fixed, world_size)

    overrides = {"precision.parameter": "bf16", "fused_loss": "true", "micro_batch": "2", "zero": "3"}
    plan = settled(device=H200, choose=choose, **overrides)
    [fixed] = found
    assert fixed.names == {"precision", "precision.parameter", "fused_loss", "micro_batch", "zero"}
    assert fixed.zero == 3
    assert (fixed.plan.precision.parameter, fixed.plan.precision.compute) == ("bf16", "bf16")
    assert (fixed.plan.fused_loss, fixed.plan.micro_batch, plan.fused_loss) == (True, 2, True)


@pytest.mark.parametrize(("device", "compute"), [(LocalDevice(), "fp32"), (H200, "bf16"), (V100, "fp16")])
def test_precision_follows_the_device_with_its_reason(device, compute):
    plan = settled(device=device)
    assert plan.precision.compute == compute
    assert device.name in plan.source("precision")


def test_batch_is_split_over_data_parallel_ranks():
    plan = settled(accumulation="3")
    assert (plan.micro_batch, plan.accumulation) == (2, 3)
    assert plan.source("accumulation") == "--set"
    assert plan.source("micro_batch").startswith("derived")


def test_micro_batch_gives_the_accumulation():
    assert settled(micro_batch="2").accumulation == 3


@pytest.mark.parametrize(
    ("overrides", "refusal"),
    [
        ({"batch_size": 1}, ("plan.batch-too-small", 2)),
        ({"batch_size": 13}, ("plan.batch-not-divisible", 12, 14)),
        ({"accumulation": "5"}, ("plan.batch-not-divisible", 10, 20)),
        ({"micro_batch": "3", "accumulation": "5"}, ("plan.batch-split-mismatch", "accumulation=2")),
        ({"micro_batch": "two"}, ("plan.not-whole-number", "micro_batch")),
        ({"micro_batch": "0"}, ("plan.not-whole-number", "micro_batch")),
        ({"acumulation": "2"}, ("cli.set-unknown-key", "'accumulation'")),
        ({"precision.compute": "fp8"}, ("plan.unknown-choice", "'fp8'", "bf16, float8")),
        ({"spec": "missing.toml"}, ("plan.read-failed", "missing.toml")),
        ({"layout": "tp2"}, ("cli.set-layout", "--plan tp2")),
    ],
)
def test_impossible_plans_are_refused_with_the_nearest_possible(overrides, refusal):
    with refuses(*refusal):
        settled(**overrides)


def test_dotted_override_reaches_a_section_and_is_reported():
    plan = settled(**{"communication.bucket_mb": "5", "precision": "bf16"})
    assert plan.communication.bucket_mb == 5
    assert plan.precision.compute == "bf16"
    assert plan.source("communication.bucket_mb") == "--set"


def test_override_of_one_dtype_is_reported_beside_what_chose_the_others():
    assert settled(**{"precision.compute": "bf16"}).source("precision") == (
        "auto: CPU computes in fp32, precision.compute by --set"
    )


def test_plan_file_is_taken_as_it_is(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(plan_to_toml(Plan.preset("ddp", 2, batch_size=12, accumulation=2)))
    plan = settled(str(path))
    assert (plan.micro_batch, plan.accumulation) == (3, 2)
    assert plan.source("micro_batch") == "mine.toml"


def test_plan_file_for_another_world_is_refused(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(plan_to_toml(Plan.preset("ddp", 4, batch_size=12)))
    with refuses("plan.world-size-mismatch", 4, 2):
        settled(str(path))


def test_split_and_refit_agree_on_the_global_batch():
    assert split_batch(60, dp=3, accumulation=5) == BatchSplit(4, 5)
    assert refit_batch(60, dp=4, largest_micro_batch=4) == BatchSplit(3, 5)
