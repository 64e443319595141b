"""`bench comm`: times and checks collectives, and reports the results with a comparison to an earlier run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from shardwise.engines.backends import backend_row
from shardwise.environment import identify
from shardwise.errors import InputError
from shardwise.hardware import probe_gpus
from shardwise.hardware.probe import available_memory
from shardwise.layout import parse_layout
from shardwise.measurement.comm.limits import check_memory
from shardwise.measurement.comm.result import (
    VERSION,
    Change,
    CommMeasurement,
    compare,
    csv_text,
    missing_text,
    read_earlier,
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
from shardwise.measurement.comm.sweep import measure_comm
from shardwise.measurement.comm.verdict import SeriesVerdict, findings, judge, sentence
from shardwise.measurement.report import BenchReport
from shardwise.measurement.specs import rank_zero, require_backend, warn_if_busy
from shardwise.planner.settle import local_device
from shardwise.runs.console import CHECK_FAILED, echo_error

if TYPE_CHECKING:
    from shardwise.measurement.findings import Findings
    from shardwise.measurement.specs import CommSpec


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
