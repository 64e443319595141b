"""The same measurements on a GPU."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.measurement.calibrate import GPU, calibrate
from shardwise.measurement.step import rehearse
from shardwise.measurement.timing import COLLECTIVES, measure_collective, time_calls
from shardwise.plans import Plan, Precision

pytestmark = pytest.mark.gpu


def test_kernels_are_timed_on_the_gpus_own_clock():
    x = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda")
    timing = time_calls(lambda: x @ x, x.device)
    assert 1e14 < 2 * 4096**3 / timing.median_s < 3e15


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_every_collective_of_a_world_of_one_is_timed(backend):
    with sw.world(backend=backend, device="cuda") as world:
        for name in set(COLLECTIVES) - {"send"}:
            timed = measure_collective(name, 1 << 16, dist.group.WORLD, world.device, budget_s=0.01)
            assert timed.timing.median_s > 0


def test_one_rank_of_a_fake_world_is_measured_with_the_allocators_own_peak():
    rows = torch.arange(16_384).reshape(128, 128) % 500
    job = sw.Job(
        model=lambda: torch.nn.Sequential(torch.nn.Embedding(500, 256), torch.nn.Linear(256, 500)),
        data=lambda split: torch.utils.data.TensorDataset(rows, rows),
        loss=sw.losses.token_cross_entropy,
        optimizer=sw.adamw(lr=1e-3),
        batch_size=8,
        steps=1,
    )
    plan = dataclasses.replace(Plan.preset("zero3", 8, batch_size=8), precision=Precision(compute="bf16"))
    measured = rehearse(job, plan, steps=3, device="cuda:0")
    assert all(seconds > 0 for seconds in measured.phases.values())
    assert 0 < measured.peak_bytes <= measured.reserved_bytes
    assert measured.first_peak_bytes > 0


def test_the_machine_is_calibrated_within_a_minute(tmp_path):
    found = calibrate(folder=tmp_path)
    assert len(found.matmuls) >= len(GPU.layers["bf16"])
    assert found.to_host.origin == found.context_bytes.origin == "measured"
    assert 100 * 2**20 < found.context_bytes.value < 4 * 2**30
