"""Plans: how to train a job on a layout, with presets, TOML files and the catalogue of published models."""

from shardwise.plans.plan import Plan
from shardwise.plans.sections import Communication, Float8, Offload, Pipeline, Precision

__all__ = ["Communication", "Float8", "Offload", "Pipeline", "Plan", "Precision"]
