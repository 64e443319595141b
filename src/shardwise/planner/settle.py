"""Resolution of "auto", presets and plan files into a Plan with the source of each value."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shardwise.engines.engine import engine_for, engine_named
from shardwise.errors import InputError, LaunchError, PlanError, ShardwiseError, nearest
from shardwise.hardware import probe_gpus
from shardwise.hardware.probe import BF16_CAPABILITY
from shardwise.job import Job, Lora, refer
from shardwise.job.callbacks import EarlyStopping
from shardwise.job.load import job_parameters, literal, parse_overrides, replace_at
from shardwise.job.optimizers import SGD, AdamW, Muon
from shardwise.job.schedules import Constant, Cosine, Linear
from shardwise.parallel.support import check_device
from shardwise.planner.search.choices import SPEED_OPTIONS
from shardwise.planner.search.question import FixedFields
from shardwise.planner.search.subject import choose_precision, job_question, search_plan
from shardwise.plans.pipeline import fill_pipeline, split_batch
from shardwise.plans.plan import Plan, preset_degrees
from shardwise.plans.sections import Precision
from shardwise.plans.toml import read_plan
from shardwise.units import format_gb

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from shardwise.dist import World
    from shardwise.job import JobReference
    from shardwise.job.job import Framework


Chooser = Callable[[FixedFields, int], tuple[Plan | None, str]]
"""Function that returns the best plan with the fixed fields for a number of ranks, or None, and the reason."""

BATCH_KEYS = ("micro_batch", "accumulation")
NOT_IN_PLAN = ("zero", "engine")
"""Fields of --set that the plan of fixed fields lacks: a ZeRO stage belongs to a layout, the engine to the job."""


@dataclass(frozen=True, kw_only=True)
class LocalDevice:
    """The device to resolve a plan for: its kind, whether it has bf16, and the engine that uses it."""

    kind: Literal["cpu", "cuda"] = "cpu"
    has_bf16: bool = False
    name: str = "CPU"
    capability: tuple[int, ...] = ()
    """CUDA compute capability, the lowest of several GPUs; empty if it is unknown."""
    engine: Framework = "torch"
    """The framework of the job's model."""
    default_reason: str = "auto: the simplest, on a CPU"
    """Reason to report if "auto" resolves to ddp without a search."""


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """How "auto" measures plans on GPUs before it chooses one."""

    reference: JobReference | None
    """The job, which the measuring process loads; None if it is not in a file, so that nothing is measured."""
    note: Callable[[str], None]
    """Receives messages for the user."""
    device: str = "cuda:0"
    may_measure: bool = True
    """Whether plans may be measured now; if not, only earlier measurements in the cache are used."""
    stored: Plan | None = None
    """The plan of the run that is resumed, whose options are used again without measuring."""
    refusal: str = ""
    """Why nothing is measured; empty if nothing prevents it."""
    budget_s: float = 60.0
    """Seconds of measuring, without compilation."""
    folder: Path | None = None
    """Directory of the cache; None is the user's cache directory."""


def settle(
    spec: str,
    *,
    batch_size: int,
    world_size: int,
    device: LocalDevice,
    overrides: Mapping[str, str] | None = None,
    choose: Chooser | None = None,
) -> Plan:
    """Resolve "auto", a preset, a product of degrees or a .toml path into a Plan for this batch, world and device.

    On GPUs, "auto" is the plan that `choose` returns; elsewhere, and if it returns None, "auto" is ddp.
    """
    overrides = dict(overrides or {})
    batch = _requested_batch(overrides)
    fixed = functools.partial(fixed_fields, device, overrides)
    plan, searched = _named(spec, world_size, device, choose, fixed)
    plan = _apply_overrides(plan, {key: value for key, value in overrides.items() if key not in BATCH_KEYS})
    plan = with_engine(plan, device.engine)
    if plan.layout.world_size != world_size:
        raise PlanError(
            f"plan {plan.layout} is for {plan.layout.world_size} ranks, but the world has {world_size}",
            code="plan.world-size-mismatch",
            fix=f"use --nproc {plan.layout.world_size}, or a preset",
        )
    return _settle_batch(plan, batch_size, batch, fixed=searched or spec.endswith(".toml"))


def with_engine(plan: Plan, engine: Framework) -> Plan:
    """Return a plan with the job's engine, unless the plan names its own."""
    is_chosen = plan.engine != Plan.engine or "engine" in plan.sources
    if is_chosen or plan.engine == engine:
        return plan
    return dataclasses.replace(plan, engine=engine, sources={**plan.sources, "engine": "the job's engine"})


def _named(
    spec: str, world_size: int, device: LocalDevice, choose: Chooser | None, fixed: Callable[[], FixedFields]
) -> tuple[Plan, bool]:
    """Return the plan that a spec names, and whether a search found it."""
    if spec.endswith(".toml"):
        return read_plan(Path(spec)), False
    if spec != "auto":
        return _preset(spec, f"preset {spec}", world_size, device), False
    if device.kind == "cpu" or choose is None:
        return _preset("ddp", device.default_reason, world_size, device), False
    plan, why = choose(fixed(), world_size)
    if plan is not None:
        return plan, True
    return _preset("ddp", f"auto: ddp, since a plan {why}", world_size, device), False


def _preset(name: str, source: str, world_size: int, device: LocalDevice) -> Plan:
    layout, zero = preset_degrees(name, world_size)
    precision, reason = choose_precision(device.name, is_cpu=device.kind == "cpu", has_bf16=device.has_bf16)
    return Plan(
        layout=layout, zero=zero, precision=precision, sources={"layout": source, "zero": source, "precision": reason}
    )


def fixed_fields(device: LocalDevice, overrides: Mapping[str, str]) -> FixedFields:
    """Return the fields that --set gives, with their values, for the search."""
    searched = {key: text for key, text in overrides.items() if key not in (*BATCH_KEYS, *NOT_IN_PLAN)}
    given: dict[str, Any] = dict(_requested_batch(overrides))
    plan = dataclasses.replace(_apply_overrides(_preset("ddp", "", 1, device), searched), **given)
    names = searched.keys() | {key.partition(".")[0] for key in overrides if key != "engine"}
    return FixedFields(plan=plan, names=frozenset(names), zero=literal(overrides.get("zero", "none")))


def _apply_overrides(plan: Plan, overrides: Mapping[str, str]) -> Plan:
    for key, text in overrides.items():
        name = key.partition(".")[0]
        fields = {field.name for field in dataclasses.fields(Plan)} - {"sources", "version"}
        if name not in fields:
            raise PlanError(f"--set {key} has an unknown key", code="cli.set-unknown-key", fix=nearest(name, fields))
        if key == "layout":
            raise PlanError("--set cannot change the layout", code="cli.set-layout", fix=f"use --plan {text}")
        value, section = _value(key, text), getattr(plan, key, None)
        if dataclasses.is_dataclass(section) and not dataclasses.is_dataclass(value):
            fix = f"use --set {key}.NAME=VALUE: {nearest('', (field.name for field in dataclasses.fields(section)))}"
            raise PlanError(f"--set {key}={text} sets a section of a plan", code="plan.not-a-section", fix=fix)
        plan = replace_at(plan, key, value)
        sources = dict(plan.sources)
        if name != key and name in sources:
            sources[name] = f"{sources[name]}, {key} by --set"
        plan = dataclasses.replace(plan, sources={**sources, key: "--set"})
    if "recompute" in overrides and "recompute_blocks" not in overrides:  # a number found for another policy
        plan = dataclasses.replace(plan, recompute_blocks=0)
    return plan


def _value(key: str, text: str) -> Any:
    """Return the value of a --set option; "none" stays a string, since it is a choice of several plan fields."""
    if key == "precision":
        return Precision(compute=text)  # type: ignore[arg-type]
    return "none" if text == "none" else literal(text)


def _requested_batch(overrides: Mapping[str, str]) -> dict[str, int]:
    """Return the micro-batch and accumulation of --set; raises PlanError if they are not positive integers."""
    requested = {key: literal(overrides[key]) for key in BATCH_KEYS if key in overrides}
    for key, value in requested.items():
        if not isinstance(value, int) or value < 1:
            raise PlanError(
                f"--set {key} must be a positive integer, got {value}",
                code="plan.not-whole-number",
                fix="use an integer of at least 1",
            )
    return requested


def _settle_batch(plan: Plan, batch_size: int, given: Mapping[str, int], *, fixed: bool) -> Plan:
    """Return the plan with micro-batch and accumulation: from --set, a plan file, or the default accumulation."""
    requested = dict(given)
    if fixed and not requested:
        split_batch(batch_size, dp=plan.layout.dp, micro_batch=plan.micro_batch, accumulation=plan.accumulation)
        return plan
    if not requested:
        requested = {"accumulation": fill_pipeline(batch_size, plan.layout)}
    split = split_batch(batch_size, dp=plan.layout.dp, **requested)
    derived = f"derived: batch_size {batch_size} over dp {plan.layout.dp}"
    sources = {key: "--set" if key in given else derived for key in BATCH_KEYS}
    return dataclasses.replace(
        plan, micro_batch=split.micro_batch, accumulation=split.accumulation, sources={**plan.sources, **sources}
    )


# The plan of a job on this machine: the fields that --set changes, the device, and the checks of the engine.


def split_settings(job: str, settings: Sequence[str]) -> tuple[JobReference, dict[str, str]]:
    """Return the reference of a job with the --set options for fields of Job, and the --set options for the Plan."""
    # A job's engine is fixed, so --set engine is for the plan.
    job_fields = {field.name for field in dataclasses.fields(Job)} - {"engine"}
    plan_fields = {field.name for field in dataclasses.fields(Plan)} - {"version", "sources"}
    parameters = job_parameters(job)
    of_job, of_plan = dict[str, str](), dict[str, str]()
    for key, value in parse_overrides(tuple(settings)).items():
        name = key.partition(".")[0]
        if key in parameters or name in job_fields:
            of_job[key] = value
        elif name in plan_fields:
            of_plan[key] = value
        else:
            raise InputError(
                f"--set {key} has an unknown key", code="cli.set-unknown-key", fix=nearest_key(key, parameters)
            )
    return refer(job, of_job), of_plan


def set_keys() -> frozenset[str]:
    """Return the dotted keys that --set accepts: fields of Job, Plan and their sections, optimizers and schedules."""
    sections: list[tuple[str, Any]] = [("", Job), ("", Plan), ("lora.", Lora), ("on_evaluate.", EarlyStopping)]
    sections += [("optimizer.", kind) for kind in (AdamW, Muon, SGD)]
    sections += [("schedule.", kind) for kind in (Constant, Cosine, Linear)]
    for field in dataclasses.fields(Plan):
        kind: Any = field.default_factory
        if field.name != "layout" and dataclasses.is_dataclass(kind):
            sections.append((f"{field.name}.", kind))
    keys = set[str]()
    for prefix, kind in sections:
        keys |= {prefix + field.name for field in dataclasses.fields(kind)}
    return frozenset(keys - {"version", "sources", "layout"})


def nearest_key(key: str, parameters: frozenset[str] = frozenset()) -> str:
    """Return the fix for an unknown key: keys with the same last component, else the key with the closest spelling.

    `parameters` are the parameters of the job file, which --set accepts as well.
    """
    keys = set_keys() | parameters
    if found := keys_ending_in(key, keys):
        return f"did you mean {' or '.join(map(repr, found))}?"
    return nearest(key, keys if "." in key else {known for known in keys if "." not in known})


def keys_ending_in(name: str, keys: frozenset[str]) -> list[str]:
    """Return the keys with the same last component as `name`."""
    last = name.rpartition(".")[2]
    return sorted(key for key in keys if key.rpartition(".")[2] == last)


def local_device(requested: str | None, nproc: int, framework: Framework = "torch") -> LocalDevice:
    """Return the device to resolve a plan for, without initializing CUDA; an engine may select its own."""
    found = engine_named(framework).local_device(requested)
    if found is not None:
        return found
    gpus = probe_gpus() if requested != "cpu" else ()
    if not gpus:
        if requested == "cuda":
            raise LaunchError(
                "--device cuda requires an NVIDIA GPU, but none is visible",
                code="launch.no-gpu",
                fix="use --device cpu",
            )
        return LocalDevice()
    if nproc > len(gpus):
        raise LaunchError(
            f"--nproc {nproc} exceeds the {len(gpus)} visible GPUs",
            code="launch.nproc-exceeds-gpus",
            fix=f"use --nproc {len(gpus)}, or --device cpu",
        )
    oldest = min(gpus, key=lambda gpu: gpu.compute_capability)
    return LocalDevice(kind="cuda", has_bf16=oldest.has_bf16, name=oldest.name, capability=oldest.compute_capability)


def settle_job_plan(
    job: Job,
    plan: str,
    *,
    world_size: int,
    device: LocalDevice,
    overrides: Mapping[str, str],
    tuning: Tuning | None = None,
) -> Plan:
    """Resolve "auto", a preset, a product of degrees or a .toml path into a Plan of this job, checked by its engine.

    On GPUs, `tuning` lets "auto" measure a few plans whose predictions are close; None decides by predictions.
    """
    settled = settle(
        plan,
        batch_size=job.batch_size,
        world_size=world_size,
        device=device,
        overrides=overrides,
        choose=functools.partial(search_plan, job),
    )
    if plan == "auto" and device.kind == "cuda" and tuning is not None:
        settled = _tuned(job, settled, tuning, fixed={key.partition(".")[0] for key in overrides})
    engine = engine_for(job, settled)
    engine.check(settled)
    engine.require()
    if device.capability:
        check_device(settled, device.name, device.capability)
    return settled


def _tuned(job: Job, plan: Plan, tuning: Tuning, *, fixed: AbstractSet[str]) -> Plan:
    """Return the plan with the options of the run that is resumed, or of the fastest measured plan."""
    stored = tuning.stored
    if stored is not None:
        kept = with_stored_options(plan, stored, fixed)
        refusal = _lacking_capacity(job, kept)
        if not refusal or kept == plan:
            return kept
        tuning.note(f"note: the options of the run that is resumed do not apply, because {refusal}")
        return plan
    if tuning.refusal:
        tuning.note(f"note: --plan auto chooses by predictions, because {tuning.refusal}")
        return plan
    from shardwise.planner.search.race import tune_plan  # imports torch

    return tune_plan(job, plan, tuning, fixed=fixed)


def _lacking_capacity(job: Job, plan: Plan) -> str:
    """Return why a plan does not fit on the devices of this machine; empty if it does, or cannot be predicted."""
    try:
        question = job_question(job, plan.layout.world_size, FixedFields(plan=plan, names=frozenset({"precision"})))[1]
    except ShardwiseError:
        return ""
    memory = question.memory_of(plan)
    if question.has_capacity(memory):
        return ""
    device = question.cluster.device
    needed = f"they need {format_gb(memory.total)} of the {format_gb(device.memory_bytes)} of {device.name}"
    return needed if memory.total > question.capacity else f"they need {format_gb(memory.host)} of host memory per rank"


def with_stored_options(plan: Plan, stored: Plan, fixed: AbstractSet[str]) -> Plan:
    """Return the plan with the options of speed of a stored plan, if that is for the same layout and batch."""
    same = ("layout", "zero", "precision", "engine", "offload", "batch_size")
    if any(getattr(plan, name) != getattr(stored, name) for name in same):
        return plan
    names = [name for name in SPEED_OPTIONS if name not in fixed]
    if fixed & set(BATCH_KEYS):
        names = [name for name in names if name not in BATCH_KEYS]
    values: dict[str, Any] = {name: getattr(stored, name) for name in names}
    sources = {**plan.sources, **dict.fromkeys(names, "auto: as in the run that is resumed")}
    return dataclasses.replace(plan, **values, sources=sources)


def settle_in_world(job: Job, plan: str, here: World, overrides: Mapping[str, str], tuning: Tuning | None) -> Plan:
    """Resolve the plan of a world that already runs, for the device of this rank; call on one rank."""
    device = engine_named(job.engine).local_device(None)
    if device is None:
        device = _device_of(here)
    if tuning is not None:
        # The other ranks wait for this one, which the guard of `shardwise launch` would report as a hang.
        may_measure = tuning.may_measure and (here.size == 1 or here.source != "shardwise")
        tuning = dataclasses.replace(tuning, device=str(here.device), may_measure=may_measure)
    return settle_job_plan(job, plan, world_size=here.size, device=device, overrides=overrides, tuning=tuning)


def _device_of(here: World) -> LocalDevice:
    import torch

    if here.device.type != "cuda":
        return LocalDevice()
    capability = torch.cuda.get_device_capability(here.device)
    return LocalDevice(
        kind="cuda",
        has_bf16=capability >= BF16_CAPABILITY,
        name=torch.cuda.get_device_name(here.device),
        capability=capability,
    )


def check_model_fits(job: Job, plan: Plan) -> None:
    """Raise PlanError if the model does not support a plan; imports torch only for plans that depend on the model."""
    layout = plan.layout
    splits_model = layout.tp > 1 or layout.pp > 1 or layout.cp > 1
    is_float8 = plan.precision.compute == "float8"
    if splits_model or is_float8 or plan.fused_loss or plan.capture != "none" or job.lora is not None:
        from shardwise.training.preflight import ModelRules  # imports torch

        ModelRules(job)(plan)
