"""Time of a collective: the links that a group of ranks spans, and the fastest of NCCL's algorithms on them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from shardwise.errors import LayoutError, nearest
from shardwise.layout import AXES

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.hardware.calibration import Calibration, Origin
    from shardwise.hardware.machine import Cluster
    from shardwise.layout import Layout

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send"]

_LAUNCH_S = 8.4e-6
"""Base latency of every NCCL collective, ring with the Simple protocol (NCCL, src/graph/tuning.cc)."""
_SMALL_BANDWIDTH = 0.25
"""Fraction of the bus bandwidth that NCCL's low-latency protocol reaches: half of its bytes are flags."""
_TREE_BANDWIDTH = 0.9
"""Fraction of the ring's bus bandwidth that trees reach (NCCL, src/graph/tuning.cc)."""
_MULTICAST_BANDWIDTH = 0.68
"""Fraction of the link bandwidth that reductions inside the switch reach: 275 GB/s of data on eight H100, whose links
would carry 450 x 8 / 9 (NCCL's authors, NVIDIA/nccl-tests issue 212)."""

_PEERS_AT_ONCE = 8
"""Messages of an all_to_all that one rank has in flight (assumption)."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Number of ranks and nodes of one group; one placement represents all groups along the same axes."""

    ranks: int
    nodes: int
    """Nodes that the group spans: the maximum over the groups if they differ."""

    @property
    def per_node(self) -> int:
        """Ranks of the group on each node, rounded down."""
        return max(1, self.ranks // self.nodes)


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Predicted time of one collective."""

    seconds: float
    algorithm: str
    """ring, tree, hierarchical, direct, measured or none."""
    uncertainty: float
    origin: Origin


def placement_of(layout: Layout, axes: tuple[str, ...], cluster: Cluster) -> Placement:
    """Return the numbers of ranks and nodes of a group along `axes`; rank r is on device r, numbered node by node."""
    for axis in axes:
        if axis not in AXES:
            raise LayoutError(f"layout has no axis {axis!r}", code="layout.unknown-axis", fix=nearest(axis, AXES))
    devices_per_node = cluster.devices_per_node
    ranks, per_node, stride = 1, 1, 1
    whole = True
    for axis, degree in zip(reversed(AXES), reversed(layout.degrees), strict=True):
        if axis in axes and degree > 1:
            here, whole = _inside(degree, stride, devices_per_node, whole=whole)
            ranks, per_node = ranks * degree, per_node * here
        stride *= degree
    return Placement(ranks=ranks, nodes=-(-ranks // per_node))


def _inside(degree: int, stride: int, devices_per_node: int, *, whole: bool) -> tuple[int, bool]:
    """Return how many neighbours along one axis share a node in every group, and whether all of them do."""
    if not whole or stride >= devices_per_node:
        return 1, False
    if devices_per_node % (stride * degree) == 0:
        return degree, True
    if devices_per_node % stride:
        return 1, False
    # Groups whose size does not divide a node straddle its boundary; a common divisor shares a node everywhere.
    return math.gcd(degree, devices_per_node // stride), False


def collective(
    name: Collective, num_bytes: float, placement: Placement, cluster: Cluster, calibration: Calibration | None = None
) -> Transfer:
    """Return the time of one collective while all groups along the same axes run it simultaneously.

    `num_bytes` is the whole tensor: the gathered output, the input of a scatter, one rank's input of all_to_all.
    All devices of a node communicate at once, so each has its share of the network cards.
    """
    if name not in _ALGORITHMS:
        raise ValueError(f"unknown collective {name!r}")
    if placement.ranks == 1 or num_bytes <= 0:
        return Transfer(seconds=0.0, algorithm="none", uncertainty=0.0, origin="catalogue")
    exact = calibration and calibration.collective(name, placement.ranks, placement.nodes)
    if exact:
        return Transfer(seconds=exact.seconds(num_bytes), algorithm="measured", uncertainty=0.1, origin="measured")
    seconds, algorithm = _modelled(name, num_bytes, placement, cluster)
    scale = _measured_over_modelled(name, num_bytes, placement, cluster, calibration) if calibration else None
    return Transfer(
        seconds=seconds * (scale or 1.0),
        algorithm=algorithm,
        uncertainty=0.3 if scale is None else 0.2,
        origin="catalogue",
    )


def bus_bandwidth(placement: Placement, cluster: Cluster) -> float:
    """Return the bytes per second of a ring over a group; 0 for one rank."""
    return _route(placement, cluster, small=False).bus if placement.ranks > 1 else 0.0


def _modelled(name: Collective, num_bytes: float, placement: Placement, cluster: Cluster) -> tuple[float, str]:
    """Return seconds and name of the fastest algorithm over NCCL's bulk and low-latency protocols."""
    algorithms = list(_ALGORITHMS[name].items())
    known = algorithms[:1] if cluster.device.kind == "cpu" else algorithms
    routes = [_route(placement, cluster, small=small) for small in (False, True)]
    return min((seconds(num_bytes, route), algorithm) for route in routes for algorithm, seconds in known)


def _measured_over_modelled(
    name: Collective, num_bytes: float, placement: Placement, cluster: Cluster, calibration: Calibration
) -> float | None:
    """Return the ratio of measured to modelled time of the measured group closest in size, or None without one."""
    alike = [p for p in calibration.collectives if p.name == name and (p.nodes > 1) == (placement.nodes > 1)]
    if not alike:
        return None
    known = min(alike, key=lambda p: abs(math.log(p.ranks / placement.ranks)))
    there = Placement(ranks=known.ranks, nodes=known.nodes)
    return known.seconds(num_bytes) / _modelled(name, num_bytes, there, cluster)[0]


class _Route(NamedTuple):
    """Link rates of one group under one protocol; a tuple, since a search creates many."""

    ranks: int
    nodes: int
    per_node: int
    inside: float
    """Bytes per second of one rank inside its node."""
    outside: float
    """Bytes per second of one rank to other nodes."""
    hop_inside: float
    hop_outside: float
    multicast: float
    """Bytes per second of one rank to a switch that reduces (NVLink SHARP), 0 without one."""
    launch: float

    @property
    def bus(self) -> float:
        """Bus bandwidth in bytes/s of a ring over all ranks; between nodes, it uses the NICs of all ranks of a node."""
        return self.inside if self.nodes == 1 else min(self.inside, self.outside * self.per_node)


def _route(placement: Placement, cluster: Cluster, *, small: bool) -> _Route:
    node = cluster.node
    inside, outside, gloo = node.inside, node.outside, node.device.kind == "cpu"
    keep = _SMALL_BANDWIDTH if small and not gloo else 1.0
    multicast = inside.multicast and not small and placement.per_node > 2
    return _Route(
        ranks=placement.ranks,
        nodes=placement.nodes,
        per_node=placement.per_node,
        inside=inside.reached * keep,
        outside=outside.reached * keep,
        hop_inside=inside.latency_s if small else inside.bulk_latency_s,
        hop_outside=outside.latency_s if small else outside.bulk_latency_s,
        multicast=inside.bandwidth * _MULTICAST_BANDWIDTH if multicast else 0.0,
        # The measured latency of gloo's link contains its base latency.
        launch=0.0 if gloo else _LAUNCH_S,
    )


def _ring(num_bytes: float, route: _Route) -> float:
    """Return seconds of a ring in which every chunk visits all other ranks once."""
    return route.launch + _round(route) + (route.ranks - 1) / route.ranks * num_bytes / route.bus


def _double_ring(num_bytes: float, route: _Route) -> float:
    """Return seconds of a ring all-reduce: a reduce-scatter, then an all-gather."""
    return route.launch + 2 * _round(route) + 2 * (route.ranks - 1) / route.ranks * num_bytes / route.bus


def _stream(num_bytes: float, route: _Route) -> float:
    """Return seconds of a pipelined chain that passes the whole tensor through all ranks."""
    return route.launch + _round(route) + num_bytes / route.bus


def _round(route: _Route) -> float:
    """Return the latency of one trip around the ring."""
    return (route.ranks - route.nodes) * route.hop_inside + (route.nodes - 1) * route.hop_outside


def _tree(num_bytes: float, route: _Route) -> float:
    """Return seconds of a double-tree all-reduce: trees over nodes, each with half the tensor, and chains inside."""
    local = 2 * num_bytes / route.inside / _TREE_BANDWIDTH if route.per_node > 1 else 0.0
    hops = (route.per_node - 1) * route.hop_inside + math.ceil(math.log2(route.nodes)) * route.hop_outside
    return route.launch + 2 * hops + max(local, _across(num_bytes, route))


def _hierarchical(num_bytes: float, route: _Route) -> float:
    """Return seconds of an all-reduce in the switch of each node (NVLink SHARP), with trees between nodes."""
    if not route.multicast:
        return math.inf
    # Each rank sends its tensor to the switch and receives its shard, then sends the shard and receives the tensor.
    local = num_bytes * (route.per_node + 1) / route.per_node / route.multicast
    hops = route.hop_inside + math.ceil(math.log2(route.nodes)) * route.hop_outside
    # Chunks pass node and network in a pipeline, so the slower of the two determines the time.
    return route.launch + 2 * hops + max(local, _across(num_bytes, route))


def _across(num_bytes: float, route: _Route) -> float:
    """Return seconds of the trees between nodes, which use the network cards of all ranks of a node."""
    # With two nodes, each is the root of one tree and every link carries the tensor once; with more nodes, twice.
    crossings = min(route.nodes - 1, 2)
    return crossings * num_bytes / (route.outside * route.per_node) / _TREE_BANDWIDTH


def _exchange(num_bytes: float, route: _Route) -> float:
    """Return seconds of an all-to-all by direct sends, inside the node and between nodes simultaneously."""
    near, far = route.per_node - 1, route.ranks - route.per_node
    hops = max(math.ceil(near / _PEERS_AT_ONCE) * route.hop_inside, math.ceil(far / _PEERS_AT_ONCE) * route.hop_outside)
    to_each = num_bytes / route.ranks
    return route.launch + hops + max(near * to_each / route.inside, far * to_each / route.outside)


def _send(num_bytes: float, route: _Route) -> float:
    """Return seconds of a send to the next rank along the axis, over the slowest link of the group."""
    bandwidth, hop = (route.inside, route.hop_inside) if route.nodes == 1 else (route.outside, route.hop_outside)
    return route.launch + hop + num_bytes / bandwidth


_ALGORITHMS: dict[str, dict[str, Callable[[float, _Route], float]]] = {
    "all_reduce": {"ring": _double_ring, "tree": _tree, "hierarchical": _hierarchical},
    "all_gather": {"ring": _ring},  # NCCL has no other algorithm for this one and the two below
    "reduce_scatter": {"ring": _ring},
    "broadcast": {"ring": _stream},
    "all_to_all": {"direct": _exchange},
    "send": {"direct": _send},
}
"""Algorithms by collective; gloo has only the first of each."""
