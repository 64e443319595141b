"""torchrun's options, read into settled values; pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from shardwise.errors import LaunchError


@dataclass(frozen=True, kw_only=True)
class Shown:
    """How the output of one stream of one rank is shown; it is always in the run directory unless `terminal`."""

    terminal: bool = False
    """The rank keeps the launcher's own terminal."""
    copied: bool = True
    """Copied to the launcher's output as it is written."""
    prefixed: bool = False
    """Each copied line begins with its rank."""


def read_nproc(text: str, *, num_gpus: int, num_cores: int) -> int:
    """Read --nproc-per-node: a number, gpu, cpu or auto (GPUs where there are some, else cores)."""
    if text == "gpu" and not num_gpus:
        raise LaunchError(
            "--nproc-per-node gpu, but no NVIDIA GPU is visible", code="launch.no-gpu", fix="use a number, cpu or auto"
        )
    named = {"gpu": num_gpus, "cpu": num_cores, "auto": num_gpus or num_cores}
    if text in named:
        return named[text]
    if not re.fullmatch(r"[0-9]+", text) or int(text) < 1:
        raise LaunchError(
            f"--nproc-per-node is {text!r}",
            code="launch.nproc-invalid",
            fix="use a number of at least 1, gpu, cpu or auto",
        )
    if num_gpus and int(text) > num_gpus:
        raise LaunchError(
            f"--nproc-per-node {text} is more than the {num_gpus} GPUs that are visible",
            code="launch.nproc-exceeds-gpus",
            fix=f"use {num_gpus}, or export CUDA_VISIBLE_DEVICES= for ranks on the CPU",
        )
    return int(text)


def read_nodes(text: str) -> tuple[int, int]:
    """Read --nnodes: N, or MIN:MAX for elastic worlds."""
    match = re.fullmatch(r"([0-9]+)(?::([0-9]+))?", text)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most:
        raise LaunchError(
            f"--nnodes is {text!r}", code="launch.nnodes-invalid", fix="use a number of nodes, or MIN:MAX"
        )
    return least, most


def read_endpoint(
    *, rdzv_backend: str, rdzv_endpoint: str, master_addr: str | None, master_port: int | None
) -> tuple[str, int]:
    """Read the rendezvous endpoint of the nodes: --rdzv-endpoint HOST[:PORT], else --master-addr and --master-port."""
    host, port = _split(rdzv_endpoint) if rdzv_endpoint else (master_addr or "", None)
    if not host:
        raise LaunchError(
            "several nodes, and no rendezvous endpoint",
            code="launch.endpoint-missing",
            fix="add --master-addr <address of node 0>",
        )
    if rdzv_endpoint and master_addr and master_addr != host:
        raise LaunchError(
            f"--rdzv-endpoint names {host} and --master-addr {master_addr}",
            code="launch.endpoint-contradicts",
            fix="leave one of them out",
        )
    if port and master_port and port != master_port:
        raise LaunchError(
            f"--rdzv-endpoint names port {port} and --master-port {master_port}",
            code="launch.endpoint-contradicts",
            fix="leave one of them out",
        )
    chosen = port or master_port or DEFAULT_PORTS[rdzv_backend]
    if not 0 < chosen < 1 << 16:
        raise LaunchError(f"port {chosen} is not a port", code="launch.port-invalid", fix="use 1 to 65535")
    return host, chosen


DEFAULT_PORTS = {"static": 29500, "c10d": 29400}
"""torchrun's, for each of its rendezvous."""


def _split(endpoint: str) -> tuple[str, int | None]:
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:.%\w]+)\]|([^:\[\]\s]+))(?::([0-9]+))?", endpoint)
    if match is None:
        raise LaunchError(f"--rdzv-endpoint is {endpoint!r}", code="launch.endpoint-invalid", fix="write HOST:PORT")
    return match[1] or match[2], int(match[3]) if match[3] else None


def read_rdzv_conf(text: str) -> dict[str, float]:
    """Read the waits, in seconds, of --rdzv-conf KEY=VALUE,...; torchrun's other keys have no meaning here."""
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    names = {"join_timeout": "join_s", "timeout": "join_s", "last_call_timeout": "last_call_s"}
    found = {}
    for key, equals, value in pairs:
        name = names.get(key.strip())
        if not equals or (name and not re.fullmatch(r"[0-9]+(\.[0-9]+)?", value.strip())):
            raise LaunchError(
                f"--rdzv-conf has {key}{equals}{value}",
                code="launch.rdzv-conf-invalid",
                fix="write KEY=VALUE,KEY=VALUE, times in seconds",
            )
        if name:
            found[name] = float(value)
    return found


def check_nodes(nodes: tuple[int, int], node_rank: int | None, rdzv_backend: str) -> None:
    """Refuse node options that contradict each other."""
    _, most = nodes
    if node_rank is not None and not 0 <= node_rank < most:
        raise LaunchError(
            f"--node-rank {node_rank} is not below --nnodes {most}",
            code="launch.node-rank-invalid",
            fix=f"use 0 to {most - 1}",
        )
    if rdzv_backend not in DEFAULT_PORTS:
        raise LaunchError(
            f"--rdzv-backend is {rdzv_backend!r}", code="launch.rdzv-backend-unknown", fix="use static or c10d"
        )


def read_port(endpoint: str, master_port: int | None, *, standalone: bool) -> int:
    """Read the port of the store: --master-port, else the one of --rdzv-endpoint, else 0 for a free one."""
    _, colon, port = endpoint.rpartition(":")
    given = int(port) if colon and port.isdigit() else None
    if standalone and (given or master_port):
        raise LaunchError(
            f"--standalone finds a port by itself, and {given or master_port} is named",
            code="launch.standalone-with-port",
            fix="leave one of them out",
        )
    if given and master_port and given != master_port:
        raise LaunchError(
            f"--rdzv-endpoint names port {given} and --master-port {master_port}",
            code="launch.endpoint-contradicts",
            fix="leave one of them out",
        )
    chosen = master_port or given or 0
    if not 0 <= chosen < 1 << 16:
        raise LaunchError(f"port {chosen} is not a port", code="launch.port-invalid", fix="use 1 to 65535")
    return chosen


def read_streams(option: str, text: str, nproc: int) -> list[tuple[bool, bool]]:
    """Read --redirects or --tee, as torchrun does: 0 none, 1 stdout, 2 stderr, 3 both, or RANK:N,RANK:N."""
    values = dict.fromkeys(range(nproc), 0)
    if re.fullmatch(r"[0-3]", text):
        values = dict.fromkeys(values, int(text))
    elif re.fullmatch(r"[0-9]+:[0-3](,[0-9]+:[0-3])*", text):
        pairs = (part.split(":") for part in text.split(","))
        named = {int(rank): int(value) for rank, value in pairs}
        unknown = [rank for rank in named if rank not in values]
        if unknown:
            raise LaunchError(
                f"--{option} names rank {unknown[0]}", code="launch.stream-rank-unknown", fix=f"use 0 to {nproc - 1}"
            )
        values.update(named)
    else:
        raise LaunchError(
            f"--{option} is {text!r}", code="launch.streams-invalid", fix="use 0, 1, 2 or 3, or RANK:N,RANK:N"
        )
    return [(bool(value & 1), bool(value & 2)) for _, value in sorted(values.items())]


def read_ranks(text: str, nproc: int) -> frozenset[int]:
    """Read --local-ranks-filter: ranks whose output is shown; empty shows all."""
    if not text:
        return frozenset(range(nproc))
    try:
        ranks = frozenset(int(part) for part in text.split(","))
    except ValueError:
        raise LaunchError(
            f"--local-ranks-filter is {text!r}", code="launch.rank-filter-invalid", fix="use ranks such as 0,1"
        ) from None
    if not ranks <= frozenset(range(nproc)):
        raise LaunchError(
            f"--local-ranks-filter {text} names ranks beyond {nproc - 1}",
            code="launch.rank-filter-unknown",
            fix=f"use 0 to {nproc - 1}",
        )
    return ranks


def shown(*, redirects: str | None, tee: str, ranks_filter: str, nproc: int) -> list[tuple[Shown, Shown]]:
    """Return how (stdout, stderr) of each rank are shown.

    By default every rank's output is copied to the terminal and kept in the run directory; --redirects keeps it
    there alone, --redirects 0 leaves the rank on the terminal, --tee copies with the rank before each line.
    """
    hidden = read_streams("redirects", redirects or "0", nproc)
    teed = read_streams("tee", tee, nproc)
    visible = read_ranks(ranks_filter, nproc)
    return [
        tuple(  # type: ignore[misc]
            Shown(
                terminal=redirects == "0" and not teed[rank][stream] and rank in visible,
                copied=rank in visible and (teed[rank][stream] or not hidden[rank][stream]),
                prefixed=teed[rank][stream],
            )
            for stream in range(2)
        )
        for rank in range(nproc)
    ]
