"""Calibration: what ranks measured together becomes the figures of a plan."""

import pytest
import torch

from shardwise.hardware.calibration import AttentionPoint, MatmulPoint, measured, read_calibration
from shardwise.hardware.cluster import this_machine
from shardwise.measurement import timing
from shardwise.measurement.calibrate import COLLECTIVES, CPU, SIZES, Grid, RankFigures, calibrate, combine

HOST = torch.device("cpu")
TINY = Grid(
    layers={"fp32": ((16, 32, 64),)},
    uneven={},
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
    assert [points.name for points in found.collectives] == list(COLLECTIVES)
    for points in found.collectives:
        assert (points.ranks, points.nodes) == (2, 1)
        assert tuple(num_bytes for num_bytes, _ in points.points) == SIZES
    for name in ("memory_bandwidth", "operator_s", "kernel_s", "optimizer_bandwidth", "host_optimizer_bandwidth"):
        assert getattr(found, name).origin == "measured"
        assert getattr(found, name).value > 0


def test_the_grid_of_a_cpu_reaches_from_small_to_large_layers():
    sizes = [rows * inner * columns for rows, inner, columns in CPU.layers["fp32"]]
    assert max(sizes) / min(sizes) > 1e4
