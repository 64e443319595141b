"""Jobs with adapters: every plan gives the numbers of one process."""

from pathlib import Path

import pytest

from shardwise.parity.verify import verify

JOBS = Path(__file__).parent / "lora_jobs.py"


def statuses(job, plans, nproc=2):
    report = verify(f"{JOBS}:{job}", plans, nproc=nproc)
    for verdict in report.verdicts:
        assert verdict.status != "passed" or verdict.worst.relative < 1e-11, verdict
    return [(verdict.status, verdict.reason) for verdict in report.verdicts]


def test_adapters_under_sharding_tensor_parallelism_and_stages_equal_one_process():
    assert statuses("job", ["zero3", "tp", "tp+sequence_parallel=true"]) == [("passed", "")] * 3
    assert statuses("untied", ["pp+accumulation=4"]) == [("passed", "")]


def test_dropped_inputs_of_adapters_are_alike_where_they_are_whole_and_differ_where_they_are_sharded():
    assert statuses("dropping", ["tp+sequence_parallel=true"]) == [("passed", "")]


def test_a_fused_head_with_an_adapter_is_refused():
    ((status, reason),) = statuses("job", ["ddp+fused_loss=true"])
    assert status == "refused"
    assert "--set fused_loss=false" in reason


MATRIX = [
    "ddp",
    "ddp+accumulation=2",
    "ddp+recompute=full",
    "ddp+offload.optimizer=cpu",
    "ddp+compile=blocks",
    "zero1",
    "zero1+offload.optimizer=cpu",
    "zero2+accumulation=2",
    "zero3+accumulation=2+gradient_sync=every",
    "zero3+recompute=selective",
    "zero3+offload.parameters=cpu+offload.optimizer=cpu",
    "tp+recompute=full",
    "tp+accumulation=2",
]


@pytest.mark.prove
@pytest.mark.parametrize("job", ["job", "untied", "some", "dropping"])
def test_adapters_equal_one_process_under_every_plan(job):
    assert statuses(job, MATRIX) == [("passed", "")] * len(MATRIX)


@pytest.mark.prove
def test_keyed_masks_of_adapters_are_compared_with_dropout_on():
    plans = ["ddp+accumulation=2", "zero3+recompute=full", "tp", "tp+sequence_parallel=true"]
    assert statuses("keyed", plans) == [("passed", "")] * 4


@pytest.mark.prove
def test_adapters_equal_one_process_under_products():
    plans = ["shard2.tp2", "replicate2.tp2+sequence_parallel=true", "hsdp"]
    assert statuses("untied", plans, nproc=4) == [("passed", "")] * 3
    pipelines = ["pp2.shard2+accumulation=4", "pp2.tp2+accumulation=4", "pp2.replicate2+accumulation=4"]
    assert statuses("untied", pipelines, nproc=4) == [("passed", "")] * 3
    schedules = ["pp+accumulation=4+pipeline.schedule=interleaved_1f1b", "pp+accumulation=4+pipeline.schedule=zbv"]
    assert statuses("deep", schedules) == [("passed", "")] * 2


@pytest.mark.prove
def test_adapters_of_transformers_gpt2_equal_one_process():
    assert statuses("transposed", ["ddp", "zero1", "zero3", "tp"]) == [("passed", "")] * 4
