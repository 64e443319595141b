"""--hosts and --kubernetes: the same command on other machines, started over ssh or written as manifests."""

from __future__ import annotations

import re
import secrets
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.environment import run_secret, variables
from shardwise.errors import LaunchError
from shardwise.launcher.kubernetes import POD_INDEX, POD_IP, manifests, node_0, read_kubernetes, to_yaml
from shardwise.launcher.local.target import Script, Target
from shardwise.launcher.nodes.node import NodesSpec
from shardwise.launcher.options import DEFAULT_PORTS, read_nodes
from shardwise.launcher.spec import LaunchSpec
from shardwise.launcher.ssh.checks import HostRendezvous
from shardwise.launcher.ssh.run import HostSpec, launch_on_hosts, read_hosts
from shardwise.launcher.ssh.session import ssh_argv
from shardwise.runner.local import node_argv, target_of
from shardwise.runs.console import echo, echo_error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardwise.training.spec import TrainSpec

_FORWARDED = re.compile(r"(NCCL|GLOO|TORCH|UCX|OMP|MKL)_.*|PYTHON(?!HOME).+")
"""Variables that follow the user over ssh; which devices are visible elsewhere is not for this machine to set."""


def start_elsewhere(spec: LaunchSpec | TrainSpec, *, grace_s: float, dry_run: bool = False) -> int | None:
    """Do what --hosts or --kubernetes ask for and return the exit code; None when neither was given.

    `grace_s` is the time that ranks get to save.
    """
    submit = spec.submit
    asked = [name for name in ("hosts", "kubernetes", "slurm") if getattr(submit, name) is not None]
    if not asked or asked == ["slurm"]:
        return None
    if len(asked) > 1:
        raise LaunchError(
            f"--{asked[0]} and --{asked[1]} contradict each other", code="cli.options-conflict", fix="use one of them"
        )
    _refuse_options_of_one_node(spec, asked[0])
    if submit.hosts is not None:
        return _on_hosts(spec, read_hosts(submit.hosts), grace_s, dry_run=dry_run)
    return _on_kubernetes(spec, submit.kubernetes or "", grace_s)


def _refuse_options_of_one_node(spec: LaunchSpec | TrainSpec, asked: str) -> None:
    rendezvous = spec.rendezvous
    given = {
        "node-rank": rendezvous.node_rank,
        "local-addr": rendezvous.local_addr,
        "rdzv-endpoint": rendezvous.rdzv_endpoint,
        "standalone": isinstance(spec, LaunchSpec) and spec.standalone,
    }
    for name, value in given.items():
        if value:
            raise LaunchError(
                f"--{name} is for one machine, and --{asked} is for many",
                code="cli.option-not-applicable",
                fix="leave it out",
            )


def _on_hosts(spec: LaunchSpec | TrainSpec, hosts: Sequence[HostSpec], grace_s: float, *, dry_run: bool) -> int:
    rendezvous = spec.rendezvous
    least, most = (len(hosts), len(hosts)) if rendezvous.nnodes is None else read_nodes(rendezvous.nnodes)
    if most != len(hosts):
        raise LaunchError(
            f"--nnodes {most} and --hosts names {len(hosts)}",
            code="launch.nnodes-hosts-mismatch",
            fix=f"use --nnodes {len(hosts)}",
        )
    if not isinstance(spec, LaunchSpec):
        _refuse_unequal(hosts, spec.nproc or 1)

    def argv_of(found: HostRendezvous) -> list[list[str]]:
        nodes = _nodes(spec, (least, most), found.address, found.port)
        return [node_argv(spec, nodes, rank, host.slots) for rank, host in enumerate(hosts)]

    if dry_run:
        echo(_describe(hosts, argv_of, spec))
        return 0
    kept = {name: value for name, value in variables("").items() if _FORWARDED.fullmatch(name)}
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


def _refuse_unequal(hosts: Sequence[HostSpec], usual: int) -> None:
    """Refuse hosts of different size: each node settles the plan for its own ranks times the number of nodes."""
    slots = [host.slots or usual for host in hosts]
    for host, number in zip(hosts, slots, strict=True):
        if number != slots[0]:
            raise LaunchError(
                f"train --hosts has {slots[0]} ranks on {hosts[0].name} and {number} on {host.name}, and a plan is for"
                " as many on every host",
                code="launch.unequal-slots",
                fix=f"use {min(slots)} on every host",
            )


def _describe(
    hosts: Sequence[HostSpec],
    argv_of: Callable[[HostRendezvous], list[list[str]]],
    spec: LaunchSpec | TrainSpec,
) -> str:
    """Return what would run on each host; no host is asked, so node 0's address is its name."""
    rendezvous = spec.rendezvous
    node_0 = HostRendezvous(rendezvous.master_addr or hosts[0].name, rendezvous.master_port or DEFAULT_PORTS["static"])
    lines = [f"# {len(hosts)} hosts; node 0's address and port are found by asking them, unless named"]
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
        return  # a terminal that was closed: the files of the run still have it all


def _on_kubernetes(spec: LaunchSpec | TrainSpec, asked: str, grace_s: float) -> int:
    cluster = read_kubernetes(asked, _target(spec).name)
    least, most = read_nodes(spec.rendezvous.nnodes or "1")
    nodes = _nodes(spec, (least, most), node_0(cluster), spec.rendezvous.master_port or DEFAULT_PORTS["static"])
    nproc = cluster.gpus if cluster.gpus and spec.nproc is None else None
    command, *rest = node_argv(spec, nodes, POD_INDEX, nproc)
    # Kubernetes expands $(NAME) in arguments, and $$ to one $; what users typed is meant as it stands.
    rest = [text if text == f"--node-rank={POD_INDEX}" else text.replace("$", "$$") for text in rest]
    text = to_yaml(manifests(cluster, [command, f"--local-addr={POD_IP}", *rest], num_nodes=most, grace_s=grace_s))
    if cluster.to:
        _write_private(Path(cluster.to), text)
        echo_error(f"shardwise: {cluster.to} is written: kubectl apply -f {cluster.to}")
    else:
        echo(text.rstrip("\n"))
    return 0


def _write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, since the run's secret is in it."""
    path.touch(mode=0o600)
    if path.is_file():  # one that existed keeps its mode otherwise; a device is not ours to change
        path.chmod(0o600)
    path.write_text(text)


def _nodes(spec: LaunchSpec | TrainSpec, nodes: tuple[int, int], host: str, port: int) -> NodesSpec:
    return NodesSpec(least=nodes[0], most=nodes[1], host=host, port=port, run_id=spec.rendezvous.rdzv_id)


def _target(spec: LaunchSpec | TrainSpec) -> Target:
    """Return what ranks will run, not looked for here: it has to exist there."""
    if isinstance(spec, LaunchSpec):
        return target_of(spec)
    return Script(spec.job.partition(":")[0])
