"""What follows a prediction: the cost of a whole training, and the command that trains with a plan."""

from __future__ import annotations

import dataclasses
import re
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwise.errors import InputError, ShardwiseError
from shardwise.layout import Layout
from shardwise.planner.settle import BATCH_KEYS, LocalDevice, settle
from shardwise.plans.plan import PRESETS, Plan
from shardwise.runs.console import counted
from shardwise.units import format_count, format_duration, format_number, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardwise.hardware.machine import Cluster
    from shardwise.planner.search.search import Candidate

HOUR = 3600.0
_COUNTS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def read_tokens(text: str | float) -> float:
    """Return the number of tokens of a text such as 1T, 300B, 1.5e12 or 1000000."""
    match = re.fullmatch(r"\s*([0-9][0-9_,]*(?:\.[0-9]+)?(?:[eE]\+?[0-9]+)?)\s*([kKmMbBtT]?)\s*", str(text))
    tokens = float(re.sub("[_,]", "", match[1])) * _COUNTS[match[2].upper()] if match else 0.0
    if not 0 < tokens < 1e18:
        raise InputError(
            f"--tokens {text!r} is not a positive number of tokens",
            code="plan.tokens-invalid",
            fix="write a number with an optional unit K, M, B or T, such as 300B or 1T",
        )
    return tokens


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Predicted time and cost of a whole training."""

    steps: float
    tokens: float | None
    seconds: float
    num_gpus: int
    """Devices of the cluster, all of which are paid for."""
    num_idle: int = 0
    """Those that the plan does not use."""
    price: float | None = None
    """Price of one device for one hour, in any currency."""
    interval: tuple[float, float]
    """Interval of time and cost, as multiples of the prediction."""

    @property
    def gpu_hours(self) -> float:
        """Hours of all devices of the cluster, idle ones included."""
        return self.seconds * self.num_gpus / HOUR

    @property
    def cost(self) -> float | None:
        """Price of all device hours; None without a price."""
        return None if self.price is None else self.price * self.gpu_hours

    def to_text(self) -> str:
        """Return the budget in one sentence."""
        what = counted(round(self.steps), "step") if self.tokens is None else f"{format_count(self.tokens)} tokens"
        verb = "takes" if what == "1 step" else "take"
        duration = format_duration(self.seconds) if self.seconds >= 1 else format_seconds(self.seconds)
        text = f"{what} {verb} {duration} and {format_hours(self.gpu_hours)} GPU-hours"
        if self.num_idle:
            text += f" of all {self.num_gpus:,} GPUs, {self.num_idle:,} of them idle"
        if self.cost is not None:
            cost = f"{self.cost:,.0f}" if self.cost >= 100 else f"{self.cost:.2f}"
            text += f", which cost {cost} at {format_number(self.price)} per GPU-hour"
        low, high = (each - 1 for each in self.interval)
        return f"{text} ({low:+.0%} to {high:+.0%})"

    def to_data(self) -> dict[str, float | None]:
        """Return the values for JSON."""
        idle = {"idle_gpu_hours": self.seconds * self.num_idle / HOUR} if self.num_idle else {}
        return {
            "tokens": self.tokens,
            "steps": self.steps,
            "seconds": self.seconds,
            "days": self.seconds / (24 * HOUR),
            "gpu_hours": self.gpu_hours,
            "cost": self.cost,
            **idle,
        }


def format_hours(hours: float) -> str:
    """Return hours with thousands separators, and digits after the point if they are few."""
    if hours < 0.01:
        return "less than 0.01"
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.3g}"


def budget_of(
    candidate: Candidate,
    tokens_per_sample: int | None,
    *,
    num_gpus: int,
    tokens: float | None,
    num_steps: int | None,
    price: float | None,
) -> Budget | None:
    """Return time and cost of a training of `tokens`, or of `num_steps`, on a cluster of `num_gpus`; None without them.

    Devices that the plan leaves idle count, because they are paid for.
    """
    plan, time = candidate.plan, candidate.time
    if tokens is not None and tokens_per_sample is not None:
        steps = tokens / (plan.batch_size * tokens_per_sample)
    elif num_steps is not None:
        steps = float(num_steps)
    else:
        return None
    seconds = steps * time.seconds
    return Budget(
        steps=steps,
        tokens=tokens,
        seconds=seconds,
        num_gpus=num_gpus,
        num_idle=num_gpus - plan.layout.world_size,
        price=price,
        interval=time.interval,
    )


# The command that trains a job with a plan.


YOUR_JOB = "YOUR_JOB.py"
"""Stands for the user's own job in a command."""


def train_command(job: str, plan: Plan, cluster: Cluster, settings: Sequence[str] = ()) -> str:
    """Return the `shardwise train` command that trains a job with this plan; `settings` are --set options of the job.

    On several nodes, the file hosts.txt must list their names.
    """
    name, differences = plan_options(plan, cluster)
    command = [*_train_on(cluster, job), "--plan", name]
    for setting in (*settings, *differences):
        command += ["--set", setting]
    return shlex.join(command)


def train_file_command(path: str, cluster: Cluster) -> str:
    """Return the `shardwise train` command for a plan file whose model is published: the job is the user's to write."""
    return shlex.join([*_train_on(cluster, YOUR_JOB), "--plan", path])


def _train_on(cluster: Cluster, job: str) -> list[str]:
    """Return the start of a `shardwise train` command on a cluster."""
    command = ["shardwise", "train", job]
    if cluster.num_nodes > 1:
        command += ["--hosts", "hosts.txt"]
    if cluster.devices_per_node > 1:
        command += ["--nproc", str(cluster.devices_per_node)]
    return command


def plan_options(plan: Plan, cluster: Cluster) -> tuple[str, list[str]]:
    """Return the value of --plan and the --set options that `train` resolves into this plan on a cluster."""
    device = cluster.device
    local = LocalDevice(kind="cpu" if device.kind == "cpu" else "cuda", has_bf16=device.has_bf16, name=device.name)
    found: list[tuple[int, str, list[str]]] = []
    for name in (*PRESETS, str(plan.layout)):
        options = _differences(name, plan, local)
        if options is not None:
            found.append((len(options), name, options))
    _, name, options = min(found, key=lambda each: each[0])
    return name, options


def _differences(name: str, plan: Plan, local: LocalDevice) -> list[str] | None:
    """Return the --set options that turn a preset into a plan; None if the preset has another layout."""
    micro_batch = {"micro_batch": str(plan.micro_batch)}
    base = _settled(name, plan, local, micro_batch)
    if base is None or base.layout != plan.layout:
        return None
    options = [f"{key}={written(value)}" for key, value in plan_changes(base, plan) if key not in BATCH_KEYS]
    default = _settled(name, plan, local, {})
    if default is None or default.micro_batch != plan.micro_batch:
        options.append(f"micro_batch={plan.micro_batch}")
    return options


def _settled(name: str, plan: Plan, local: LocalDevice, overrides: dict[str, str]) -> Plan | None:
    """Return a preset for the batch and the ranks of a plan; None if it does not divide them."""
    world_size = plan.layout.world_size
    try:
        return settle(name, batch_size=plan.batch_size, world_size=world_size, device=local, overrides=overrides)
    except ShardwiseError:
        return None


def plan_changes(base: Any, wanted: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted names of the fields in which two plans differ, with their values in `wanted`."""
    for field in dataclasses.fields(base):
        mine, theirs = getattr(base, field.name), getattr(wanted, field.name)
        if mine == theirs or field.name in {"sources", "version"} or isinstance(theirs, Layout):
            continue
        if dataclasses.is_dataclass(theirs):
            yield from plan_changes(mine, theirs, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, theirs


def written(value: Any) -> str:
    """Return a value as --set accepts it."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value)) if isinstance(value, tuple) else str(value)
