"""Seconds of a collective: which links a group of ranks spans, and the best of NCCL's algorithms on them."""

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
"""Base of every NCCL collective, ring with the Simple protocol (NCCL, src/graph/tuning.cc)."""
_SMALL_BANDWIDTH = 0.25
"""Of the bus bandwidth that NCCL's low-latency protocol keeps: half of its bytes are flags, and less is in flight."""
_TREE_BANDWIDTH = 0.9
"""Of the ring's bus bandwidth that trees reach (NCCL, src/graph/tuning.cc)."""
_MULTICAST_BANDWIDTH = 0.68
"""Of the wire that reductions inside the switch reach: 275 GB/s of tensor on eight H100, whose links would carry
450 x 8 / 9 (NCCL's authors, NVIDIA/nccl-tests issue 212)."""

_PEERS_AT_ONCE = 8
"""Messages of an all_to_all that one rank has under way (assumption)."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """How the ranks of one group lie on nodes; all groups of a kind lie alike."""

    ranks: int
    nodes: int
    """Nodes that the group spans, the worst group where some span more."""

    @property
    def per_node(self) -> int:
        """Ranks of the group on each node, rounded down where they do not divide."""
        return max(1, self.ranks // self.nodes)


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """What one collective costs."""

    seconds: float
    algorithm: str
    """ring, tree, hierarchical, direct, measured or none."""
    uncertainty: float
    origin: Origin


def placement_of(layout: Layout, axes: tuple[str, ...], cluster: Cluster) -> Placement:
    """Return the nodes of groups along `axes` when rank r is device r of the cluster, counted node by node."""
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
    """Return how many neighbours along one axis surely share a node, and whether all do."""
    if not whole or stride >= devices_per_node:
        return 1, False
    if devices_per_node % (stride * degree) == 0:
        return degree, True
    # Groups that do not divide a node straddle its edge; as many as divide it share a node everywhere.
    return math.gcd(
        degree, devices_per_node // math.gcd(stride, devices_per_node)
    ) if devices_per_node % stride == 0 else 1, False


def collective(
    name: Collective, num_bytes: float, placement: Placement, cluster: Cluster, calibration: Calibration | None = None
) -> Transfer:
    """Return the cost of one collective while every group of its kind does the same.

    `num_bytes` is the whole tensor: the gathered output, the input of a scatter, one rank's input of all_to_all.
    All devices of a node are busy at once, so each has its share of the network cards.
    """
    if name not in _ALGORITHMS:
        raise ValueError(name)
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


def _modelled(name: Collective, num_bytes: float, placement: Placement, cluster: Cluster) -> tuple[float, str]:
    """Return seconds and name of the fastest algorithm, each tried with NCCL's bulk and small-message protocols."""
    algorithms = list(_ALGORITHMS[name].items())
    known = algorithms[:1] if cluster.device.kind == "cpu" else algorithms
    routes = [_route(placement, cluster, small=small) for small in (False, True)]
    return min((seconds(num_bytes, route), algorithm) for route in routes for algorithm, seconds in known)


def _measured_over_modelled(
    name: Collective, num_bytes: float, placement: Placement, cluster: Cluster, calibration: Calibration
) -> float | None:
    """Return how far off the model was on the measured group most like this one, None without any."""
    alike = [p for p in calibration.collectives if p.name == name and (p.nodes > 1) == (placement.nodes > 1)]
    if not alike:
        return None
    known = min(alike, key=lambda p: abs(math.log(p.ranks / placement.ranks)))
    there = Placement(ranks=known.ranks, nodes=known.nodes)
    return known.seconds(num_bytes) / _modelled(name, num_bytes, there, cluster)[0]


class _Route(NamedTuple):
    """The links of one group under one protocol; made for every call of a search, so a tuple."""

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
    """Bytes per second of one rank to a switch that adds, 0 where there is none."""
    launch: float

    @property
    def bus(self) -> float:
        """Bytes per second of a ring through all ranks: all cards of the group's ranks carry a part of it."""
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
        # gloo's own base is in the latency that was measured for its link.
        launch=0.0 if gloo else _LAUNCH_S,
    )


def _ring(num_bytes: float, route: _Route) -> float:
    """Each rank hands pieces to its neighbour until all but its own went by."""
    return route.launch + _round(route) + (route.ranks - 1) / route.ranks * num_bytes / route.bus


def _double_ring(num_bytes: float, route: _Route) -> float:
    """One round adds, one spreads the sums."""
    return route.launch + 2 * _round(route) + 2 * (route.ranks - 1) / route.ranks * num_bytes / route.bus


def _stream(num_bytes: float, route: _Route) -> float:
    """The whole tensor flows through all ranks, one after the other."""
    return route.launch + _round(route) + num_bytes / route.bus


def _round(route: _Route) -> float:
    """Seconds of latency once around the ring."""
    return (route.ranks - route.nodes) * route.hop_inside + (route.nodes - 1) * route.hop_outside


def _tree(num_bytes: float, route: _Route) -> float:
    """Two trees over nodes, each for half of the tensor, chains inside nodes: sums go up, the result comes down."""
    local = 2 * num_bytes / route.inside / _TREE_BANDWIDTH if route.per_node > 1 else 0.0
    hops = (route.per_node - 1) * route.hop_inside + math.ceil(math.log2(route.nodes)) * route.hop_outside
    return route.launch + 2 * hops + max(local, _across(num_bytes, route))


def _hierarchical(num_bytes: float, route: _Route) -> float:
    """The switch of each node adds (NVLink SHARP), trees between nodes add the parts, the switch copies."""
    if not route.multicast:
        return math.inf
    # Each rank sends its tensor to the switch and takes its part back, then the other way round.
    local = num_bytes * (route.per_node + 1) / route.per_node / route.multicast
    hops = route.hop_inside + math.ceil(math.log2(route.nodes)) * route.hop_outside
    # Chunks flow through node and network at once, so the slower sets the pace.
    return route.launch + 2 * hops + max(local, _across(num_bytes, route))


def _across(num_bytes: float, route: _Route) -> float:
    """Seconds of the trees between nodes, whose halves go through the cards of all ranks of a node."""
    # With two nodes each is the root of one tree, so every wire carries the tensor once; with more, twice.
    crossings = min(route.nodes - 1, 2)
    return crossings * num_bytes / (route.outside * route.per_node) / _TREE_BANDWIDTH


def _exchange(num_bytes: float, route: _Route) -> float:
    """Every rank sends straight to its peers; what stays in the node and what leaves it go at once."""
    near, far = route.per_node - 1, route.ranks - route.per_node
    hops = max(math.ceil(near / _PEERS_AT_ONCE) * route.hop_inside, math.ceil(far / _PEERS_AT_ONCE) * route.hop_outside)
    to_each = num_bytes / route.ranks
    return route.launch + hops + max(near * to_each / route.inside, far * to_each / route.outside)


def _send(num_bytes: float, route: _Route) -> float:
    """One rank sends to the next along the axis, over the slowest link that any of them has to."""
    bandwidth, hop = (route.inside, route.hop_inside) if route.nodes == 1 else (route.outside, route.hop_outside)
    return route.launch + hop + num_bytes / bandwidth


_ALGORITHMS: dict[str, dict[str, Callable[[float, _Route], float]]] = {
    "all_reduce": {"ring": _double_ring, "tree": _tree, "hierarchical": _hierarchical},
    "all_gather": {"ring": _ring},  # NCCL has no other for these three
    "reduce_scatter": {"ring": _ring},
    "broadcast": {"ring": _stream},
    "all_to_all": {"direct": _exchange},
    "send": {"direct": _send},
}
"""gloo knows only the first of each."""
