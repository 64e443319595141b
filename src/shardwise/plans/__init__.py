"""How to train a Job on a Layout: the Plan, its presets, its TOML form, and the catalogue of published models."""

from shardwise.plans.plan import Communication, Offload, Pipeline, Plan, Precision

__all__ = ["Communication", "Offload", "Pipeline", "Plan", "Precision"]
