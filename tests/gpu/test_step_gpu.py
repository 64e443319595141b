"""Steps measured and profiled on a GPU."""

import json

import pytest
import torch

import shardwise as sw
from shardwise.layout import Layout
from shardwise.measurement.profile import ProfileSpec
from shardwise.measurement.step import measure_step, rehearse
from shardwise.parallel.gradsync import GradNorm
from shardwise.plans import Plan
from shardwise.training.step.update import NormedUpdate, choose_update

pytestmark = pytest.mark.gpu


def make_job():
    rows = torch.arange(16_384).reshape(128, 128) % 500
    return sw.Job(
        model=lambda: torch.nn.Sequential(torch.nn.Embedding(500, 256), torch.nn.Linear(256, 500)),
        data=lambda split: torch.utils.data.TensorDataset(rows, rows),
        loss=sw.losses.token_cross_entropy,
        optimizer=sw.adamw(lr=1e-3),
        batch_size=8,
        steps=1,
    )


def test_a_profile_on_a_gpu_is_of_its_kernels(tmp_path):
    trace = tmp_path / "trace.json"
    plan = Plan.preset("ddp", 2, batch_size=8)
    measured = rehearse(make_job(), plan, steps=2, device="cuda:0", profile=ProfileSpec(trace=trace))
    assert measured.matmul_flops > 1e12
    assert measured.profile.kind == "kernels"
    assert 0 < measured.profile.compute_s <= measured.profile.seconds
    assert not any(kernel.name.startswith("aten::") for kernel in measured.profile.top)
    events = json.loads(trace.read_text())["traceEvents"]
    assert {"kernel", "user_annotation"} <= {event.get("cat") for event in events}


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_a_world_of_one_is_measured_on_its_gpu(backend):
    with sw.world(backend=backend, device="cuda") as world:
        measured = measure_step(make_job(), Plan.preset("ddp", 1, batch_size=8), world, steps=2)
    assert all(seconds > 0 for seconds in measured.phases.values())
    assert 0 < measured.peak_bytes <= measured.reserved_bytes


@pytest.mark.parametrize("value", [1e15, float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_overflow_of_a_large_model_is_found_by_its_norm(value, dtype):
    parameters = [torch.nn.Parameter(torch.zeros(2**25, device="cuda", dtype=dtype)) for _ in range(3)]
    norm = GradNorm(parameters, layout=Layout(), sharded_axes=(), group=None, device=parameters[0].device)
    update = choose_update(norm, parameters=parameters, clip_norm=None, fp16_gain=None)
    assert isinstance(update, NormedUpdate)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    parameters[1].grad[12_345] = value
    optimizer = torch.optim.SGD(parameters, lr=1.0, fused=True)
    is_skipped = value != 1e15
    assert float(update(optimizer).skipped) == is_skipped
    assert parameters[0][0].item() == (0 if is_skipped else -1)
