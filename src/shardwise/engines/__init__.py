"""Other engines behind the same Step."""

RECORDED_MODULES = ("shardwise.engines.mlx.waits",)
"""Modules of engines whose collectives no process group of torch sees: each has `record(ring, world_size)`, which the
recorder of a rank calls when the module is imported."""
