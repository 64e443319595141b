"""A DeepSpeed JSON as a plan: unknown and contradictory keys named, and what is the job's said with its line."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from shardwise.engines.deepspeed.config import DTYPES, bucket_elements, bucket_megabytes
from shardwise.engines.deepspeed.json_keys import (
    ACCUMULATION,
    ASIDE,
    BATCH,
    MICRO_BATCH,
    REFUSED,
    is_off,
    job_notes,
    known,
    parse,
)
from shardwise.errors import PlanError, nearest
from shardwise.layout import Layout
from shardwise.plans.batch import split_batch
from shardwise.plans.plan import Communication, Offload, Plan, Precision

if TYPE_CHECKING:
    from pathlib import Path

    from shardwise.plans.batch import BatchSplit
    from shardwise.plans.plan import DType

AUTO = "auto"
"""What Hugging Face's Trainer fills in by itself."""

_SECTIONS = ("bf16", "fp16", "data_types", "zero_optimization", "activation_checkpointing")
_PLACES = ("offload_param", "offload_optimizer")


@dataclass(frozen=True)
class ConfigReading:
    """A plan that was read from DeepSpeed's JSON."""

    plan: Plan
    notes: tuple[str, ...]
    """What the plan does not hold, one sentence each: the job's lines first."""


def read_json(
    path: Path, *, num_ranks: int | None = None, batch_size: int | None = None, precision: DType | None = None
) -> ConfigReading:
    """Read a file; `num_ranks`, `batch_size` and `precision` fill in what it leaves open."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise PlanError(
            f"{path} cannot be read ({reason})", code="plan.deepspeed-read-failed", fix="name a DeepSpeed JSON"
        ) from None
    return plan_from_json(text, path.name, num_ranks=num_ranks, batch_size=batch_size, precision=precision)


def plan_from_json(
    text: str,
    origin: str,
    *,
    num_ranks: int | None = None,
    batch_size: int | None = None,
    precision: DType | None = None,
) -> ConfigReading:
    """Return the plan that a DeepSpeed JSON describes; `origin` names the text in errors and sources."""
    data = parse(text, origin)
    file = _File(origin, data)
    file.check_keys()
    zero = data["zero_optimization"]
    held = _precision(file, precision)
    num_ranks, batch = _batch(file, num_ranks, batch_size)
    stage = file.whole(zero, "stage", 0)
    if stage not in (0, 1, 2, 3):
        raise PlanError(
            f"{origin} has zero_optimization.stage {stage}", code="plan.deepspeed-stage-invalid", fix="use 0, 1, 2 or 3"
        )
    offload = _offload(file, zero, stage)
    communication = _communication(file, zero, held)
    if stage and num_ranks == 1:
        file.notes.append(f"stage {stage}: on one rank there is nothing to cut, so zero = 0")
    sharded = bool(stage) and num_ranks > 1
    plan = Plan(
        layout=Layout(shard=num_ranks) if sharded else Layout(replicate=num_ranks),
        zero=cast("Any", stage if sharded else 0),
        micro_batch=batch.micro_batch,
        accumulation=batch.accumulation,
        recompute="full" if "activation_checkpointing" in file.given else "none",
        engine="deepspeed",
        precision=held,
        offload=offload,
        communication=communication,
        sources=dict.fromkeys(_READ, origin),
    )
    return ConfigReading(plan, (*job_notes(data), *file.notes, *file.left_aside()))


_READ = (
    *("layout", "zero", "micro_batch", "accumulation", "recompute", "engine", "precision.compute", "precision.reduce"),
    *("offload.parameters", "offload.optimizer", "offload.folder", "communication.bucket_mb", "communication.prefetch"),
)
"""What of a plan the JSON decides."""


@dataclass
class _File:
    """One JSON while it is read: its sections, and what there is to say of it."""

    origin: str
    data: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    aside: list[str] = field(default_factory=list)
    given: set[str] = field(default_factory=set)
    """Sections that are in it."""

    def check_keys(self) -> None:
        """Refuse unknown keys and what a plan cannot hold, and give every section a place."""
        data = self.data
        if isinstance(data.get("zero_optimization"), bool):  # how it was written before 0.3
            data["zero_optimization"] = {"stage": int(data["zero_optimization"])}
        if "bfloat16" in data:
            if "bf16" in data:
                raise PlanError(
                    f"{self.origin} has bf16 and bfloat16, which are one",
                    code="plan.deepspeed-key-two-names",
                    fix="keep bf16",
                )
            data["bf16"] = data.pop("bfloat16")
        self._check("", data)
        for name in _SECTIONS:
            self._check(name, self._section(data, name))
        for name in _PLACES:
            self._check(name, self._section(data["zero_optimization"], name))
        op = data.get("gradient_allreduce_op", "mean")
        if op != "mean":
            raise PlanError(
                f"{self.origin} has gradient_allreduce_op {op!r}",
                code="plan.deepspeed-reduce-op",
                fix='leave it out, or write "mean"',
            )
        ratio = data["zero_optimization"]["offload_optimizer"].get("ratio", 1)
        if ratio not in (1, AUTO):
            raise PlanError(
                f"{self.origin} offloads a share of {ratio} of the optimizer",
                code="plan.deepspeed-partial-offload",
                fix="leave ratio out",
            )

    def _section(self, parent: dict[str, Any], name: str) -> dict[str, Any]:
        if parent.get(name) is not None:
            self.given.add(name)
        section = parent[name] = {} if parent.get(name) is None else parent[name]
        if not isinstance(section, dict):
            raise PlanError(
                f"{self.origin} has {name} {section!r}",
                code="plan.deepspeed-not-section",
                fix=f'write a section, "{name}": {{ ... }}',
            )
        return section

    def _check(self, section: str, values: dict[str, Any]) -> None:
        for key, value in values.items():
            full = f"{section}.{key}" if section else key
            if key not in known(section):
                raise PlanError(
                    f"{self.origin} has an unknown key {full!r}",
                    code="plan.deepspeed-unknown-key",
                    fix=nearest(key, known(section)),
                )
            if key in REFUSED.get(section, ()) and not is_off(value):
                raise PlanError(
                    f"{self.origin} has {full}, for which a plan has no word",
                    code="plan.deepspeed-no-equivalent",
                    fix=f"take {key} out",
                )
            if key in ASIDE[section]:
                self.aside.append(full)

    def left_aside(self) -> list[str]:
        """Return one sentence on the keys that change nothing of what is trained."""
        return [f"left out, as the trained numbers do not depend on it: {', '.join(self.aside)}"] if self.aside else []

    def value(self, section: dict[str, Any], key: str, default: Any) -> Any:
        """Return a value; one that Hugging Face would fill in is the default, and that is said."""
        given = section.get(key, default)
        if given != AUTO:
            return given
        self.notes.append(f'{key} is "auto", which Hugging Face fills in: {default!r} is taken')
        return default

    def whole(self, section: dict[str, Any], key: str, default: int | None) -> Any:
        """Return a whole number, which may be written as 5e8."""
        given = self.value(section, key, default)
        if given is default:
            return default
        if isinstance(given, bool) or not isinstance(given, int | float) or given != int(given) or given < 0:
            raise PlanError(
                f"{self.origin} has {key} {given!r}", code="plan.deepspeed-not-whole-number", fix="write a whole number"
            )
        return int(given)

    def switch(self, section: dict[str, Any], key: str, *, default: bool) -> bool:
        """Return a truth value."""
        given = self.value(section, key, default)
        if not isinstance(given, bool):
            raise PlanError(
                f"{self.origin} has {key} {given!r}", code="plan.deepspeed-not-boolean", fix="write true or false"
            )
        return given


def _precision(file: _File, asked: DType | None) -> Precision:
    """Read in which dtype is computed and summed; `asked` is taken where the file leaves it to Hugging Face."""
    on: list[DType] = []
    names: tuple[DType, ...] = ("bf16", "fp16")
    for name in names:
        section = file.data[name]
        if section.get("enabled") == AUTO and asked is not None:
            section["enabled"] = asked == name
        if file.switch(section, "enabled", default=False):
            on.append(name)
    if len(on) == 2:
        raise PlanError(
            f"{file.origin} enables bf16 and fp16", code="plan.deepspeed-two-precisions", fix="keep one of them"
        )
    compute: DType = on[0] if on else "fp32"
    if asked not in (None, compute):
        raise PlanError(
            f"--precision {asked}, and {file.origin} computes in {compute}",
            code="plan.deepspeed-precision-contradicts",
            fix="leave --precision out",
        )
    if compute == "fp16" and file.data["fp16"].get("loss_scale", 0) not in (0, AUTO):
        file.notes.append("fp16.loss_scale: the loss is scaled dynamically")
    reduce = file.value(file.data, "communication_data_type", None) or compute
    if reduce not in DTYPES:
        raise PlanError(
            f"{file.origin} has communication_data_type {reduce!r}",
            code="plan.deepspeed-unknown-dtype",
            fix=nearest(reduce, DTYPES),
        )
    return Precision(compute=compute, reduce=reduce)


def _batch(file: _File, num_ranks: int | None, batch_size: int | None) -> tuple[int, BatchSplit]:
    """Check DeepSpeed's three batch numbers with our algebra; without `num_ranks` all three must be there."""
    batch, micro, accumulation = (file.whole(file.data, key, None) for key in (BATCH, MICRO_BATCH, ACCUMULATION))
    for key, value in ((BATCH, batch), (MICRO_BATCH, micro), (ACCUMULATION, accumulation)):
        if value == 0:
            raise PlanError(
                f"{file.origin} has {key} 0", code="plan.deepspeed-batch-zero", fix="write a whole number of at least 1"
            )
    if batch_size is not None and batch not in (None, batch_size):
        raise PlanError(
            f"--batch-size {batch_size}, and {file.origin} has {batch}",
            code="plan.deepspeed-batch-contradicts",
            fix="leave --batch-size out",
        )
    batch = batch or batch_size
    if num_ranks is None:
        num_ranks = _ranks(file.origin, batch, micro, accumulation)
    if batch is None:
        if micro is None:
            raise PlanError(
                f"{file.origin} has neither {BATCH} nor {MICRO_BATCH}",
                code="plan.deepspeed-batch-missing",
                fix="give --batch-size",
            )
        batch = micro * (accumulation or 1) * num_ranks
    try:
        split = split_batch(batch, dp=num_ranks, accumulation=accumulation, micro_batch=micro)
    except PlanError as error:
        raise PlanError(f"{file.origin}: {error.fact}", code=error.code, fix=error.fix) from None
    return num_ranks, split


def _ranks(origin: str, batch: int | None, micro: int | None, accumulation: int | None) -> int:
    if batch is None or micro is None or accumulation is None:
        raise PlanError(
            f"{origin} does not tell how many ranks it is for", code="plan.deepspeed-ranks-unknown", fix="give --nproc"
        )
    ranks, rest = divmod(batch, micro * accumulation)
    if rest or not ranks:
        raise PlanError(
            f"{origin}: {BATCH} {batch} is no multiple of {MICRO_BATCH} {micro} x {ACCUMULATION} {accumulation}",
            code="plan.batch-not-divisible",
            fix=f"set {BATCH} to {max(1, ranks) * micro * accumulation}, or leave one of the three out",
        )
    return ranks


def _offload(file: _File, zero: dict[str, Any], stage: int) -> Offload:
    """Read what waits outside the device, in today's form or the one before it."""
    places, folders = {}, set()
    for name, old, least in (("offload_param", "cpu_offload_param", 3), ("offload_optimizer", "cpu_offload", 1)):
        device = file.value(zero[name], "device", "none")
        if zero.get(old):
            if name in file.given:
                raise PlanError(
                    f"{file.origin} has {name} and {old}", code="plan.deepspeed-key-two-names", fix=f"keep {name}"
                )
            device = "cpu"
        if device not in _DEVICES:
            raise PlanError(
                f"{file.origin} has {name}.device {device!r}",
                code="plan.deepspeed-offload-device",
                fix=nearest(str(device), _DEVICES),
            )
        if device != "none" and stage < least:
            raise PlanError(
                f"{file.origin} has {name} with stage {stage}",
                code="plan.deepspeed-offload-stage",
                fix=f"use stage {least} or more, or none",
            )
        if device == "nvme":
            folders.add(zero[name].get("nvme_path") or "")
        places[name] = device
    if "" in folders:
        raise PlanError(
            f"{file.origin} offloads to nvme without a folder",
            code="plan.nvme-folder-missing",
            fix="write nvme_path beside device",
        )
    if len(folders) > 1:
        raise PlanError(
            f"{file.origin} offloads to {' and '.join(sorted(folders))}",
            code="plan.nvme-folders-differ",
            fix="use one folder for both",
        )
    folder = folders.pop() if folders else ""
    return Offload(parameters=places["offload_param"], optimizer=places["offload_optimizer"], folder=folder)


_DEVICES = ("none", "cpu", "nvme")


def _communication(file: _File, zero: dict[str, Any], precision: Precision) -> Communication:
    default = Communication()
    elements = file.whole(zero, "reduce_bucket_size", None)
    gathered = file.whole(zero, "allgather_bucket_size", None)
    ahead = file.whole(zero, "stage3_prefetch_bucket_size", None)
    for key in ("overlap_comm", "contiguous_gradients"):
        if not file.switch(zero, key, default=True):
            file.notes.append(f"{key} false: it is on, gradients travel while backward goes on")
    if gathered is not None and gathered != (elements or 0) + (elements or 0) % 2:
        file.notes.append(f"allgather_bucket_size {gathered}: one bucket_mb is for both, reduce_bucket_size is taken")
    if elements == 0:
        raise PlanError(
            f"{file.origin} has reduce_bucket_size 0", code="plan.bucket-not-positive", fix="write a size above 0"
        )
    megabytes = default.bucket_mb if elements is None else bucket_megabytes(elements, precision.reduce)
    per_block = bucket_elements(megabytes, precision.reduce)
    prefetch = default.prefetch if ahead is None else max(1, round(ahead / per_block))
    return Communication(bucket_mb=megabytes, prefetch=prefetch)
