"""The options that name the user's own plan: --plan, --set, --compile and --precision.

Without --plan, the fields of --set and --compile are fixed before the search, as in `train --plan auto`. Precision and
compilation also apply to the recommended plan, with which the user's own is compared.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.engines.engine import engine_named
from shardwise.errors import InputError, PlanError, nearest
from shardwise.job import Job
from shardwise.job.load import parse_overrides
from shardwise.layout import AXES
from shardwise.parallel.support import check_device
from shardwise.planner.search.question import FixedFields
from shardwise.planner.settle import BATCH_KEYS, LocalDevice, fixed_fields, settle
from shardwise.plans.plan import Plan
from shardwise.plans.toml import read_plan

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardwise.hardware.machine import Cluster
    from shardwise.planner.settle import Chooser
    from shardwise.plans.sections import Precision

CONDITIONS = frozenset({"precision", "compile"})
"""Fields that the user's own plan and the recommended one have in common, so that they can be compared."""


@dataclass(frozen=True, kw_only=True)
class OwnOptions:
    """The options that name the user's own plan."""

    name: str = "auto"
    """The value of --plan."""
    batch_size: int
    precision: Precision | None = None
    """That of --precision, which a plan file must not contradict; None is the default of the device."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """The fields of the plan that --set and --compile change."""

    @property
    def is_named(self) -> bool:
        """Whether --plan names a plan."""
        return self.name != "auto"

    def batch_is_given(self, cluster: Cluster) -> bool:
        """Whether the micro-batch is not a default; "auto" is a preset on a CPU, and is searched on GPUs."""
        is_searched = not self.is_named and cluster.device.kind != "cpu"
        return is_searched or self.name.endswith(".toml") or not self.settings.keys().isdisjoint(BATCH_KEYS)

    @property
    def overrides(self) -> dict[str, str]:
        """The settings, with the dtypes of --precision if --set changes single ones of them."""
        is_partial = any(key.startswith("precision.") for key in self.settings) and "precision" not in self.settings
        if self.precision is None or not is_partial:
            return dict(self.settings)
        given = {f"precision.{name}": str(dtype) for name, dtype in dataclasses.asdict(self.precision).items()}
        return {**given, **self.settings}

    def conditions(self, cluster: Cluster) -> FixedFields:
        """Return the precision and compilation that the options give, which apply to every plan of the comparison."""
        if self.is_named:
            own, names = self.resolve(cluster), CONDITIONS
        else:
            fixed = fixed_fields(_local(cluster), self.overrides)
            own, names = fixed.plan, fixed.names & CONDITIONS
        plan = Plan(precision=own.precision, float8=own.float8, compile=own.compile)
        return FixedFields(plan=plan, names=names)

    def compares_natively(self, cluster: Cluster, searched: str) -> bool:
        """Whether the plan and the searched engine use torch's own wrappers, of which own runs are recorded."""
        given: Any = self.settings.get("engine", Plan.engine)
        own = self.resolve(cluster) if self.is_named else Plan(engine=given)
        return all(engine_named(name).uses_fsdp for name in (own.engine, searched))

    def resolve(self, cluster: Cluster, choose: Chooser | None = None) -> Plan:
        """Return the plan for a cluster, by the rules of `train --plan`; `choose` searches "auto"."""
        device = cluster.device
        if self.name.endswith(".toml"):
            _check_file(self.name, cluster, self.precision)
        local, size = _local(cluster), cluster.num_devices
        try:
            plan = settle(
                self.name,
                batch_size=self.batch_size,
                world_size=size,
                device=local,
                overrides=self.overrides,
                choose=choose,
            )
        except PlanError as error:
            if error.code != "plan.batch-too-small":
                raise
            fix = f"use --batch-size {size} or more, or a --cluster of at most {self.batch_size} devices"
            raise PlanError(error.fact, code=error.code, fix=fix) from None
        is_given = any(key.partition(".")[0] == "precision" for key in self.settings)
        if self.precision is not None and not is_given and not self.name.endswith(".toml"):
            sources = {**plan.sources, "precision": "--precision"}
            plan = dataclasses.replace(plan, precision=self.precision, sources=sources)
        if device.capability:
            check_device(plan, device.name, device.capability)
        return plan


def is_searched_again(fixed: FixedFields) -> bool:
    """Whether fields are fixed that the recommended plan need not have."""
    return bool({name.partition(".")[0] for name in fixed.names} - CONDITIONS)


def _local(cluster: Cluster) -> LocalDevice:
    """Return the device of a cluster as `train` would find it there."""
    device = cluster.device
    return LocalDevice(kind="cpu" if device.kind == "cpu" else "cuda", has_bf16=device.has_bf16, name=device.name)


def _check_file(name: str, cluster: Cluster, precision: Precision | None) -> None:
    plan = read_plan(Path(name))
    if plan.layout.world_size != cluster.num_devices:
        size = plan.layout.world_size
        raise PlanError(
            f"{name} is for {size} ranks ({plan.layout}), but the cluster has {cluster.num_devices} devices",
            code="plan.world-size-mismatch",
            fix=f"use --cluster {size}x{cluster.device.name}, or a preset such as --plan fsdp",
        )
    if precision is not None and plan.precision.compute != precision.compute:
        raise PlanError(
            f"--precision {precision.compute} contradicts {name}, which computes in {plan.precision.compute}",
            code="cli.options-conflict",
            fix="remove --precision, or use --set precision.compute=VALUE",
        )


# The options --set and --compile.


def plan_settings(settings: Sequence[str], compile_option: str | None) -> dict[str, str]:
    """Return the fields of the Plan that --set and --compile change; raises InputError for fields of a Job."""
    fields = {field.name for field in dataclasses.fields(Plan)} - {"version", "sources"}
    job_fields = {field.name for field in dataclasses.fields(Job)}
    overrides = parse_overrides(tuple(settings))
    for key in overrides:
        name = key.partition(".")[0]
        if name == "batch_size":
            raise InputError(
                "--set batch_size is a field of a job, but this model has none",
                code="cli.set-unknown-key",
                fix=f"use --batch-size {overrides[key]}",
            )
        if name not in fields:
            fix = nearest(name, fields - {"layout"})
            if name in AXES:
                fix = f"use --plan, such as --plan {name}{overrides[key]}"
            elif name in job_fields:
                fix = "change the job"
            raise InputError(f"--set {key} is not a field of a plan", code="cli.set-unknown-key", fix=fix)
    return with_compile(overrides, compile_option)


def with_compile(overrides: Mapping[str, str], compile_option: str | None) -> dict[str, str]:
    """Return the overrides with those of --compile; raises InputError if --set contradicts it."""
    if compile_option is None:
        return dict(overrides)
    if overrides.get("compile", compile_option) != compile_option:
        raise InputError(
            f"--compile {compile_option} contradicts --set compile={overrides['compile']}",
            code="cli.options-conflict",
            fix="remove one of the two",
        )
    return {**overrides, "compile": compile_option}
