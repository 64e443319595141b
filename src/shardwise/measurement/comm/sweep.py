"""The sweep: every collective, size, dtype, operation and group that was asked for, timed and checked."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING

import torch

from shardwise.dist import world as open_world
from shardwise.dist.stores import PrefixStore
from shardwise.dist.world import running_group
from shardwise.errors import InputError
from shardwise.measurement.comm.check import check_all, count_wrong, refuse_missing
from shardwise.measurement.comm.collectives import CollectiveSpec, prepare
from shardwise.measurement.comm.limits import find_ceiling, higher, require_room
from shardwise.measurement.comm.result import CommMeasurement, row_of
from shardwise.measurement.comm.spec import KINDS, OPERATIONS, TYPES, group_ranks
from shardwise.measurement.report.findings import machine_facts, rank_device
from shardwise.measurement.timing import slowest, time_collective
from shardwise.units import write_size

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from shardwise.dist import World
    from shardwise.dist.stores import Store
    from shardwise.measurement.comm.result import Check, SweepRow
    from shardwise.measurement.comm.spec import SweepSettings

_MOST_CELL_S = 0.5
"""That one cell is given, however few there are."""
_SHORT_S = 1.0
"""What takes less than this is never left out for want of time."""
_MOST_BLOCKS = 200
_CALLS = 6
"""Of a cell at the least: to warm up, to see how long it takes, three samples, and the check."""


def measure_comm(spec: SweepSettings) -> CommMeasurement:
    """Communicate over a world of its own, called on every rank: time and check all that `spec` asks for."""
    with open_world(device=rank_device(spec.device, spec.backend), backend=spec.backend) as world:
        return sweep(world, spec)


def sweep(world: World, spec: SweepSettings) -> CommMeasurement:
    """Communicate over the world, called on every rank: time and check all that `spec` asks for.

    Every rank returns the same times; wrong elements are those of all ranks.
    """
    began = time.perf_counter()
    places = tuple(world.gather((world.node, world.local_rank)))
    kinds = {name: group_ranks(name, places, spec.layout) for name in spec.groups}
    for name, groups in kinds.items():
        if not 0 <= spec.root < len(groups[0]):
            raise InputError(
                f"--root {spec.root} is outside a group {name} of {len(groups[0])} ranks",
                code="bench.root-out-of-range",
                fix=f"use 0 to {len(groups[0]) - 1}",
            )
    require_room(spec, world, kinds)
    store = _own_store(world)
    checks = check_all(spec, world, store)
    refuse_missing(spec, checks, world.backend)
    bench = _Sweep(world=world, spec=spec, store=store)
    before = {name: find_ceiling(world, groups[0]) for name, groups in kinds.items()}
    bench.run(kinds, checks)
    after = {name: find_ceiling(world, groups[0]) for name, groups in kinds.items()}
    wrong = _add_up(world, store, [*(row.wrong for row in bench.rows), *(check.wrong or 0 for check in checks)])
    return CommMeasurement(
        backend=world.backend,
        device=torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "CPU",
        world_size=world.size,
        num_nodes=world.num_nodes,
        rows=tuple(replace(row, wrong=wrong[index]) for index, row in enumerate(bench.rows)),
        checks=tuple(
            check if check.wrong is None else replace(check, wrong=wrong[len(bench.rows) + index])
            for index, check in enumerate(checks)
        ),
        ceilings={name: higher(before[name], after[name]) for name in kinds},
        left_out=tuple(bench.left_out),
        seconds=time.perf_counter() - began,
        facts=tuple((name, str(value)) for name, value in machine_facts(world.device)) if world.is_main else (),
    )


@dataclass(frozen=True, kw_only=True)
class _Sweep:
    """One rank's place in a sweep."""

    world: World
    spec: SweepSettings
    store: Store
    rows: list[SweepRow] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def run(self, kinds: dict[str, tuple[tuple[int, ...], ...]], checks: list[Check]) -> None:
        """Measure sizes in ascending order, so that what there is no time for is the largest."""
        groups = {name: self._join(ranks) for name, ranks in kinds.items()}
        cells, began = self._cells(checks), time.perf_counter()
        for index, (group, mode, asked) in enumerate(cells):
            elapsed = slowest([time.perf_counter() - began], running_group(), self.world.device)[0]
            collective = replace(asked, is_async=mode == "async")
            need_s = self._need_s(collective, group, mode)
            if need_s > _SHORT_S and elapsed + need_s > 2 * self.spec.budget_s:
                self.left_out.append(f"{asked.name} of {write_size(asked.num_bytes)} in {group} (about {need_s:.0f} s)")
                continue
            left = max(0.0, self.spec.budget_s - elapsed) / (len(cells) - index)
            # Half, so that what small sizes do not need is there for large ones.
            share = min(_MOST_CELL_S, left / 2)
            self._measure(collective, groups[group], group, mode, share)

    def _join(self, groups: tuple[tuple[int, ...], ...]) -> ProcessGroup:
        """Communicate over the world to make every group of one kind; return this rank's."""
        if len(groups) == 1:
            return running_group()
        made = [self.world.group(ranks) for ranks in groups]
        return next(group for group in made if group is not None)

    def _cells(self, checks: list[Check]) -> list[tuple[str, str, CollectiveSpec]]:
        """Return (group, mode, collective) of all there is to time: what the backend has, each once."""
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

    def _need_s(self, asked: CollectiveSpec, group: str, mode: str) -> float:
        """Return about how long a cell takes at the least, by its next smaller size; 0 for the smallest."""
        alike = [row for row in self.rows if (row.collective, row.group, row.mode) == (asked.name, group, mode)]
        if not alike or not alike[-1].size:
            return 0.0
        return _CALLS * alike[-1].time_us / 1e6 * asked.num_bytes / alike[-1].size

    def _measure(self, asked: CollectiveSpec, group: ProcessGroup, name: str, mode: str, share_s: float) -> None:
        """Communicate over the world: time one cell on all groups at once, then check it."""
        collective = prepare(asked, group, self.world.device)
        timing = time_collective(collective, running_group(), budget_s=share_s, most=_MOST_BLOCKS)
        first = min(torch.distributed.get_process_group_ranks(group))
        wrong = count_wrong(collective, self.store, f"cell {len(self.rows)} of {first}")
        kind = KINDS[asked.name]
        self.rows.append(
            row_of(
                timing,
                collective=asked.name,
                group=name,
                ranks=collective.ranks,
                mode=mode,
                size=collective.size_bytes,
                count=collective.count,
                type=TYPES[str(asked.dtype).removeprefix("torch.")] if kind.traffic != "none" else "none",
                redop=OPERATIONS[asked.operation] if kind.reduces else "none",
                root=asked.root if kind.is_rooted else -1,
                wrong=wrong,
            )
        )


def _own_store(world: World) -> Store:
    """Communicate through the world's store, called on every rank: return a part of it that no sweep has used."""
    number = (world.store.add("bench comm", 1) - 1) // world.size
    return PrefixStore(f"bench comm {number}", world.store)


def _add_up(world: World, store: Store, counts: list[int]) -> list[int]:
    """Communicate through the store, called on every rank: return the sum of each place.

    Not by a collective: these counts are what judges the collectives.
    """
    store.set(f"wrong {world.rank}", json.dumps(counts))
    found = [json.loads(store.get(f"wrong {rank}")) for rank in range(world.size)]
    return [sum(each) for each in zip(*found, strict=True)]
