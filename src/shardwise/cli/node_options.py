"""torchrun's options about many machines, for every verb that can run on them."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shardwise.launcher.nodes.node import NodesSpec

Command = TypeVar("Command", bound="Callable[..., Any]")


def _checked_slurm(text: str | None) -> str | None:
    """Refuse what cannot be read at once: a script's name in its place would be missed as the script otherwise."""
    from shardwise.launcher.slurm import read_directives

    if text is not None:
        read_directives(text)
    return text


_OPTIONS = (
    click.option("--nnodes", default="1", help="Machines: N, or MIN:MAX to go on with any number between."),
    click.option("--node-rank", type=int, help="Which machine this is; 0 is where nodes meet."),
    click.option("--rdzv-backend", default="static", help="static, or c10d, where --node-rank may be left out."),
    click.option("--rdzv-endpoint", default="", metavar="HOST:PORT", help="Where nodes meet: node 0."),
    click.option("--rdzv-id", default="none", help="Name of the run, the same on all nodes."),
    click.option("--rdzv-conf", default="", help="join_timeout=S,last_call_timeout=S: how long nodes are waited for."),
    click.option("--master-addr", help="Host name or address of node 0."),
    click.option("--master-port", type=int, help="Port of node 0 (default: 29500; on one machine a free one)."),
    click.option("--local-addr", help="Address of this machine, where it cannot be told from the way to node 0."),
    click.option(
        "--slurm",
        is_flag=False,
        flag_value="",  # alone, before another option or --
        metavar="KEY=VALUE,...",
        callback=lambda _context, _option, text: _checked_slurm(text),
        help="Submit it to SLURM with these options of sbatch; inside an allocation, run it there.",
    ),
    click.option("--hosts", metavar="A,B:8|FILE", help="Run one node on each of these machines, started over ssh."),
    click.option("--kubernetes", metavar="image=I,...", help="Print manifests that run it on Kubernetes."),
)


def node_options(command: Command) -> Command:
    """Give a command the options about many machines, in this order."""
    return reduce(lambda inner, option: option(inner), reversed(_OPTIONS), command)


def settle_nodes(options: Mapping[str, Any]) -> NodesSpec | None:
    """Read torchrun's options about nodes, or SLURM's variables; None when they mean this machine alone."""
    from shardwise.cli.slurm import implied_nodes
    from shardwise.environment import run_secret
    from shardwise.launcher.nodes.node import NodesSpec
    from shardwise.launcher.options import check_nodes, read_endpoint, read_nodes, read_rdzv_conf

    options = {**options, **implied_nodes()}
    least, most = read_nodes(options["nnodes"])
    check_nodes((least, most), options["node_rank"], options["rdzv_backend"])
    if most == 1 or options.get("standalone"):
        return None
    host, port = read_endpoint(
        rdzv_backend=options["rdzv_backend"],
        rdzv_endpoint=options["rdzv_endpoint"],
        master_addr=options["master_addr"],
        master_port=options["master_port"],
    )
    return NodesSpec(
        least=least,
        most=most,
        host=host,
        port=port,
        # torchrun's static rendezvous takes this for node 0 unless told otherwise.
        node_rank=0 if options["node_rank"] is None and options["rdzv_backend"] == "static" else options["node_rank"],
        run_id=options["rdzv_id"],
        secret=run_secret(),
        local_addr=options["local_addr"] or "",
        max_restarts=options["max_restarts"],
        **read_rdzv_conf(options["rdzv_conf"]),
    )
