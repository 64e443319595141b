"""`shardwise bench comm`: every collective timed, checked and judged, with the columns of nccl-tests."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardwise.cli.bench import place_options, warn_if_busy
from shardwise.engines.backends import backend_row
from shardwise.environment import identify
from shardwise.errors import InputError
from shardwise.runs.console import CHECK_FAILED, DONE, complain, say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.bench.comm.result import Change, CommMeasurement
    from shardwise.bench.comm.spec import CommSpec
    from shardwise.bench.comm.verdict import SeriesVerdict

_PATH = click.Path(path_type=Path)


@click.command("comm", context_settings={"token_normalize_func": lambda token: token.replace("_", "-")})
@click.argument("collectives", nargs=-1, metavar="[COLLECTIVE]...")
@click.option("--sizes", default="1KiB:64MiB", show_default=True, help="FIRST:LAST[:FACTOR], or a list with commas.")
@click.option("--dtypes", help="Dtypes to time, with commas, or all (default: float32; all are checked).")
@click.option("--ops", help="Reduce operations to time, with commas, or all (default: SUM; all are checked).")
@click.option("--group", default="world", show_default=True, help="world, node, across, or an axis of --layout.")
@click.option("--layout", help="How axes cut the ranks, such as shard2.tp2.")
@click.option("--root", type=click.IntRange(min=0), default=0, show_default=True, help="Rank in its group.")
@click.option("--async", "also_async", is_flag=True, help="Time calls that are started and waited for, too.")
@click.option(
    "--seconds", type=click.FloatRange(min=0.1), default=20.0, show_default=True, help="About how long to measure."
)
@click.option(
    "--nproc",
    "--nproc-per-node",
    "nproc",
    type=click.IntRange(min=1),
    help="Processes to start (default: one a GPU, 2 on a CPU).",
)
@place_options(
    device="Where to run (default: cuda where there is one).",
    backend="gloo, nccl or mpi (default: nccl on cuda, else gloo); gloo's ranks may share a GPU, mpi's are on CPUs.",
)
@click.option("--json", "as_json", is_flag=True, help="Write all that was found as JSON to standard output.")
@click.option("--csv", "csv_path", type=_PATH, help="Write the table to this file.")
@click.option("--report", "report_path", type=_PATH, help="Write a page (.html) or Markdown (.md) with plots.")
@click.option("--compare", "earlier_path", type=_PATH, help="JSON of an earlier run; what is slower is named.")
@click.option(
    "--explain", "explained", metavar="NAME", help="Show on real ranks what a call does; all shows every one."
)
def command(
    *,
    nproc: int | None,
    as_json: bool,
    csv_path: Path | None,
    report_path: Path | None,
    earlier_path: Path | None,
    explained: str | None,
    **asked: Any,
) -> int:
    """Time and check collectives on every size, dtype, reduce operation and group that is asked for.

    Without COLLECTIVE: all of them. Exit code 3 when a result is wrong or slower than in the earlier run.
    """
    if explained:
        from shardwise.cli.explain import explain

        return explain(explained, nproc, **{name: asked[name] for name in ("ops", "device", "backend")})
    from shardwise.bench.comm.result import compare, read_earlier
    from shardwise.bench.comm.verdict import judge
    from shardwise.bench.ranks import rank_zero
    from shardwise.bench.report.write import check_report_path

    spec = read_spec(**asked)
    earlier = read_earlier(earlier_path) if earlier_path else None
    if report_path:
        check_report_path(report_path)
    if csv_path:
        _check_folder(csv_path)
    nproc = _check_start(spec, nproc)
    found: CommMeasurement | None = rank_zero(_measure, nproc, spec, backend=spec.backend)
    if found is None:  # another rank of a world that somebody else started
        return DONE
    verdicts = judge(found)
    changes = compare(found.rows, earlier.rows, earlier_path) if earlier and earlier_path else None
    _write(found, verdicts, changes, csv_path=csv_path, report_path=report_path)
    _show_json(found, verdicts, changes) if as_json else _show(found, verdicts, changes)
    slower = [change for change in changes or () if change.is_regression]
    return CHECK_FAILED if found.wrong or slower else DONE


def read_spec(
    *,
    collectives: tuple[str, ...] = (),
    sizes: str = "1KiB:64MiB",
    dtypes: str | None = None,
    ops: str | None = None,
    group: str = "world",
    layout: str | None = None,
    root: int = 0,
    also_async: bool = False,
    seconds: float = 20.0,
    device: str | None = None,
    backend: str | None = None,
) -> CommSpec:
    """Return what the options ask for; words that name nothing are refused."""
    from shardwise.bench.comm.spec import (
        KINDS,
        OPERATIONS,
        TYPES,
        CommSpec,
        read_aliased,
        read_groups,
        read_names,
        read_sizes,
    )
    from shardwise.layout import parse_layout

    cut = parse_layout(layout) if layout else None
    timed_dtypes = read_aliased(dtypes, TYPES, "dtype") if dtypes else None
    timed_ops = read_aliased(ops, OPERATIONS, "reduce operation") if ops else None
    named = [names for text, names in ((dtypes, timed_dtypes), (ops, timed_ops)) if text and text != "all"]
    return CommSpec(
        collectives=read_names(collectives, tuple(KINDS), "collective") if collectives else tuple(KINDS),
        sizes=read_sizes(sizes),
        dtypes=timed_dtypes or ("float32",),
        operations=timed_ops or ("SUM",),
        checked_dtypes=timed_dtypes or tuple(TYPES),
        checked_operations=timed_ops or tuple(OPERATIONS),
        named=tuple(name for names in named for name in names or ()),
        groups=read_groups(group, cut),
        layout=cut,
        root=root,
        modes=("sync", "async") if also_async else ("sync",),
        budget_s=seconds,
        device=device,
        backend=backend,
    )


def _check_start(spec: CommSpec, nproc: int | None) -> int | None:
    """Refuse what ranks could not run, before any starts; return how many to start, None inside a world."""
    from shardwise.bench.comm.limits import check_room
    from shardwise.bench.comm.spec import group_ranks
    from shardwise.bench.ranks import require_backend
    from shardwise.hardware import probe_gpus
    from shardwise.hardware.probe import available_memory
    from shardwise.planner.settle import local_device

    if identify().world_size > 1:
        return nproc
    if spec.backend is not None and backend_row(spec.backend).is_rare:
        require_backend(spec.backend)
    gpus = len(probe_gpus()) if spec.device != "cpu" else 0
    count = nproc or gpus or 2
    local_device(spec.device, 1 if spec.backend == "gloo" else count)
    places = tuple((0, rank) for rank in range(count))
    smallest = min(len(group_ranks(group, places, spec.layout)[0]) for group in spec.groups)
    if spec.root >= smallest:
        raise InputError(
            f"--root {spec.root} is outside a group of {smallest} ranks",
            code="bench.root-out-of-range",
            fix=f"use 0 to {smallest - 1}, or more --nproc",
        )
    if not gpus:
        check_room(spec, ranks=smallest, sharing=count, free=available_memory(), where="this host")
    warn_if_busy()
    complain(f"shardwise: measuring on {count} ranks for about {spec.budget_s:g} s")
    return count


def _check_folder(path: Path) -> None:
    if not path.parent.is_dir() or path.is_dir():
        raise InputError(
            f"{path} cannot be written", code="cli.output-not-writable", fix="name a file in a folder that is there"
        )


def _measure(spec: CommSpec) -> CommMeasurement:
    """Run on a rank; torch is imported there, not where the ranks are started from."""
    from shardwise.bench.comm.sweep import measure_comm

    return measure_comm(spec)


def _write(
    found: CommMeasurement,
    verdicts: Sequence[SeriesVerdict],
    changes: Sequence[Change] | None,
    *,
    csv_path: Path | None,
    report_path: Path | None,
) -> None:
    from shardwise.bench.comm.result import csv_text
    from shardwise.bench.comm.verdict import findings
    from shardwise.bench.report.write import write_report

    if csv_path:
        csv_path.write_text(csv_text(found.rows))
    if report_path:
        write_report(findings(found, verdicts, changes), report_path)


def _show_json(found: CommMeasurement, verdicts: Sequence[SeriesVerdict], changes: Sequence[Change] | None) -> None:
    import msgspec

    from shardwise.bench.comm.result import VERSION

    document = msgspec.to_builtins(found)
    say(msgspec.json.encode({"version": VERSION, **document, "verdicts": verdicts, "changes": changes}).decode())


def _show(found: CommMeasurement, verdicts: Sequence[SeriesVerdict], changes: Sequence[Change] | None) -> None:
    from shardwise.bench.comm.result import missing_words, table_lines
    from shardwise.bench.comm.verdict import sentence

    nodes = "one node" if found.num_nodes == 1 else f"{found.num_nodes} nodes"
    say(f"{found.backend} · {found.world_size} ranks on {nodes} · {found.device} · {found.seconds:.1f} s")
    for line in table_lines(found.rows):
        say(line)
    for verdict in verdicts:
        fit, held_out = verdict.fit, verdict.held_out
        words = "" if fit is None else f" · alpha {fit.alpha_s * 1e6:.0f} us, 1/beta {fit.bytes_per_s / 1e9:.2f} GB/s"
        error = "" if held_out is None else f" (held-out error {held_out:.0%})"
        say(f"{verdict.name}: {verdict.words}{words}{error}")
    checked = sum(check.wrong is not None for check in found.checks)
    say(f"checked on little data: {checked} combinations of collective, operation and dtype")
    lacks = missing_words(found.checks, found.backend)
    if lacks:
        say(lacks)
    if found.left_out:
        say(f"left out for want of time (raise --seconds): {', '.join(found.left_out)}")
    for change in changes or ():
        if change.is_regression:
            say(f"slower than before: {change.words}")
    if changes is not None:
        say(f"{sum(change.is_regression for change in changes)} of {len(changes)} measurements are slower than before")
    say(sentence(found, verdicts))
