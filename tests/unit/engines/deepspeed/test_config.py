"""A plan as DeepSpeed's JSON: complete, accepted by DeepSpeed, and read back with nothing lost that it can hold."""

import dataclasses
import importlib.util
import json
import random

import pytest
import torch

from refusals import refuses
from shardwise.engines.deepspeed.config import bucket_elements, bucket_megabytes, deepspeed_config, left_out
from shardwise.engines.deepspeed.engine import load_deepspeed
from shardwise.engines.deepspeed.from_json import plan_from_json
from shardwise.layout import Layout
from shardwise.plans import Plan
from shardwise.plans.sections import Communication, Offload, Precision
from shardwise.testing import run_ranks

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="pip install 'shardwise[deepspeed]'"
)


def some_plan(seed, ranks=None):
    """Any plan that DeepSpeed can express."""
    chance = random.Random(seed)
    ranks = ranks or chance.choice([1, 2, 3, 8, 64])
    zero = chance.choice([0, 1, 2, 3]) if ranks > 1 else 0
    compute = chance.choice(["fp32", "bf16", "fp16"])
    reduce = chance.choice(["fp32", compute])
    places = ["none", "cpu", "nvme"]
    return Plan(
        layout=Layout(shard=ranks) if zero else Layout(replicate=ranks),
        zero=zero,
        micro_batch=chance.randint(1, 9),
        accumulation=chance.randint(1, 9),
        recompute=chance.choice(["none", "full"]),
        engine="deepspeed",
        precision=Precision(compute=compute, reduce=reduce),
        offload=Offload(
            parameters=chance.choice(places) if zero == 3 or ranks == 1 else "none",
            optimizer=chance.choice(places) if zero or ranks == 1 else "none",
        ),
        communication=Communication(
            bucket_mb=bucket_megabytes(chance.randint(1, 10**9), reduce),
            prefetch=chance.randint(1, 5) if zero == 3 else 1,
        ),
    )


def with_folder(plan):
    uses_disk = "nvme" in (plan.offload.parameters, plan.offload.optimizer)
    return dataclasses.replace(plan, offload=dataclasses.replace(plan.offload, folder="/disk" if uses_disk else ""))


@pytest.mark.parametrize("seeds", [range(400), pytest.param(range(400, 20_000), marks=pytest.mark.prove)], ids=len)
def test_plan_to_json_to_plan_loses_nothing(seeds):
    for seed in seeds:
        plan = with_folder(some_plan(seed))
        text = json.dumps(deepspeed_config(plan, clip_norm=None))
        assert plan_from_json(text, "ds.json").plan == plan, seed
        assert left_out(plan) == ()


def test_a_bucket_of_any_size_is_kept_to_one_element():
    for megabytes in (0.000001, 0.3, 25.0, 1234.5678):
        for dtype in ("fp32", "bf16"):
            elements = bucket_elements(megabytes, dtype)
            assert elements >= 1
            assert bucket_elements(bucket_megabytes(elements, dtype), dtype) == elements
            assert abs(bucket_megabytes(elements, dtype) - megabytes) * 2**20 <= 4


def test_what_json_cannot_express_is_reported():
    plan = Plan(compile="blocks", batch_norm="local", recompute="selective", communication=Communication(prefetch=3))
    assert left_out(plan) == (
        "compile = 'blocks': DeepSpeed's JSON has no key for it",
        "batch_norm = 'local': DeepSpeed's JSON has no key for it",
        "recompute = 'selective': DeepSpeed's JSON has no key for it",
        "communication.prefetch = 3: DeepSpeed's JSON has no key for it",
    )


def test_clipping_is_always_written_since_deepspeed_clips_by_itself():
    assert deepspeed_config(Plan(), clip_norm=None)["gradient_clipping"] == 0.0
    assert deepspeed_config(Plan(), clip_norm=0.5)["gradient_clipping"] == 0.5


def test_one_rank_that_offloads_gets_the_stage_that_can():
    offload = Offload(optimizer="cpu")
    assert deepspeed_config(Plan(offload=offload), clip_norm=None)["zero_optimization"]["stage"] == 1
    offload = Offload(parameters="cpu", optimizer="cpu")
    assert deepspeed_config(Plan(offload=offload), clip_norm=None)["zero_optimization"]["stage"] == 3


REFUSED = {
    "tp": (Plan(layout=Layout(tp=2)), ("support.deepspeed-axis", "tp2")),
    "hsdp": (
        Plan(layout=Layout(replicate=2, shard=2), zero=3),
        ("support.deepspeed-partial-sharding", "replicate2.shard2"),
    ),
    "fp64": (
        Plan(precision=Precision(parameter="fp64", compute="fp64")),
        ("support.deepspeed-precision", "parameters fp64"),
    ),
    "compression": (
        Plan(communication=Communication(compression="bf16")),
        ("support.compression-without-ddp", "'bf16'"),
    ),
    "offloaded parameters": (
        Plan(layout=Layout(shard=2), zero=2, offload=Offload(parameters="cpu", optimizer="cpu")),
        ("support.offload-whole-parameters", "zero = 3"),
    ),
    "offload without zero": (
        Plan(layout=Layout(replicate=2), offload=Offload(optimizer="cpu")),
        ("support.deepspeed-offload-unsharded", "zero"),
    ),
    "nvme nowhere": (
        Plan(layout=Layout(shard=2), zero=3, offload=Offload(optimizer="nvme")),
        ("plan.nvme-folder-missing", "nvme"),
    ),
}


@pytest.mark.parametrize(("plan", "refusal"), REFUSED.values(), ids=REFUSED)
def test_a_plan_that_json_cannot_express_is_refused(plan, refusal):
    with refuses(*refusal) as caught:
        deepspeed_config(plan, clip_norm=None)
    assert caught.value.fix


def accepting(world):
    """Let DeepSpeed read JSON of many plans for two ranks; return what it made of them beside what was meant."""
    deepspeed = load_deepspeed(Plan(), torch.device("cpu"), world.local_rank)
    deepspeed.init_distributed(dist_init_required=False)
    pairs = []
    for seed in range(60):
        plan = with_folder(some_plan(seed, ranks=2))
        taken = deepspeed.runtime.config.DeepSpeedConfig(deepspeed_config(plan, clip_norm=0.5))
        zero = taken.zero_config
        dtypes = {str(taken.communication_data_type).removeprefix("torch.")}
        found = (taken.train_batch_size, taken.gradient_accumulation_steps, taken.gradient_clipping, dtypes)
        found += (int(zero.stage), zero.reduce_bucket_size, taken.bfloat16_config.enabled, zero.overlap_comm)
        found += (str(zero.offload_optimizer and zero.offload_optimizer.nvme_path),)
        names = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
        meant = (plan.batch_size, plan.accumulation, 0.5, {names[plan.precision.reduce]})
        meant += (plan.zero, bucket_elements(plan.communication.bucket_mb, plan.precision.reduce))
        meant += (plan.precision.compute == "bf16", True, "/disk" if plan.offload.optimizer == "nvme" else "None")
        pairs.append((found, meant))
    return pairs


@needs_deepspeed
def test_deepspeed_takes_the_json_as_it_was_meant():
    for found, meant in run_ranks(accepting, 2)[0]:
        assert found == meant
