"""Which plans are verified, and how they are typed."""

import pytest

from refusals import refuses
from shardwise.parity.spec import all_plans, changed_numbers, in_precision, parse_plans, settle_plan
from shardwise.plans import Plan
from shardwise.plans.toml import plan_to_toml


@pytest.mark.parametrize("nproc", [2, 4, 8])
def test_every_plan_of_all_settles_for_its_number_of_ranks(nproc):
    plans = all_plans(nproc)
    assert len(plans) >= 14
    assert len(set(plans)) == len(plans)
    assert all(settle_plan(name, batch_size=80, nproc=nproc).layout.world_size == nproc for name in plans)


def test_hybrids_grow_with_the_ranks():
    assert not any("." in name.partition("+")[0] for name in all_plans(2))
    assert "shard2.tp2" in all_plans(4)
    assert "pp2.shard2.tp2+accumulation=4" in all_plans(8)


def test_a_plan_may_carry_overrides():
    plan = settle_plan("zero3+recompute=full+accumulation=2", batch_size=8, nproc=2)
    assert (plan.zero, plan.recompute, plan.accumulation, plan.micro_batch) == (3, "full", 2, 2)


def test_a_plan_file_may_carry_overrides_too(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(plan_to_toml(Plan.preset("fsdp", 2, batch_size=8)))
    plan = settle_plan(f"{path}+recompute=full", batch_size=8, nproc=2)
    assert (plan.zero, plan.recompute, plan.micro_batch) == (3, "full", 4)


@pytest.mark.parametrize(
    ("text", "refusal"),
    [("", ("verify.no-plans",)), (" , ", ("verify.no-plans",)), ("ddp,zero3,ddp", ("verify.plan-repeated", "ddp"))],
)
def test_an_empty_list_or_one_with_duplicates_is_refused(text, refusal):
    with refuses(*refusal):
        parse_plans(text)


@pytest.mark.parametrize(
    ("name", "refusal"),
    [
        ("fspd", ("plan.unknown-preset", "'fsdp'")),
        ("ddp+acumulation=2", ("cli.set-unknown-key", "'accumulation'")),
        ("ddp+accumulation", ("cli.set-syntax", "key=value")),
    ],
)
def test_a_misspelled_plan_is_refused_with_the_nearest(name, refusal):
    with refuses(*refusal):
        settle_plan(name, batch_size=8, nproc=2)


def test_a_batch_that_does_not_divide_is_refused():
    with refuses("plan.batch-not-divisible", "8"):
        settle_plan("ddp+accumulation=3", batch_size=8, nproc=2)


def changes(name, *, has_batch_norm=False):
    return list(changed_numbers(settle_plan(name, batch_size=8, nproc=2), has_batch_norm=has_batch_norm))


def test_what_changes_numbers_is_named_and_nothing_else():
    assert changes("ddp") == changes("zero3+recompute=full") == []
    assert changes("ddp+precision=bf16") == ["computes in bf16"]
    assert changes("ddp+precision.optimizer=bf16") == ["stores optimizer states in bf16"]
    assert changes("ddp+precision.optimizer=int8") == ["stores optimizer states in int8"]
    assert changes("ddp+precision.compute=float8") == ["computes in float8"]
    low = "+precision.parameter=bf16+precision.compute=bf16+precision.reduce=bf16"
    assert changes(f"ddp{low}") == ["computes in bf16", "stores parameters in bf16"]
    assert changes("ddp+communication.compression=powersgd") == ["compresses gradients by powersgd"]
    assert changes("ddp+batch_norm=local") == []
    assert changes("ddp+batch_norm=local", has_batch_norm=True) == ["computes batch statistics per rank"]


def test_equality_is_judged_in_one_dtype_throughout():
    plan = in_precision(Plan.preset("ddp", 2), "fp64")
    assert str(plan.precision) == "fp64 throughout"
