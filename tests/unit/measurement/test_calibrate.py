"""Calibration: what ranks measured together becomes the figures of a plan."""

import dataclasses

import pytest
import torch

from shardwise.hardware.calibration import (
    AttentionPoint,
    GroupedPoint,
    MatmulPoint,
    default_calibration,
    measured,
    read_calibration,
)
from shardwise.hardware.cluster import parse_cluster, this_machine
from shardwise.measurement import low_precision, timing
from shardwise.measurement.calibrate import COLLECTIVES, CPU, SIZES, Grid, RankFigures, calibrate, combine

HOST = torch.device("cpu")
TINY = Grid(
    layers={"fp32": ((16, 32, 64),)},
    uneven={},
    float8=((16, 32, 64),),
    experts=((2, 16, 32, 64),),
    attentions={"fp32": ((16, 8),)},
    tokens=32,
    numels=(1 << 12,),
    low=torch.float32,
    parameters=1 << 20,
    budget_s=0.001,
)


def figures(rate, bandwidth):
    return RankFigures(
        figures={"memory_bandwidth": measured(bandwidth, 0.03)},
        matmuls=(MatmulPoint(m=1, n=2, k=3, dtype="fp32", flops=rate),),
        attentions=(AttentionPoint(length=8, head_dim=4, dtype="fp32", forward=rate, backward=2 * rate),),
        collectives=(),
    )


def test_ranks_that_measure_at_once_give_their_mean_and_their_distance():
    found = combine([figures(1e9, 1e10), figures(3e9, 3e10)], this_machine(2).node)
    assert [(point.m, point.flops) for point in found.matmuls] == [(1, 2e9)]
    assert [(point.forward, point.backward) for point in found.attentions] == [(2e9, 4e9)]
    assert found.memory_bandwidth.value == 2e10
    assert found.memory_bandwidth.uncertainty == pytest.approx(0.5)
    assert found.memory_bandwidth.origin == "measured"
    assert found.operator_s.origin == "catalogue"


def test_a_layer_is_timed_forward_and_in_both_products_of_backward():
    points = timing.matmul_points([(16, 32, 64)], "fp32", HOST, budget_s=0.001)
    assert [(point.m, point.n, point.k) for point in points] == [(16, 64, 32), (16, 32, 64), (32, 64, 16)]
    assert all(point.flops > 0 for point in points)


def test_layers_too_large_for_the_budget_are_left_out():
    points = timing.matmul_points([(8, 8, 8), (4096, 4096, 4096)], "fp32", HOST, budget_s=1e-4)
    assert {(point.m, point.n, point.k) for point in points} == {(8, 8, 8)}


def test_two_ranks_measure_this_machine_and_keep_it(tmp_path):
    found = calibrate(2, folder=tmp_path, grid=TINY)
    assert read_calibration(found.device, tmp_path) == found
    assert len(found.matmuls) == 3
    assert found.skipped.keys() == {"float8", "grouped"}  # no kernels on a CPU
    assert found.grouped == ()
    assert [points.name for points in found.collectives] == list(COLLECTIVES)
    for points in found.collectives:
        assert (points.ranks, points.nodes) == (2, 1)
        assert tuple(num_bytes for num_bytes, _ in points.points) == SIZES
    for name in ("memory_bandwidth", "operator_s", "kernel_s", "optimizer_bandwidth", "host_optimizer_bandwidth"):
        assert getattr(found, name).origin == "measured"
        assert getattr(found, name).value > 0


def test_grouped_products_are_timed_and_give_the_rate_of_experts_of_other_sizes():
    points = low_precision.grouped_points([(2, 64, 32, 48)], HOST, budget_s=0.001)  # torch's reference on a CPU
    assert [(point.groups, point.m, point.n, point.k) for point in points] == [(2, 64, 48, 32)]
    node = parse_cluster("1xH100").node
    listed = default_calibration(node)
    alone = listed.matmul(2048, 14_336, 4096, "bf16").value
    assert listed.grouped_matmul(8, 16_384, 14_336, 4096, "bf16").origin == "catalogue"
    assert listed.grouped_matmul(8, 16_384, 14_336, 4096, "bf16").value == alone
    slow = GroupedPoint(groups=8, m=16_384, n=14_336, k=4096, dtype="bf16", flops=alone / 2)
    known = dataclasses.replace(listed, grouped=(slow,))
    assert known.grouped_matmul(8, 16_384, 14_336, 4096, "bf16").value == pytest.approx(alone / 2)
    near = known.grouped_matmul(8, 32_768, 14_336, 4096, "bf16")
    assert near.origin == "measured"
    assert near.value == pytest.approx(known.matmul(4096, 14_336, 4096, "bf16").value / 2)


@pytest.mark.parametrize(
    ("capability", "skipped"), [((8, 0), {"float8"}), ((7, 5), {"float8", "grouped"}), ((9, 0), set())]
)
def test_low_precision_is_skipped_on_devices_without_kernels(monkeypatch, capability, skipped):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    device = torch.device("cuda", 0)
    reasons = {"float8": low_precision.why_not_float8(device), "grouped": low_precision.why_not_grouped(device)}
    assert {name for name, reason in reasons.items() if reason} == skipped


@pytest.mark.gpu
def test_float8_layers_are_timed_with_the_accumulation_of_training():
    device = torch.device("cuda")
    if low_precision.why_not_float8(device):
        pytest.skip(low_precision.why_not_float8(device))
    points = low_precision.float8_points([(4096, 4096, 4096), (10, 10, 10)], device, budget_s=0.02)
    assert [(point.m, point.n, point.k) for point in points] == [(4096, 4096, 4096)] * 3
    assert points[0].flops > max(point.flops for point in points[1:])


def test_the_grid_of_a_cpu_reaches_from_small_to_large_layers():
    sizes = [rows * inner * columns for rows, inner, columns in CPU.layers["fp32"]]
    assert max(sizes) / min(sizes) > 1e4
