"""How to train a Job on a Layout: the Plan, its presets, its TOML form, and how it is settled."""

from shardwise.plan.plan import Communication, Offload, Pipeline, Plan, Precision
from shardwise.plan.settle import MLX, Device, searching, settle, with_engine, with_engine_of

__all__ = [
    "MLX",
    "Communication",
    "Device",
    "Offload",
    "Pipeline",
    "Plan",
    "Precision",
    "searching",
    "settle",
    "with_engine",
    "with_engine_of",
]
