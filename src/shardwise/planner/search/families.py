"""Families of plans, the simplest first, and which of two plans is the simpler one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwise.plans.plan import Plan

FAMILIES: dict[str, str] = {
    "ddp": "everything whole on every device",
    "zero1": "optimizer states cut",
    "zero2": "and gradients",
    "zero3": "and parameters (fsdp)",
    "hsdp": "cut inside groups, whole across them",
    "cp": "tokens of a sample cut",
    "tp": "matrices cut",
    "pp": "layers in stages",
    "3d": "stages of cut matrices",
    "offload": "states wait on the host",
}
"""Name -> what it does, the simplest first."""

_ORDER = {family: place for place, family in enumerate(FAMILIES)}
_RECOMPUTE = ("none", "selective", "full")
_SCHEDULES = ("1f1b", "gpipe", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev")


def family_of(plan: Plan) -> str:
    """Return the family of a plan."""
    layout = plan.layout
    if plan.offload.optimizer != "none" or plan.offload.parameters != "none":
        return "offload"
    if layout.cp > 1:
        return "cp"
    if layout.pp > 1:
        return "3d" if layout.tp > 1 else "pp"
    if layout.tp > 1:
        return "tp"
    if layout.shard == 1:
        return "ddp"
    return "hsdp" if layout.replicate > 1 else f"zero{plan.zero}"


def cuts_model(plan: Plan) -> bool:
    """Whether matrices, layers or sequences are cut, beyond samples and states."""
    return plan.layout.pp > 1 or plan.layout.tp > 1 or plan.layout.cp > 1


def simplicity(plan: Plan) -> tuple[int, ...]:
    """Return what sorts plans from simple to involved; different plans differ in it."""
    layout = plan.layout
    return (
        _ORDER[family_of(plan)],
        layout.pp,
        layout.tp,
        layout.cp,
        plan.fused_loss,
        plan.offload.parameters != "none",
        _RECOMPUTE.index(plan.recompute),
        plan.gradient_sync != "last",
        _SCHEDULES.index(plan.pipeline.schedule) if layout.pp > 1 else 0,
        plan.zero,
        plan.accumulation,
        layout.replicate,
        plan.sequence_parallel,
    )
