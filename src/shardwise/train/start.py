"""What is said before the first step: who runs where, the batch algebra, dtypes, rates, and each value's source."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.job import Job
    from shardwise.plan import Plan
    from shardwise.step.plain import PlainStep
    from shardwise.world import World

_QUARTERS = (0.0, 0.25, 0.5, 1.0)


def start_report(job: Job, plan: Plan, world: World, step: PlainStep) -> dict[str, Any]:
    """Return the facts of the start as plain values; communicates over the world, on every rank."""
    me = {"rank": world.rank, "host": world.host, "device": str(world.device), "pid": os.getpid()}
    length, layout = step.length, plan.layout
    last = length.num_steps - 1
    base_rate = step.base_rates[0]
    rates = {f"{share:.0%}": base_rate * job.schedule(round(share * last), length.num_steps) for share in _QUARTERS}
    batch = (
        f"{plan.batch_size} = micro-batch {plan.micro_batch} x accumulation {plan.accumulation} x {layout.dp} readers"
    )
    return {
        "ranks": world.gather(me),
        "parameters": sum(parameter.numel() for parameter in step.model.parameters()),
        "num_steps": length.num_steps,
        "facts": [
            [
                "world",
                f"{world.size} x {world.backend}, collectives time out after {world.timeout_s:g} s",
                world.source,
            ],
            ["plan", f"{layout} (zero {plan.zero})", plan.source("layout")],
            ["batch", batch, plan.source("micro_batch")],
            ["length", f"{length.num_steps} steps", length.source],
            ["precision", str(plan.precision), plan.source("precision")],
            ["learning rate", " · ".join(f"{rate:.2g} at {at}" for at, rate in rates.items()), _words(job.schedule)],
            ["batch norm", plan.batch_norm, plan.source("batch_norm")],
        ],
    }


def _words(schedule: object) -> str:
    """A schedule's own repr when it has one, else its name."""
    return getattr(schedule, "__name__", repr(schedule))
