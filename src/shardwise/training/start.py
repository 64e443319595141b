"""What is said before the first step: who runs where, the batch algebra, dtypes, rates, and each value's source."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardwise.dist import World
    from shardwise.job import Job
    from shardwise.plans import Plan
    from shardwise.training.step.step import Step

_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
_QUARTERS = (0.0, 0.25, 0.5, 1.0)


def start_report(job: Job, plan: Plan, world: World, step: Step) -> dict[str, Any]:
    """Return the facts of the start as plain values; communicates over the world, on every rank."""
    me = {"rank": world.rank, "host": world.host, "device": str(world.device), "pid": os.getpid()}
    length, layout = step.length, plan.layout
    num_parameters = _on_all_stages(step.num_parameters, plan, world)
    num_trained = num_parameters
    if job.lora is not None:
        mine = sum(parameter.numel() for _, parameter in step.named_parameters() if parameter.requires_grad)
        num_trained = _on_all_stages(mine, plan, world)
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
            ["optimizer", _kind(step), "job"],
            ["learning rate", " · ".join(f"{rate:.2g} at {at}" for at, rate in rates.items()), _words(job.schedule)],
            ["batch norm", plan.batch_norm, plan.source("batch_norm")],
            *_adapters(job, num_trained),
            *_options(plan, num_trained),
        ],
    }


def _adapters(job: Job, num_trained: int) -> Iterator[list[str]]:
    """Yield a line about adapters, where there are some."""
    if job.lora is not None:
        lora = job.lora
        words = f"rank {lora.rank}, alpha {lora.alpha:g} beside {', '.join(lora.targets)}"
        yield ["adapters", f"{words}: {num_trained:,} parameters are trained, the others frozen", "job"]


def _options(plan: Plan, num_trained: int) -> Iterator[list[str]]:
    """Yield a line for each option that is not at its default, and the trade of gradient sync where there is one."""
    default = type(plan)()
    for name in ("engine", "recompute", "compile", "capture", "fused_loss", "sequence_parallel", "offload", "pipeline"):
        value = getattr(plan, name)
        if value != getattr(default, name) or (name == "pipeline" and plan.layout.pp > 1):
            yield [name.replace("_", " "), _shown(value), plan.source(name)]
    if plan.communication.sync_every > 1:
        yield ["low communication", _rounds(plan), plan.source("communication.sync_every")]
    if plan.zero >= 2 and plan.accumulation > 1:
        yield ["gradient sync", sync_trade(plan, num_trained), plan.source("gradient_sync")]


def _rounds(plan: Plan) -> str:
    """Say how replicas come together that train on their own."""
    options = plan.communication
    return (
        f"{plan.layout.replicate} replicas meet after {options.sync_every} steps, outer learning rate"
        f" {options.outer_lr:g}, momentum {options.outer_momentum:g}; changes numbers"
    )


def sync_trade(plan: Plan, num_trained: int) -> str:
    """Say what `gradient_sync` costs on one rank of a sharded plan: memory held against bytes sent, in GB."""
    whole = num_trained * _BYTES[plan.precision.reduce] / (plan.layout.pp * plan.layout.tp) / 1e9
    shards = plan.layout.folded.shard
    cut = whole / shards
    sent = whole * (shards - 1) / shards
    kept = {"last": whole, "every": cut}
    send = {"last": sent, "every": sent * plan.accumulation}
    mine, other = plan.gradient_sync, "every" if plan.gradient_sync == "last" else "last"
    return (
        f"{mine}: holds {kept[mine]:.2g} GB of gradients, sends {send[mine]:.2g} GB a step"
        f" ({other}: {kept[other]:.2g} GB, {send[other]:.2g} GB)"
    )


def _shown(value: object) -> str:
    """A section as its fields, engine mlx with its version and device, anything else as itself."""
    if value == "mlx":
        from shardwise.engines.mlx.words import engine_words

        return engine_words()
    if not dataclasses.is_dataclass(value):
        return str(value)
    return ", ".join(f"{field.name} {getattr(value, field.name)}" for field in dataclasses.fields(value))


def _on_all_stages(mine: int, plan: Plan, world: World) -> int:
    """Return a count of parameters of the whole model, given this rank's; communicates over the world."""
    if plan.layout.pp == 1:
        return mine
    return round(world.sum({"parameters": mine})["parameters"] * plan.layout.pp / world.size)


def _kind(step: Step) -> str:
    """An optimizer's class, and which of torch's kinds of it was chosen."""
    defaults: dict[str, object] = getattr(step.optimizer, "defaults", {})
    chosen = [kind for kind in ("fused", "foreach") if defaults.get(kind)]
    return ", ".join([step.optimized.kind, *chosen])


def _words(schedule: object) -> str:
    """A schedule's own repr when it has one, else its name."""
    return getattr(schedule, "__name__", repr(schedule))
