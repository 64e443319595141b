"""Training engines behind one interface: torch, DeepSpeed and MLX, and the collective backends, including MPI."""

RECORDED_MODULES = ("shardwise.engines.mlx.step",)
"""Modules of engines that communicate without a torch process group. Each defines `record(ring, world_size)`; the
recorder of a rank calls it when the module is imported."""
