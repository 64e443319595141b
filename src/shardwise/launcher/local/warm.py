"""A launcher's side of the warm server: join it, start it, look at it, stop it."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.errors import LaunchError
from shardwise.launcher.local.orders import AskStatus, AskStop, Channel, Join, Report, WarmStatus
from shardwise.launcher.local.starters import ForkStarter
from shardwise.launcher.local.warm_place import (
    PRELOAD,
    address,
    import_environment,
    locked,
    open_place,
    place_path,
    warm_key,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

IDLE_S = 900.0
"""Seconds without a launch after which a server ends, unless asked for otherwise."""
_ANSWER_S = 10.0
_BACKLOG = 64
_HOW_TO_STOP = "or with: shardwise launch --warm-server stop"


def join_warm_server(environ: Mapping[str, str], *, idle_s: float, note: Callable[[str], None]) -> ForkStarter | None:
    """Return a fork parent lent by this user's warm server, started if there is none; None, and why, if it refuses.

    Call it before this process becomes a reaper: a server that is started here outlives it.
    """
    try:
        key, folder = warm_key(environ), place_path(environ)
        with open_place(folder) as place:
            end, is_new = _connect_or_start(place, folder, key, environ, idle_s)
            starter = ForkStarter(end)
            with contextlib.suppress(ConnectionError):  # a refusal may come before the request
                Channel[Report](end, Report).send(Join(key, idle_s), [0, 1, 2])
            refusal = starter.wait_until_ready()
            if not refusal:
                if is_new:
                    pid = _ask(place, key, AskStatus()).pid
                    note(f"shardwise: warm server {pid} started: ends after {idle_s:g} s idle, {_HOW_TO_STOP}")
                return starter
            starter.close()
    except (LaunchError, OSError) as error:
        refusal = str(error)
    note(f"shardwise: a cold start, since the warm server cannot be used: {refusal}")
    return None


def warm_servers(environ: Mapping[str, str], *, stop: bool) -> list[WarmStatus]:
    """Return how every warm server of this user is, stopping it if asked; what dead ones left is removed."""
    found = []
    with open_place(place_path(environ)) as place:
        for name in sorted(path.name for path in Path(f"/proc/self/fd/{place}").iterdir()):
            try:
                found.append(_ask(place, name, AskStop() if stop else AskStatus()))
            except (ConnectionError, FileNotFoundError):
                with locked(place), contextlib.suppress(FileNotFoundError):
                    _remove_if_dead(place, name)
    return found


def _connect_or_start(
    place: int, folder: Path, key: str, environ: Mapping[str, str], idle_s: float
) -> tuple[socket.socket, bool]:
    """Return a connection to the server, and whether it had to be started; it may still be importing."""
    with contextlib.suppress(ConnectionRefusedError, FileNotFoundError):
        return _connect(place, key), False
    with locked(place):
        with contextlib.suppress(FileNotFoundError):
            if not _remove_if_dead(place, key):
                return _connect(place, key), False  # somebody else started it meanwhile
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address(place, key))
            listener.listen(_BACKLOG)
            argv = [str(listener.fileno()), str(folder), key, str(idle_s), *PRELOAD]
            subprocess.run(
                [sys.executable, "-m", "shardwise.launcher.local.warm_server", *argv],
                env=import_environment(environ),
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[listener.fileno()],
                start_new_session=True,
                check=False,  # a server that is not there does not answer
            )
            return _connect(place, key), True


def _remove_if_dead(place: int, key: str) -> bool:
    """Remove a socket on which nobody listens any more; hold the lock."""
    try:
        _connect(place, key).close()
    except ConnectionRefusedError:
        Path(address(place, key)).unlink()
        return True
    return False


def _connect(place: int, key: str) -> socket.socket:
    end = socket.socket(socket.AF_UNIX)
    try:
        end.connect(address(place, key))
    except OSError:
        end.close()
        raise
    return end


def _ask(place: int, key: str, request: AskStatus | AskStop) -> WarmStatus:
    with _connect(place, key) as end:
        channel: Channel[WarmStatus] = Channel(end, WarmStatus)
        channel.send(request)
        while (answers := channel.receive(_ANSWER_S)) is not None:
            if answers:
                return answers[0]
    raise ConnectionError(f"warm server {key} hung up")
