"""`shardwise bench p2p`: the links between all pairs of ranks, and which of them is slow."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardwise.cli.bench import place_options
from shardwise.environment import identify
from shardwise.errors import InputError
from shardwise.runs.console import CHECK_FAILED, DONE, say

if TYPE_CHECKING:
    from shardwise.bench.p2p.pairs import Pairs

_WAYS = ("send", "isend", "batch")


@click.command("p2p", context_settings={"token_normalize_func": lambda token: token.replace("_", "-")})
@click.option(
    "--nproc", "--nproc-per-node", "nproc", type=click.IntRange(min=1), help="Processes to start, at least two."
)
@click.option("--way", "ways", type=click.Choice(_WAYS), multiple=True, help="How to send (default: all three).")
@click.option("--size", help="Of a large message, such as 4MiB (default: 1MiB on CPUs, 16MiB on GPUs).")
@click.option("--small", default="8", show_default=True, help="Bytes of the message that latency is measured with.")
@click.option("--together", is_flag=True, help="Measure disjoint pairs at the same time, to see what they share.")
@click.option(
    "--seconds", type=click.FloatRange(min=0, min_open=True), default=20.0, show_default=True, help="About how long."
)
@place_options(
    device="Where to run (default: cuda where there is one).",
    backend="gloo, nccl or mpi (default: nccl on cuda, else gloo); gloo's ranks may share a GPU.",
)
@click.option("--json", "as_json", is_flag=True, help="Write what was measured as JSON to standard output.")
@click.option("--report", type=click.Path(path_type=Path), help="Write a page (.html) or Markdown (.md) too.")
def command(
    *,
    nproc: int | None,
    ways: tuple[str, ...],
    size: str | None,
    small: str,
    together: bool,
    seconds: float,
    device: str | None,
    backend: str | None,
    as_json: bool,
    report: Path | None,
) -> int:
    """Measure latency and bandwidth between all pairs of ranks, check what arrives, and find the slow link.

    Alone it starts ranks here; on many machines start it there:
    shardwise launch --nnodes=2 ... -m shardwise bench p2p
    """
    from shardwise.bench.report.write import check_report_path
    from shardwise.units import read_size

    small_bytes, large_bytes = read_size(small), read_size(size) if size else None
    _check_ranks(nproc, device, backend)
    if report is not None:
        check_report_path(report)
    from shardwise.bench.p2p.pairs import PairSpec, measure_pairs
    from shardwise.bench.ranks import rank_zero

    spec = PairSpec(
        ways=tuple(dict.fromkeys(ways)) or _WAYS,
        small_bytes=small_bytes,
        large_bytes=large_bytes,
        together=together,
        budget_s=seconds,
        device=device,
        backend=backend,
    )
    pairs: Pairs | None = rank_zero(measure_pairs, nproc, spec, backend=backend)
    if pairs is None:  # another rank shows it
        return DONE
    _show(pairs, as_json=as_json, report=report)
    return CHECK_FAILED if any(cell.wrong for cell in pairs.timings) else DONE


def _check_ranks(nproc: int | None, device: str | None, backend: str | None) -> None:
    """Refuse what ranks could not do, before any is started."""
    from shardwise.hardware import probe_gpus
    from shardwise.planner.settle import local_device

    size = identify().world_size
    if max(nproc or 1, size) < 2:
        raise InputError(
            "one rank for p2p has nobody to send to",
            code="bench.too-few-ranks",
            fix="use --nproc 2, or start two ranks",
        )
    if size > 1:
        return
    gpus = len(probe_gpus()) if device != "cpu" else 0
    if 0 < gpus < (nproc or 1) and backend != "gloo":
        raise InputError(
            f"--nproc {nproc} with nccl needs a GPU for each rank, and {gpus} can be seen",
            code="launch.nproc-exceeds-gpus",
            fix="add --backend gloo, whose ranks may share one, or --device cpu",
        )
    local_device(device, 1)


def _show(pairs: Pairs, *, as_json: bool, report: Path | None) -> None:
    from shardwise.bench.p2p.verdict import find_slow, in_words

    if as_json:
        import msgspec

        rates = pairs.rates
        links = [
            {"source": source, "target": target, "latency_s": latency_s, "bytes_per_s": rates[source, target]}
            for (source, target), latency_s in pairs.latencies.items()
        ]
        found = {"pairs": pairs, "links": links, "slow": find_slow(pairs), "verdict": in_words(pairs)}
        say(msgspec.json.encode(found).decode())
    else:
        from shardwise.cli.p2p_view import show_pairs

        show_pairs(pairs)
    if report is not None:
        from shardwise.bench.p2p.findings import find_links
        from shardwise.bench.report.findings import machine_facts
        from shardwise.bench.report.write import write_report

        write_report(find_links(pairs, machine_facts(None)), report)
        if not as_json:
            say(f"report: {report}")
