"""Sequences split over gloo ranks that share one GPU: losses of one process, half of its activations."""

import json
import os
import subprocess
import sys

import pytest
import torch

from gpu.test_strategies_gpu import losses

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

EXACT = ("cp", "cp+zero=3", "cp+recompute=full", "cp+recompute=selective", "cp+accumulation=2")

MEMORY = """
import dataclasses, json, sys
import torch
import shardwise as sw
from shardwise.planner.settle import LocalDevice, settle

LENGTH = 8192

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        tokens = torch.randint(0, 4096, (LENGTH + 1,), generator=torch.Generator().manual_seed(index))
        return tokens[:-1], tokens[1:]

job = sw.Job(
    model=lambda: sw.models.decoder("llama-tiny", vocab_size=4096, context=LENGTH, width=256, num_layers=4),
    data=lambda split: Rows() if split == "train" else None,
    loss=sw.losses.token_cross_entropy, optimizer=sw.adamw(lr=1e-3), batch_size=1, steps=2,
)
rank, size, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
with sw.world(backend="gloo", device="cuda:0", init_method=f"file://{store}", rank=rank, world_size=size) as world:
    plan = settle("cp", batch_size=1, world_size=size, device=LocalDevice(), overrides={"precision": "bf16"})
    step = sw.build_step(job, plan, world)
    shares = []
    for batch in step.feed:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        shares.append(step(batch).loss_share.item())
        print(json.dumps([torch.cuda.max_memory_allocated() - before, shares[-1]]), flush=True)
"""


def last_step(tmp_path, size):
    """(bytes above what stands, share of the loss) of the second step, by rank."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", MEMORY, str(rank), str(size), str(tmp_path / f"memory{size}")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(size)
    ]
    outputs = [rank.communicate(timeout=110) for rank in ranks]
    for rank, (_, errors) in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, errors[-3000:]
    return [json.loads(printed.splitlines()[-1]) for printed, _ in outputs]


def test_slices_on_two_ranks_of_one_gpu_equal_one_process(tmp_path):
    one = losses(tmp_path, 1, ["ddp"])["ddp"]
    for spec, found in losses(tmp_path, 2, EXACT).items():
        assert found == pytest.approx(one, rel=1e-9), spec


def test_activations_on_a_gpu_fall_as_one_over_cp(tmp_path):
    ((whole, loss),) = last_step(tmp_path, 1)
    halves = last_step(tmp_path, 2)
    assert sum(share for _, share in halves) == pytest.approx(loss, rel=0.02)
    for num_bytes, _ in halves:
        assert num_bytes == pytest.approx(whole / 2, rel=0.1)
