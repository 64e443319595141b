"""NVMe offload: optimizer states are on the disk, and the numbers are those of one process."""

import shutil
from pathlib import Path

import pytest
import torch
from engines.deepspeed.deepspeed_jobs import needs_deepspeed

import shardwise as sw
from jobs import sentences_job
from shardwise.engines.engine import engine_named
from shardwise.planner.settle import LocalDevice, settle
from shardwise.testing import run_ranks
from shardwise.training.build import build_step

pytestmark = [
    needs_deepspeed,
    pytest.mark.prove,
    pytest.mark.skipif(
        not (Path("/usr/include/libaio.h").exists() and shutil.which("c++") and shutil.which("ninja")),
        reason="apt-get install libaio-dev g++ ninja-build",
    ),
]
COMPILES_S = 1800.0
"""What DeepSpeed's operator may take to compile; 274 s on two free cores, once."""


def wide_job():
    """Return a job of 6 million parameters: DeepSpeed leaves small tensors in memory."""
    model = lambda: sw.models.decoder("gpt2-tiny", vocab_size=50, width=512, num_layers=2, num_heads=4, context=16)  # noqa: E731
    return sentences_job(model=model, optimizer=sw.adamw(lr=1e-3), steps=3)


def trained(world, name, overrides):
    """Train; return losses, bytes on the disk and the number of parameters, and on rank 0 the last state."""
    job = wide_job()
    plan = settle(name, batch_size=job.batch_size, world_size=world.size, device=LocalDevice(), overrides=overrides)
    step = build_step(job, plan, world)
    losses = torch.stack([step(batch).loss_share.double() for batch in step.feed])
    if world.size > 1:
        torch.distributed.all_reduce(losses)
    files = Path(plan.offload.folder).rglob("*.swp") if plan.offload.folder else ()
    return (
        losses.tolist(),
        sum(file.stat().st_size for file in files),
        step.num_parameters,
        sw.full_state_dict(step.model),
    )


def on_disk(folder, **more):
    overrides = {"engine": "deepspeed", "offload.optimizer": "nvme", "offload.folder": str(folder), **more}
    return run_ranks(trained, 2, "zero3", overrides, timeout_s=COMPILES_S)[0]


@pytest.fixture(scope="module", autouse=True)
def _imported_once():
    engine_named("deepspeed").preload()


def test_optimizer_on_disk_trains_as_one_process_does(tmp_path):
    wanted = run_ranks(trained, 1, "ddp", {})[0]
    losses, on_disk_bytes, num_parameters, state = on_disk(tmp_path)
    print(f"{num_parameters:,} parameters, {on_disk_bytes:,} bytes on disk, losses {losses} and {wanted[0]}")
    assert losses == pytest.approx(wanted[0], rel=1e-6)
    assert on_disk_bytes > 0.9 * 12 * num_parameters  # fp32 weights and Adam's two states of all but tiny tensors
    for key, value in wanted[3].items():
        if not key.endswith("qkv.bias"):  # the gradient of a key's bias is rounding, which Adam makes steps of
            torch.testing.assert_close(state[key], value, rtol=1e-3, atol=1e-4, msg=key)


def test_bf16_parameters_on_disk_train_as_in_memory(tmp_path):
    in_memory = {"engine": "deepspeed", "precision": "bf16", "offload.optimizer": "cpu", "offload.parameters": "cpu"}
    wanted = run_ranks(trained, 2, "zero3", in_memory, timeout_s=120)[0]
    losses, *_ = on_disk(tmp_path, **{"precision": "bf16", "offload.parameters": "nvme"})
    assert losses == pytest.approx(wanted[0], rel=1e-6)
