"""--hosts, --kubernetes and --slurm: run the same command on other machines, or print manifests for it."""

from __future__ import annotations

import atexit
import os
import re
import secrets
import shlex
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from shardwise.environment import run_secret, variables
from shardwise.errors import LaunchError
from shardwise.launcher.kubernetes import POD_INDEX, POD_IP, manifests, node_0, read_kubernetes, to_yaml
from shardwise.launcher.local.target import Script, Target
from shardwise.launcher.nodes.node import NodesSpec
from shardwise.launcher.options import DEFAULT_PORTS, read_nodes
from shardwise.launcher.slurm import (
    BatchSpec,
    batch_script,
    is_step,
    nodes_of_allocation,
    num_tasks,
    read_directives,
    require_slurm,
    resolve_nproc,
    srun_argv,
    submit,
)
from shardwise.launcher.spec import LaunchSpec
from shardwise.launcher.ssh.checks import HostRendezvous
from shardwise.launcher.ssh.run import HostSpec, launch_on_hosts, read_hosts
from shardwise.launcher.ssh.session import ssh_argv
from shardwise.runner.local import command_argv, node_argv, target_of
from shardwise.runs import RunDirectory, create_run
from shardwise.runs.console import PREEMPTED, echo, echo_error

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shardwise.launcher.kubernetes import PodsSpec
    from shardwise.training.spec import TrainSpec

_FORWARDED = re.compile(
    r"(?!.*(?:TOKEN|KEY|SECRET|PASSWORD)$)(?:(NCCL|GLOO|TORCH|TORCHDYNAMO|TORCHINDUCTOR|PYTORCH|TRITON|UCX|FI|OMP|MKL|HF|TOKENIZERS|WANDB|MLFLOW)_.*"
    r"|CUDA_(?!VISIBLE_DEVICES).+|PYTHON(?!HOME).+)"
)
"""Environment variables that are forwarded over ssh. CUDA_VISIBLE_DEVICES is not, since it depends on the host, and
credentials such as HF_TOKEN are not, unless --env names them."""


def start_remote(spec: LaunchSpec | TrainSpec, *, grace_s: float, dry_run: bool = False) -> int | None:
    """Run on --hosts, or write manifests for --kubernetes, and return the exit code; None with neither option.

    `grace_s` is the time in seconds that ranks have to save a checkpoint before SIGKILL.
    """
    submit = spec.submit
    given = [name for name in ("hosts", "kubernetes", "slurm") if getattr(submit, name) is not None]
    if not given or given == ["slurm"]:
        return None
    if len(given) > 1:
        raise LaunchError(
            f"--{given[0]} cannot be combined with --{given[1]}", code="cli.options-conflict", fix="pass only one"
        )
    _check_no_node_options(spec, given[0])
    if submit.hosts is not None:
        return _on_hosts(spec, read_hosts(submit.hosts), grace_s, dry_run=dry_run)
    return _on_kubernetes(spec, submit.kubernetes or "", grace_s)


def _check_no_node_options(spec: LaunchSpec | TrainSpec, option: str) -> None:
    rendezvous = spec.rendezvous
    node_options = {
        "node-rank": rendezvous.node_rank,
        "local-addr": rendezvous.local_addr,
        "rdzv-endpoint": rendezvous.rdzv_endpoint,
        "standalone": isinstance(spec, LaunchSpec) and spec.standalone,
    }
    for name, value in node_options.items():
        if value:
            raise LaunchError(
                f"--{name} configures a single node, and cannot be combined with --{option}",
                code="cli.option-not-applicable",
                fix=f"remove --{name}",
            )


def _on_hosts(spec: LaunchSpec | TrainSpec, hosts: Sequence[HostSpec], grace_s: float, *, dry_run: bool) -> int:
    rendezvous = spec.rendezvous
    least, most = (len(hosts), len(hosts)) if rendezvous.nnodes is None else read_nodes(rendezvous.nnodes)
    if most != len(hosts):
        raise LaunchError(
            f"--nnodes {most} does not match the {len(hosts)} hosts of --hosts",
            code="launch.nnodes-hosts-mismatch",
            fix=f"pass --nnodes {len(hosts)}, or remove --nnodes",
        )
    if not isinstance(spec, LaunchSpec):
        _check_equal_slots(hosts, spec.nproc or 1)

    def argv_of(found: HostRendezvous) -> list[list[str]]:
        nodes = _nodes(spec, (least, most), found.address, found.port)
        return [node_argv(spec, nodes, rank, host.slots) for rank, host in enumerate(hosts)]

    if dry_run:
        echo(_describe(hosts, argv_of, spec))
        return 0
    kept = forwarded_variables(variables(""), spec.submit.env)
    return launch_on_hosts(
        hosts,
        _target(spec),
        argv_of,
        variables={**kept, "SHARDWISE_SECRET": run_secret() or secrets.token_hex(16)},
        least=least,
        master_addr=rendezvous.master_addr or "",
        master_port=rendezvous.master_port or 0,
        grace_s=grace_s,
        show=_show,
        note=echo_error,
    )


def forwarded_variables(environ: Mapping[str, str], given: Sequence[str]) -> dict[str, str]:
    """Return the variables that every host receives: those of known libraries, then NAME or NAME=VALUE in `given`."""
    found = {name: value for name, value in environ.items() if _FORWARDED.fullmatch(name)}
    for text in given:
        name, equals, value = text.partition("=")
        if not name or not (equals or name in environ):
            raise LaunchError(
                f"--env {text}: the environment variable {name!r} is not set here",
                code="launch.env-not-set",
                fix=f"export {name or 'NAME'}=VALUE first, or pass --env {name or 'NAME'}=VALUE",
            )
        found[name] = value if equals else environ[name]
    return found


def _check_equal_slots(hosts: Sequence[HostSpec], default: int) -> None:
    """Raise LaunchError if hosts differ in their number of ranks, from which every node computes the world size."""
    slots = [host.slots or default for host in hosts]
    for host, num_ranks in zip(hosts, slots, strict=True):
        if num_ranks != slots[0]:
            raise LaunchError(
                f"train requires the same number of ranks on every host, but --hosts has {slots[0]} on {hosts[0].name}"
                f" and {num_ranks} on {host.name}",
                code="launch.unequal-slots",
                fix=f"set {min(slots)} slots on every host: --hosts NAME:{min(slots)},...",
            )


def _describe(
    hosts: Sequence[HostSpec],
    argv_of: Callable[[HostRendezvous], list[list[str]]],
    spec: LaunchSpec | TrainSpec,
) -> str:
    """Return the command of each host for --dry-run. Hosts are not contacted, so node 0's address is its name."""
    rendezvous = spec.rendezvous
    node_0 = HostRendezvous(rendezvous.master_addr or hosts[0].name, rendezvous.master_port or DEFAULT_PORTS["static"])
    lines = [f"# {len(hosts)} hosts; unless they are specified, node 0's address and port are determined at launch"]
    for host, argv in zip(hosts, argv_of(node_0), strict=True):
        command = shlex.join([sys.executable, "-P", "-m", "shardwise", *argv])
        lines.append(shlex.join([*ssh_argv(host), f"cd {shlex.quote(str(Path.cwd()))} && {command}"]))
    return "\n".join(lines)


def _show(stream: int, line: bytes) -> None:
    out = (sys.stdout, sys.stderr)[stream].buffer
    try:
        out.write(line)
        out.flush()
    except OSError:
        return  # the terminal was closed; the log files have the complete output


def _on_kubernetes(spec: LaunchSpec | TrainSpec, text: str, grace_s: float) -> int:
    cluster = read_kubernetes(text, _target(spec).name)
    if not isinstance(spec, LaunchSpec):
        spec = _with_run_on_volume(spec, cluster)
    least, most = read_nodes(spec.rendezvous.nnodes or "1")
    nodes = _nodes(spec, (least, most), node_0(cluster), spec.rendezvous.master_port or DEFAULT_PORTS["static"])
    nproc = cluster.gpus if cluster.gpus and spec.nproc is None else None
    command, *rest = node_argv(spec, nodes, POD_INDEX, nproc)
    # Kubernetes expands $(NAME) in arguments, so every other $ is escaped as $$.
    rest = [each if each == f"--node-rank={POD_INDEX}" else each.replace("$", "$$") for each in rest]
    argv = [command, f"--local-addr={POD_IP}", *rest]
    manifest = to_yaml(manifests(cluster, argv, num_nodes=most, grace_s=grace_s))
    if cluster.to:
        _write_private(Path(cluster.to), manifest)
        echo_error(f"shardwise: wrote {cluster.to}; submit it with: kubectl apply -f {cluster.to}")
    else:
        echo(manifest.rstrip("\n"))
    return 0


def _with_run_on_volume(spec: TrainSpec, cluster: PodsSpec) -> TrainSpec:
    """Return the spec with a run directory on a volume, from which new pods resume; print a note without a volume."""
    writable = [volume.path for volume in cluster.volumes if not volume.is_read_only]
    if spec.run_dir is None and not writable:
        echo_error("note: the run directory and its checkpoints are lost with the pod; add volume=CLAIM:/PATH")
        return spec
    # The time keeps a later submission of the same name from resuming this run.
    run_dir = spec.run_dir or Path(writable[0], "runs", f"{cluster.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    return spec.replace(run_dir=run_dir, save=spec.save.replace(resume=spec.save.resume or "auto"))


def _write_private(path: Path, text: str) -> None:
    """Write a file that is readable by its owner only, because it contains the secret of the run."""
    path.touch(mode=0o600)
    if path.is_file():  # touch does not change the mode of an existing file; the mode of a device must not change
        path.chmod(0o600)
    path.write_text(text)


def _nodes(spec: LaunchSpec | TrainSpec, nodes: tuple[int, int], host: str, port: int) -> NodesSpec:
    return NodesSpec(least=nodes[0], most=nodes[1], host=host, port=port, run_id=spec.rendezvous.rdzv_id)


def _target(spec: LaunchSpec | TrainSpec) -> Target:
    """Return the target of the ranks without checking that it exists, since it must exist on the other hosts."""
    if isinstance(spec, LaunchSpec):
        return target_of(spec)
    return Script(spec.job.partition(":")[0])


def start_by_slurm(spec: LaunchSpec | TrainSpec, name: str, *, grace_s: float, dry_run: bool = False) -> int | None:
    """Submit this command to SLURM, or run it with srun in the current allocation; None if neither was requested.

    `name` is the name of the job, `grace_s` the time in seconds that ranks have to save a checkpoint before SIGKILL.
    In an allocation, this function does not return, because srun replaces this process.
    """
    slurm = variables("SLURM_")
    option = spec.submit.slurm
    if is_step(slurm) and (option is None or num_tasks(slurm) > 1):
        signal.signal(signal.SIGUSR1, _exit_preempted)
        atexit.register(signal.signal, signal.SIGUSR1, signal.SIG_IGN)  # a finished run keeps its exit code
        return None
    if option is None:
        _warn_about_idle_nodes(spec, slurm)
        return None
    directives = read_directives(option)
    nodes = read_nodes(spec.rendezvous.nnodes) if spec.rendezvous.nnodes is not None else None
    nproc = resolve_nproc(_nproc_text(spec), directives)
    num_nodes = nodes_of_allocation(slurm, nodes, nproc)
    if num_nodes is not None:
        elastic = nodes is not None and nodes[0] < nodes[1]
        argv = srun_argv(num_nodes, elastic=elastic, inside=is_step(slurm))
        argv += _command(spec, nodes, nproc, spec.run_dir)
        if not dry_run:
            _exec_srun(argv)
        echo(shlex.join(argv))
        return 0
    folder = spec.run_dir or Path("runs", f"{name}-TIME")
    batch = BatchSpec(
        name=name,
        nodes=nodes or (1, 1),
        command=tuple(_command(spec, nodes, nproc, folder)),
        nproc=nproc,
        run=str(folder),
        directives=directives,
        grace_s=grace_s,
    )
    if dry_run:
        echo(f"{batch_script(batch)}\n{_describe_job(batch)}")
        return 0
    require_slurm("sbatch")
    resumes = not isinstance(spec, LaunchSpec) and spec.save.resume == "auto" and spec.run_dir is not None
    is_existing = resumes and RunDirectory(spec.run_dir or Path()).is_resumable
    run = RunDirectory(spec.run_dir or Path()) if is_existing else create_run(spec.run_dir, name)
    folder = run.path.resolve()
    _submit(replace(batch, run=str(folder), command=tuple(_command(spec, nodes, nproc, folder))), run)
    return 0


def _submit(spec: BatchSpec, run: RunDirectory) -> None:
    """Submit the batch script and print the job id. If SLURM rejects it, a new run directory is removed."""
    run.batch_script.write_text(batch_script(spec), errors="surrogateescape")
    try:
        job = submit(run.batch_script)
    except LaunchError:
        if not run.has_trained and not run.checkpoints.exists():
            run.batch_script.unlink()
            run.remove()
        raise
    echo_error(f"shardwise: submitted job {job}; run directory {run.path}, output in slurm-{job}.out there")
    echo(job)


def _exit_preempted(*_: object) -> NoReturn:
    """Exit with code 75 on SIGUSR1, SLURM's signal before the time limit, when no ranks are running."""
    sys.exit(PREEMPTED)


def _warn_about_idle_nodes(spec: LaunchSpec | TrainSpec, slurm: Mapping[str, str]) -> None:
    if slurm.get("SLURM_JOB_NUM_NODES", "1") != "1" and spec.rendezvous.nnodes is None:
        num_nodes = slurm["SLURM_JOB_NUM_NODES"]
        echo_error(f"shardwise: SLURM allocated {num_nodes} nodes, but one is used; add --slurm to use all of them")


def _exec_srun(argv: list[str]) -> NoReturn:
    """Replace this process with srun, which then receives signals and owns the terminal."""
    require_slurm(argv[0])
    # The secret is not passed on the command line, which all users of the machine can read.
    os.execvpe(argv[0], argv, {**variables(""), "SHARDWISE_SECRET": secrets.token_hex(16)})  # noqa: S606 - no shell


def _command(
    spec: LaunchSpec | TrainSpec, nodes: tuple[int, int] | None, nproc: int | None, run_dir: Path | None
) -> list[str]:
    """Return the command of each node: this command without --slurm."""
    first = [] if nodes is None or nodes[0] == nodes[1] else [f"--nnodes={nodes[0]}:{nodes[1]}"]
    first.append(f"--nproc-per-node={_nproc_text(spec) if nproc is None else nproc}")
    if run_dir is not None:
        first.append(f"--run-dir={run_dir}")
    return [sys.executable, "-m", "shardwise", *command_argv(spec.replace(nproc=None, run_dir=None), first)]


def _describe_job(spec: BatchSpec) -> str:
    """Return the ranks and the command of each node for --dry-run."""
    least, most = spec.nodes
    lines = []
    for node in range(most):
        ranks = "number of ranks determined on the node"
        if spec.nproc is not None:
            first, last = node * spec.nproc, (node + 1) * spec.nproc - 1
            span = f"ranks {first}-{last}" if last > first else f"rank {first}"
            ranks = f"{span} of {most * spec.nproc}"
        optional = "" if node < least else " (optional)"
        lines.append(f"# node {node}{optional} (SLURM_NODEID={node}): {ranks}; {shlex.join(spec.command)}")
    return "\n".join(lines)


def _nproc_text(spec: LaunchSpec | TrainSpec) -> str | None:
    return None if spec.nproc is None else str(spec.nproc)
