"""From torchrun's options to one settled launch."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from shardwise.cli.sinks import settle_preset
from shardwise.cli.train_options import equality_variables, settle_hang, settle_replicas
from shardwise.environment import profiler, run_secret
from shardwise.errors import LaunchError
from shardwise.hardware import probe_gpus, usable_cores
from shardwise.launcher.local.attempts import LocalLaunch
from shardwise.launcher.local.target import Module, Program, Script, Target, check_target
from shardwise.launcher.options import Shown, read_nproc, read_port, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shardwise.doctor.guard.guard import HangLimits
    from shardwise.launcher.nodes.node import NodesSpec
    from shardwise.runs.drift import ReplicaSpec


_DDP = frozenset({"DistributedDataParallel", "DDP"})
_DYNAMO_USERS = _DDP | {"fully_shard", "FullyShardedDataParallel", "compile"}


@dataclass(frozen=True, kw_only=True)
class SettledLaunch:
    """What will run, and how its output is shown."""

    spec: LocalLaunch
    shown: list[tuple[Shown, Shown]]
    nodes: NodesSpec | None
    """The machines of the run; None when this is the only one."""
    hang: HangLimits | None
    """When ranks that others wait for are named; None if nobody looks."""
    replicas: ReplicaSpec | None
    """When what DDP keeps equal is compared; None if nobody does."""
    note: str
    """What the user should know of how ranks will be started; empty when it is as asked."""


def settle_target(script: str, arguments: tuple[str, ...], options: Mapping[str, Any]) -> Target:
    """Return what ranks will run; what cannot be found is refused."""
    if options["module"] and options["no_python"]:
        raise LaunchError(
            "--module and --no-python contradict each other", code="cli.options-conflict", fix="use one of them"
        )
    target: Target = Script(script, arguments)
    if options["module"]:
        target = Module(script, arguments)
    elif options["no_python"]:
        target = Program(script, arguments)
    check_target(target)
    return target


def settle_launch(target: Target, options: Mapping[str, Any]) -> SettledLaunch:
    """Check every option; nothing is started yet."""
    equality = equality_variables(options)
    if equality and isinstance(target, Program):
        raise LaunchError(
            "--check-replicas and --deterministic are for Python",
            code="cli.option-not-applicable",
            fix="leave them or --no-python out",
        )
    nodes = settle_nodes(options)
    hang = None if isinstance(target, Program) else settle_hang(options)
    num_gpus = len(probe_gpus())
    nproc = read_nproc(options["nproc_per_node"], num_gpus=num_gpus, num_cores=usable_cores())
    names = _names(target)
    added = settle_preset(options["preset"], nproc=nproc, num_gpus=num_gpus, uses_ddp=bool(names and names & _DDP))
    views = shown(
        redirects=options["redirects"], tee=options["tee"], ranks_filter=options["local_ranks_filter"], nproc=nproc
    )
    spec = LocalLaunch(
        target=target,
        nproc=nproc,
        max_restarts=options["max_restarts"],
        run_id=options["rdzv_id"],
        port=0
        if nodes
        else read_port(options["rdzv_endpoint"], options["master_port"], standalone=options["standalone"]),
        record=hang is not None or bool(equality),
        fork=options["start_method"] == "fork" and not profiler() and not _is_folder(target),
        on_terminal=tuple((out.terminal, err.terminal) for out, err in views),
        grace_s=options["shutdown_timeout"],
        preload=_preload(names),
        variables={**added, **equality},
    )
    return SettledLaunch(
        spec=spec,
        shown=views,
        nodes=nodes,
        hang=hang,
        replicas=settle_replicas(options),
        note=_note(target),
    )


def _note(target: Target) -> str:
    if isinstance(target, Program):
        return "shardwise: a program that is not Python records no collectives: hangs of its ranks are not noticed"
    return f"shardwise: a profiler is here ({profiler()}): ranks are fresh processes, not forks" if profiler() else ""


def _is_folder(target: Target) -> bool:
    """Folders and zip files with a __main__.py are left to a fresh interpreter."""
    return isinstance(target, Script) and not target.path.endswith((".py", ".pyw"))


def _preload(names: frozenset[str] | None) -> tuple[str, ...]:
    """What the fork parent imports: torch if the script can be seen to, and what its first DDP would bring in.

    A guess from the script's own words, wrong at no cost but time: whatever is missing is imported by the rank.
    """
    if names is None:
        return ()
    return ("torch", "numpy", "torch._dynamo") if names & _DYNAMO_USERS else ("torch", "numpy")


def _names(target: Target) -> frozenset[str] | None:
    """Return the names that a script uses, none where it is none; None where it cannot be read."""
    if not isinstance(target, Script):
        return frozenset()
    try:
        tree = ast.parse(Path(target.path).read_bytes())
    except (SyntaxError, ValueError, OSError):
        return None
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.name for alias in node.names}
    return frozenset(names)


# torchrun's options about many machines, for every verb that can run on them.


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
