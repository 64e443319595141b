"""The plan of a job on this machine: which --set goes where, which device there is, and what the plan must allow."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from shardwise.engines.engine import engine_for, engine_named
from shardwise.errors import InputError, LaunchError, nearest
from shardwise.hardware import probe_gpus
from shardwise.job import Job, Lora, refer
from shardwise.job.optimizers import SGD, AdamW
from shardwise.job.overrides import parse_overrides
from shardwise.job.schedules import Constant, Cosine, Linear
from shardwise.planner.settle import LocalDevice, searching, settle
from shardwise.plans import Plan

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardwise.job import JobReference
    from shardwise.job.job import Framework


def split_settings(job: str, settings: Sequence[str]) -> tuple[JobReference, dict[str, str]]:
    """Return the reference of a job with the --set that are fields of Job, and the --set that are fields of Plan."""
    # A job is written for its engine; --set chooses the plan's.
    job_fields = {field.name for field in dataclasses.fields(Job)} - {"engine"}
    plan_fields = {field.name for field in dataclasses.fields(Plan)} - {"version", "sources"}
    of_job, of_plan = dict[str, str](), dict[str, str]()
    for key, value in parse_overrides(tuple(settings)).items():
        name = key.partition(".")[0]
        if name in job_fields:
            of_job[key] = value
        elif name in plan_fields:
            of_plan[key] = value
        else:
            raise InputError(f"--set {key}: there is no key {name!r}", code="cli.set-unknown-key", fix=nearest_key(key))
    return refer(job, of_job), of_plan


def set_keys() -> frozenset[str]:
    """Return the dotted keys that --set knows by itself: fields of Job and Plan, and of what shardwise puts there."""
    sections: list[tuple[str, Any]] = [("", Job), ("", Plan), ("lora.", Lora)]
    sections += [("optimizer.", kind) for kind in (AdamW, SGD)]
    sections += [("schedule.", kind) for kind in (Constant, Cosine, Linear)]
    for field in dataclasses.fields(Plan):
        kind: Any = field.default_factory
        if field.name != "layout" and dataclasses.is_dataclass(kind):
            sections.append((f"{field.name}.", kind))
    keys = set[str]()
    for prefix, kind in sections:
        keys |= {prefix + field.name for field in dataclasses.fields(kind)}
    return frozenset(keys - {"version", "sources", "layout"})


def nearest_key(key: str) -> str:
    """Return advice for a key that does not exist: the keys that end in it, else the one that is spelled most alike."""
    keys = set_keys()
    if found := keys_ending_in(key, keys):
        return f"did you mean {' or '.join(map(repr, found))}?"
    return nearest(key, keys if "." in key else {known for known in keys if "." not in known})


def keys_ending_in(name: str, keys: frozenset[str]) -> list[str]:
    """Return the keys whose last name is that of `name`."""
    last = name.rpartition(".")[2]
    return sorted(key for key in keys if key.rpartition(".")[2] == last)


def local_device(asked: str | None, nproc: int, framework: Framework = "torch") -> LocalDevice:
    """Return what settling must know of the GPUs, without touching CUDA; an engine may find its device itself."""
    found = engine_named(framework).local_device(asked)
    if found is not None:
        return found
    gpus = probe_gpus() if asked != "cpu" else ()
    if not gpus:
        if asked == "cuda":
            raise LaunchError(
                "--device cuda, but this machine shows no NVIDIA GPU", code="launch.no-gpu", fix="use --device cpu"
            )
        return LocalDevice()
    if nproc > len(gpus):
        raise LaunchError(
            f"--nproc {nproc} is more than the {len(gpus)} GPUs that are visible",
            code="launch.nproc-exceeds-gpus",
            fix=f"use --nproc {len(gpus)}, or --device cpu",
        )
    return LocalDevice(kind="cuda", has_bf16=all(gpu.has_bf16 for gpu in gpus), name=gpus[0].name)


def settle_job_plan(job: Job, plan: str, *, world_size: int, device: LocalDevice, overrides: Mapping[str, str]) -> Plan:
    """Resolve "auto", a preset, a product or a .toml path into a Plan of this job that the engine supports."""
    settled = settle(
        plan,
        batch_size=job.batch_size,
        world_size=world_size,
        device=device,
        overrides=overrides,
        choose=searching(job),
    )
    engine = engine_for(job, settled)
    engine.check(settled)
    engine.require()
    return settled


def check_model_fits(job: Job, plan: Plan) -> None:
    """Refuse a plan that the model does not allow; torch is imported only for plans that depend on the model."""
    layout = plan.layout
    splits_model = layout.tp > 1 or layout.pp > 1 or layout.cp > 1
    if splits_model or plan.fused_loss or plan.capture != "none" or job.lora is not None:
        from shardwise.training.preflight import check_model  # imports torch

        check_model(job, plan)
