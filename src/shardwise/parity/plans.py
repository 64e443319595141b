"""Which plans are verified: the list behind "all", and plans as they are typed: SPEC+KEY=VALUE+..."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

from shardwise.engines.engine import engine_named
from shardwise.errors import InputError
from shardwise.job.overrides import parse_overrides
from shardwise.planner.settle import LocalDevice, settle, with_engine
from shardwise.plans import Plan, Precision
from shardwise.plans.pipeline import SCHEDULES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardwise.job.job import Framework

Exact = Literal["fp64", "fp32"]

BANDS = {"rounds": 0.25, "powersgd": 0.15, "batch_norm": 0.15, "bf16": 0.03, "fp16": 0.03}
"""Largest relative distance of a step's loss, by what changes the arithmetic. A low-rank gradient, the statistics of
half a batch or steps of half a batch are other numbers from the first on; 8 bits of mantissa are rounding. Where a
loss halves within four steps, replicas that trained a short step on their own were 18 % behind after it."""


def all_plans(nproc: int) -> list[str]:
    """Return every plan that makes sense on this many ranks, as one would type it."""
    plans = [
        "ddp",
        "ddp+accumulation=2",
        "ddp+accumulation=5",
        "ddp+accumulation=2+gradient_sync=every",
        "zero1",
        "zero2",
        "zero3",
        "zero3+accumulation=2",
        "zero3+accumulation=2+gradient_sync=every",
    ]
    if nproc >= 4 and nproc % 2 == 0:
        plans.append("hsdp")
    plans += ["tp", "tp+sequence_parallel=true", "cp", "cp+zero=3+recompute=full"]
    plans += [*_pipelines(nproc), *_products(nproc)]
    plans += [
        "ddp+recompute=full",
        "ddp+recompute=selective",
        "zero3+recompute=full",
        "zero3+offload.parameters=cpu+offload.optimizer=cpu",
        "zero3+compile=blocks",
        "ddp+precision=bf16",
        "zero3+precision=bf16",
        "ddp+precision=fp16",
        "ddp+communication.compression=bf16",
        "ddp+communication.compression=fp16",
        "ddp+communication.compression=powersgd",
        "ddp+communication.sync_every=2",
    ]
    return plans


def _pipelines(nproc: int) -> Iterator[str]:
    """Yield one pipeline per schedule; with twice as many micro-batches as stages, every schedule overlaps."""
    for schedule in SCHEDULES:
        yield f"pp+accumulation={2 * nproc}+pipeline.schedule={schedule}"


def _products(nproc: int) -> list[str]:
    if nproc % 4:
        return []
    rest = nproc // 2
    hybrids = [
        f"pp2.shard{rest}+accumulation=4",
        f"pp2.replicate{rest}+accumulation=4",
        f"pp2.replicate{rest}+accumulation=4+pipeline.schedule=zbv",
        f"pp2.tp{rest}+accumulation=4",
        f"shard2.tp{rest}",
        f"replicate2.tp{rest}",
        f"shard2.cp{rest}",
        f"cp2.tp{rest}",
    ]
    if nproc % 8 == 0:
        hybrids.append(f"pp2.shard{nproc // 4}.tp2+accumulation=4")
    return hybrids


def named_plans(plans: str | Sequence[str], settings: Mapping[str, str]) -> list[str] | None:
    """Return the plans that were asked for, each with the settings for all of them; None for "all" there are."""
    if plans != "all":
        more = "".join(f"+{key}={value}" for key, value in settings.items())
        return [name + more for name in parse_plans(plans if isinstance(plans, str) else ",".join(plans))]
    if settings:
        raise InputError(
            f"--set {next(iter(settings))} is a field of plans, and --plans all brings its own",
            code="cli.option-not-applicable",
            fix="name the plans",
        )
    return None


def parse_plans(text: str) -> list[str]:
    """Split what was typed after --plans; refuses an empty list and a plan named twice."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise InputError(
            f"--plans {text!r} names no plan", code="verify.no-plans", fix="write --plans all, or --plans ddp,zero3"
        )
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InputError(f"--plans names {twice[0]} twice", code="verify.plan-repeated", fix="name each plan once")
    return names


def settle_plan(text: str, *, batch_size: int, nproc: int, framework: Framework = "torch") -> Plan:
    """Settle SPEC+KEY=VALUE+... for a batch on this many CPU ranks, for a model of this framework."""
    spec, *settings = text.split("+")
    overrides = parse_overrides(settings)
    device = engine_named(framework).local_device("cpu") or LocalDevice()
    return settle(spec, batch_size=batch_size, world_size=nproc, device=device, overrides=overrides)


def one_process(batch_size: int, *, dtype: Exact, accumulation: int = 1, framework: Framework = "torch") -> Plan:
    """Return the plan of the process that others are compared with."""
    plan = Plan.preset("ddp", 1, batch_size=batch_size, accumulation=accumulation)
    return with_engine(in_precision(plan, dtype), framework)


def in_precision(plan: Plan, dtype: Exact) -> Plan:
    """Return the plan with everything stored and computed in one dtype."""
    precision = Precision(parameter=dtype, compute=dtype, reduce=dtype, optimizer=dtype)
    return dataclasses.replace(plan, precision=precision)


def measured_in(plan: Plan, asked: Exact) -> Exact:
    """Return the dtype a plan is compared in: fp32 where its engine has no fp64."""
    return asked if engine_named(plan.engine).has_fp64 else "fp32"


def changed_numbers(plan: Plan, *, has_batch_norm: bool) -> dict[str, float]:
    """Return what in a plan changes the arithmetic, as text, each with its loss band; empty for an exact plan."""
    changes = {}
    if plan.precision.compute in BANDS:
        changes[f"computes in {plan.precision.compute}"] = BANDS[plan.precision.compute]
    if plan.precision.reduce in BANDS and plan.precision.reduce != plan.precision.compute:
        changes[f"reduces gradients in {plan.precision.reduce}"] = BANDS[plan.precision.reduce]
    if plan.communication.compression != "none" and plan.layout.folded.dp > 1:
        compression = plan.communication.compression
        changes[f"compresses gradients by {compression}"] = BANDS[compression]
    if plan.communication.sync_every > 1 and plan.layout.replicate > 1:
        changes["lets replicas train on their own between syncs"] = BANDS["rounds"]
    if plan.batch_norm == "local" and has_batch_norm and plan.layout.dp > 1:
        changes["normalises each rank's rows by themselves"] = BANDS["batch_norm"]
    return changes
