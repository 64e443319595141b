"""Where this user's warm servers listen: a private folder, and one name per interpreter and surroundings."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.errors import LaunchError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

PRELOAD = ("torch", "numpy", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "torch.utils.data")
"""What a warm server imports: all that a first step of any strategy brings in; never the user's modules."""

_READ_AT_IMPORT = re.compile(
    r"(PYTHON|LD_|GLIBC_|MALLOC_|TORCH|PYTORCH|TRITON|ATEN_|DNNL_|ONEDNN_|MKL_|KMP_|GOMP_|OPENBLAS_|NPY_|NUMPY_|LC_).*"
    r"|OMP_(?!NUM_THREADS$).*|LANG|TZ|HOME|TMPDIR"
)
"""Variables that the interpreter, torch or numpy read when they are loaded. OMP_NUM_THREADS is not among them, since
every rank applies its own again."""


def import_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what of `environ` shapes an import: all that a server gets, so that it holds nobody's secrets."""
    kept = {name: value for name, value in sorted(environ.items()) if _READ_AT_IMPORT.fullmatch(name)}
    if kept.get("PYTHONPATH"):
        # A server works in no folder of the user's, where relative entries would mean something else.
        entries = kept["PYTHONPATH"].split(os.pathsep)
        kept["PYTHONPATH"] = os.pathsep.join(str(Path(entry).absolute()) for entry in entries)
    return kept


def warm_key(environ: Mapping[str, str]) -> str:
    """Return the name of the server that this process may use: same interpreter, files, variables and cgroup."""
    tops = [*dict.fromkeys(name.partition(".")[0] for name in PRELOAD)]
    origins = [spec.origin for name in tops if (spec := importlib.util.find_spec(name)) and spec.origin]
    files = [*origins, *map(str, sorted(Path(__file__).parent.glob("*.py")))]
    facts = [
        *(sys.executable, sys.prefix, sys.version),
        *((name, Path(name).stat().st_mtime_ns) for name in files),
        import_environment(environ),
        Path("/proc/self/cgroup").read_text(),  # memory and cores are counted where the server was started
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def place_path(environ: Mapping[str, str]) -> Path:
    """Return the folder of this user's servers: in XDG_RUNTIME_DIR if that is theirs, else beside temporary files."""
    runtime = Path(environ.get("XDG_RUNTIME_DIR") or "/nowhere")
    with contextlib.suppress(OSError):
        if runtime.is_absolute() and runtime.stat().st_uid == os.geteuid():
            return runtime / "shardwise"
    return Path(environ.get("TMPDIR") or "/tmp") / f"shardwise-{os.geteuid()}"  # noqa: S108 - checked by open_place


@contextlib.contextmanager
def open_place(path: Path) -> Iterator[int]:
    """Yield a descriptor of the folder, made if need be; refuse one that others own, enter or put there as a link."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    advice = f"remove {path}, or export XDG_RUNTIME_DIR=<a folder of your own>"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise LaunchError(
            f"{path} is no folder for a private socket ({error.strerror})",
            code="launch.socket-folder-failed",
            fix=advice,
        ) from None
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise LaunchError(f"{path} is open to other users", code="launch.socket-folder-shared", fix=advice)
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(place: int) -> Iterator[None]:
    """Hold the folder's lock: one process at a time puts a socket there or takes one away."""
    fcntl.flock(place, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(place, fcntl.LOCK_UN)


def address(place: int, key: str) -> str:
    """Return a server's socket in the folder that was checked, whatever has become of its path; never too long."""
    return f"/proc/self/fd/{place}/{key}"
