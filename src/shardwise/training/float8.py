"""The float8 layers of a job: chosen on rank 0, stored with the plan, and checked before ranks start."""

from __future__ import annotations

import dataclasses
import tomllib
from typing import TYPE_CHECKING

import torch

from shardwise.hardware import probe_gpus
from shardwise.hardware.calibration import calibration_for
from shardwise.hardware.cluster import this_machine
from shardwise.parallel.float8 import float8_note, select_linears
from shardwise.parallel.support import check_float8_tokens
from shardwise.parallel.tensor_rules import find_rules
from shardwise.planner.cost.compute import float8_least_width
from shardwise.training.step.captured import sampled_meta_batch

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from typing import Any

    from torch import nn

    from shardwise.dist import World
    from shardwise.job import Job
    from shardwise.parallel.meta_model import MetaModel
    from shardwise.plans import Plan


def settle_float8(
    meta_model: MetaModel, plan: Plan, world: World, note: Callable[[str], None]
) -> tuple[MetaModel, Plan]:
    """Return the model and the plan with the names of its float8 layers. Communicates over a world of GPUs.

    `meta_model` has the full model: a pipeline stage may contain none of the layers. Checkpoints contain the plan with
    the names, so that a resumed run computes the same layers in float8 although a limit or the calibration has changed.
    """
    if plan.precision.compute != "float8":
        return meta_model, plan
    width = None
    if world.device.type == "cuda":  # that of rank 0: the calibrations of other machines may differ
        width = measured_width(plan) if world.is_main else None
        width = width if world.size == 1 or world.backend == "fake" else world.gather(width)[0]
    layers = select_linears(meta_model.module, plan, meta_model.tensor_rules, least_width=width)
    note(float8_note(layers, plan, world.device))
    named = dataclasses.replace(plan.float8, modules=tuple(sorted(layers.names)))
    return dataclasses.replace(meta_model, float8=layers.names), dataclasses.replace(plan, float8=named)


def measured_width(plan: Plan) -> int:
    """Return the least width of a float8 layer by the calibration of this machine, else that of its recipe."""
    return float8_least_width(calibration_for(this_machine().node), plan.float8.recipe)


def with_saved_layers(plan: Plan, facts: Mapping[str, Any]) -> Plan:
    """Return the plan with the float8 layers of a checkpoint's facts, unless the plan names its own."""
    if plan.precision.compute != "float8" or plan.float8.modules:
        return plan
    saved = tomllib.loads(facts.get("plan", ""))
    if saved.get("precision", {}).get("compute") != "float8":
        return plan
    return dataclasses.replace(plan, float8=dataclasses.replace(plan.float8, modules=saved["float8"]["modules"]))


# The checks before ranks start.


class Float8Rules:
    """Rejects plans whose layers or micro-batches float8 kernels do not support; caches the tokens of a micro-batch."""

    def __init__(self, job: Job, module: nn.Module) -> None:
        """Check plans of `job`; `module` is its model on the meta device."""
        self._job, self._module = job, module
        self._tokens: dict[tuple[int, frozenset[str]], dict[str, int]] = {}

    def __call__(self, plan: Plan) -> None:
        """Raise JobError or PlanError if no layer, or the tokens of a micro-batch, support float8."""
        rules = find_rules(self._module, self._job.tensor_rules) if plan.layout.tp > 1 else {}
        width = measured_width(plan) if probe_gpus() else None
        names = select_linears(self._module, plan, rules, least_width=width).names
        if plan.float8.recipe == "rowwise":  # which computes weight gradients in bf16
            return
        key = plan.micro_batch, names
        if key not in self._tokens:
            self._tokens[key] = self._tokens_of(*key)
        for name, number in self._tokens[key].items():
            check_float8_tokens(plan, name, number)

    def _tokens_of(self, rows: int, names: Collection[str]) -> dict[str, int]:
        """Return the tokens that each layer receives of `rows` samples; empty if a sample or meta tensors fail."""
        tokens: dict[str, int] = {}

        def observe(name: str) -> Callable[..., None]:
            def hook(_module: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
                tokens[name] = arguments[0].shape[:-1].numel()

            return hook

        batch = sampled_meta_batch(self._job, rows)
        layers = {name: self._module.get_submodule(name) for name in sorted(names)}
        handles = [layer.register_forward_pre_hook(observe(name)) for name, layer in layers.items()]
        try:
            if batch is not None:
                with torch.no_grad():
                    self._job.forward(self._module, batch)
        except Exception:  # noqa: BLE001 - a model may raise any exception on meta tensors
            return {}
        finally:
            for handle in handles:
                handle.remove()
        return tokens
