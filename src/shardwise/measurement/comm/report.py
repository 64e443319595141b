"""`bench comm`: times and checks every collective, size, dtype, operation and group, and reports the results."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING

import msgspec
import torch

from shardwise.dist import world as open_world
from shardwise.dist.rendezvous import PrefixStore
from shardwise.dist.world import running_group
from shardwise.engines.backends import backend_row
from shardwise.environment import identify
from shardwise.errors import InputError
from shardwise.hardware import probe_gpus
from shardwise.hardware.probe import available_memory
from shardwise.layout import parse_layout
from shardwise.measurement.comm.check import check_all, count_wrong, refuse_missing
from shardwise.measurement.comm.collectives import CollectiveSpec, prepare
from shardwise.measurement.comm.limits import check_memory, find_ceiling, higher, require_memory
from shardwise.measurement.comm.result import (
    VERSION,
    Change,
    CommMeasurement,
    compare,
    csv_text,
    missing_text,
    read_earlier,
    row_of,
    table_lines,
)
from shardwise.measurement.comm.spec import (
    KINDS,
    OPERATIONS,
    TYPES,
    SweepSettings,
    group_ranks,
    read_aliased,
    read_groups,
    read_names,
    read_sizes,
)
from shardwise.measurement.comm.verdict import SeriesVerdict, findings, judge, sentence
from shardwise.measurement.report import BenchReport, machine_facts, rank_device
from shardwise.measurement.specs import rank_zero, require_backend, warn_if_busy
from shardwise.measurement.timing import slowest, time_collective
from shardwise.planner.settle import local_device
from shardwise.runs.console import CHECK_FAILED, echo_error
from shardwise.units import write_size

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from shardwise.dist import World
    from shardwise.dist.rendezvous import Store
    from shardwise.measurement.comm.result import Check, SweepRow
    from shardwise.measurement.specs import CommSpec
    from shardwise.plots.page import Findings


class CommReport(BenchReport, frozen=True, kw_only=True):
    """The measurements of a sweep, a verdict for each series of sizes, and the changes since an earlier run."""

    found: CommMeasurement
    verdicts: tuple[SeriesVerdict, ...]
    changes: tuple[Change, ...] | None = None
    """None without an earlier run."""

    def __post_init__(self) -> None:
        """Set the exit code: 3 if a result is wrong or slower than in the earlier run."""
        if self.found.wrong or self.slower:
            msgspec.structs.force_setattr(self, "exit_code", CHECK_FAILED)

    @property
    def slower(self) -> list[Change]:
        """Measurements that are slower than in the earlier run."""
        return [change for change in self.changes or () if change.is_regression]

    def to_json(self) -> str:
        """Return all measurements as JSON, which --compare reads."""
        document = msgspec.to_builtins(self.found)
        document |= {"verdicts": self.verdicts, "changes": self.changes}
        return msgspec.json.encode({"version": VERSION, **document}).decode()

    def to_csv(self) -> str:
        """Return the table as CSV with a header; the names contain the units."""
        return csv_text(self.found.rows)

    def findings(self) -> Findings:
        """Return the content of the HTML or Markdown report."""
        return findings(self.found, self.verdicts, self.changes)

    def to_text(self) -> str:
        """Return the table of nccl-tests, the verdicts and the checks."""
        found = self.found
        nodes = "one node" if found.num_nodes == 1 else f"{found.num_nodes} nodes"
        lines = [f"{found.backend} · {found.world_size} ranks on {nodes} · {found.device} · {found.seconds:.1f} s"]
        lines += [*table_lines(found.rows), *map(_verdict_line, self.verdicts)]
        checked = sum(check.wrong is not None for check in found.checks)
        lines.append(f"checked on small tensors: {checked} combinations of collective, operation and dtype")
        missing = missing_text(found.checks, found.backend)
        if missing:
            lines.append(missing)
        if found.left_out:
            lines.append(f"skipped for lack of time (raise --seconds): {', '.join(found.left_out)}")
        lines += [f"slower than in the earlier run: {change.text}" for change in self.slower]
        if self.changes is not None:
            lines.append(f"{len(self.slower)} of {len(self.changes)} measurements are slower than in the earlier run")
        return "\n".join([*lines, sentence(found, self.verdicts)])


def _verdict_line(verdict: SeriesVerdict) -> str:
    fitted = error = ""
    if verdict.fit is not None:
        fitted = f" · alpha {verdict.fit.alpha_s * 1e6:.0f} us, 1/beta {verdict.fit.bytes_per_s / 1e9:.2f} GB/s"
    if verdict.held_out is not None:
        error = f" (held-out error {verdict.held_out:.0%})"
    return f"{verdict.name}: {verdict.text}{fitted}{error}"


def measure(spec: CommSpec) -> CommReport | None:
    """Time and check collectives; return None on ranks other than 0 of an existing world."""
    settings = sweep_settings(spec)
    earlier = read_earlier(spec.compare) if spec.compare else None
    nproc = _check_start(settings, spec.nproc)
    found: CommMeasurement | None = rank_zero(measure_comm, nproc, settings, backend=settings.backend)
    if found is None:
        return None
    changes = None
    if earlier is not None and spec.compare is not None:
        changes = tuple(compare(found.rows, earlier.rows, spec.compare))
    return CommReport(found=found, verdicts=judge(found), changes=changes)


def sweep_settings(spec: CommSpec) -> SweepSettings:
    """Convert the options of `bench comm` to settings of a sweep; raise InputError for unknown names."""
    layout = parse_layout(spec.layout) if spec.layout else None
    dtypes = read_aliased(spec.dtypes, TYPES, "dtype") if spec.dtypes else None
    operations = read_aliased(spec.ops, OPERATIONS, "reduce operation") if spec.ops else None
    named: list[str] = []
    for text, names in ((spec.dtypes, dtypes), (spec.ops, operations)):
        if text and text != "all":
            named += names or ()
    return SweepSettings(
        collectives=read_names(spec.collectives, tuple(KINDS), "collective") if spec.collectives else tuple(KINDS),
        sizes=read_sizes(spec.sizes),
        dtypes=dtypes or ("float32",),
        operations=operations or ("SUM",),
        checked_dtypes=dtypes or tuple(TYPES),
        checked_operations=operations or tuple(OPERATIONS),
        named=tuple(named),
        groups=read_groups(spec.group, layout),
        layout=layout,
        root=spec.root,
        modes=("sync", "async") if spec.also_async else ("sync",),
        budget_s=spec.seconds,
        device=spec.place.device,
        backend=spec.place.backend,
    )


def _check_start(settings: SweepSettings, nproc: int | None) -> int | None:
    """Return the number of ranks to start; raise InputError for settings that the ranks could not run."""
    if identify().world_size > 1:
        return nproc
    if settings.backend is not None and backend_row(settings.backend).is_rare:
        require_backend(settings.backend)
    gpus = len(probe_gpus()) if settings.device != "cpu" else 0
    count = nproc or gpus or 2
    local_device(settings.device, 1 if settings.backend == "gloo" else count)
    places = tuple((0, rank) for rank in range(count))
    smallest = min(len(group_ranks(group, places, settings.layout)[0]) for group in settings.groups)
    if settings.root >= smallest:
        raise InputError(
            f"--root {settings.root} must be below the group size of {smallest}",
            code="bench.root-out-of-range",
            fix=f"use --root 0 to {smallest - 1}, or a larger --nproc",
        )
    if not gpus:
        check_memory(settings, ranks=smallest, sharing=count, free=available_memory(), where="this host")
    warn_if_busy()
    echo_error(f"shardwise: measuring on {count} ranks for about {settings.budget_s:g} s")
    return count


_MOST_CELL_S = 0.5
"""Maximum seconds of one cell: a collective of one size, dtype, operation, group and mode."""
_SHORT_S = 1.0
"""Cells that take less than this are never skipped for lack of time."""
_MOST_BLOCKS = 200
_CALLS = 6
"""Minimum number of calls of a cell: warm-up, estimate of its time, three samples, and the check."""


def measure_comm(spec: SweepSettings) -> CommMeasurement:
    """Open a world, time and check the collectives of `spec`. Communicates over the world; call on every rank."""
    with open_world(device=rank_device(spec.device, spec.backend), backend=spec.backend) as world:
        return sweep(world, spec)


def sweep(world: World, spec: SweepSettings) -> CommMeasurement:
    """Time and check the collectives of `spec`. Communicates over the world; call on every rank.

    Every rank returns the same times; wrong elements are summed over all ranks.
    """
    began = time.perf_counter()
    places = tuple(world.gather((world.node, world.local_rank)))
    kinds = {name: group_ranks(name, places, spec.layout) for name in spec.groups}
    for name, groups in kinds.items():
        if not 0 <= spec.root < len(groups[0]):
            raise InputError(
                f"--root {spec.root} must be below {len(groups[0])}, the size of group {name}",
                code="bench.root-out-of-range",
                fix=f"use --root 0 to {len(groups[0]) - 1}",
            )
    require_memory(spec, world, kinds)
    store = _own_store(world)
    checks = check_all(spec, world, store)
    refuse_missing(spec, checks, world.backend)
    bench = _Sweep(world=world, spec=spec, store=store)
    before = {name: find_ceiling(world, groups[0]) for name, groups in kinds.items()}
    bench.run(kinds, checks)
    after = {name: find_ceiling(world, groups[0]) for name, groups in kinds.items()}
    wrong_rows = _sum_over_ranks(world, store, "rows", [row.wrong for row in bench.rows])
    wrong_checks = _sum_over_ranks(world, store, "checks", [check.wrong or 0 for check in checks])
    summed_checks = []
    for check, wrong in zip(checks, wrong_checks, strict=True):
        is_supported = check.wrong is not None
        summed_checks.append(msgspec.structs.replace(check, wrong=wrong) if is_supported else check)
    return CommMeasurement(
        backend=world.backend,
        device=torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "CPU",
        world_size=world.size,
        num_nodes=world.num_nodes,
        rows=tuple(replace(row, wrong=wrong) for row, wrong in zip(bench.rows, wrong_rows, strict=True)),
        checks=tuple(summed_checks),
        ceilings={name: higher(before[name], after[name]) for name in kinds},
        left_out=tuple(bench.left_out),
        seconds=time.perf_counter() - began,
        facts=tuple((name, str(value)) for name, value in machine_facts(world.device)) if world.is_main else (),
    )


@dataclass(frozen=True, kw_only=True)
class _Sweep:
    """The state of a sweep on one rank."""

    world: World
    spec: SweepSettings
    store: Store
    rows: list[SweepRow] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def run(self, kinds: dict[str, tuple[tuple[int, ...], ...]], checks: list[Check]) -> None:
        """Measure all cells, in ascending order of size, so that the largest are skipped if time runs out."""
        groups = {name: self._join(ranks) for name, ranks in kinds.items()}
        cells, began = self._cells(checks), time.perf_counter()
        for index, (group, mode, case) in enumerate(cells):
            elapsed = slowest([time.perf_counter() - began], running_group(), self.world.device)[0]
            collective = replace(case, is_async=mode == "async")
            need_s = self._need_s(collective, group, mode)
            if need_s > _SHORT_S and elapsed + need_s > 2 * self.spec.budget_s:
                self.left_out.append(f"{case.name} of {write_size(case.num_bytes)} in {group} (about {need_s:.0f} s)")
                continue
            left = max(0.0, self.spec.budget_s - elapsed) / (len(cells) - index)
            # Half, so that large sizes get the time that small sizes do not need.
            share = min(_MOST_CELL_S, left / 2)
            self._measure(collective, groups[group], group, mode, share)

    def _join(self, groups: tuple[tuple[int, ...], ...]) -> ProcessGroup:
        """Create all groups of one kind and return the group of this rank; communicates over the world."""
        if len(groups) == 1:
            return running_group()
        made = [self.world.group(ranks) for ranks in groups]
        return next(group for group in made if group is not None)

    def _cells(self, checks: list[Check]) -> list[tuple[str, str, CollectiveSpec]]:
        """Return (group, mode, collective) of every cell that the backend supports."""
        spec, cells = self.spec, []
        has = {check.case for check in checks if check.wrong is not None}
        for size, name in product(spec.sizes, spec.collectives):
            kind = KINDS[name]
            dtypes = spec.dtypes if kind.traffic != "none" else ("",)
            for dtype, operation in product(dtypes, spec.operations if kind.reduces else ("",)):
                if (name, operation, dtype) not in has or (not dtype and size != spec.sizes[0]):
                    continue
                found = CollectiveSpec(
                    name=name,
                    num_bytes=size if dtype else 0,
                    dtype=getattr(torch, dtype or "float32"),
                    operation=operation or "SUM",
                    root=spec.root if kind.is_rooted else 0,
                )
                cells += [(group, mode, found) for group, mode in product(spec.groups, spec.modes)]
        return cells

    def _need_s(self, case: CollectiveSpec, group: str, mode: str) -> float:
        """Return the minimum seconds of a cell, estimated from the last row of its collective, group and mode, or 0."""
        alike = [row for row in self.rows if (row.collective, row.group, row.mode) == (case.name, group, mode)]
        if not alike or not alike[-1].size:
            return 0.0
        return _CALLS * alike[-1].time_us / 1e6 * case.num_bytes / alike[-1].size

    def _measure(self, case: CollectiveSpec, group: ProcessGroup, name: str, mode: str, share_s: float) -> None:
        """Time one cell on all groups at the same time, then check it; communicates over the world."""
        collective = prepare(case, group, self.world.device)
        timing = time_collective(collective, running_group(), budget_s=share_s, most=_MOST_BLOCKS)
        first = min(torch.distributed.get_process_group_ranks(group))
        wrong = count_wrong(collective, self.store, f"cell {len(self.rows)} of {first}")
        kind = KINDS[case.name]
        self.rows.append(
            row_of(
                timing,
                collective=case.name,
                group=name,
                ranks=collective.ranks,
                mode=mode,
                size=collective.size_bytes,
                count=collective.count,
                type=TYPES[str(case.dtype).removeprefix("torch.")] if kind.traffic != "none" else "none",
                redop=OPERATIONS[case.operation] if kind.reduces else "none",
                root=case.root if kind.is_rooted else -1,
                wrong=wrong,
            )
        )


def _own_store(world: World) -> Store:
    """Return a store with an unused prefix. Communicates through the world's store; call on every rank."""
    number = (world.store.add("bench comm", 1) - 1) // world.size
    return PrefixStore(f"bench comm {number}", world.store)


def _sum_over_ranks(world: World, store: Store, name: str, counts: list[int]) -> list[int]:
    """Return the element-wise sum over ranks. Communicates through the store; call on every rank.

    A collective is not used, since these counts are the results of checking collectives.
    """
    store.set(f"{name} {world.rank}", json.dumps(counts))
    found = [json.loads(store.get(f"{name} {rank}")) for rank in range(world.size)]
    return [sum(values) for values in zip(*found, strict=True)]
