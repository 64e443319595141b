"""Rendezvous of ranks by env://, tcp://host:port or file:///path, with an error message for each cause of failure."""

from __future__ import annotations

import ipaddress
import shlex
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

from torch.distributed import (  # type: ignore[attr-defined]
    FileStore,
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
)
from torch.distributed.rendezvous import rendezvous as torch_rendezvous

from shardwise.environment import master_endpoint
from shardwise.errors import LaunchError, WorldError, nearest
from shardwise.launcher.nodes.network import resolve

_SCHEMES = ("env", "tcp", "file")
_RESOLVE_S = 30.0
"""Time limit for name resolution. Kubernetes publishes the name of a pod when it is running, seconds after its peers
may have started."""
_VERDICT = "shardwise/verdict"
_GO = "go"


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Endpoint of the rendezvous: environment variables, a TCP endpoint, or a file that all ranks can write."""

    scheme: str
    host: str = ""
    port: int = 0
    path: Path = Path()

    def __str__(self) -> str:
        rest = {"env": "", "tcp": self.endpoint, "file": str(self.path)}
        return f"{self.scheme}://{rest[self.scheme]}"

    @property
    def endpoint(self) -> str:
        """Host and port in URL syntax."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_rendezvous(init_method: str) -> Rendezvous:
    """Parse "env://", "tcp://host:port" or "file:///path"; raises WorldError for anything else."""
    scheme, separator, rest = init_method.partition("://")
    if not separator or scheme not in _SCHEMES:
        raise WorldError(
            f"init_method {init_method!r} must be env://, tcp://host:port or file:///path",
            code="rendezvous.unknown-scheme",
            fix=nearest(scheme, _SCHEMES),
        )
    if scheme == "env":
        return Rendezvous(scheme="env")
    if scheme == "file":
        if not rest.startswith("/") or rest.endswith("/"):
            raise WorldError(
                f"init_method {init_method!r} must contain an absolute file path",
                code="rendezvous.file-path-invalid",
                fix="use file:///directory/file",
            )
        return Rendezvous(scheme="file", path=Path(rest))
    return _parse_tcp(init_method)


def join(rdzv: Rendezvous, *, rank: int, world_size: int, timeout_s: float) -> Store:
    """Join the other ranks at `rdzv` and return the shared store. Communicates; call on every rank."""
    if rdzv.scheme == "env":
        return _join_env(rank, world_size, timeout_s)
    store = _open_tcp(rdzv, rank, world_size, timeout_s) if rdzv.scheme == "tcp" else _open_file(rdzv, world_size)
    store.set_timeout(timedelta(seconds=timeout_s))
    _announce(store, rdzv, rank, world_size, timeout_s)
    return store


def _parse_tcp(init_method: str) -> Rendezvous:
    try:
        parts = urlsplit(init_method)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port, parts = None, None, None
    if not host or not port:
        raise WorldError(
            f"init_method {init_method!r} must contain a host and a port",
            code="rendezvous.endpoint-invalid",
            fix="use tcp://host:port",
        )
    if parts is None or parts.path or parts.query:
        raise WorldError(
            f"init_method {init_method!r} must contain only a host and a port",
            code="rendezvous.endpoint-invalid",
            fix=f"use tcp://{host}:{port} and pass rank= and world_size=",
        )
    return Rendezvous(scheme="tcp", host=host, port=port)


def _join_env(rank: int, world_size: int, timeout_s: float) -> Store:
    """Join through torch's env:// rendezvous, which uses the store of the torchrun agent if one is running."""
    host, port = master_endpoint()
    if host is None or port is None:
        missing = [name for name, value in (("MASTER_ADDR", host), ("MASTER_PORT", port)) if value is None]
        raise WorldError(
            f"env:// with {world_size} ranks requires {' and '.join(missing)} to be set",
            code="rendezvous.master-not-set",
            fix=f"export {' and '.join(missing)}, or start the ranks with torchrun",
        )
    _resolve(host, port, timeout_s)
    try:
        store: Store = next(torch_rendezvous("env://", rank, world_size, timeout=timedelta(seconds=timeout_s)))[0]
    except RuntimeError as error:
        raise _network_error(error, f"{host}:{port}", rank, timeout_s) from error
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def _open_tcp(rdzv: Rendezvous, rank: int, world_size: int, timeout_s: float) -> Store:
    _resolve(rdzv.host, rdzv.port, timeout_s)
    listener = _loopback_listener(rdzv) if rank == 0 else None
    try:
        return TCPStore(
            rdzv.host,
            rdzv.port,
            world_size,
            is_master=rank == 0,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,  # _announce waits instead, and reports which ranks are missing
            master_listen_fd=listener,
        )
    except RuntimeError as error:
        raise _network_error(error, rdzv.endpoint, rank, timeout_s) from error


def _loopback_listener(rdzv: Rendezvous) -> int | None:
    """Return a file descriptor that listens on loopback only, since torch would listen on all interfaces."""
    try:
        if not ipaddress.IPv4Address(rdzv.host).is_loopback:
            return None
    except ValueError:
        return None
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((rdzv.host, rdzv.port))
        except OSError as error:
            raise _port_error(rdzv.endpoint, error.strerror) from error
        return listener.detach()


def _open_file(rdzv: Rendezvous, world_size: int) -> Store:
    # Without this check, torch would retry for five minutes.
    if not rdzv.path.parent.is_dir():
        raise WorldError(
            f"the directory of {rdzv} does not exist",
            code="rendezvous.file-folder-missing",
            fix=f"mkdir -p {rdzv.path.parent}",
        )
    try:
        rdzv.path.touch()
    except OSError as error:
        raise WorldError(
            f"{rdzv} cannot be written: {error.strerror}",
            code="rendezvous.file-write-failed",
            fix="use a path that this process can write",
        ) from error
    return FileStore(str(rdzv.path), world_size)


def _announce(store: Store, rdzv: Rendezvous, rank: int, world_size: int, timeout_s: float) -> None:
    """Announce `rank` in `store` and wait for all ranks; raises WorldError for a stale store or a duplicate rank."""
    try:
        # A verdict that exists before this rank was counted is from an earlier run.
        if store.add(_joined(rank), 1) > 1 or store.check([_VERDICT]):
            store.set(_VERDICT, str(rank))
        elif store.add("shardwise/arrived", 1) == world_size:
            store.set(_VERDICT, _GO)
        verdict = _wait_for_verdict(store, rdzv, world_size, timeout_s)
    except RuntimeError as error:
        raise WorldError(
            f"rank {rank} lost the connection to the store at {rdzv} during rendezvous",
            code="rendezvous.store-lost",
            fix="check the log of rank 0 for an error",
        ) from error
    if verdict != _GO:
        raise _conflict(rdzv, int(verdict))


def _wait_for_verdict(store: Store, rdzv: Rendezvous, world_size: int, timeout_s: float) -> str:
    start = time.monotonic()
    # Poll with increasing intervals, because Ctrl-C has no effect inside store.wait.
    while not store.check([_VERDICT]):
        waited_s = time.monotonic() - start
        if waited_s > timeout_s:
            missing = [str(rank) for rank in range(world_size) if not store.check([_joined(rank)])]
            raise WorldError(
                f"after {timeout_s:g} s at {rdzv}, {len(missing)} of {world_size} ranks have not joined:"
                f" {', '.join(missing[:8])}{', ...' if len(missing) > 8 else ''}",
                code="rendezvous.timeout",
                fix="start every rank with the same init_method and world_size",
            )
        time.sleep(min(0.5, max(0.002, waited_s / 20)))
    return store.get(_VERDICT).decode()


def _joined(rank: int) -> str:
    return f"shardwise/joined/{rank}"


def _conflict(rdzv: Rendezvous, rank: int) -> WorldError:
    if rdzv.scheme == "file":
        return WorldError(
            f"{rdzv} exists from an earlier run, or two processes joined as rank {rank}",
            code="rendezvous.file-stale",
            fix=f"rm {shlex.quote(str(rdzv.path))}",
        )
    return WorldError(
        f"two processes joined {rdzv} as rank {rank}",
        code="rendezvous.rank-repeated",
        fix="pass a unique rank to every process, and use a different port for every job",
    )


def _resolve(host: str, port: int, timeout_s: float) -> None:
    limit_s = min(timeout_s, _RESOLVE_S)
    try:
        resolve(host, port, limit_s)
    except LaunchError as error:
        raise WorldError(
            f"host {host!r} could not be resolved within {limit_s:g} s",
            code=error.code,
            fix="use an address that this machine can resolve",
        ) from error


def _network_error(error: RuntimeError, endpoint: str, rank: int, timeout_s: float) -> WorldError:
    text = str(error)
    if "EADDRINUSE" in text:
        return _port_error(endpoint, "address already in use")
    if "clients joined" in text:
        return WorldError(
            f"after {timeout_s:g} s at {endpoint}, not all ranks have joined ({text.splitlines()[0]})",
            code="rendezvous.timeout",
            fix="start every rank with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE",
        )
    return WorldError(
        f"rank {rank} could not reach {endpoint} within {timeout_s:g} s ({text.splitlines()[0]})",
        code="rendezvous.unreachable",
        fix="start rank 0 on that host, and allow connections to the port",
    )


def _port_error(endpoint: str, reason: str | None) -> WorldError:
    return WorldError(
        f"rank 0 cannot listen on {endpoint}: {reason}",
        code="rendezvous.listen-failed",
        fix="use a free port (MASTER_PORT, or tcp://host:port)",
    )


__all__ = ["FileStore", "HashStore", "PrefixStore", "Store", "TCPStore"]
