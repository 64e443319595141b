"""Collectives left out on a GPU: NCCL with a world of one, and gloo ranks that share the GPU."""

import json
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.measurement.switch import SwitchedWorld, _Inside, replay

pytestmark = pytest.mark.gpu

JOB = """
import torch
import shardwise as sw

rows = torch.arange(16384).reshape(128, 128) % 500
job = sw.Job(
    model=lambda: sw.models.decoder("llama-tiny", vocab_size=512, context=128),
    data=lambda split: torch.utils.data.TensorDataset(rows, rows),
    loss=sw.losses.token_cross_entropy,
    optimizer=sw.adamw(lr=1e-3),
    batch_size=8,
    steps=1,
)
"""


@pytest.fixture
def job_file(tmp_path):
    path = tmp_path / "job.py"
    path.write_text(JOB)
    return path


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_collectives_of_a_world_of_one_can_be_left_out(backend):
    with sw.world(backend=backend, device="cuda") as world:
        here = SwitchedWorld.around(world)
        group = dist.new_group(
            [0], backend="shardwise_switched", pg_options=_Inside(group=dist.group.WORLD, switch=here.switch)
        )
        value = torch.ones(4, device=world.device)
        model = torch.nn.parallel.DistributedDataParallel(
            torch.nn.Linear(4, 4).to(world.device), device_ids=[world.device.index], process_group=group
        )
        for on in (True, False):
            here.switch.on = on
            model(value).sum().backward()
            dist.all_reduce(value, group=group)
        here.switch.on = True
        calls = here.switch.record(lambda: model(value).sum().backward())
        assert calls
        replay(calls)()
        torch.cuda.synchronize()
        assert torch.equal(value, torch.ones_like(value))


def run_bench(*arguments):
    command = [sys.executable, "-m", "shardwise", "bench", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("plan", ["ddp", "zero3"])
def test_gloo_ranks_that_share_a_gpu_are_measured(job_file, plan):
    options = ["--nproc", "2", "--backend", "gloo", "--device", "cuda", "--plan", plan, "--rounds", "1", "--json"]
    found = run_bench("overlap", str(job_file), *options)
    assert all(each["split"]["communication"]["median_s"] > 0 for each in found["settings"])
    scaled = run_bench(
        "scaling", "--ranks", "1,2", "--backend", "gloo", "--plan", plan, "--rounds", "1", "--json", str(job_file)
    )
    assert all(each["parts"]["compute"] > 0 for each in scaled["curves"][0]["points"])


def test_one_rank_with_nccl_is_measured(job_file):
    found = run_bench("scaling", "--ranks", "1", "--rounds", "1", "--json", str(job_file))
    assert [each["ranks"] for each in found["curves"][0]["points"]] == [1]
