"""The command line of every node and every rank: what --dry-run prints, and what other starters run on each machine."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from shardwise.cli.launch_plan import SettledLaunch
    from shardwise.launcher.nodes.node import NodesSpec

_ABOUT_NODES = frozenset(
    {
        "nnodes",
        "node_rank",
        "rdzv_backend",
        "rdzv_endpoint",
        "rdzv_id",
        "master_addr",
        "master_port",
        "standalone",
        "local_addr",
        "slurm",
        "hosts",
        "kubernetes",
        "dry_run",
    }
)
"""Parameters that `node_words` writes itself, or that mean one machine only."""


def node_words(context: click.Context, nodes: NodesSpec, node_rank: int | str, nproc: int | None = None) -> list[str]:
    """Return the words after `shardwise` that make one machine a node of the run, with `nproc` ranks if given.

    Whatever else the user typed is kept; `node_rank` may be a shell word such as "$SLURM_NODEID".
    """
    most = f"{nodes.least}:{nodes.most}" if nodes.least != nodes.most else str(nodes.most)
    words = [f"--nnodes={most}", f"--node-rank={node_rank}", f"--master-addr={nodes.host}"]
    words += [f"--master-port={nodes.port}", f"--rdzv-id={nodes.run_id}"]
    if nproc is None:
        return launch_words(context, words)
    return launch_words(context, [*words, f"--nproc-per-node={nproc}"], without=("nproc_per_node", "nproc"))


def launch_words(context: click.Context, first: Sequence[str], without: Collection[str] = ()) -> list[str]:
    """Return the words after `shardwise` of this launch elsewhere: `first`, then what the user typed of the rest.

    What is about nodes is left out, and so are the parameters in `without`.
    """
    options, arguments = _typed(context, without={*_ABOUT_NODES, *without})
    return [context.info_name or "", *first, *options, *arguments]


def resume_words(context: click.Context, run: Path) -> list[str]:
    """Return the command that continues this training: all that the user typed, but from the checkpoints of `run`."""
    options, arguments = _typed(context, without=("run_dir", "resume"))
    return ["shardwise", context.info_name or "", *arguments, *options, f"--resume={run}"]


def _typed(context: click.Context, without: Collection[str]) -> tuple[list[str], list[str]]:
    """Return the options and the arguments that the user typed, except the parameters in `without`."""
    options, arguments = list[str](), list[str]()
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        if parameter.name in without or value is None:
            continue
        if isinstance(parameter, click.Argument):
            arguments += [value] if isinstance(value, str) else value
        elif context.get_parameter_source(parameter.name or "") is not ParameterSource.DEFAULT:
            options += _option(parameter, value)
    return options, arguments


def _option(parameter: click.Parameter, value: object) -> list[str]:
    name = max(parameter.opts, key=len)
    if isinstance(parameter, click.Option) and parameter.is_flag:
        return [name] if value else []
    values = value if isinstance(value, tuple) else (value,)
    return [f"{name}={one}" for one in values]


def describe(settled: SettledLaunch, context: click.Context) -> str:
    """Return the command line of every node, and of every rank with the variables it gets, one per line."""
    spec, nodes = settled.spec, settled.nodes
    how = "forked from one process that imports torch" if spec.fork else "each a fresh process"
    if nodes is None:
        port = spec.port or "a free one"
        lines = [f"# {spec.nproc} ranks, {how}; store on 127.0.0.1, port {port}; {spec.max_restarts} restarts"]
        return "\n".join(lines + _ranks(settled, 0, 1))
    lines = [f"# {nodes.most} nodes, ranks {how}; they meet at {nodes.host}:{nodes.port}; {spec.max_restarts} restarts"]
    for node in range(nodes.most):
        optional = "" if node < nodes.least else ", which may be missing"
        lines += [f"# node {node}{optional}", shlex.join(["shardwise", *node_words(context, nodes, node)])]
        lines += [f"#   {line}" for line in _ranks(settled, node, nodes.most)]
    return "\n".join(lines)


def _ranks(settled: SettledLaunch, node: int, num_nodes: int) -> list[str]:
    spec = settled.spec
    lines = []
    for local_rank in range(spec.nproc):
        rank, size = node * spec.nproc + local_rank, num_nodes * spec.nproc
        variables = f"RANK={rank} LOCAL_RANK={local_rank} WORLD_SIZE={size} LOCAL_WORLD_SIZE={spec.nproc}"
        lines.append(f"{variables} {shlex.join(spec.target.argv())}")
    return lines
