"""Calibration of the planner: measures the rates of this machine in under a minute."""

from __future__ import annotations

import datetime as dt
import socket
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardwise.dist import world
from shardwise.environment import identify
from shardwise.hardware import probe_gpus
from shardwise.hardware.calibration import (
    AttentionPoint,
    Calibration,
    CollectivePoints,
    Figure,
    GroupedPoint,
    MatmulPoint,
    default_calibration,
    measured,
    write_calibration,
)
from shardwise.hardware.cluster import this_machine
from shardwise.measurement import low_precision, timing
from shardwise.measurement.specs import on_ranks
from shardwise.measurement.timing import measure_collective

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from shardwise.dist import World
    from shardwise.hardware.machine import NodeType

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send")
SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 23, 1 << 26)
"""Sizes of collectives in bytes, from the weight of a norm to a gradient bucket."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Shapes and sizes to measure on one kind of device."""

    layers: dict[str, tuple[tuple[int, int, int], ...]]
    """dtype -> linear layers as (rows, inner, columns)."""
    uneven: dict[str, tuple[tuple[int, int, int], ...]]
    """Linear layers whose columns are not a multiple of 16 bytes."""
    float8: tuple[tuple[int, int, int], ...]
    """Linear layers that are multiplied in float8."""
    experts: tuple[tuple[int, int, int, int], ...]
    """Grouped products as (groups, rows of all groups, inner, columns)."""
    attentions: dict[str, tuple[tuple[int, int], ...]]
    """dtype -> (sequence length, head dim)."""
    tokens: int
    """Tokens per batch of attention."""
    numels: tuple[int, ...]
    """Elements of the tensors that memory-bound operators read."""
    low: torch.dtype
    """dtype of the tensors that memory-bound operators read."""
    parameters: int
    """Number of parameters in the timed optimizer step."""
    budget_s: float
    """Seconds per measured point."""


_WIDE = (
    *((768, 768), (768, 2304), (768, 3072), (3072, 768), (768, 50_304)),  # GPT-2
    *((2048, 512), (2048, 2048), (2048, 5632), (5632, 2048), (2048, 32_000)),  # 1B Llama
    *((4096, 1024), (4096, 4096), (4096, 14_336), (14_336, 4096), (4096, 128_256)),  # 8B Llama
    *((8192, 8192), (8192, 28_672), (28_672, 8192)),  # 70B Llama
)
_SQUARES = ((512, 512), (1024, 1024), (1536, 1536))  # with those of _WIDE: from which width float8 is faster
_FEW = ((768, 768), (768, 3072), (2048, 2048), (4096, 4096), (4096, 14_336))
_NARROW = ((64, 64), (64, 256), (128, 512), (256, 256), (256, 1024), (1024, 256), (768, 768), (768, 3072), (128, 8192))


def _with_rows(rows: Iterable[int], widths: Iterable[tuple[int, int]]) -> tuple[tuple[int, int, int], ...]:
    widths = tuple(widths)
    return tuple((row, *width) for row in rows for width in widths)


GPU = Grid(
    layers={
        "bf16": _with_rows((512, 2048, 8192, 16_384), _WIDE) + _with_rows((16_384,), _SQUARES),
        "fp16": _with_rows((4096,), _FEW),
        "tf32": _with_rows((1024, 8192), _FEW),
        "fp32": _with_rows((1024, 8192), _FEW),
    },
    uneven={"bf16": _with_rows((2048, 8192, 16_384), ((768, 50_257), (1600, 50_257)))},
    float8=(
        *_with_rows((4096, 16_384), ((2048, 2048), (2048, 5632), (4096, 4096), (4096, 14_336), (8192, 28_672))),
        *_with_rows((16_384,), ((768, 768), *_SQUARES)),
    ),
    # Experts of OLMoE, Mixtral and Qwen3-30B-A3B, two products each.
    experts=(
        *((64, 65_536, 2048, 1024), (64, 65_536, 1024, 2048), (8, 16_384, 4096, 14_336), (8, 16_384, 14_336, 4096)),
        *((128, 65_536, 2048, 768), (128, 65_536, 768, 2048)),
    ),
    attentions={
        "bf16": ((512, 64), (1024, 64), (2048, 64), (4096, 64), (1024, 128), (2048, 128), (4096, 128), (8192, 128)),
        "fp16": ((2048, 128),),
        "fp32": ((1024, 64),),
    },
    tokens=16_384,
    numels=(1 << 23, 1 << 25),
    low=torch.bfloat16,
    parameters=100_000_000,
    budget_s=0.02,
)
CPU = Grid(
    layers={"fp32": _with_rows((64, 512, 2048), _NARROW), "bf16": _with_rows((512,), ((256, 256), (256, 1024)))},
    uneven={},
    float8=_with_rows((512,), ((256, 256),)),
    experts=((4, 512, 256, 256),),
    attentions={"fp32": ((64, 16), (64, 64), (256, 32), (256, 64), (1024, 64))},
    tokens=512,
    numels=(1 << 18, 1 << 21),
    low=torch.float32,
    parameters=4_000_000,
    budget_s=0.04,
)


@dataclass(frozen=True, kw_only=True)
class RankFigures:
    """The measurements of one rank, taken while all other ranks run the same operators."""

    figures: dict[str, Figure]
    """Field of Calibration -> value."""
    matmuls: tuple[MatmulPoint, ...]
    attentions: tuple[AttentionPoint, ...]
    collectives: tuple[CollectivePoints, ...]
    grouped: tuple[GroupedPoint, ...] = ()
    skipped: dict[str, str] = field(default_factory=dict)
    """Measurement -> reason why the device does not support it."""


def calibrate(ranks: int | None = None, *, folder: Path | None = None, grid: Grid | None = None) -> Calibration:
    """Start ranks that measure this machine, save the calibration in `folder` for the planner, and return it.

    `ranks` ranks (default: 1) measure at the same time, including the collectives between them. CPU ranks share the
    cores, so that every rate includes their contention. `grid` defaults to the grid of the device.
    """
    node = this_machine(ranks).node
    on_cpu = node.device.kind == "cpu"
    found = on_ranks(measure_rank, ranks or 1, grid or (CPU if on_cpu else GPU), "cpu" if on_cpu else "cuda")
    calibration = combine(found, node)
    write_calibration(calibration, folder)
    return calibration


def combine(found: Sequence[RankFigures], node: NodeType) -> Calibration:
    """Return the calibration from the measurements of all ranks; other values come from the catalogue."""
    base = default_calibration(node)
    names = found[0].figures
    return replace(
        base,
        machine=socket.gethostname(),
        date=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        torch=str(torch.__version__),
        matmuls=_mean_points([point for rank in found for point in rank.matmuls], ("flops",)),
        attentions=_mean_points([point for rank in found for point in rank.attentions], ("forward", "backward")),
        grouped=_mean_points([point for rank in found for point in rank.grouped], ("flops",)),
        skipped=found[0].skipped,
        collectives=found[0].collectives,  # times of the slowest rank, equal on every rank
        **{name: _mean([rank.figures[name] for rank in found]) for name in names},  # type: ignore[arg-type]
    )


def _mean(figures: Sequence[Figure]) -> Figure:
    value = sum(figure.value for figure in figures) / len(figures)
    apart = max(abs(figure.value - value) / value for figure in figures) if value else 0.0
    return measured(value, max(apart, *(figure.uncertainty for figure in figures)))


def _mean_points(points: Sequence[Any], rates: tuple[str, ...]) -> tuple[Any, ...]:
    """Merge points of the same shape into one with the mean of their rates."""
    alike: dict[Any, list[Any]] = defaultdict(list)
    for point in points:
        alike[replace(point, **dict.fromkeys(rates, 0.0))].append(point)
    return tuple(
        replace(shape, **{rate: sum(getattr(point, rate) for point in group) / len(group) for rate in rates})
        for shape, group in alike.items()
    )


def measure_rank(grid: Grid, device: str) -> RankFigures:
    """Open a world and measure on this rank. Communicates over the world; call on every rank."""
    used = _memory_in_use(identify().local_rank) if device == "cuda" else 0
    with world(device=device) as here:
        matmuls: list[MatmulPoint] = []
        for dtype, layers in _present(grid.layers, here.device) + _present(grid.uneven, here.device):
            here.barrier()  # so that all ranks time the same operators at the same time
            matmuls += timing.matmul_points(layers, dtype, here.device, budget_s=grid.budget_s)
        skipped = _unsupported(here.device)
        if "float8" not in skipped:
            here.barrier()
            matmuls += low_precision.float8_points(grid.float8, here.device, budget_s=grid.budget_s)
        grouped: list[GroupedPoint] = []
        if "grouped" not in skipped:
            here.barrier()
            grouped = low_precision.grouped_points(grid.experts, here.device, budget_s=grid.budget_s)
        attentions: list[AttentionPoint] = []
        for dtype, shapes in _present(grid.attentions, here.device):
            here.barrier()
            attentions += timing.attention_points(
                shapes, dtype, here.device, tokens=grid.tokens, budget_s=grid.budget_s
            )
        figures = _figures(here, grid)
        if device == "cuda":
            reserved = torch.cuda.memory_reserved(here.device)
            figures["context_bytes"] = measured(max(1.0, _memory_in_use(here.local_rank) - used - reserved), 0.1)
        return RankFigures(
            figures=figures,
            matmuls=tuple(matmuls),
            attentions=tuple(attentions),
            collectives=_collectives(here, grid.budget_s) if here.size > 1 else (),
            grouped=tuple(grouped),
            skipped=skipped,
        )


def _unsupported(device: torch.device) -> dict[str, str]:
    """Return the measurements that a device or this version of torch does not support, with the reason."""
    reasons = {"float8": low_precision.why_not_float8(device), "grouped": low_precision.why_not_grouped(device)}
    return {name: reason for name, reason in reasons.items() if reason}


def _present(table: dict[str, Any], device: torch.device) -> list[tuple[str, Any]]:
    """Return the entries of dtypes that the device supports in hardware."""
    if device.type == "cpu":
        return list(table.items())
    major = torch.cuda.get_device_capability(device)[0]
    return [(dtype, shapes) for dtype, shapes in table.items() if major >= 8 or dtype not in {"bf16", "tf32"}]


def _together(here: World, work: Callable[[], Any]) -> Any:
    """Run `work` on all ranks at the same time. Communicates over the world; call on every rank."""
    here.barrier()
    return work()


def _figures(here: World, grid: Grid) -> dict[str, Figure]:
    device, budget_s, host = here.device, grid.budget_s, torch.device("cpu")
    steps: dict[str, Callable[[], Figure]] = {
        "memory_bandwidth": lambda: timing.memory_bandwidth(grid.numels, device, low=grid.low, budget_s=budget_s),
        "operator_s": lambda: timing.operator_seconds(device),
        "kernel_s": lambda: timing.kernel_seconds(device, budget_s=budget_s),
        "optimizer_bandwidth": lambda: timing.optimizer_bandwidth(grid.parameters, device, budget_s=2 * budget_s),
    }
    figures: dict[str, Figure] = {name: _together(here, step) for name, step in steps.items()}
    if device.type == "cpu":
        return {**figures, "host_optimizer_bandwidth": figures["optimizer_bandwidth"]}
    to_host, from_host = _together(here, lambda: timing.copy_bandwidths(device, budget_s=5 * budget_s))
    on_host = _together(here, lambda: timing.optimizer_bandwidth(CPU.parameters, host, budget_s=CPU.budget_s))
    return {**figures, "host_optimizer_bandwidth": on_host, "to_host": to_host, "from_host": from_host}


def _collectives(here: World, budget_s: float) -> tuple[CollectivePoints, ...]:
    """Time all collectives. Communicates over the world; call on every rank."""
    group = dist.group.WORLD
    assert group is not None  # noqa: S101 - a world is open
    found = []
    for name in COLLECTIVES:
        timed = [measure_collective(name, size, group, here.device, budget_s=budget_s) for size in SIZES]
        points = tuple((item.num_bytes, item.timing.median_s) for item in timed)
        found.append(CollectivePoints(name=name, ranks=here.size, nodes=here.num_nodes, points=points))
    return tuple(found)


def _memory_in_use(local_rank: int) -> float:
    """Return the bytes in use on this rank's GPU as the driver reports them, without initializing CUDA."""
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(probe_gpus()[local_rank].index)
    return float(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
