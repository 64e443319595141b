"""Workspaces of convolutions: in the forecast of a GPU, by the figures of an H200, and in no other."""

import pytest
import torch

import shardwise as sw
from shardwise.planner.cost.memory import WORKSPACE, predict_memory
from shardwise.planner.trace.cuda_rules import workspace_bytes
from shardwise.planner.trace.trace import describe
from shardwise.plans import Plan

MIB = 1 << 20
# (rows, channels, out channels, window, stride, side, dtype) -> MiB forward and backward, measured on an H200.
MEASURED = {
    (32, 3, 64, 7, 2, 224, torch.float32): (116.4, 128.3),
    (64, 64, 64, 3, 1, 56, torch.float32): (98.1, 100.1),
    (64, 64, 64, 1, 1, 56, torch.float32): (0.0, 1.0),
    (64, 64, 128, 1, 2, 56, torch.float32): (0.0, 76.8),
    (64, 512, 512, 3, 1, 7, torch.float32): (21.3, 29.5),
    (64, 512, 2048, 1, 1, 7, torch.float32): (30.6, 30.6),
    (32, 3, 64, 7, 2, 224, torch.bfloat16): (73.5, 79.4),
    (64, 128, 128, 3, 1, 28, torch.bfloat16): (24.8, 27.0),
    (64, 512, 2048, 1, 1, 7, torch.bfloat16): (15.3, 16.0),
}


@pytest.mark.parametrize("shape", MEASURED, ids=str)
def test_a_convolution_takes_what_was_measured(shape):
    rows, channels, out_channels, window, stride, side, dtype = shape
    value = torch.empty(rows, channels, side, side, dtype=dtype, device="meta")
    weight = torch.empty(out_channels, channels, window, window, dtype=dtype, device="meta")
    forward, backward = MEASURED[shape]
    strides = [stride, stride]
    # Within 12 MiB: cuDNN also splits sums, by rules of its own.
    assert workspace_bytes("aten::convolution", (value, weight, None, strides)) / MIB == pytest.approx(forward, abs=12)
    found = workspace_bytes("aten::convolution_backward", (None, value, weight, None, strides)) / MIB
    assert found == pytest.approx(backward, abs=12)


def test_channels_that_come_last_already_are_not_copied():
    value = torch.empty(4, 64, 56, 56, device="meta").to(memory_format=torch.channels_last)
    weight = torch.empty(64, 64, 3, 3, device="meta")
    assert workspace_bytes("aten::convolution", (value, weight, None, [1, 1])) == 0


def test_only_a_gpu_needs_workspaces():
    job = sw.Job(
        model=lambda: torch.nn.Sequential(
            torch.nn.Conv2d(1, 16, 3, padding=1), torch.nn.Flatten(), torch.nn.Linear(16 * 64, 10)
        ),
        data=sw.datasets.digits,
        loss=sw.losses.cross_entropy,
        optimizer=sw.sgd(lr=1e-3),
        batch_size=1024,
        steps=1,
    )
    plan = Plan.preset("ddp", 1, batch_size=1024)
    shape = describe(job, "fp32").for_plan(plan)
    on_gpu, on_host = (predict_memory(shape, plan, context=context) for context in (1.0, 0.0))
    assert on_gpu.at_peak["workspace"] == WORKSPACE
    assert "workspace" not in on_host.at_peak
    copies = 1024 * 64 * (1 + 16) * 4  # of input and output, at another moment than that of the host
    assert 0 < on_gpu.peak - WORKSPACE - on_host.peak < copies
