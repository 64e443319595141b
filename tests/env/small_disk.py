"""A disk of 1 MiB: a tmpfs in a mount namespace of its own, which goes away with the process that made it."""

import contextlib
import ctypes
import os
import subprocess

import pytest

from shardwise.launcher.local.function import run_forked

_CLONE_NEWNS = 0x20000

needs_small_disk = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")


def on_small_disk(folder, body):
    """Return what `body(folder)` returns in a fork for which `folder` is a disk of 1 MiB."""

    def mounted(_rank):
        assert ctypes.CDLL(None).unshare(_CLONE_NEWNS) == 0
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], check=True)
        return body(folder)

    return run_forked(mounted, 1, timeout_s=60)[0]


def fill(folder):
    """Fill the disk of `folder` with one file."""
    with (folder / "file").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
