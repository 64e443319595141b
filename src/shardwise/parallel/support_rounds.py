"""Which plans can let replicas train on their own between syncs; asked before any process starts, so no torch here."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shardwise.errors import PlanError

if TYPE_CHECKING:
    from shardwise.plans import Plan


def check_rounds(plan: Plan) -> None:
    """Refuse a plan with sync_every above 1 that has no replicas, or an option which they cannot have alone."""
    every = plan.communication.sync_every
    if every == 1:
        return
    if plan.layout.replicate == 1:
        raise PlanError(
            f"plan has sync_every = {every} with replicate = 1: there are no replicas to train on their own",
            code="plan.sync-every-without-replicas",
            fix="use --plan ddp or hsdp, or sync_every = 1",
        )
    for unfit in _unfit(plan):
        if unfit.is_asked:
            raise PlanError(
                f"plan has sync_every = {every} with {unfit.words}, which replicas on their own do not have",
                code="support.sync-every-option",
                fix=f"{unfit.fix}, or sync_every = 1",
            )


class _Unfit(NamedTuple):
    """An option that replicas cannot have alone: whether it is asked for, how to name it, what to type instead."""

    is_asked: bool
    words: str
    fix: str


def _unfit(plan: Plan) -> list[_Unfit]:
    layout, options, other = plan.layout, plan.communication, "use --plan ddp or hsdp"
    axes = ((axis, getattr(layout, axis)) for axis in ("pp", "cp", "tp"))
    of_ddp = ("static_graph", "find_unused_parameters", "broadcast_buffers")
    return [
        *(_Unfit(size > 1, f"{axis} = {size}", other) for axis, size in axes),
        _Unfit(plan.zero == 1, "zero = 1", other),
        _Unfit(
            plan.precision.compute == "fp16",
            "fp16, whose loss scale would be each replica's own",
            'use precision.compute = "bf16" or "fp32"',
        ),
        _Unfit(
            "cpu" in (plan.offload.parameters, plan.offload.optimizer),
            "offload",
            'use offload.parameters = "none" and offload.optimizer = "none"',
        ),
        _Unfit(plan.capture != "none", f"capture = {plan.capture!r}", 'use capture = "none"'),
        *(_Unfit(getattr(options, name), f"{name}, which is DDP's", f"use {name} = false") for name in of_ddp),
    ]
