"""The Plan: a frozen, fully resolved answer to how a Job is trained, and the named presets."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_type_hints

from shardwise.errors import LayoutError, PlanError, nearest
from shardwise.layout import AXES, Layout, parse_layout
from shardwise.plans.batch import fill_pipeline, refit_batch, split_batch
from shardwise.plans.pipeline import ScheduleName  # noqa: TC001 - read at run time by check_types

# Named plans as pure arithmetic: which degrees, and what the shard axis shards.


Zero = Literal[0, 1, 2, 3]

PRESETS = ("ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp", "tp", "pp", "cp")

_ZERO: dict[str, Zero] = {"zero1": 1, "zero2": 2, "zero3": 3, "fsdp": 3}


def preset_degrees(name: str, world_size: int) -> tuple[Layout, Zero]:
    """Return layout and zero stage of a preset or a product such as pp2.shard2.tp2, for this many ranks."""
    if world_size < 1:
        raise LayoutError(f"a world of {world_size} ranks", code="layout.empty-world", fix="use at least 1")
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
            f"plan {name!r} is not a preset, a product or a .toml file",
            code="plan.unknown-preset",
            fix=nearest(name, ["auto", *PRESETS]),
        )
    return _product(name, world_size)


def _hybrid(world_size: int) -> Layout:
    """Two replicas, each sharded over half of the ranks."""
    if world_size < 4 or world_size % 2:
        raise PlanError(
            f"hsdp needs an even number of at least 4 ranks, not {world_size}",
            code="plan.hsdp-world-size",
            fix="use fsdp",
        )
    return Layout(replicate=2, shard=world_size // 2)


def _product(name: str, world_size: int) -> tuple[Layout, Zero]:
    layout = parse_layout(name)
    if layout.world_size != world_size:
        rest, over = divmod(world_size, layout.world_size // layout.replicate)
        fix = (
            f"use {layout.world_size} ranks" if over or rest < 1 else f"set replicate{rest}, or use {layout.world_size}"
        )
        raise LayoutError(
            f"layout {layout} needs {layout.world_size} ranks, the world has {world_size}",
            code="layout.world-size-mismatch",
            fix=fix,
        )
    return layout, 3 if layout.shard > 1 else 0


VERSION = 1

DType = Literal["fp64", "fp32", "bf16", "fp16"]
Place = Literal["none", "cpu", "nvme"]


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtypes of parameters, compute, reductions and optimizer states."""

    parameter: DType = "fp32"
    compute: DType = "fp32"
    """Forward, loss and backward; below fp32 by autocast, for which sharded weights are gathered in that dtype."""
    reduce: DType = "fp32"
    """Gradients while they are summed over ranks."""
    optimizer: DType = "fp32"

    def __str__(self) -> str:
        if {self.parameter, self.reduce, self.optimizer} == {self.compute}:
            return f"{self.compute} throughout"
        return (
            f"parameters {self.parameter} · compute {self.compute} · reduce {self.reduce} · optimizer {self.optimizer}"
        )


@dataclass(frozen=True, kw_only=True)
class Offload:
    """What waits outside the device."""

    parameters: Place = "none"
    optimizer: Place = "none"
    folder: str = ""
    """Where on the disk what waits on nvme is kept."""


@dataclass(frozen=True, kw_only=True)
class Communication:
    """How gradients and weights travel; docs/ddp.md has the table of DDP's own arguments."""

    bucket_mb: float = 25.0
    """Gradients are reduced in buckets of this size during backward."""
    compression: Literal["none", "bf16", "fp16", "powersgd"] = "none"
    find_unused_parameters: bool = False
    static_graph: bool = False
    gradient_as_bucket_view: bool = True
    broadcast_buffers: bool = False
    """Copy rank 0's buffers to all before each forward; for buffers that differ by rank."""
    prefetch: int = 1
    """Sharded blocks gathered ahead of use."""
    sync_every: int = 1
    """Optimizer steps of replicas on their own between two syncs; 1 reduces gradients in every step."""
    outer_lr: float = 0.5
    """How far the common weights move along the mean of the replicas' moves; matters when sync_every > 1."""
    outer_momentum: float = 0.3
    """Nesterov's, of that move; 0 with outer_lr = 1 averages weights. Measured in docs/low-communication.md."""


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """How stages of a pipeline take turns; matters when layout.pp > 1."""

    schedule: ScheduleName = "1f1b"
    split: tuple[int, ...] = ()
    """First layer of each stage after the first; empty splits evenly."""

    def __post_init__(self) -> None:
        given: Any = self.split  # TOML and the command line give lists
        if not isinstance(given, list | tuple) or not all(type(layer) is int for layer in given):
            raise PlanError(
                f"plan pipeline.split is {given!r}",
                code="plan.pipeline-split-not-list",
                fix="give a list of layers, such as [4, 8]",
            )
        object.__setattr__(self, "split", tuple(given))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How to train a Job on a Layout. Contains no "auto": every value is settled, with its origin in `sources`."""

    version: int = VERSION
    layout: Layout = field(default_factory=Layout)
    zero: Literal[0, 1, 2, 3] = 0
    """What is sharded: optimizer states (1), gradients (2), parameters (3); 0 exactly when shard = 1 (cp: any)."""
    micro_batch: int = 1
    """Samples per forward pass and data-parallel rank."""
    accumulation: int = 1
    """Forward passes per optimizer step."""
    gradient_sync: Literal["last", "every"] = "last"
    """Sum gradients over ranks once per step, or after every micro-batch (less memory when sharded)."""
    recompute: Literal["none", "selective", "full"] = "none"
    compile: Literal["none", "blocks", "model"] = "none"
    """Repeated blocks one by one (one graph for all layers, fast to compile), or the whole model as one graph."""
    capture: Literal["none", "step"] = "none"
    fused_loss: bool = False
    """Cross entropy from the head's input, chunk by chunk: logits [tokens, vocabulary] are never materialized."""
    sequence_parallel: bool = False
    """Between tensor-parallel layers, split activations along the sequence; matters when layout.tp > 1."""
    batch_norm: Literal["sync", "local"] = "sync"
    """Batch statistics over all data-parallel ranks (equal to one process), or over each rank's own rows."""
    engine: Literal["torch", "deepspeed", "mlx"] = "torch"
    precision: Precision = field(default_factory=Precision)
    offload: Offload = field(default_factory=Offload)
    communication: Communication = field(default_factory=Communication)
    pipeline: Pipeline = field(default_factory=Pipeline)
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Dotted field name -> where its value came from; absent means its default."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.version != VERSION:
            raise PlanError(
                f"plan version {self.version} is not supported",
                code="plan.version-unknown",
                fix=f"write version = {VERSION}",
            )
        for name in ("micro_batch", "accumulation"):
            if getattr(self, name) < 1:
                raise PlanError(
                    f"plan {name} is {getattr(self, name)}",
                    code="plan.not-whole-number",
                    fix="use a whole number of at least 1",
                )
        if (self.zero == 0) != (self.layout.shard == 1) and not (self.layout.shard == 1 < self.layout.cp):
            raise PlanError(
                f"plan has zero = {self.zero} with shard = {self.layout.shard}",
                code="plan.zero-shard-mismatch",
                fix="use zero 1, 2 or 3 exactly when shard is above 1, or with cp, whose ranks are shards too",
            )
        _check_ranges(self.communication)

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
        """Return a named plan: ddp, zero1, zero2, zero3, fsdp, hsdp, tp, pp, cp or a product (pp2.shard2.tp2).

        Without `batch_size` it trains one sample per forward pass: enough for `parallelize`. Without `accumulation`
        there is none, except as much as keeps a pipeline busy. `options` are other fields of a plan: a precision by
        name, `precision="bf16"`, `recompute="full"`, a section as a dict, `communication={"bucket_mb": 50.0}`.
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
        """Samples per optimizer step over the whole world."""
        return self.micro_batch * self.accumulation * self.layout.dp

    @property
    def is_captured(self) -> bool:
        """Whether the step becomes one CUDA graph on a GPU: asked for, no rank to wait for, nothing on the host."""
        return self.capture == "step" and self.layout.world_size == 1 and self.offload.optimizer == "none"

    @property
    def dp_axes(self) -> tuple[str, ...]:
        """Axes whose ranks read other samples and sum their gradients in every step."""
        return ("shard",) if self.communication.sync_every > 1 else ("replicate", "shard")

    def replica(self, rank: int) -> int:
        """Return which of the replicas that train on their own a rank belongs to; 0 where none does."""
        return self.layout.coordinate(rank).replicate if self.communication.sync_every > 1 else 0

    def source(self, name: str) -> str:
        """Say where the value of a dotted field came from."""
        own = [source for key, source in self.sources.items() if key.startswith(f"{name}.")]
        return (
            self.sources.get(name)
            or ", ".join(dict.fromkeys(own))
            or self.sources.get(name.partition(".")[0], "default")
        )

    def refit(self, world_size: int) -> Plan:
        """Return this plan for another number of ranks: tp, pp, cp and the global batch stay, or it is refused."""
        layout = self.layout
        model_ranks = layout.pp * layout.cp * layout.tp
        dp, rest = divmod(world_size, model_ranks)
        if rest or dp == 0:
            raise PlanError(
                f"{world_size} ranks do not divide by pp x cp x tp = {model_ranks}",
                code="plan.world-not-divisible",
                fix=f"use a multiple of {model_ranks} ranks",
            )
        shard = _refit_shard(layout, dp)
        batch = refit_batch(self.batch_size, dp=dp, largest_micro_batch=self.micro_batch)
        source = f"refitted to {world_size} ranks"
        every = self.communication.sync_every if dp > shard else 1  # one replica has no other to synchronize with
        rounds = ("communication.sync_every",) if every != self.communication.sync_every else ()
        return dataclasses.replace(
            self,
            communication=dataclasses.replace(self.communication, sync_every=every),
            layout=dataclasses.replace(layout, shard=shard, replicate=dp // shard),
            zero=self.zero if shard * layout.cp > 1 else 0,
            micro_batch=batch.micro_batch,
            accumulation=batch.accumulation,
            sources={**self.sources, **dict.fromkeys(("layout", "micro_batch", "accumulation", *rounds), source)},
        )


_DTYPE_FIELDS = ("parameter", "compute", "reduce", "optimizer")
_SECTIONS = {"precision": Precision, "offload": Offload, "communication": Communication, "pipeline": Pipeline}


def _option(name: str, value: Any) -> Any:
    """Return the value of a plan's field as `Plan.preset` takes it; refuses a field that is not its to set."""
    taken = {"version", "layout", "zero", "micro_batch", "sources"}
    choices = sorted({part.name for part in dataclasses.fields(Plan)} - taken)
    if name not in choices:
        raise PlanError(f"Plan.preset has no option {name!r}", code="plan.unknown-option", fix=nearest(name, choices))
    if name == "precision" and isinstance(value, str):
        # Weights in fp64 need everything in fp64; every other precision trains fp32 weights.
        return Precision(**dict.fromkeys(_DTYPE_FIELDS, value)) if value == "fp64" else Precision(compute=value)  # type: ignore[arg-type]
    if name in _SECTIONS and isinstance(value, Mapping):
        known = [part.name for part in dataclasses.fields(_SECTIONS[name])]
        for key in value:
            if key not in known:
                raise PlanError(
                    f"Plan.preset has no option {name}.{key}", code="plan.unknown-option", fix=nearest(key, known)
                )
        return _SECTIONS[name](**value)
    return value


def _check_ranges(options: Communication) -> None:
    if options.bucket_mb <= 0:
        raise PlanError(
            f"plan bucket_mb is {options.bucket_mb}", code="plan.bucket-not-positive", fix="use a size above 0"
        )
    if options.sync_every < 1:
        raise PlanError(
            f"plan sync_every is {options.sync_every}",
            code="plan.sync-every-invalid",
            fix="use a whole number of at least 1",
        )
    if not 0 < options.outer_lr < math.inf:
        raise PlanError(
            f"plan outer_lr is {options.outer_lr}",
            code="plan.outer-lr-invalid",
            fix="use a number above 0, such as 0.7",
        )
    if not 0 <= options.outer_momentum < 1:
        raise PlanError(
            f"plan outer_momentum is {options.outer_momentum}",
            code="plan.outer-momentum-invalid",
            fix="use a number from 0 to below 1",
        )


def _refit_shard(layout: Layout, dp: int) -> int:
    """Keep pure sharding pure and pure replication pure; of a mix, keep the shard degree when it divides."""
    if layout.shard == 1:
        return 1
    if layout.replicate > 1 and dp % layout.shard == 0:
        return layout.shard
    return dp


def check_types(value: Any, prefix: str = "") -> None:
    """Refuse a field of a plan whose value is not of its declared type, naming the choices."""
    kind: Any = type(value)
    hints = _hints(kind)
    for part in dataclasses.fields(value):
        given, wanted, name = getattr(value, part.name), hints[part.name], prefix + part.name
        if dataclasses.is_dataclass(given):
            check_types(given, f"{name}.") if not isinstance(given, Layout) else None
        elif get_args(wanted) and all(isinstance(choice, str | int) for choice in get_args(wanted)):
            if given not in get_args(wanted) or isinstance(given, bool):
                choices = [str(choice) for choice in get_args(wanted)]
                raise PlanError(
                    f"plan {name} is {given!r}", code="plan.unknown-choice", fix=nearest(str(given), choices)
                )
        elif wanted in (int, bool, float) and not _fits(given, wanted):
            raise PlanError(f"plan {name} is {given!r}", code="plan.wrong-type", fix=f"give {_TYPE_NAMES[wanted]}")


@functools.cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    """Read annotations once: it takes 0.3 ms, and a search makes thousands of plans."""
    return get_type_hints(kind)


_TYPE_NAMES = {int: "a whole number", bool: "true or false", float: "a number"}


def _fits(given: object, wanted: type) -> bool:
    if wanted is float:
        return isinstance(given, int | float) and not isinstance(given, bool)
    return type(given) is wanted
