"""Plans: how to train a job on a layout, with presets, TOML files and the catalogue of published models."""

from shardwise.plans.plan import Communication, Offload, Pipeline, Plan, Precision

__all__ = ["Communication", "Offload", "Pipeline", "Plan", "Precision"]
