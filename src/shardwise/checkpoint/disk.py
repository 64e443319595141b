"""File-system effects that survive a crash: synced folders, atomic replacement, one writer, checksums."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zlib_ng import zlib_ng

from shardwise.checkpoint.errors import CheckpointError, nothing_more, rank_in, size_of, together

if TYPE_CHECKING:
    import torch.distributed as dist


TEMPORARY = ".tmp-"
"""Everything under such a name is unfinished or being removed, and may be removed by the next save."""
LOCK = ".lock"
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
"""Errors of file systems without locks: there, two runs that save into one folder are not detected."""


def temporary_name(name: str) -> str:
    """Return a name for `name` while it is being made, never used before."""
    return f"{TEMPORARY}{name}-{secrets.token_hex(4)}"


def is_seen(path: Path, *, timeout_s: float = 2.0) -> bool:
    """Whether `path` exists, or appears soon: a network file system may show what another node wrote late."""
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_file(path: Path) -> None:
    """Make the bytes of a file durable that something else wrote."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_synced(path: Path, data: bytes) -> None:
    """Write a new file and make its bytes durable."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_synced(path: Path, data: bytes) -> None:
    """Replace a file: at every moment it holds the old bytes or the new ones."""
    temporary = path.with_name(temporary_name(path.name))
    try:
        write_synced(temporary, data)
        temporary.rename(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def remove_whole(path: Path) -> None:
    """Remove a folder so that no half of it is ever seen under its name."""
    leaving = path.with_name(temporary_name(path.name))
    path.rename(leaving)
    shutil.rmtree(leaving, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Remove what dead saves left; only for the holder of the folder's lock."""
    for path in folder.glob(f"{TEMPORARY}*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def lock(folder: Path, *, timeout_s: float = 10.0) -> int:
    """Return a descriptor that locks the folder until it is closed or its process dies.

    Waits a little: forked children of a killed writer (data loaders) hold its lock until they notice.
    """
    fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(fd)
                raise CheckpointError(
                    f"another save into {folder} is under way",
                    code="checkpoint.save-in-progress",
                    fix="give each run its own folder",
                ) from None
            time.sleep(0.05)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return fd
            os.close(fd)
            raise
        else:
            return fd


def unlock(fd: int) -> None:
    """Release the lock, also where a forked child still has the descriptor."""
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


# The checksum of a checkpoint: CRC-32 by zlib-ng, 24 GB/s on one core of an EPYC where zlib has 4.


def crc32(data: Any, start: int = 0) -> int:
    """Return the CRC-32 of a buffer, continued from `start`; other threads run meanwhile."""
    return zlib_ng.crc32(data, start)


def crc32_text(data: Any) -> str:
    """Return the CRC-32 of a buffer as manifests hold it: eight hexadecimal digits."""
    return f"{crc32(data):08x}"


# Whether a folder is one and the same storage on every rank, found out before there is anything to lose.


def check_storage(folder: Path | str, *, group: dist.ProcessGroup | None) -> None:
    """Make `folder` and prove that every rank can see what rank 0 writes there; communicates over `group`.

    Called on every rank, before the first save. Raises the same CheckpointError on all of them.
    """
    folder, doing = Path(folder), f"preparing to save into {folder}"

    def share(_: list[None]) -> list[tuple[Path, str]]:
        folder.mkdir(parents=True, exist_ok=True)
        token = folder / f"{TEMPORARY}token-{secrets.token_hex(8)}"
        write_synced(token, b"")
        return [(token, socket.gethostname())] * size_of(group)

    token, maker = together(group, doing, lambda: None, share)

    def look() -> None:
        if not is_seen(token):
            raise CheckpointError(
                f"{folder} is not the same storage on {maker} and {socket.gethostname()}",
                code="checkpoint.storage-not-shared",
                fix="save to storage that every node shares",
            )

    try:
        together(group, doing, look, nothing_more)
    finally:
        if rank_in(group) == 0:
            token.unlink(missing_ok=True)
