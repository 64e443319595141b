"""What is said before the first step: who runs where, the batch algebra, dtypes, rates, and each value's source."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardwise.job import Job
    from shardwise.plan import Plan
    from shardwise.step.step import Step
    from shardwise.world import World

_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
_QUARTERS = (0.0, 0.25, 0.5, 1.0)


def start_report(job: Job, plan: Plan, world: World, step: Step) -> dict[str, Any]:
    """Return the facts of the start as plain values; communicates over the world, on every rank."""
    me = {"rank": world.rank, "host": world.host, "device": str(world.device), "pid": os.getpid()}
    length, layout = step.length, plan.layout
    num_parameters = _count_parameters(step, plan, world)
    last = length.num_steps - 1
    base_rate = step.base_rates[0]
    rates = {f"{share:.0%}": base_rate * job.schedule(round(share * last), length.num_steps) for share in _QUARTERS}
    batch = (
        f"{plan.batch_size} = micro-batch {plan.micro_batch} x accumulation {plan.accumulation} x {layout.dp} readers"
    )
    return {
        "ranks": world.gather(me),
        "parameters": num_parameters,
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
            ["weights", step.origin, "job" if job.weights is not None else "model"],
            ["precision", str(plan.precision), plan.source("precision")],
            ["learning rate", " · ".join(f"{rate:.2g} at {at}" for at, rate in rates.items()), _words(job.schedule)],
            ["batch norm", plan.batch_norm, plan.source("batch_norm")],
            *_options(plan, num_parameters),
        ],
    }


def _options(plan: Plan, num_parameters: int) -> Iterator[list[str]]:
    """Yield a line for each option that is not at its default, and the trade of gradient sync where there is one."""
    default = type(plan)()
    for name in ("engine", "recompute", "compile", "sequence_parallel", "offload", "pipeline"):
        value = getattr(plan, name)
        if value != getattr(default, name) or (name == "pipeline" and plan.layout.pp > 1):
            yield [name.replace("_", " "), _shown(value), plan.source(name)]
    if plan.zero >= 2 and plan.accumulation > 1:
        yield ["gradient sync", sync_trade(plan, num_parameters), plan.source("gradient_sync")]


def sync_trade(plan: Plan, num_parameters: int) -> str:
    """Say what `gradient_sync` costs on one rank of a sharded plan: memory held against bytes sent, in GB."""
    whole = num_parameters * _BYTES[plan.precision.reduce] / (plan.layout.pp * plan.layout.tp) / 1e9
    cut = whole / plan.layout.shard
    sent = whole * (plan.layout.shard - 1) / plan.layout.shard
    kept = {"last": whole, "every": cut}
    send = {"last": sent, "every": sent * plan.accumulation}
    mine, other = plan.gradient_sync, "every" if plan.gradient_sync == "last" else "last"
    return (
        f"{mine}: holds {kept[mine]:.2g} GB of gradients, sends {send[mine]:.2g} GB a step"
        f" ({other}: {kept[other]:.2g} GB, {send[other]:.2g} GB)"
    )


def _shown(value: object) -> str:
    """A section as its fields, anything else as itself."""
    if not dataclasses.is_dataclass(value):
        return str(value)
    return ", ".join(f"{field.name} {getattr(value, field.name)}" for field in dataclasses.fields(value))


def _count_parameters(step: Step, plan: Plan, world: World) -> int:
    """Count the whole model's parameters, on all stages; communicates over the world."""
    mine = step.num_parameters
    if plan.layout.pp == 1:
        return mine
    return round(world.sum({"parameters": mine})["parameters"] * plan.layout.pp / world.size)


def _words(schedule: object) -> str:
    """A schedule's own repr when it has one, else its name."""
    return getattr(schedule, "__name__", repr(schedule))
