"""Adapters on a GPU: a model of 7 billion parameters as rank 0 of eight fits in the memory that was predicted."""

import dataclasses
import multiprocessing

import pytest
import torch

import shardwise as sw
from shardwise.planner.cost.memory import predict_memory
from shardwise.planner.trace.trace import describe
from shardwise.plans import Plan, Precision
from shardwise.testing import fake_world

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

RANKS, MICRO_BATCH, LENGTH = 8, 2, 2048
TARGETS = ("attn.qkv", "attn.out", "mlp.gate", "mlp.up", "mlp.down")


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 1024

    def __getitem__(self, index):
        row = torch.randint(0, 32_000, (LENGTH + 1,), generator=torch.Generator().manual_seed(index))
        return row[:-1], row[1:]


def make_job(dtype):
    return sw.Job(
        model=lambda: sw.models.decoder("llama-7b", context=LENGTH).to(dtype),
        data=lambda split: Tokens() if split == "train" else None,
        loss=sw.losses.token_cross_entropy,
        optimizer=sw.adamw(lr=1e-4),
        batch_size=RANKS * MICRO_BATCH,
        steps=3,
        lora=sw.Lora(rank=16, alpha=32, targets=TARGETS),
    )


def make_plan(recompute):
    plan = Plan.preset("fsdp", RANKS, batch_size=RANKS * MICRO_BATCH)
    return dataclasses.replace(plan, precision=Precision(compute="bf16"), recompute=recompute)


def measured(dtype, recompute):
    """Return peak bytes over the second and third step, trained parameters, and the losses."""
    with fake_world(RANKS, device="cuda") as world:
        step = sw.build_step(make_job(dtype), make_plan(recompute), world)
        losses = []
        for batch in step.feed:
            losses.append(float(step(batch).loss_share))
            if len(losses) == 1:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        trained = sum(parameter.numel() for _, parameter in step.named_parameters() if parameter.requires_grad)
        return torch.cuda.max_memory_allocated(), trained, losses


@pytest.mark.parametrize(
    ("dtype", "recompute"), [(torch.float32, "full"), (torch.float32, "none"), (torch.bfloat16, "full")]
)
def test_seven_billion_frozen_parameters_fit_in_the_predicted_memory(dtype, recompute):
    plan = make_plan(recompute)
    predicted = predict_memory(describe(make_job(dtype), "bf16").for_plan(plan), plan).peak
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        peak, trained, losses = pool.apply(measured, (dtype, recompute))
    print(f"{dtype} recompute {recompute}: predicted {predicted / 1e9:.2f} GB, measured {peak / 1e9:.2f} GB")
    width, hidden, layers = 4096, 11_008, 32
    assert trained == 16 * layers * ((width + 3 * width) + 2 * width + 3 * (width + hidden))
    assert all(0 < loss < 100 for loss in losses)
    assert predicted == pytest.approx(peak, rel=0.03)
