"""Reads a plan from a DeepSpeed JSON configuration.

Unknown, contradictory and unsupported keys are errors. Values that belong to a Job (optimizer, scheduler, clipping)
become notes with the line to add to the job file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from shardwise.engines.deepspeed.config import DTYPES, bucket_elements, bucket_megabytes
from shardwise.engines.deepspeed.json_keys import (
    ACCUMULATION,
    BATCH,
    IGNORED,
    MICRO_BATCH,
    REFUSED,
    is_off,
    job_notes,
    known,
    parse,
)
from shardwise.errors import PlanError, nearest
from shardwise.layout import Layout
from shardwise.plans.pipeline import split_batch
from shardwise.plans.plan import Plan
from shardwise.plans.sections import Communication, Offload, Precision

if TYPE_CHECKING:
    from pathlib import Path

    from shardwise.plans.pipeline import BatchSplit
    from shardwise.plans.sections import DType

AUTO = "auto"
"""The value that Hugging Face's Trainer replaces."""

_SECTIONS = ("bf16", "fp16", "data_types", "zero_optimization", "activation_checkpointing")
_OFFLOAD_SECTIONS = ("offload_param", "offload_optimizer")


@dataclass(frozen=True)
class ConfigReading:
    """A plan read from DeepSpeed's JSON, with notes on the keys that the plan does not express."""

    plan: Plan
    notes: tuple[str, ...]
    """One sentence per key that the plan does not express; keys that belong to the job are first."""


def read_json(
    path: Path, *, num_ranks: int | None = None, batch_size: int | None = None, precision: DType | None = None
) -> ConfigReading:
    """Read a plan from a JSON file; `num_ranks`, `batch_size` and `precision` supply values that it omits."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise PlanError(
            f"{path} cannot be read ({reason})", code="plan.deepspeed-read-failed", fix="pass a DeepSpeed JSON file"
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
    """Return the plan that a DeepSpeed JSON describes; `origin` names the file in errors and in `Plan.sources`."""
    data = parse(text, origin)
    file = _ConfigFile(origin, data)
    file.check_keys()
    zero = data["zero_optimization"]
    dtypes = _precision(file, precision)
    num_ranks, batch = _batch(file, num_ranks, batch_size)
    stage = file.integer(zero, "stage", 0)
    if stage not in (0, 1, 2, 3):
        raise PlanError(
            f"{origin}: zero_optimization.stage must be 0, 1, 2 or 3, got {stage}",
            code="plan.deepspeed-stage-invalid",
            fix="set zero_optimization.stage to 0, 1, 2 or 3",
        )
    offload = _offload(file, zero, stage)
    communication = _communication(file, zero, dtypes)
    layout = Layout(replicate=num_ranks)
    if stage and num_ranks == 1:
        file.notes.append(f"stage {stage}: one rank has nothing to shard, so the plan has zero = 0")
        stage = 0
    elif stage:
        layout = Layout(shard=num_ranks)
    plan = Plan(
        layout=layout,
        zero=cast("Any", stage),
        micro_batch=batch.micro_batch,
        accumulation=batch.accumulation,
        recompute="full" if "activation_checkpointing" in file.given else "none",
        engine="deepspeed",
        precision=dtypes,
        offload=offload,
        communication=communication,
        sources=dict.fromkeys(_READ, origin),
    )
    return ConfigReading(plan, (*job_notes(data), *file.notes, *file.ignored_notes()))


_READ = (
    *("layout", "zero", "micro_batch", "accumulation", "recompute", "engine", "precision.compute", "precision.reduce"),
    *("offload.parameters", "offload.optimizer", "offload.folder", "communication.bucket_mb", "communication.prefetch"),
)
"""The fields of a plan that the JSON sets."""


@dataclass
class _ConfigFile:
    """One JSON configuration while it is read: its sections and the notes collected so far."""

    origin: str
    data: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    given: set[str] = field(default_factory=set)
    """Names of the sections that the file contains."""

    def check_keys(self) -> None:
        """Raise PlanError for unknown keys and values that a plan cannot express; add missing sections as {}."""
        data = self.data
        if isinstance(data.get("zero_optimization"), bool):  # the syntax before DeepSpeed 0.3
            data["zero_optimization"] = {"stage": int(data["zero_optimization"])}
        if "bfloat16" in data:
            if "bf16" in data:
                raise PlanError(
                    f"{self.origin} has both bf16 and bfloat16, two names of one section",
                    code="plan.deepspeed-key-two-names",
                    fix="remove bfloat16",
                )
            data["bf16"] = data.pop("bfloat16")
        self._check("", data)
        for name in _SECTIONS:
            self._check(name, self._section(data, name))
        for name in _OFFLOAD_SECTIONS:
            self._check(name, self._section(data["zero_optimization"], name))
        op = data.get("gradient_allreduce_op", "mean")
        if op != "mean":
            raise PlanError(
                f'{self.origin}: gradient_allreduce_op must be "mean", got {op!r}',
                code="plan.deepspeed-reduce-op",
                fix="remove gradient_allreduce_op",
            )
        ratio = data["zero_optimization"]["offload_optimizer"].get("ratio", 1)
        if ratio not in (1, AUTO):
            raise PlanError(
                f"{self.origin}: offload_optimizer.ratio must be 1, got {ratio}",
                code="plan.deepspeed-partial-offload",
                fix="remove ratio",
            )

    def _section(self, parent: dict[str, Any], name: str) -> dict[str, Any]:
        """Return a section of `parent`, adding it as an empty one if it is missing or null."""
        if parent.get(name) is None:
            parent[name] = {}
        else:
            self.given.add(name)
        section = parent[name]
        if not isinstance(section, dict):
            raise PlanError(
                f"{self.origin}: {name} must be a JSON object, got {section!r}",
                code="plan.deepspeed-not-section",
                fix=f'write "{name}": {{ ... }}',
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
                    f"{self.origin} has {full}, which a plan cannot express",
                    code="plan.deepspeed-no-equivalent",
                    fix=f"remove {key}",
                )
            if key in IGNORED[section]:
                self.ignored.append(full)

    def ignored_notes(self) -> list[str]:
        """Return one sentence on the keys that do not affect training results, if there are any."""
        if not self.ignored:
            return []
        return [f"ignored, because they do not affect training results: {', '.join(self.ignored)}"]

    def value(self, section: dict[str, Any], key: str, default: Any) -> Any:
        """Return a value; for "auto", add a note and return `default`."""
        given = section.get(key, default)
        if given != AUTO:
            return given
        self.notes.append(f'{key} is "auto", which Hugging Face fills in: the plan uses {default!r}')
        return default

    def integer(self, section: dict[str, Any], key: str, default: int | None) -> Any:
        """Return a non-negative integer, which may be written as 5e8."""
        given = self.value(section, key, default)
        if given is default:
            return default
        if isinstance(given, bool) or not isinstance(given, int | float) or given != int(given) or given < 0:
            raise PlanError(
                f"{self.origin}: {key} must be a non-negative integer, got {given!r}",
                code="plan.deepspeed-not-whole-number",
                fix=f"set {key} to an integer",
            )
        return int(given)

    def boolean(self, section: dict[str, Any], key: str, *, default: bool) -> bool:
        """Return a boolean value."""
        given = self.value(section, key, default)
        if not isinstance(given, bool):
            raise PlanError(
                f"{self.origin}: {key} must be true or false, got {given!r}",
                code="plan.deepspeed-not-boolean",
                fix=f"set {key} to true or false",
            )
        return given


def _precision(file: _ConfigFile, requested: DType | None) -> Precision:
    """Return the dtypes of compute and reduction; `requested` replaces "auto"."""
    on: list[DType] = []
    names: tuple[DType, ...] = ("bf16", "fp16")
    for name in names:
        section = file.data[name]
        if section.get("enabled") == AUTO and requested is not None:
            section["enabled"] = requested == name
        if file.boolean(section, "enabled", default=False):
            on.append(name)
    if len(on) == 2:
        raise PlanError(
            f"{file.origin} enables both bf16 and fp16", code="plan.deepspeed-two-precisions", fix="disable fp16"
        )
    compute: DType = on[0] if on else "fp32"
    if requested not in (None, compute):
        raise PlanError(
            f"--precision {requested} contradicts {file.origin}, which computes in {compute}",
            code="plan.deepspeed-precision-contradicts",
            fix="remove --precision",
        )
    if compute == "fp16" and file.data["fp16"].get("loss_scale", 0) not in (0, AUTO):
        file.notes.append("fp16.loss_scale: the plan uses a dynamic loss scale")
    reduce = file.value(file.data, "communication_data_type", None) or compute
    if reduce not in DTYPES:
        raise PlanError(
            f"{file.origin} has an unknown communication_data_type {reduce!r}",
            code="plan.deepspeed-unknown-dtype",
            fix=nearest(reduce, DTYPES),
        )
    return Precision(compute=compute, reduce=reduce)


def _batch(file: _ConfigFile, num_ranks: int | None, batch_size: int | None) -> tuple[int, BatchSplit]:
    """Return the number of ranks and the batch split; without `num_ranks` the file must set all three batch sizes."""
    sizes = {}
    for key in (BATCH, MICRO_BATCH, ACCUMULATION):
        sizes[key] = file.integer(file.data, key, None)
        if sizes[key] == 0:
            raise PlanError(
                f"{file.origin}: {key} must be positive, got 0",
                code="plan.deepspeed-batch-zero",
                fix=f"set {key} to an integer of at least 1",
            )
    batch, micro, accumulation = sizes.values()
    if batch_size is not None and batch not in (None, batch_size):
        raise PlanError(
            f"--batch-size {batch_size} contradicts {file.origin}, which has {batch}",
            code="plan.deepspeed-batch-contradicts",
            fix="remove --batch-size",
        )
    batch = batch or batch_size
    if num_ranks is None:
        num_ranks = _ranks(file.origin, batch, micro, accumulation)
    if batch is None:
        if micro is None:
            raise PlanError(
                f"{file.origin} has neither {BATCH} nor {MICRO_BATCH}",
                code="plan.deepspeed-batch-missing",
                fix="pass --batch-size N",
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
            f"{origin} does not set the number of ranks", code="plan.deepspeed-ranks-unknown", fix="pass --nproc N"
        )
    ranks, rest = divmod(batch, micro * accumulation)
    if rest or not ranks:
        raise PlanError(
            f"{origin}: {BATCH} {batch} is not a multiple of {MICRO_BATCH} {micro} x {ACCUMULATION} {accumulation}",
            code="plan.batch-not-divisible",
            fix=f"set {BATCH} to {max(1, ranks) * micro * accumulation}, or remove one of the three",
        )
    return ranks


def _offload(file: _ConfigFile, zero: dict[str, Any], stage: int) -> Offload:
    """Return the offload devices, from the current keys or from the older `cpu_offload` keys."""
    devices, folders = {}, set()
    for name, old, least in (("offload_param", "cpu_offload_param", 3), ("offload_optimizer", "cpu_offload", 1)):
        device = file.value(zero[name], "device", "none")
        if zero.get(old):
            if name in file.given:
                raise PlanError(
                    f"{file.origin} has both {name} and {old}", code="plan.deepspeed-key-two-names", fix=f"remove {old}"
                )
            device = "cpu"
        if device not in _DEVICES:
            raise PlanError(
                f"{file.origin} has an unknown {name}.device {device!r}",
                code="plan.deepspeed-offload-device",
                fix=nearest(str(device), _DEVICES),
            )
        if device != "none" and stage < least:
            raise PlanError(
                f"{file.origin}: {name} needs stage {least} or more, got {stage}",
                code="plan.deepspeed-offload-stage",
                fix=f'set stage {least}, or device "none"',
            )
        if device == "nvme":
            folders.add(zero[name].get("nvme_path") or "")
        devices[name] = device
    if "" in folders:
        raise PlanError(
            f"{file.origin} offloads to nvme, but nvme_path is not set",
            code="plan.nvme-folder-missing",
            fix="set nvme_path in the same section",
        )
    if len(folders) > 1:
        raise PlanError(
            f"{file.origin} offloads to two folders, {' and '.join(sorted(folders))}",
            code="plan.nvme-folders-differ",
            fix="set the same nvme_path in both sections",
        )
    folder = folders.pop() if folders else ""
    return Offload(parameters=devices["offload_param"], optimizer=devices["offload_optimizer"], folder=folder)


_DEVICES = ("none", "cpu", "nvme")


def _communication(file: _ConfigFile, zero: dict[str, Any], precision: Precision) -> Communication:
    """Return bucket size and prefetch depth, converted from elements to MiB and blocks."""
    default = Communication()
    elements = file.integer(zero, "reduce_bucket_size", None)
    gathered = file.integer(zero, "allgather_bucket_size", None)
    prefetched = file.integer(zero, "stage3_prefetch_bucket_size", None)
    for key in ("overlap_comm", "contiguous_gradients"):
        if not file.boolean(zero, key, default=True):
            file.notes.append(f"{key} false: the plan enables it and reduces gradients during backward")
    if gathered is not None and gathered != (elements or 0) + (elements or 0) % 2:
        file.notes.append(f"allgather_bucket_size {gathered}: the plan uses reduce_bucket_size for all buckets")
    if elements == 0:
        raise PlanError(
            f"{file.origin}: reduce_bucket_size must be positive, got 0",
            code="plan.bucket-not-positive",
            fix="set reduce_bucket_size to a positive integer",
        )
    megabytes, prefetch = default.bucket_mb, default.prefetch
    if elements is not None:
        megabytes = bucket_megabytes(elements, precision.reduce)
    if prefetched is not None:
        prefetch = max(1, round(prefetched / bucket_elements(megabytes, precision.reduce)))
    return Communication(bucket_mb=megabytes, prefetch=prefetch)
