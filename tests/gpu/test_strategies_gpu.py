"""Sharded strategies on a GPU: two gloo ranks that share one device, and one rank of a fake world."""

import json
import os
import subprocess
import sys

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

RANK = """
import dataclasses, json, sys
import torch
import shardwise as sw
from shardwise.planner.settle import LocalDevice, settle
from shardwise.plans import Precision

class Sentences(torch.utils.data.Dataset):
    def __len__(self):
        return 22
    def __getitem__(self, index):
        tokens = torch.randint(0, 50, (9,), generator=torch.Generator().manual_seed(index))
        targets = tokens[1:].clone()
        targets[: index % 5] = -100
        return tokens[:-1], targets

job = sw.Job(
    model=lambda: sw.models.decoder("llama-tiny", vocab_size=50, context=16),
    data=lambda split: Sentences() if split == "train" else None,
    loss=sw.losses.token_cross_entropy, optimizer=sw.adamw(lr=1e-2), batch_size=8, steps=4, clip_norm=0.5,
)
rank, size, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
results = {}
with sw.world(backend="gloo", device="cuda:0", init_method=f"file://{store}", rank=rank, world_size=size) as world:
    for spec in sys.argv[4:]:
        print(spec, file=sys.stderr, flush=True)
        name, *changes = spec.split("+")
        overrides = dict(change.split("=") for change in changes)
        plan = settle(name, batch_size=8, world_size=size, device=LocalDevice(), overrides=overrides)
        if "precision" not in overrides:
            dtypes = dict.fromkeys(("parameter", "compute", "reduce", "optimizer"), "fp64")
            plan = dataclasses.replace(plan, precision=Precision(**dtypes))
        step = sw.build_step(job, plan, world)
        shares = [step(batch).loss_share.double() for batch in step.feed]
        losses = torch.stack(shares)
        if size > 1:
            torch.distributed.all_reduce(losses)
        results[spec] = losses.tolist()
        del step
print(json.dumps(results))
"""

# No pipelines: gloo sends no GPU tensors, and nccl wants a GPU per rank.
EXACT = (
    "ddp",
    "zero1",
    "zero2",
    "zero3",
    "zero3+accumulation=2+gradient_sync=every",
    "zero3+recompute=full",
    "ddp+recompute=selective",
    "zero3+offload.parameters=cpu+offload.optimizer=cpu",
    "ddp+offload.optimizer=cpu",
    "zero1+offload.optimizer=cpu",
    "zero2+offload.optimizer=cpu",
    "tp",
    "tp+sequence_parallel=true",
)
CLOSE = (
    "ddp+precision=bf16",
    "zero3+precision=bf16",
    "ddp+precision=fp16",
    "zero3+precision=fp16",
    "tp+precision=bf16",
    "ddp+communication.compression=bf16",
    'zero3+precision=float8+float8.modules=["blocks.0.mlp.up", "blocks.0.mlp.down"]',
    'zero3+precision=float8+float8.modules=["blocks.0.mlp.up", "blocks.0.mlp.down"]+compile=blocks',
)


def losses(tmp_path, size, specs):
    """Losses by plan, of `size` gloo ranks on one GPU."""
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                "-X",
                "faulthandler",
                "-c",
                RANK,
                str(rank),
                str(size),
                str(tmp_path / f"store{size}"),
                *specs,
            ],
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
    return json.loads(outputs[0][0].splitlines()[-1])


def test_strategies_on_two_ranks_of_one_gpu_equal_one_process(tmp_path):
    one = losses(tmp_path, 1, ["ddp"])["ddp"]
    for spec, found in losses(tmp_path, 2, EXACT).items():
        assert found == pytest.approx(one, rel=1e-9), spec


def test_lower_precision_stays_close_on_a_gpu(tmp_path):
    one = losses(tmp_path, 1, ["ddp"])["ddp"]
    for spec, found in losses(tmp_path, 2, CLOSE).items():
        assert found == pytest.approx(one, rel=0.03), spec
