"""The Plan, a frozen and fully resolved description of how a job is trained, and the named presets."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_type_hints

from shardwise.errors import LayoutError, PlanError, nearest
from shardwise.layout import AXES, Layout, parse_layout
from shardwise.plans.pipeline import fill_pipeline, refit_batch, split_batch
from shardwise.plans.sections import Communication, Float8, Offload, Pipeline, Precision, check_ranges

# Presets: the degrees of parallelism and the ZeRO stage of each named plan.


Zero = Literal[0, 1, 2, 3]

PRESETS = ("ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp", "tp", "pp", "cp")

_ZERO: dict[str, Zero] = {"zero1": 1, "zero2": 2, "zero3": 3, "fsdp": 3}


def preset_degrees(name: str, world_size: int) -> tuple[Layout, Zero]:
    """Return the layout and ZeRO stage of a preset, or of a product such as pp2.shard2.tp2, for a world size."""
    if world_size < 1:
        raise LayoutError(
            f"world size must be positive, got {world_size}", code="layout.empty-world", fix="use at least 1 rank"
        )
    if name == "ddp" or (world_size == 1 and name in PRESETS):
        return Layout(replicate=world_size), 0
    if name in _ZERO:
        return Layout(shard=world_size), _ZERO[name]
    if name == "hsdp":
        return _hybrid(world_size), 3
    if name in {"tp", "pp", "cp"}:
        return Layout(**{name: world_size}), 0
    is_product = re.fullmatch(r"[a-z]+[0-9]+(\.[a-z]+[0-9]+)*|one", name) is not None
    is_typo = "." not in name and name.rstrip("0123456789") not in {"one", "ep", *AXES}  # such as zero5
    if not is_product or is_typo:
        raise PlanError(
            f"plan {name!r} is not a preset, a product of axes or a .toml file",
            code="plan.unknown-preset",
            fix=nearest(name, ["auto", *PRESETS]),
        )
    return _product(name, world_size)


def _hybrid(world_size: int) -> Layout:
    """Return a layout of two replicas, each sharded over half of the ranks."""
    if world_size < 4 or world_size % 2:
        raise PlanError(
            f"hsdp requires an even number of at least 4 ranks, got {world_size}",
            code="plan.hsdp-world-size",
            fix="use fsdp",
        )
    return Layout(replicate=2, shard=world_size // 2)


def _product(name: str, world_size: int) -> tuple[Layout, Zero]:
    layout = parse_layout(name)
    if layout.world_size != world_size:
        replicate, remainder = divmod(world_size, layout.world_size // layout.replicate)
        fix = f"use {layout.world_size} ranks"
        if remainder == 0 and replicate >= 1:
            fix = f"use replicate{replicate}, or {layout.world_size} ranks"
        raise LayoutError(
            f"layout {layout} requires {layout.world_size} ranks, but the world has {world_size}",
            code="layout.world-size-mismatch",
            fix=fix,
        )
    return layout, 3 if layout.shard > 1 else 0


VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A plan for training a job on a layout. Every value is resolved (not "auto"), with its origin in `sources`."""

    version: int = VERSION
    layout: Layout = field(default_factory=Layout)
    zero: Literal[0, 1, 2, 3] = 0
    """ZeRO stage: 1 shards optimizer states, 2 also gradients, 3 also parameters. 0 if and only if shard = 1 (except
    with cp, over which states can be sharded, too)."""
    micro_batch: int = 1
    """Samples per forward pass on each data-parallel rank."""
    accumulation: int = 1
    """Gradient accumulation steps: forward passes per optimizer step."""
    gradient_sync: Literal["last", "every"] = "last"
    """Reduce gradients once per step, or after every micro-batch, which needs less memory if they are sharded."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation checkpointing."""
    recompute_blocks: int = 0
    """Number of blocks to recompute: the first ones, in a pipeline those of each stage. 0 means all blocks. Their
    activations are the last that backward needs, when most others are freed."""
    compile: Literal["none", "blocks", "model"] = "none"
    """torch.compile of each repeated block, which compiles one graph for all layers, or of the whole model."""
    capture: Literal["none", "step"] = "none"
    """Capture the training step in a CUDA graph."""
    fused_loss: bool = False
    """Fuse the output projection with cross entropy, so that logits [tokens, vocabulary] are never materialized."""
    sequence_parallel: bool = False
    """Shard activations along the sequence between tensor-parallel layers; used if layout.tp > 1."""
    batch_norm: Literal["sync", "local"] = "sync"
    """Batch-norm statistics over all data-parallel ranks (as in a single process), or over the rows of each rank."""
    engine: Literal["torch", "deepspeed", "mlx"] = "torch"
    precision: Precision = field(default_factory=Precision)
    float8: Float8 = field(default_factory=Float8)
    offload: Offload = field(default_factory=Offload)
    communication: Communication = field(default_factory=Communication)
    pipeline: Pipeline = field(default_factory=Pipeline)
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Dotted field name -> origin of its value; fields with their default are absent."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.version != VERSION:
            raise PlanError(
                f"plan version {self.version} is not supported",
                code="plan.version-unknown",
                fix=f"use version = {VERSION}",
            )
        for name in ("micro_batch", "accumulation"):
            if getattr(self, name) < 1:
                raise PlanError(
                    f"plan {name} must be positive, got {getattr(self, name)}",
                    code="plan.not-whole-number",
                    fix="use an integer of at least 1",
                )
        if self.recompute_blocks < 0:
            raise PlanError(
                f"plan recompute_blocks must be at least 0, got {self.recompute_blocks}",
                code="plan.recompute-blocks-negative",
                fix="use 0 for all blocks, or the number of blocks to recompute",
            )
        if (self.zero == 0) != (self.layout.shard == 1) and not (self.layout.shard == 1 < self.layout.cp):
            raise PlanError(
                f"zero = {self.zero} does not match shard = {self.layout.shard}",
                code="plan.zero-shard-mismatch",
                fix="set zero to 1, 2 or 3 if shard or cp is above 1, else to 0",
            )
        check_ranges(self.communication)

    @classmethod
    def preset(
        cls,
        name: str,
        world_size: int,
        *,
        batch_size: int | None = None,
        accumulation: int | None = None,
        **options: Any,
    ) -> Plan:
        """Return a named plan: ddp, zero1, zero2, zero3, fsdp, hsdp, tp, pp, cp or a product such as pp2.shard2.tp2.

        Without `batch_size`, the micro-batch is 1, which is sufficient for `parallelize`. `accumulation` is 1 by
        default, or the number of micro-batches that fills a pipeline. `options` are other fields of the plan, such as
        `recompute="full"`, a precision by name (`precision="bf16"`) or a section as a dict
        (`communication={"bucket_mb": 50.0}`).
        """
        layout, zero = preset_degrees(name, world_size)
        accumulation = accumulation or fill_pipeline(batch_size, layout)
        batch = split_batch(batch_size or layout.dp * accumulation, dp=layout.dp, accumulation=accumulation)
        source = f"preset {name}"
        return cls(
            layout=layout,
            zero=zero,
            micro_batch=batch.micro_batch,
            accumulation=batch.accumulation,
            sources={"layout": source, "zero": source, **dict.fromkeys(options, "argument of preset")},
            **{key: _option(key, value) for key, value in options.items()},
        )

    @property
    def batch_size(self) -> int:
        """Global batch size: samples per optimizer step over all ranks."""
        return self.micro_batch * self.accumulation * self.layout.dp

    @property
    def is_captured(self) -> bool:
        """Whether the step is captured in a CUDA graph on a GPU: requested, on one rank and without offload."""
        return self.capture == "step" and self.layout.world_size == 1 and self.offload.optimizer == "none"

    @property
    def dp_axes(self) -> tuple[str, ...]:
        """Axes whose ranks read different samples and reduce their gradients in every step."""
        return ("shard",) if self.communication.sync_every > 1 else ("replicate", "shard")

    def replica(self, rank: int) -> int:
        """Return the index of the replica of a rank if replicas take local steps (sync_every > 1), else 0."""
        return self.layout.coordinate(rank).replicate if self.communication.sync_every > 1 else 0

    def source(self, name: str) -> str:
        """Return the origin of the value of a dotted field."""
        nested = [source for key, source in self.sources.items() if key.startswith(f"{name}.")]
        return (
            self.sources.get(name)
            or ", ".join(dict.fromkeys(nested))
            or self.sources.get(name.partition(".")[0], "default")
        )

    def refit(self, world_size: int) -> Plan:
        """Return this plan for another world size with the same tp, pp, cp and global batch, or raise PlanError."""
        layout = self.layout
        model_ranks = layout.pp * layout.cp * layout.tp
        dp, remainder = divmod(world_size, model_ranks)
        if remainder or dp == 0:
            raise PlanError(
                f"world size {world_size} is not divisible by pp x cp x tp = {model_ranks}",
                code="plan.world-not-divisible",
                fix=f"use a multiple of {model_ranks} ranks",
            )
        shard = _refit_shard(layout, dp)
        batch = refit_batch(self.batch_size, dp=dp, largest_micro_batch=self.micro_batch)
        source = f"refitted to {world_size} ranks"
        changed = ["layout", "micro_batch", "accumulation"]
        sync_every = self.communication.sync_every
        if sync_every > 1 and dp <= shard:  # a single replica has nothing to synchronize with
            sync_every = 1
            changed.append("communication.sync_every")
        return dataclasses.replace(
            self,
            communication=dataclasses.replace(self.communication, sync_every=sync_every),
            layout=dataclasses.replace(layout, shard=shard, replicate=dp // shard),
            zero=self.zero if shard * layout.cp > 1 else 0,
            micro_batch=batch.micro_batch,
            accumulation=batch.accumulation,
            sources={**self.sources, **dict.fromkeys(changed, source)},
        )


_DTYPE_FIELDS = ("parameter", "compute", "reduce", "optimizer")
_SECTIONS = {
    "precision": Precision,
    "float8": Float8,
    "offload": Offload,
    "communication": Communication,
    "pipeline": Pipeline,
}


def _option(name: str, value: Any) -> Any:
    """Return the value of a field for an option of `Plan.preset`; raises PlanError for fields that the preset sets."""
    set_by_preset = {"version", "layout", "zero", "micro_batch", "sources"}
    choices = sorted({part.name for part in dataclasses.fields(Plan)} - set_by_preset)
    if name not in choices:
        raise PlanError(f"Plan.preset has no option {name!r}", code="plan.unknown-option", fix=nearest(name, choices))
    if name == "precision" and value == "fp64":
        return Precision(**dict.fromkeys(_DTYPE_FIELDS, value))
    if name == "precision" and isinstance(value, str):
        return Precision(compute=value)  # type: ignore[arg-type]  # check_types rejects other values; weights stay in fp32
    if name in _SECTIONS and isinstance(value, Mapping):
        known = [part.name for part in dataclasses.fields(_SECTIONS[name])]
        for key in value:
            if key not in known:
                raise PlanError(
                    f"Plan.preset has no option {name}.{key}", code="plan.unknown-option", fix=nearest(key, known)
                )
        return _SECTIONS[name](**value)
    return value


def _refit_shard(layout: Layout, dp: int) -> int:
    """Return the shard degree for `dp` ranks: 1 for DDP, unchanged for HSDP if it divides `dp`, else `dp`."""
    if layout.shard == 1:
        return 1
    if layout.replicate > 1 and dp % layout.shard == 0:
        return layout.shard
    return dp


def check_types(value: Any, prefix: str = "") -> None:
    """Raise PlanError if a field of a plan, or of one of its sections, does not have its declared type."""
    kind: Any = type(value)
    hints = _hints(kind)
    for part in dataclasses.fields(value):
        given, expected, name = getattr(value, part.name), hints[part.name], prefix + part.name
        if isinstance(given, Layout):
            continue
        choices = get_args(expected)
        if dataclasses.is_dataclass(given):
            check_types(given, f"{name}.")
        elif choices and all(isinstance(choice, str | int) for choice in choices):
            if given not in choices or isinstance(given, bool):
                fix = nearest(str(given), map(str, choices))
                raise PlanError(f"plan {name} cannot be {given!r}", code="plan.unknown-choice", fix=fix)
        elif expected in (int, bool, float) and not _has_type(given, expected):
            fix = f"set {name} to {_TYPE_NAMES[expected]}"
            raise PlanError(f"plan {name} cannot be {given!r}", code="plan.wrong-type", fix=fix)


@functools.cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    """Return the annotations of a class. They are cached: reading takes 0.3 ms, and a search creates many plans."""
    return get_type_hints(kind)


_TYPE_NAMES = {int: "an integer", bool: "true or false", float: "a number"}


def _has_type(given: object, expected: type) -> bool:
    if expected is float:
        return isinstance(given, int | float) and not isinstance(given, bool)
    return type(given) is expected
