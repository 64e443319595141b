"""Resolves the Specs of `launch` and `train`: targets, nodes, presets, command lines, and the inputs of a run."""

from __future__ import annotations

import ast
import shlex
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from shardwise.diagnosis.catalogue import find_preset
from shardwise.diagnosis.env import CERTAIN, EnvironmentFacts
from shardwise.environment import identify, profiler, run_secret, variables
from shardwise.errors import InputError, LaunchError
from shardwise.hardware import probe_gpus, usable_cores
from shardwise.job import JobReference
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
from shardwise.planner.settle import Tuning, split_settings
from shardwise.plans.toml import plan_to_toml, read_plan
from shardwise.recorder.imports import RecorderOptions, deterministic_variables
from shardwise.runs import RunDirectory, create_run, share_run
from shardwise.runs.console import echo_error
from shardwise.spec import is_url
from shardwise.torch_private.distributed import DYNAMO
from shardwise.training.spec import RunStart

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardwise.plans import Plan
    from shardwise.training.spec import TrainSpec

_DDP = frozenset({"DistributedDataParallel", "DDP"})
_DYNAMO_USERS = _DDP | {"fully_shard", "FullyShardedDataParallel", "compile"}
LEAST_JOIN_S = 400.0
"""Seconds for which the other nodes must wait for node 0 while it measures plans: the limit of a race is 300 s."""
PRELOAD = ("torch", DYNAMO)
"""Modules that every rank of a job imports: torch, and Dynamo, which the first DDP imports (800 modules, 1.5 s)."""


@dataclass(frozen=True, kw_only=True)
class SettledLaunch:
    """A launch whose options are checked and resolved."""

    local: LocalLaunch
    shown: list[tuple[Shown, Shown]]
    """How standard output and standard error of each local rank are shown."""
    nodes: NodesSpec | None
    """The nodes of the run; None for a single node."""
    note: str
    """A message for the user about how ranks are started; may be empty."""


def target_of(spec: LaunchSpec) -> Target:
    """Return the target of the ranks without checking that it exists, since it may be on another machine."""
    if spec.module:
        return Module(spec.script, spec.arguments)
    return Program(spec.script, spec.arguments) if spec.no_python else Script(spec.script, spec.arguments)


def settle_launch(target: Target, spec: LaunchSpec) -> SettledLaunch:
    """Check and resolve all options, without starting ranks."""
    determinism = _determinism_variables(spec)
    if determinism and isinstance(target, Program):
        raise LaunchError(
            "--check-replicas and --deterministic cannot be combined with --no-python",
            code="cli.option-not-applicable",
            fix="remove --check-replicas and --deterministic, or remove --no-python",
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
        record=watches_hangs(spec, target) or bool(determinism),
        fork=spec.start_method == "fork" and not profiler() and not _is_folder(target),
        on_terminal=tuple((out.terminal, err.terminal) for out, err in views),
        grace_s=spec.grace_s,
        preload=_preload(names),
        variables={**added, **determinism},
    )
    return SettledLaunch(local=local, shown=views, nodes=nodes, note=_note(target))


def watches_hangs(spec: LaunchSpec, target: Target) -> bool:
    """Return whether hangs are detected; programs that are not Python do not record collectives."""
    return spec.hang.after_s > 0 and not isinstance(target, Program)


def settle_nodes(rendezvous: RendezvousSpec, *, standalone: bool, max_restarts: int) -> NodesSpec | None:
    """Resolve the nodes of a run from torchrun's options or from an srun step; None for a single node."""
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
        node_rank = 0  # the default of torchrun's static rendezvous
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
        lost_s=rendezvous.node_timeout_s,
        **read_rdzv_conf(rendezvous.rdzv_conf),
    )


def _implied_by_slurm(rendezvous: RendezvousSpec, *, standalone: bool) -> RendezvousSpec:
    options = msgspec.structs.asdict(rendezvous)
    default = RendezvousSpec()
    given = {name for name, value in options.items() if value != getattr(default, name)}
    return rendezvous.replace(**nodes_of_step(variables("SLURM_"), {**options, "standalone": standalone}, given))


def _determinism_variables(spec: LaunchSpec) -> dict[str, str]:
    """Return the environment variables that enable replica checks and deterministic mode in ranks."""
    options = RecorderOptions(deterministic=spec.deterministic, check_replicas=spec.replicas.every)
    return {**options.variables(), **(deterministic_variables(variables("")) if spec.deterministic else {})}


def _note(target: Target) -> str:
    if isinstance(target, Program):
        return "shardwise: hangs are not detected, because a program that is not Python does not record collectives"
    return f"shardwise: ranks are not forked, because a profiler is attached ({profiler()})" if profiler() else ""


def _is_folder(target: Target) -> bool:
    """Whether the target is a directory or zip file with a __main__.py, which a new interpreter must run."""
    return isinstance(target, Script) and not target.path.endswith((".py", ".pyw"))


def _preload(names: frozenset[str] | None) -> tuple[str, ...]:
    """Return the modules that the fork parent imports: torch, and Dynamo if the script uses DDP, FSDP or compile.

    This is a guess from the names in the script. It affects startup time only, because ranks import missing modules.
    """
    if names is None:
        return ()
    return ("torch", "numpy", DYNAMO) if names & _DYNAMO_USERS else ("torch", "numpy")


def _names(target: Target) -> frozenset[str] | None:
    """Return the names used in a script, empty for other targets; None if the script cannot be parsed."""
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


def open_run(spec: TrainSpec, reference: JobReference) -> RunDirectory:
    """Return a new run directory; with --resume auto or --resume RUN_DIR, an existing run of the same job.

    First checks that the URLs of --upload and --resume can be used.
    """
    spec.save.check_remote(spec.run_dir)
    run = RunDirectory(spec.run_dir or Path())
    continues = spec.run_dir is not None and spec.save.resume in ("auto", str(run.path.resolve()))
    if not continues or not run.is_resumable:
        return create_run(spec.run_dir, reference.name)
    known = msgspec.json.decode(run.job.read_bytes(), type=JobReference)
    if (known.path, known.attribute) != (reference.path, reference.attribute):
        raise InputError(
            f"run directory {run.path} belongs to the job {known.path}:{known.attribute}",
            code="run.other-job",
            fix="choose another directory with --run-dir",
        )
    return share_run(run.path)


def with_inherited_settings(spec: TrainSpec) -> TrainSpec:
    """Return the Spec with the --set options of the run that it resumes, for fields of the job that it does not set."""
    run = resumed_run(spec)
    if run is None:
        return spec
    reference, _ = split_settings(spec.job, spec.settings)
    known = msgspec.json.decode(run.job.read_bytes(), type=JobReference)
    missing = [f"{key}={value}" for key, value in known.overrides.items() if key not in reference.overrides]
    if not missing or (known.path, known.attribute) != (reference.path, reference.attribute):
        return spec
    if identify().rank == 0:
        echo_error(f"note: --set {' --set '.join(missing)} applies, as in the run that is resumed")
    return spec.replace(settings=(*missing, *spec.settings))


def resumed_run(spec: TrainSpec) -> RunDirectory | None:
    """Return the run that a Spec resumes, given as a run, its checkpoints or one checkpoint; None for a new run."""
    resumed = spec.save.resume
    path = spec.run_dir if resumed == "auto" else Path(resumed or "")
    if path is None or resumed in {None, "never"} or is_url(resumed):
        return None
    runs = [RunDirectory(folder) for folder in (path, *path.resolve().parents[:3])]
    return next((run for run in runs if run.job.is_file()), None)


def tuning_of(spec: TrainSpec, reference: JobReference | None, nodes: NodesSpec | None = None) -> Tuning | None:
    """Return how the plan auto is measured, None with --no-tune; a dry run uses earlier measurements only.

    A resumed run keeps the options of its plan. `reference` is None for a Job that is not in a file. Of several nodes,
    node 0 decides, so the others predict.
    """
    if not spec.tune or (nodes is not None and nodes.node_rank):
        return None
    refusal = ""
    if reference is None:
        refusal = "this Job is not in a file, from which a measuring process could load it"
    elif nodes is not None and nodes.node_rank is None:
        refusal = "node 0, which decides, is known only after the nodes have joined; pass --node-rank"
    elif nodes is not None and nodes.join_s < LEAST_JOIN_S:
        refusal = f"the other nodes wait for at most {nodes.join_s:g} s; pass --rdzv-conf join_timeout=600"
    elif spec.deterministic:
        refusal = "--deterministic changes the kernels that would be measured"
    run = resumed_run(spec)
    stored = read_plan(run.plan) if run and run.plan.is_file() else None
    return Tuning(reference=reference, note=echo_error, may_measure=not spec.dry_run, stored=stored, refusal=refusal)


def write_run_inputs(
    run: RunDirectory, reference: JobReference, plan: Plan, *, spec: TrainSpec | None = None, started_at: float = 0.0
) -> None:
    """Write the job reference, the resolved plan and, with `spec`, the options and the start time of the launcher."""
    run.job.write_bytes(msgspec.json.format(msgspec.json.encode(reference), indent=1))
    run.plan.write_text(plan_to_toml(plan))
    if spec is not None:
        options = tuple(_kept_options(spec))
        start = RunStart(started_at=started_at, plan_sources=dict(plan.sources), options=options)
        run.start.write_bytes(msgspec.json.encode(start))


def has_inputs(run: RunDirectory, reference: JobReference, plan: Plan) -> bool:
    """Return whether the run directory contains this job reference and this plan."""
    if not run.plan.exists() or not run.job.exists():
        return False
    known = msgspec.json.decode(run.job.read_bytes(), type=JobReference)
    return known == reference and run.plan.read_text() == plan_to_toml(plan)


def worker_launch(
    spec: TrainSpec, run: RunDirectory, *, nproc: int, added: Mapping[str, str] | None = None
) -> LocalLaunch:
    """Return the LocalLaunch of a node's training workers, which receive `spec` with this run directory."""
    worker_spec = spec.replace(run_dir=run.path.resolve())
    deterministic = deterministic_variables(variables("")) if spec.deterministic else {}
    return LocalLaunch(
        target=Module("shardwise.worker", (worker_spec.to_json(),)),
        nproc=nproc,
        max_restarts=spec.max_restarts,
        grace_s=LocalLaunch.grace_s + spec.save.upload_grace_s,
        preload=PRELOAD,
        record=spec.hang.after_s > 0,
        variables={**(added or {}), **deterministic},
    )


# Command lines of nodes and ranks, for --dry-run, ssh, SLURM and Kubernetes.


def node_argv(
    spec: LaunchSpec | TrainSpec, nodes: NodesSpec, node_rank: int | str, nproc: int | None = None
) -> list[str]:
    """Return the arguments of the `shardwise` command of a node, with `nproc` ranks if it is not None.

    All other options are kept. `node_rank` may be a shell variable such as "$SLURM_NODEID".
    """
    most = f"{nodes.least}:{nodes.most}" if nodes.least != nodes.most else str(nodes.most)
    first = [f"--nnodes={most}", f"--node-rank={node_rank}", f"--master-addr={nodes.host}"]
    first += [f"--master-port={nodes.port}", f"--rdzv-id={nodes.run_id}"]
    if nproc is not None:
        first.append(f"--nproc-per-node={nproc}")
        spec = spec.replace(nproc=None)
    return command_argv(spec, first)


def command_argv(spec: LaunchSpec | TrainSpec, first: Sequence[str]) -> list[str]:
    """Return the arguments of this command for another machine: `first`, then all options except node options."""
    given = spec.rendezvous
    rendezvous = RendezvousSpec(rdzv_conf=given.rdzv_conf, node_timeout_s=given.node_timeout_s)
    spec = spec.replace(rendezvous=rendezvous, submit=SubmitSpec(), dry_run=False)
    if isinstance(spec, LaunchSpec):
        spec = spec.replace(standalone=False)
    options, arguments = spec.to_argv()
    return [spec.command, *first, *options, *arguments]


def resume_argv(spec: TrainSpec, run: Path) -> list[str]:
    """Return the command that continues `run` in its run directory, with the same options, also those of this node."""
    return ["shardwise", spec.command, spec.job, *_kept_options(spec), f"--run-dir={run}", "--resume=auto"]


def _kept_options(spec: TrainSpec) -> list[str]:
    """Return the options of a command that also apply when its run is continued."""
    return spec.replace(run_dir=None, save=spec.save.replace(resume=None)).to_argv()[0]


def describe(spec: LaunchSpec, settled: SettledLaunch) -> str:
    """Return the command lines of all nodes and ranks, with the environment variables of each rank, for --dry-run."""
    local, nodes = settled.local, settled.nodes
    how = "forked from one process that imports torch" if local.fork else "each in a new process"
    if nodes is None:
        port = local.port or "chosen at launch"
        lines = [f"# {local.nproc} ranks, {how}; store on 127.0.0.1, port {port}; {local.max_restarts} restarts"]
        return "\n".join(lines + _ranks(settled, 0, 1))
    where = f"{nodes.host}:{nodes.port}"
    lines = [f"# {nodes.most} nodes, ranks {how}; rendezvous at {where}; {local.max_restarts} restarts"]
    for node in range(nodes.most):
        optional = "" if node < nodes.least else " (optional)"
        lines += [f"# node {node}{optional}", shlex.join(["shardwise", *node_argv(spec, nodes, node)])]
        lines += [f"#   {line}" for line in _ranks(settled, node, nodes.most)]
    return "\n".join(lines)


def describe_plan(spec: TrainSpec, nodes: NodesSpec | None, plan: Plan) -> str:
    """Return the command of each node and the plan of a training run, for --dry-run."""
    commands = []
    if nodes is not None:
        commands = [shlex.join(["shardwise", *node_argv(spec, nodes, node)]) for node in range(nodes.most)]
    lines = [f"# node {node}: {command}" for node, command in enumerate(commands)]
    return "\n".join([f"# {plan.layout.world_size} ranks", *lines, plan_to_toml(plan).rstrip()])


def _ranks(settled: SettledLaunch, node: int, num_nodes: int) -> list[str]:
    local = settled.local
    lines = []
    for local_rank in range(local.nproc):
        rank, size = node * local.nproc + local_rank, num_nodes * local.nproc
        variables = f"RANK={rank} LOCAL_RANK={local_rank} WORLD_SIZE={size} LOCAL_WORLD_SIZE={local.nproc}"
        lines.append(f"{variables} {shlex.join(local.target.argv())}")
    return lines


def settle_preset(name: str | None, *, nproc: int, num_gpus: int, uses_ddp: bool) -> dict[str, str]:
    """Return the variables that a preset adds for `nproc` ranks; raises LaunchError if ranks could not run with them.

    Other problems are reported by `shardwise doctor env`. `num_gpus` is 0 for training on the CPU.
    """
    added = {} if name is None else find_preset(name).missing_from(variables(""))
    here = EnvironmentFacts(
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        num_gpus=num_gpus,
        uses_nccl=num_gpus > 0,
        uses_ddp=uses_ddp,
        nproc=nproc,
        cores=usable_cores(),
    )
    for rule in CERTAIN:
        for verdict in rule({**variables(""), **added}, here):
            if verdict.state == "fail":
                raise LaunchError(f"{verdict.name}: {verdict.fact}", code="env.variable-unusable", fix=verdict.fix)
    return added
