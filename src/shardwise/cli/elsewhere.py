"""--hosts and --kubernetes: the same command on other machines, started over ssh or written down as manifests."""

from __future__ import annotations

import re
import secrets
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from shardwise.cli.node_words import node_words
from shardwise.environment import run_secret, variables
from shardwise.errors import LaunchError
from shardwise.launcher.local.target import Module, Program, Script, Target
from shardwise.launcher.nodes.node import NodesSpec
from shardwise.launcher.options import read_nodes
from shardwise.launcher.ssh.run import read_hosts
from shardwise.runs.console import complain, say

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardwise.launcher.ssh.checks import HostRendezvous
    from shardwise.launcher.ssh.run import HostSpec

_TRAVELLING = re.compile(r"(NCCL|GLOO|TORCH|UCX|OMP|MKL)_.*|PYTHON(?!HOME).+")
"""Variables that follow the user over ssh; which devices are visible elsewhere is not for this machine to say."""
_DEFAULT_PORT = 29500


def start_elsewhere(*, grace_s: float, dry_run: bool = False) -> int | None:
    """Do what --hosts or --kubernetes ask for and return the exit code; None when neither was given.

    `grace_s` is what ranks get to save.
    """
    context = click.get_current_context()
    asked = [name for name in ("hosts", "kubernetes", "slurm") if context.params.get(name) is not None]
    if not asked or asked == ["slurm"]:
        return None
    if len(asked) > 1:
        raise LaunchError(
            f"--{asked[0]} and --{asked[1]} contradict each other", code="cli.options-conflict", fix="use one of them"
        )
    for name in ("node_rank", "local_addr", "rdzv_endpoint", "standalone"):
        if context.params.get(name) and context.get_parameter_source(name) is not ParameterSource.DEFAULT:
            option = name.replace("_", "-")
            raise LaunchError(
                f"--{option} is for one machine, and --{asked[0]} is for many",
                code="cli.option-not-applicable",
                fix="leave it out",
            )
    if asked == ["hosts"]:
        return _on_hosts(context, grace_s, dry_run=dry_run)
    return _on_kubernetes(context, grace_s)


def _on_hosts(context: click.Context, grace_s: float, *, dry_run: bool) -> int:
    from shardwise.launcher.ssh.run import launch_on_hosts

    hosts = read_hosts(context.params["hosts"])
    least, most = (len(hosts), len(hosts)) if not _is_typed(context, "nnodes") else read_nodes(context.params["nnodes"])
    if most != len(hosts):
        raise LaunchError(
            f"--nnodes {most} and --hosts names {len(hosts)}",
            code="launch.nnodes-hosts-mismatch",
            fix=f"use --nnodes {len(hosts)}",
        )

    if "job" in context.params:
        _refuse_unequal(hosts, context.params["nproc"] or 1)

    def words_of(meeting: HostRendezvous) -> list[list[str]]:
        nodes = _nodes(context, (least, most), meeting.address, meeting.port)
        return [node_words(context, nodes, rank, host.slots) for rank, host in enumerate(hosts)]

    if dry_run:
        say(_describe(hosts, words_of, context.params))
        return 0
    kept = {name: value for name, value in variables("").items() if _TRAVELLING.fullmatch(name)}
    return launch_on_hosts(
        hosts,
        _target(context.params),
        words_of,
        variables={**kept, "SHARDWISE_SECRET": run_secret() or secrets.token_hex(16)},
        least=least,
        master_addr=context.params["master_addr"] or "",
        master_port=context.params["master_port"] or 0,
        grace_s=grace_s,
        show=_show,
        note=complain,
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
    hosts: Sequence[HostSpec], words_of: Callable[[HostRendezvous], list[list[str]]], params: dict[str, Any]
) -> str:
    """Return what would run on each host; no host is asked, so node 0's address is its name."""
    from shardwise.launcher.ssh.checks import HostRendezvous
    from shardwise.launcher.ssh.session import ssh_words

    meeting = HostRendezvous(params["master_addr"] or hosts[0].name, params["master_port"] or _DEFAULT_PORT)
    lines = [f"# {len(hosts)} hosts; node 0's address and port are found by asking them, unless named"]
    for host, words in zip(hosts, words_of(meeting), strict=True):
        command = shlex.join([sys.executable, "-P", "-m", "shardwise", *words])
        lines.append(shlex.join([*ssh_words(host), f"cd {shlex.quote(str(Path.cwd()))} && {command}"]))
    return "\n".join(lines)


def _show(stream: int, line: bytes) -> None:
    out = (sys.stdout, sys.stderr)[stream].buffer
    try:
        out.write(line)
        out.flush()
    except OSError:
        return  # a terminal that was closed: the files of the run still have it all


def _on_kubernetes(context: click.Context, grace_s: float) -> int:
    from shardwise.launcher.kubernetes import POD_INDEX, POD_IP, manifests, node_0, read_kubernetes, to_yaml

    spec = read_kubernetes(context.params["kubernetes"], _target(context.params).name)
    least, most = read_nodes(context.params["nnodes"])
    nodes = _nodes(context, (least, most), node_0(spec), context.params["master_port"] or _DEFAULT_PORT)
    typed = any(_is_typed(context, name) for name in ("nproc_per_node", "nproc"))
    verb, *rest = node_words(context, nodes, POD_INDEX, spec.gpus if spec.gpus and not typed else None)
    # Kubernetes reads $(NAME) in words, and $$ as one $; what users typed is meant as it stands.
    rest = [word if word == f"--node-rank={POD_INDEX}" else word.replace("$", "$$") for word in rest]
    text = to_yaml(manifests(spec, [verb, f"--local-addr={POD_IP}", *rest], num_nodes=most, grace_s=grace_s))
    if spec.to:
        _write_private(Path(spec.to), text)
        complain(f"shardwise: {spec.to} is written: kubectl apply -f {spec.to}")
    else:
        say(text.rstrip("\n"))
    return 0


def _write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, since the run's secret is in it."""
    path.touch(mode=0o600)
    if path.is_file():  # one that was there keeps its mode otherwise; a device is not ours to change
        path.chmod(0o600)
    path.write_text(text)


def _nodes(context: click.Context, nodes: tuple[int, int], host: str, port: int) -> NodesSpec:
    return NodesSpec(least=nodes[0], most=nodes[1], host=host, port=port, run_id=context.params["rdzv_id"])


def _target(params: dict[str, Any]) -> Target:
    """Return what ranks will run, not looked for here: it has to be there."""
    if "job" in params:
        return Script(params["job"].partition(":")[0])
    script, arguments = params["script"], params["arguments"]
    if params["module"]:
        return Module(script, arguments)
    return Program(script, arguments) if params["no_python"] else Script(script, arguments)


def _is_typed(context: click.Context, name: str) -> bool:
    return name in context.params and context.get_parameter_source(name) is not ParameterSource.DEFAULT
