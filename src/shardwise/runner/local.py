"""From a Spec to the ranks of one node: what they run, on which nodes, how output is shown, what a run starts with."""

from __future__ import annotations

import ast
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from shardwise.environment import profiler, run_secret, variables
from shardwise.errors import LaunchError
from shardwise.hardware import probe_gpus, usable_cores
from shardwise.launcher.local.attempts import LocalLaunch
from shardwise.launcher.local.target import Module, Program, Script, Target
from shardwise.launcher.nodes.node import NodesSpec
from shardwise.launcher.options import (
    Shown,
    check_nodes,
    read_endpoint,
    read_nodes,
    read_nproc,
    read_port,
    read_rdzv_conf,
    shown,
)
from shardwise.launcher.slurm import nodes_of_step
from shardwise.launcher.spec import LaunchSpec, RendezvousSpec, SubmitSpec
from shardwise.plans.toml import plan_to_toml
from shardwise.recorder.imports import Asked, deterministic_variables
from shardwise.runner.presets import settle_preset
from shardwise.torch_private.runtime import DYNAMO
from shardwise.training.spec import RunStart

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardwise.job import JobReference
    from shardwise.plans import Plan
    from shardwise.runs import RunDirectory
    from shardwise.training.spec import TrainSpec


_DDP = frozenset({"DistributedDataParallel", "DDP"})
_DYNAMO_USERS = _DDP | {"fully_shard", "FullyShardedDataParallel", "compile"}
PRELOAD = ("torch", DYNAMO)
"""What every rank of a job would import: torch, and what the first DDP imports (800 modules, 1.5 s)."""


@dataclass(frozen=True, kw_only=True)
class SettledLaunch:
    """What will run, and how its output is shown."""

    local: LocalLaunch
    shown: list[tuple[Shown, Shown]]
    nodes: NodesSpec | None
    """The nodes of the run; None when this is the only one."""
    note: str
    """What the user should know of how ranks will be started; empty when it is as asked."""


def target_of(spec: LaunchSpec) -> Target:
    """Return what ranks run; whether it exists is not checked, since it may be on another machine."""
    if spec.module:
        return Module(spec.script, spec.arguments)
    return Program(spec.script, spec.arguments) if spec.no_python else Script(spec.script, spec.arguments)


def settle_launch(target: Target, spec: LaunchSpec) -> SettledLaunch:
    """Check every option; nothing is started yet."""
    equality = _equality_variables(spec)
    if equality and isinstance(target, Program):
        raise LaunchError(
            "--check-replicas and --deterministic are for Python",
            code="cli.option-not-applicable",
            fix="leave them or --no-python out",
        )
    nodes = settle_nodes(spec.rendezvous, standalone=spec.standalone, max_restarts=spec.max_restarts)
    num_gpus = len(probe_gpus())
    nproc = read_nproc(str(spec.nproc or 1), num_gpus=num_gpus, num_cores=usable_cores())
    names = _names(target)
    added = settle_preset(spec.preset, nproc=nproc, num_gpus=num_gpus, uses_ddp=bool(names and names & _DDP))
    views = shown(redirects=spec.redirects, tee=spec.tee, ranks_filter=spec.local_ranks_filter, nproc=nproc)
    port = 0
    if nodes is None:
        port = read_port(spec.rendezvous.rdzv_endpoint, spec.rendezvous.master_port, standalone=spec.standalone)
    local = LocalLaunch(
        target=target,
        nproc=nproc,
        max_restarts=spec.max_restarts,
        run_id=spec.rendezvous.rdzv_id,
        port=port,
        record=watches_hangs(spec, target) or bool(equality),
        fork=spec.start_method == "fork" and not profiler() and not _is_folder(target),
        on_terminal=tuple((out.terminal, err.terminal) for out, err in views),
        grace_s=spec.grace_s,
        preload=_preload(names),
        variables={**added, **equality},
    )
    return SettledLaunch(local=local, shown=views, nodes=nodes, note=_note(target))


def watches_hangs(spec: LaunchSpec, target: Target) -> bool:
    """Return whether hangs are looked for: a program that is not Python records no collectives."""
    return spec.hang.after_s > 0 and not isinstance(target, Program)


def settle_nodes(rendezvous: RendezvousSpec, *, standalone: bool, max_restarts: int) -> NodesSpec | None:
    """Read torchrun's options about nodes, or the variables of an srun step; None when they mean this node alone."""
    rendezvous = _implied_by_slurm(rendezvous, standalone=standalone)
    least, most = read_nodes(rendezvous.nnodes or "1")
    check_nodes((least, most), rendezvous.node_rank, rendezvous.rdzv_backend)
    if most == 1 or standalone:
        return None
    host, port = read_endpoint(
        rdzv_backend=rendezvous.rdzv_backend,
        rdzv_endpoint=rendezvous.rdzv_endpoint,
        master_addr=rendezvous.master_addr,
        master_port=rendezvous.master_port,
    )
    node_rank = rendezvous.node_rank
    if node_rank is None and rendezvous.rdzv_backend == "static":
        node_rank = 0  # as torchrun's static rendezvous has it
    return NodesSpec(
        least=least,
        most=most,
        host=host,
        port=port,
        node_rank=node_rank,
        run_id=rendezvous.rdzv_id,
        secret=run_secret(),
        local_addr=rendezvous.local_addr or "",
        max_restarts=max_restarts,
        **read_rdzv_conf(rendezvous.rdzv_conf),
    )


def _implied_by_slurm(rendezvous: RendezvousSpec, *, standalone: bool) -> RendezvousSpec:
    options = msgspec.structs.asdict(rendezvous)
    default = RendezvousSpec()
    given = {name for name, value in options.items() if value != getattr(default, name)}
    return rendezvous.replace(**nodes_of_step(variables("SLURM_"), {**options, "standalone": standalone}, given))


def _equality_variables(spec: LaunchSpec) -> dict[str, str]:
    """Return the variables by which ranks know that replicas are compared and that runs must repeat."""
    asked = Asked(deterministic=spec.deterministic, check_replicas=spec.replicas.every)
    return {**asked.variables(), **(deterministic_variables(variables("")) if spec.deterministic else {})}


def _note(target: Target) -> str:
    if isinstance(target, Program):
        return "shardwise: a program that is not Python records no collectives: hangs of its ranks are not noticed"
    return f"shardwise: a profiler is here ({profiler()}): ranks are fresh processes, not forks" if profiler() else ""


def _is_folder(target: Target) -> bool:
    """Folders and zip files with a __main__.py are left to a fresh interpreter."""
    return isinstance(target, Script) and not target.path.endswith((".py", ".pyw"))


def _preload(names: frozenset[str] | None) -> tuple[str, ...]:
    """Return what the fork parent imports: torch if the script uses it, and what its first DDP would import.

    A guess from the names in the script, wrong at no cost but time: whatever is missing is imported by the rank.
    """
    if names is None:
        return ()
    return ("torch", "numpy", DYNAMO) if names & _DYNAMO_USERS else ("torch", "numpy")


def _names(target: Target) -> frozenset[str] | None:
    """Return the names that a script uses, none for other targets; None where it cannot be parsed."""
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


def write_run_inputs(
    run: RunDirectory, reference: JobReference, plan: Plan, *, started_at: float | None = None
) -> None:
    """Write what will run: the job's reference, the resolved plan, and with `started_at` when the launcher began."""
    run.job.write_bytes(msgspec.json.format(msgspec.json.encode(reference), indent=1))
    run.plan.write_text(plan_to_toml(plan))
    if started_at is not None:
        run.start.write_bytes(msgspec.json.encode(RunStart(started_at=started_at, plan_sources=dict(plan.sources))))


def worker_launch(
    spec: TrainSpec, run: RunDirectory, *, nproc: int, added: Mapping[str, str] | None = None
) -> LocalLaunch:
    """Return what starts the workers of one node, each with the same Spec and this run directory."""
    of_worker = spec.replace(run_dir=run.path.resolve())
    repeating = deterministic_variables(variables("")) if spec.deterministic else {}
    return LocalLaunch(
        target=Module("shardwise.worker", (of_worker.to_json(),)),
        nproc=nproc,
        max_restarts=spec.max_restarts,
        preload=PRELOAD,
        record=spec.hang.after_s > 0,
        variables={**(added or {}), **repeating},
    )


# The command line of every node and every rank: what --dry-run prints, and what ssh, SLURM and Kubernetes run.


def node_argv(
    spec: LaunchSpec | TrainSpec, nodes: NodesSpec, node_rank: int | str, nproc: int | None = None
) -> list[str]:
    """Return the arguments of `shardwise` that make one machine a node of the run, with `nproc` ranks if given.

    Whatever else the user asked for is kept; `node_rank` may be a shell variable such as "$SLURM_NODEID".
    """
    most = f"{nodes.least}:{nodes.most}" if nodes.least != nodes.most else str(nodes.most)
    first = [f"--nnodes={most}", f"--node-rank={node_rank}", f"--master-addr={nodes.host}"]
    first += [f"--master-port={nodes.port}", f"--rdzv-id={nodes.run_id}"]
    if nproc is not None:
        first.append(f"--nproc-per-node={nproc}")
        spec = spec.replace(nproc=None)
    return command_argv(spec, first)


def command_argv(spec: LaunchSpec | TrainSpec, first: Sequence[str]) -> list[str]:
    """Return the arguments of `shardwise` of the same command elsewhere: `first`, then all that is not about nodes."""
    spec = spec.replace(rendezvous=RendezvousSpec(rdzv_conf=spec.rendezvous.rdzv_conf), submit=SubmitSpec())
    if isinstance(spec, LaunchSpec):
        spec = spec.replace(standalone=False, dry_run=False)
    options, arguments = spec.to_argv()
    return [spec.command, *first, *options, *arguments]


def resume_argv(spec: TrainSpec, run: Path) -> list[str]:
    """Return the command that continues this training: all that the user asked for, from the checkpoints of `run`."""
    options, arguments = spec.replace(run_dir=None, save=spec.save.replace(resume="auto")).to_argv()
    return ["shardwise", spec.command, *arguments, *options, f"--resume={run}"]


def describe(spec: LaunchSpec, settled: SettledLaunch) -> str:
    """Return the command line of every node, and of every rank with the variables it gets, one per line."""
    local, nodes = settled.local, settled.nodes
    how = "forked from one process that imports torch" if local.fork else "each a fresh process"
    if nodes is None:
        port = local.port or "a free one"
        lines = [f"# {local.nproc} ranks, {how}; store on 127.0.0.1, port {port}; {local.max_restarts} restarts"]
        return "\n".join(lines + _ranks(settled, 0, 1))
    where = f"{nodes.host}:{nodes.port}"
    lines = [f"# {nodes.most} nodes, ranks {how}; rendezvous at {where}; {local.max_restarts} restarts"]
    for node in range(nodes.most):
        optional = "" if node < nodes.least else ", which may be missing"
        lines += [f"# node {node}{optional}", shlex.join(["shardwise", *node_argv(spec, nodes, node)])]
        lines += [f"#   {line}" for line in _ranks(settled, node, nodes.most)]
    return "\n".join(lines)


def _ranks(settled: SettledLaunch, node: int, num_nodes: int) -> list[str]:
    local = settled.local
    lines = []
    for local_rank in range(local.nproc):
        rank, size = node * local.nproc + local_rank, num_nodes * local.nproc
        variables = f"RANK={rank} LOCAL_RANK={local_rank} WORLD_SIZE={size} LOCAL_WORLD_SIZE={local.nproc}"
        lines.append(f"{variables} {shlex.join(local.target.argv())}")
    return lines
