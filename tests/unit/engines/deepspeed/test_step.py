"""A job on DeepSpeed gives the losses, gradients, norms and weights of one process."""

import dataclasses
from pathlib import Path

import pytest
import torch
from data.test_corpus import Leaking, corpus_job
from engines.deepspeed.deepspeed_jobs import HalfFrozen, Poisoned, Unused, digits_job, needs_deepspeed

import shardwise as sw
from jobs import sentences_job
from refusals import refuses
from shardwise.engines.engine import engine_named
from shardwise.errors import DataError, JobError
from shardwise.parity.verify import verify
from shardwise.planner.settle import LocalDevice, settle
from shardwise.runs import EventLog
from shardwise.runs.recorder import Timeline
from shardwise.testing import run_ranks
from shardwise.training.build import build_step
from shardwise.training.loop import run_loop

pytestmark = needs_deepspeed

JOBS = Path(__file__).parent / "deepspeed_jobs.py"
STAGES = ["ddp", "zero1", "zero2", "zero3"]
OFFLOADED = [
    "zero1+offload.optimizer=cpu",
    "zero2+offload.optimizer=cpu",
    "zero3+offload.optimizer=cpu",
    "zero3+offload.parameters=cpu+offload.optimizer=cpu",
]
MORE = [
    "ddp+accumulation=2",
    "zero1+accumulation=2",
    "zero2+accumulation=4",
    "zero2+accumulation=2+offload.optimizer=cpu",
    "zero3+accumulation=2",
    "zero2+recompute=selective",
    "zero3+recompute=full",
    "zero2+communication.bucket_mb=0.01",
    "zero3+communication.bucket_mb=0.01",
]


@pytest.fixture(scope="module", autouse=True)
def _imported_once():
    engine_named("deepspeed").preload()


def settled(job, name, world_size, engine="deepspeed"):
    spec, *settings = name.split("+")
    overrides = {"engine": engine, **dict(setting.split("=") for setting in settings)}
    return settle(spec, batch_size=job.batch_size, world_size=world_size, device=LocalDevice(), overrides=overrides)


def trained(world, job, name, engine="deepspeed"):
    """Train; return losses, norms, which steps were skipped, and on rank 0 the whole state before and after."""
    step = build_step(job, settled(job, name, world.size, engine), world)
    first = sw.full_state_dict(step.model)
    reports = [step(batch) for batch in step.feed]
    losses = torch.stack([report.loss_share.double() for report in reports])
    if world.size > 1:
        torch.distributed.all_reduce(losses)
    norms = [None if report.grad_norm is None else float(report.grad_norm) for report in reports]
    return losses.tolist(), norms, [float(report.skipped) for report in reports], first, sw.full_state_dict(step.model)


def check_verified(job, plans):
    report = verify(f"{JOBS}:{job}", [f"{plan}+engine=deepspeed" for plan in plans], nproc=2)
    assert {verdict.plan: (verdict.status, verdict.findings) for verdict in report.verdicts} == {
        f"{plan}+engine=deepspeed": ("passed", ()) for plan in plans
    }


@pytest.mark.slow
def test_decoder_on_two_stages_equals_one_process():
    check_verified("decoder", ["zero1", "zero3+accumulation=2"])


@pytest.mark.prove
@pytest.mark.parametrize("job", ["decoder", "resnet"])
def test_every_stage_and_offload_equals_one_process(job):
    check_verified(job, STAGES + OFFLOADED)


@pytest.mark.prove
@pytest.mark.parametrize("job", ["decoder", "normed"])
def test_every_option_of_the_plan_equals_one_process(job):
    check_verified(job, [plan for plan in MORE if job == "decoder" or "accumulation" not in plan])


@pytest.mark.parametrize("name", ["ddp", "zero2"])
def test_bf16_trains_from_the_very_values_of_one_process(name):
    job = sentences_job(steps=2)
    wanted = run_ranks(trained, 1, job, "ddp", "torch")[0]
    losses, _, _, first, _ = run_ranks(trained, 2, job, f"{name}+precision=bf16")[0]
    assert {key: torch.equal(value, wanted[3][key]) for key, value in first.items()} == dict.fromkeys(wanted[3], True)
    assert losses == pytest.approx(wanted[0], rel=1e-3)


@pytest.mark.prove
@pytest.mark.parametrize("name", ["zero1", "zero2+accumulation=2", "zero3", "zero3+offload.parameters=cpu"])
def test_bf16_of_every_stage_trains_from_the_very_values_of_one_process(name):
    test_bf16_trains_from_the_very_values_of_one_process(name)


@pytest.mark.parametrize("name", ["ddp", pytest.param("zero2", marks=pytest.mark.prove), "zero3"])
def test_step_with_infinite_gradient_is_skipped_and_training_continues(name):
    job = digits_job(Poisoned, clip_norm=None)
    losses, _, skipped, first, last = run_ranks(trained, 2, job, name)[0]
    assert skipped == [0.0, 1.0, 0.0]
    assert all(torch.isfinite(value).all() for value in last.values())
    assert not torch.equal(first["head.weight"], last["head.weight"])
    assert losses[2] < 10


@pytest.mark.parametrize("name", ["zero3", pytest.param("zero1", marks=pytest.mark.prove)])
def test_frozen_and_tiny_parameters_are_as_in_one_process(name):
    job = digits_job(HalfFrozen)
    wanted = run_ranks(trained, 1, job, "ddp", "torch")[0]
    losses, norms, _, first, last = run_ranks(trained, 2, job, name)[0]
    assert losses == pytest.approx(wanted[0], rel=1e-6)
    assert norms == pytest.approx(wanted[1], rel=1e-6)
    for key, value in wanted[3].items():
        assert torch.equal(first[key], value), key
    for key, value in wanted[4].items():
        torch.testing.assert_close(last[key], value, rtol=1e-4, atol=1e-6, msg=key)


def evaluated(world, job, name, engine="deepspeed"):
    report, _ = run_loop(job, settled(job, name, world.size, engine), world, EventLog(None), Timeline())
    return report.evaluation


@pytest.mark.parametrize("name", ["zero3", pytest.param("zero2+precision=bf16", marks=pytest.mark.prove)])
def test_evaluation_and_the_steps_after_it_are_as_in_one_process(name):
    job = digits_job(HalfFrozen, batch_size=500, steps=None, epochs=2, data=sw.datasets.digits)
    wanted = run_ranks(evaluated, 1, job, "ddp", "torch")[0]
    assert run_ranks(evaluated, 2, job, name)[0] == pytest.approx(wanted, rel=1e-5 if name == "zero3" else 0.05)


def test_parameter_without_dimension_is_refused_by_name():
    with refuses("support.deepspeed-scalar-parameter", "scale"):
        run_ranks(trained, 2, digits_job(lambda: HalfFrozen(())), "zero1")


def test_parameter_without_gradient_is_refused_by_name():
    with refuses("train.unused-parameters", "forgotten.weight", "forgotten.bias"):
        run_ranks(trained, 2, digits_job(Unused), "zero1")


@pytest.mark.parametrize("name", ["zero1", "zero3"])
def test_optimizer_that_looks_at_shapes_is_refused_where_parameters_are_flat(name):
    def adafactor(named):
        return torch.optim.Adafactor([parameter for _, parameter in named])

    job = dataclasses.replace(digits_job(Poisoned), optimizer=adafactor)
    with refuses("support.deepspeed-optimizer-elementwise", "Adafactor"):
        run_ranks(trained, 2, job, name)


def test_fp16_where_the_device_has_none_is_refused():
    if torch.ops.mkldnn._is_mkldnn_fp16_supported():
        pytest.skip("this CPU computes in fp16")
    with refuses("support.deepspeed-fp16-device", "fp16"):
        run_ranks(trained, 2, sentences_job(), "zero1+precision=fp16")


def packed_step(world, name, leak):
    """Return the code with which the first step on packed rows is refused, or None."""
    job = corpus_job(packed=True, model=lambda: Leaking(leak))
    step = build_step(job, settled(job, name, world.size), world)
    try:
        step(next(iter(step.feed)))
    except JobError as error:
        return error.code
    return None


def packed_steps(world, name):
    return [packed_step(world, name, leak) for leak in ("no mask", None)]


@pytest.mark.representative("zero3")
@pytest.mark.parametrize("name", ["zero1", "zero3", "zero3+precision.compute=bf16"])
def test_leaks_between_packed_documents_are_refused(name):
    assert run_ranks(packed_steps, 2, name) == [["support.packed-attention", None]] * 2


def unknown_id(world):
    job = corpus_job(model=lambda: sw.models.decoder("llama-tiny", vocab_size=40, context=32))
    step = build_step(job, settled(job, "zero1", world.size), world)
    with pytest.raises(DataError) as refused:
        next(iter(step.feed))
    return refused.value.code


def test_token_ids_outside_of_the_vocabulary_are_refused():
    assert run_ranks(unknown_id, 1) == ["data.token-outside-vocabulary"]
