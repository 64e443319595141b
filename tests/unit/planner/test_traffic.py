"""Seconds of collectives against hand-worked cases, and where groups of ranks stand."""

import math
import time
from dataclasses import replace

import pytest

from refusals import refuses
from shardwise.hardware.calibration import CollectivePoints, default_calibration
from shardwise.hardware.cluster import parse_cluster
from shardwise.hardware.machine import Cluster
from shardwise.layout import Layout, parse_layout
from shardwise.planner.cost import traffic
from shardwise.planner.cost.traffic import Placement, collective, placement_of

NAMES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send")
H100 = parse_cluster("1024xH100")
A100 = parse_cluster("1024xA100-80GB")
LAUNCH = 8.4e-6


def nodes_of(group, per_node):
    return len({rank // per_node for rank in group})


@pytest.mark.parametrize(
    "text",
    [
        "shard64",
        "pp2.replicate2.shard2.cp2.tp4",
        "pp4.shard2.tp8",
        "replicate8.tp8",
        "pp8.replicate2.shard4",
        "cp16.tp4",
    ],
)
@pytest.mark.parametrize("shape", ["64xH100", "16x4xH100", "32x2xH100", "64x1xH100"])
@pytest.mark.parametrize("axes", [("tp",), ("shard",), ("replicate", "shard"), ("pp",), ("shard", "tp"), ("cp",)])
def test_placement_equals_counting_the_ranks(text, shape, axes):
    layout, cluster = parse_layout(text), parse_cluster(shape)
    groups = layout.groups(*axes)
    placed = placement_of(layout, axes, cluster)
    assert placed.ranks == len(groups[0])
    assert {placed.nodes} == {nodes_of(group, cluster.devices_per_node) for group in groups}


@pytest.mark.parametrize(
    "text", ["replicate8.tp3", "shard4.tp6", "pp3.shard8", "shard12.tp2", "replicate2.shard3.cp2.tp2"]
)
@pytest.mark.parametrize("axes", [("tp",), ("shard",), ("replicate", "shard"), ("shard", "tp"), ("shard", "cp")])
def test_groups_that_straddle_nodes_are_never_placed_too_well(text, axes):
    layout, cluster = parse_layout(text), parse_cluster("3xhgx-h100")
    worst = max(nodes_of(group, 8) for group in layout.groups(*axes))
    assert placement_of(layout, axes, cluster).nodes >= worst


def test_placing_does_not_list_ranks():
    layout, cluster = Layout(pp=16, replicate=128, shard=8, tp=8), parse_cluster("131072xH100")
    start = time.process_time()
    for _ in range(100):
        placement_of(layout, ("replicate",), cluster)
    assert time.process_time() - start < 0.1


def test_unknown_axis_is_refused():
    with refuses("layout.unknown-axis", "'dp'"):
        placement_of(Layout(), ("dp",), H100)


def test_a_group_of_one_costs_nothing():
    assert [collective(name, 1e9, Placement(ranks=1, nodes=1), H100).seconds for name in NAMES] == [0.0] * 6


def test_ring_all_gather_inside_a_node_by_hand():
    size = 2**30
    link = A100.node.inside
    seconds = collective("all_gather", size, Placement(ranks=8, nodes=1), A100).seconds
    assert seconds == pytest.approx(LAUNCH + 7 * 1.9e-6 + 7 / 8 * size / (300e9 * link.efficiency))


def test_ring_all_reduce_is_two_rounds_by_hand():
    size = 2**30
    cost = collective("all_reduce", size, Placement(ranks=8, nodes=1), A100)
    by_hand = LAUNCH + 2 * 7 * 1.9e-6 + 2 * 7 / 8 * size / (300e9 * 0.77)
    assert (cost.algorithm, cost.seconds) == ("ring", pytest.approx(by_hand))


def test_ring_across_nodes_uses_the_cards_of_all_its_ranks():
    size = 2**32
    cost = collective("reduce_scatter", size, Placement(ranks=32, nodes=4), A100)
    cards = 8 * 25e9 * 0.93
    by_hand = LAUNCH + 28 * 1.9e-6 + 3 * 4.0e-6 + 31 / 32 * size / cards
    assert cost.seconds == pytest.approx(by_hand)


def test_one_rank_per_node_has_one_share_of_the_network():
    size = 2**32
    p4d = parse_cluster("4xp4d")
    cost = collective("all_gather", size, Placement(ranks=4, nodes=4), p4d)
    share = 4 * 12.5e9 / 8 * 0.6
    assert cost.seconds == pytest.approx(LAUNCH + 3 * 25e-6 + 3 / 4 * size / share)


def test_broadcast_streams_the_whole_tensor_once():
    size = 2**30
    cost = collective("broadcast", size, Placement(ranks=4, nodes=1), A100)
    assert cost.seconds == pytest.approx(LAUNCH + 3 * 1.9e-6 + size / (300e9 * 0.77))


def test_send_to_the_next_node_takes_one_devices_share():
    cost = collective("send", 2**30, Placement(ranks=2, nodes=2), H100)
    assert cost.seconds == pytest.approx(LAUNCH + 4.0e-6 + 2**30 / (50e9 * 0.94))


def test_all_to_all_is_bound_by_what_leaves_the_node():
    size = 2**30
    cost = collective("all_to_all", size, Placement(ranks=16, nodes=2), H100)
    assert cost.seconds == pytest.approx(LAUNCH + 4.0e-6 + 8 / 16 * size / (50e9 * 0.94))


@pytest.mark.parametrize(
    ("text", "name", "bus", "tolerance"),
    [
        ("8xH100", "all_reduce", 476, 0.03),  # NVIDIA/nccl-tests issues 212 and 290
        ("8xH100", "all_gather", 370, 0.03),
        ("p4d", "all_reduce", 230.8, 0.03),  # NVIDIA/nccl issue 527
        ("2xp4d", "all_reduce", 57.2, 0.15),
        ("4xp4d", "all_reduce", 29.6, 0.03),
    ],
)
def test_bus_bandwidth_of_a_gibibyte_is_near_published_ones(text, name, bus, tolerance):
    cluster = parse_cluster(text)
    ranks = cluster.num_devices
    cost = collective(name, 2**30, Placement(ranks=ranks, nodes=cluster.num_nodes), cluster)
    factor = (2 if name == "all_reduce" else 1) * (ranks - 1) / ranks
    assert factor * 2**30 / cost.seconds / 1e9 == pytest.approx(bus, rel=tolerance)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("placement", [(2, 1), (8, 1), (16, 2), (16, 16), (1024, 128)])
@pytest.mark.parametrize("cluster", [H100, A100, parse_cluster("2048xcpu")], ids=["H100", "A100", "cpu"])
def test_more_bytes_never_take_less_time(name, placement, cluster):
    ranks, nodes = placement
    sizes = [2**power for power in range(36)]
    seconds = [collective(name, size, Placement(ranks=ranks, nodes=nodes), cluster).seconds for size in sizes]
    assert seconds == sorted(seconds)
    assert seconds[0] > 0
    assert math.isfinite(seconds[-1])


def test_trees_win_for_small_tensors_on_many_nodes():
    assert collective("all_reduce", 1024, Placement(ranks=1024, nodes=128), A100).algorithm == "tree"
    assert collective("all_reduce", 2**32, Placement(ranks=1024, nodes=128), A100).algorithm == "ring"


def test_switches_that_add_beat_a_flat_ring_over_slow_links():
    slow = parse_cluster("2xa3-highgpu-8g")
    mute = replace(slow.node, inside=replace(slow.node.inside, multicast=False))
    placed = Placement(ranks=16, nodes=2)
    adding = collective("all_reduce", 2**28, placed, slow)
    assert adding.algorithm == "hierarchical"
    ring = traffic._double_ring(2**28, traffic._route(placed, slow, small=False))
    assert adding.seconds < 0.7 * ring
    assert collective("all_reduce", 2**28, placed, Cluster(node=mute, num_devices=16)).algorithm == "tree"


def test_slower_network_takes_longer():
    placed = Placement(ranks=16, nodes=2)
    fast, efa, tcp = (parse_cluster(name) for name in ("2xnd-a100-v4", "2xp4d", "2xa2-highgpu-8g"))
    seconds = [collective("all_gather", 2**28, placed, cluster).seconds for cluster in (fast, efa, tcp)]
    assert seconds == sorted(seconds)
    assert seconds[2] > 4 * seconds[0]


def test_gloo_between_two_ranks_is_as_measured():
    cost = collective("all_reduce", 8 * 2**20, Placement(ranks=2, nodes=1), parse_cluster("2xcpu"))
    assert 8 * 2**20 / cost.seconds / 1e9 == pytest.approx(1.0, rel=0.1)
    small = collective("all_reduce", 4096, Placement(ranks=2, nodes=1), parse_cluster("2xcpu"))
    assert 0.33e-3 <= small.seconds <= 0.45e-3


def calibrated(ranks, factor):
    cluster, placed = parse_cluster("8xH100"), Placement(ranks=ranks, nodes=1)
    points = [
        (2**power, factor * collective("all_reduce", 2**power, placed, cluster).seconds) for power in range(10, 31)
    ]
    group = CollectivePoints(name="all_reduce", ranks=ranks, nodes=1, points=tuple(points))
    return cluster, replace(default_calibration(cluster.node), collectives=(group,))


def test_measured_collective_is_taken_as_it_is():
    cluster, calibration = calibrated(ranks=8, factor=1.5)
    cost = collective("all_reduce", 2**20, Placement(ranks=8, nodes=1), cluster, calibration)
    assert (cost.origin, cost.algorithm) == ("measured", "measured")
    assert cost.seconds == pytest.approx(dict(calibration.collectives[0].points)[2**20])


def test_other_group_sizes_are_scaled_by_what_was_measured():
    cluster, calibration = calibrated(ranks=8, factor=1.5)
    placed = Placement(ranks=4, nodes=1)
    listed = collective("all_reduce", 2**20, placed, cluster)
    scaled = collective("all_reduce", 2**20, placed, cluster, calibration)
    assert scaled.seconds == pytest.approx(1.5 * listed.seconds)
    assert scaled.uncertainty < listed.uncertainty


def test_measuring_inside_a_node_gives_nothing_about_the_network():
    _, calibration = calibrated(ranks=8, factor=1.5)
    placed = Placement(ranks=16, nodes=2)
    assert collective("all_reduce", 2**20, placed, H100, calibration) == collective("all_reduce", 2**20, placed, H100)
