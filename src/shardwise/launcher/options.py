"""Parsers of torchrun's options as pure functions: processes, nodes, rendezvous endpoint and output streams."""

from __future__ import annotations

import re
from dataclasses import dataclass

from shardwise.errors import LaunchError


@dataclass(frozen=True, kw_only=True)
class Shown:
    """How one output stream of one rank is displayed; it is logged to the run directory unless `terminal` is set."""

    terminal: bool = False
    """Whether the rank writes directly to the launcher's terminal."""
    copied: bool = True
    """Whether the output is copied to the launcher's output as it is written."""
    prefixed: bool = False
    """Whether each copied line starts with the rank."""


def read_nproc(text: str, *, num_gpus: int, num_cores: int) -> int:
    """Parse --nproc-per-node: a number, gpu, cpu, or auto (the number of GPUs, or of cores if no GPU is visible)."""
    if text == "gpu" and not num_gpus:
        raise LaunchError(
            "--nproc-per-node gpu requires a visible NVIDIA GPU", code="launch.no-gpu", fix="pass --nproc-per-node auto"
        )
    named = {"gpu": num_gpus, "cpu": num_cores, "auto": num_gpus or num_cores}
    if text in named:
        return named[text]
    if not re.fullmatch(r"[0-9]+", text) or int(text) < 1:
        raise LaunchError(
            f"--nproc-per-node must be a positive integer, gpu, cpu or auto, got {text!r}",
            code="launch.nproc-invalid",
            fix="pass --nproc-per-node gpu, cpu, auto or a number of at least 1",
        )
    if num_gpus and int(text) > num_gpus:
        raise LaunchError(
            f"--nproc-per-node {text} exceeds the {num_gpus} visible GPUs",
            code="launch.nproc-exceeds-gpus",
            fix=f"pass --nproc-per-node {num_gpus}, or export CUDA_VISIBLE_DEVICES= to run on the CPU",
        )
    return int(text)


def read_nodes(text: str) -> tuple[int, int]:
    """Parse --nnodes: N, or MIN:MAX for an elastic run; return (min, max)."""
    match = re.fullmatch(r"([0-9]+)(?::([0-9]+))?", text)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most:
        raise LaunchError(
            f"--nnodes must be N or MIN:MAX, got {text!r}", code="launch.nnodes-invalid", fix="pass --nnodes 2 or 2:4"
        )
    return least, most


def read_endpoint(
    *, rdzv_backend: str, rdzv_endpoint: str, master_addr: str | None, master_port: int | None
) -> tuple[str, int]:
    """Return (host, port) of the rendezvous from --rdzv-endpoint HOST[:PORT], or --master-addr and --master-port."""
    host, port = _split(rdzv_endpoint) if rdzv_endpoint else (master_addr or "", None)
    if not host:
        raise LaunchError(
            "a run on several nodes requires a rendezvous endpoint",
            code="launch.endpoint-missing",
            fix="pass --master-addr <address of node 0>",
        )
    if rdzv_endpoint and master_addr and master_addr != host:
        raise LaunchError(
            f"--rdzv-endpoint {host} and --master-addr {master_addr} are different hosts",
            code="launch.endpoint-contradicts",
            fix="remove --rdzv-endpoint or --master-addr",
        )
    _check_same_port(port, master_port)
    return host, _checked_port(port or master_port or DEFAULT_PORTS[rdzv_backend], least=1)


def _check_same_port(port: int | None, master_port: int | None) -> None:
    if port and master_port and port != master_port:
        raise LaunchError(
            f"--rdzv-endpoint has port {port}, but --master-port is {master_port}",
            code="launch.endpoint-contradicts",
            fix="remove --master-port, or the port of --rdzv-endpoint",
        )


def _checked_port(port: int, *, least: int) -> int:
    if not least <= port < 1 << 16:
        raise LaunchError(
            f"the port must be from 1 to 65535, got {port}", code="launch.port-invalid", fix="pass --master-port 29500"
        )
    return port


DEFAULT_PORTS = {"static": 29500, "c10d": 29400}
"""torchrun's default port of each rendezvous backend."""


def _split(endpoint: str) -> tuple[str, int | None]:
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:.%\w]+)\]|([^:\[\]\s]+))(?::([0-9]+))?", endpoint)
    if match is None:
        raise LaunchError(
            f"--rdzv-endpoint must be HOST:PORT, got {endpoint!r}",
            code="launch.endpoint-invalid",
            fix="pass --rdzv-endpoint HOST:29400",
        )
    return match[1] or match[2], int(match[3]) if match[3] else None


def read_rdzv_conf(text: str) -> dict[str, float]:
    """Parse the timeouts of --rdzv-conf KEY=VALUE,... in seconds; other keys of torchrun are ignored."""
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    names = {"join_timeout": "join_s", "timeout": "join_s", "last_call_timeout": "last_call_s"}
    found = {}
    for key, equals, value in pairs:
        name = names.get(key.strip())
        if not equals or (name and not re.fullmatch(r"[0-9]+(\.[0-9]+)?", value.strip())):
            raise LaunchError(
                f"--rdzv-conf must be KEY=SECONDS,..., got {key}{equals}{value}",
                code="launch.rdzv-conf-invalid",
                fix="pass --rdzv-conf join_timeout=600,last_call_timeout=5",
            )
        if name:
            found[name] = float(value)
    return found


def check_nodes(nodes: tuple[int, int], node_rank: int | None, rdzv_backend: str) -> None:
    """Raise LaunchError if --node-rank is not below --nnodes or --rdzv-backend is unknown."""
    _, most = nodes
    if node_rank is not None and not 0 <= node_rank < most:
        raise LaunchError(
            f"--node-rank must be below --nnodes {most}, got {node_rank}",
            code="launch.node-rank-invalid",
            fix=f"pass --node-rank 0 to {most - 1}",
        )
    if rdzv_backend not in DEFAULT_PORTS:
        raise LaunchError(
            f"--rdzv-backend {rdzv_backend!r} is unknown", code="launch.rdzv-backend-unknown", fix="pass static or c10d"
        )


def read_port(endpoint: str, master_port: int | None, *, standalone: bool) -> int:
    """Return the port of the store: --master-port, the port of --rdzv-endpoint, or 0 to select a free port."""
    _, colon, port = endpoint.rpartition(":")
    given = int(port) if colon and port.isdigit() else None
    if standalone and (given or master_port):
        raise LaunchError(
            f"--standalone selects a free port and cannot be combined with port {given or master_port}",
            code="launch.standalone-with-port",
            fix="remove --standalone, or remove the port",
        )
    _check_same_port(given, master_port)
    return _checked_port(master_port or given or 0, least=0)


def read_streams(option: str, text: str, nproc: int) -> list[tuple[bool, bool]]:
    """Parse --redirects or --tee (0 none, 1 stdout, 2 stderr, 3 both, or RANK:N,...); return flags per rank."""
    values = dict.fromkeys(range(nproc), 0)
    if re.fullmatch(r"[0-3]", text):
        values = dict.fromkeys(values, int(text))
    elif re.fullmatch(r"[0-9]+:[0-3](,[0-9]+:[0-3])*", text):
        pairs = (part.split(":") for part in text.split(","))
        named = {int(rank): int(value) for rank, value in pairs}
        unknown = [rank for rank in named if rank not in values]
        if unknown:
            raise LaunchError(
                f"--{option} has rank {unknown[0]}, but the ranks of this node are 0 to {nproc - 1}",
                code="launch.stream-rank-unknown",
                fix=f"pass ranks 0 to {nproc - 1}",
            )
        values.update(named)
    else:
        raise LaunchError(
            f"--{option} must be 0, 1, 2, 3 or RANK:N,..., got {text!r}", code="launch.streams-invalid", fix="pass 3"
        )
    return [(bool(value & 1), bool(value & 2)) for _, value in sorted(values.items())]


def read_ranks(text: str, nproc: int) -> frozenset[int]:
    """Parse --local-ranks-filter, the ranks whose output is displayed; an empty text selects all ranks."""
    if not text:
        return frozenset(range(nproc))
    try:
        ranks = frozenset(int(part) for part in text.split(","))
    except ValueError:
        raise LaunchError(
            f"--local-ranks-filter must be RANK,..., got {text!r}", code="launch.rank-filter-invalid", fix="pass 0,1"
        ) from None
    if not ranks <= frozenset(range(nproc)):
        raise LaunchError(
            f"--local-ranks-filter must contain only ranks from 0 to {nproc - 1}, got {text}",
            code="launch.rank-filter-unknown",
            fix=f"pass ranks 0 to {nproc - 1}",
        )
    return ranks


def shown(*, redirects: str | None, tee: str, ranks_filter: str, nproc: int) -> list[tuple[Shown, Shown]]:
    """Return how (stdout, stderr) of each rank are displayed.

    By default, every rank's output is logged to the run directory and copied to the terminal. --redirects disables the
    copy, --redirects 0 attaches the rank to the terminal, and --tee prefixes each copied line with its rank.
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
