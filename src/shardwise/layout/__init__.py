"""How a world of ranks is partitioned along named axes: pure arithmetic, no torch."""

from shardwise.layout.layout import AXES, Coordinate, Layout, parse_layout

__all__ = ["AXES", "Coordinate", "Layout", "parse_layout"]
