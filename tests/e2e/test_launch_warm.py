"""The warm server: launches through it are those of a cold start, and nobody else gets in."""

import contextlib
import json
import os
import re
import resource
import shutil
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from e2e.processes import wait_for, working_in

LAUNCH = [sys.executable, "-m", "shardwise", "launch"]

FACTS = """
import atexit, json, os, random, resource, sys
import numpy, torch, torch.distributed as dist

def tell(name, value):
    os.write(1, (json.dumps([os.environ["RANK"], name, value]) + chr(10)).encode())

class Here: pass

atexit.register(tell, "atexit", True)
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
dist.destroy_process_group()
mask = os.umask(0)
tell("facts", {
    "sum": total.item(), "argv": sys.argv, "cwd": os.getcwd(), "name": __name__, "file": __file__, "path": sys.path,
    "module": Here.__module__, "main": sys.modules["__main__"].__dict__ is globals(), "umask": mask,
    "limits": {n: resource.getrlimit(getattr(resource, n)) for n in dir(resource) if n.startswith("RLIMIT_")},
    "cores": sorted(os.sched_getaffinity(0)), "nice": os.getpriority(os.PRIO_PROCESS, 0), "flags": str(sys.flags),
    "threads": torch.get_num_threads(), "terminal": os.isatty(0), "encoding": sys.stdout.encoding,
    "environ": dict(os.environ), "open": len(os.listdir("/proc/self/fd")),
})
tell("drawn", [random.random(), numpy.random.rand(), torch.rand(1).item()])
"""
WAITING = """
import os, pathlib, subprocess, sys, time
import torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
subprocess.Popen(["sleep", "1000"], start_new_session=True)
pathlib.Path(f"ready.{rank}").write_text(f"{os.getppid()}")
while not pathlib.Path("go").exists():
    time.sleep(0.02)
dist.barrier()
dist.destroy_process_group()
"""


def environment(runtime, **more):
    return {**os.environ, "XDG_RUNTIME_DIR": str(runtime), **more}


def launch(runtime, folder, *arguments, prefix=(), **options):
    command = [*prefix, *LAUNCH, *arguments]
    options.setdefault("env", environment(runtime))
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=200, **options)


def socket_of(runtime):
    (path,) = (runtime / "shardwise").iterdir()
    return path


def server_of(runtime):
    done = launch(runtime, runtime, "--warm-server", "status")
    match = re.search(r"pid (\d+)", done.stdout)
    return int(match[1]) if match else None


def stop(runtime):
    return launch(runtime, runtime, "--warm-server", "stop")


@pytest.fixture(scope="module")
def runtime(tmp_path_factory):
    """The folder of a warm server that many tests share; started by the first launch."""
    folder = tmp_path_factory.mktemp("runtime")
    yield folder
    stop(folder)


@pytest.fixture
def own_runtime(tmp_path):
    folder = tmp_path / "runtime"
    folder.mkdir()
    yield folder
    stop(folder)


@pytest.fixture
def folder(tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    (work / "facts.py").write_text(FACTS)
    (work / "waiting.py").write_text(WAITING)
    return work


@contextlib.contextmanager
def waiting(runtime, folder, *options):
    """A warm launch of two ranks that wait, each with a child in a session of its own."""
    command = [*LAUNCH, "--warm", "--nproc", "2", *options, "waiting.py"]
    with (folder / "out").open("w") as file:
        launcher = subprocess.Popen(command, cwd=folder, env=environment(runtime), stdout=file, stderr=file)
    try:
        wait_for(lambda: all((folder / f"ready.{rank}").exists() for rank in range(2)), 120)
        yield launcher
    finally:
        for pid in working_in(folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        launcher.wait(60)


def facts(output):
    found = {}
    for rank, name, value in map(json.loads, output.splitlines()):
        found.setdefault(rank, {})[name] = value
    return found


def narrow():
    os.umask(0o027)
    os.nice(3)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    resource.setrlimit(resource.RLIMIT_NOFILE, (500, 600))


def test_ranks_of_a_warm_server_are_those_of_a_cold_start(runtime, folder):
    launch(runtime, folder, "--warm", "facts.py")  # the server lives in wider surroundings than the next launcher
    secret = environment(runtime, OMP_NUM_THREADS="1", MY_SETTING="mine")
    settings = {"env": secret, "preexec_fn": narrow, "stdin": subprocess.DEVNULL}
    warm, cold = (
        launch(runtime, folder, *how, "--nproc", "2", "facts.py", "--lr", "1", **settings) for how in (["--warm"], [])
    )
    assert warm.returncode == cold.returncode == 0, warm.stderr + cold.stderr
    assert warm.stderr == cold.stderr == ""
    ours, theirs = facts(warm.stdout), facts(cold.stdout)
    for rank in ("0", "1"):
        assert ours[rank].keys() == theirs[rank].keys() == {"facts", "drawn", "atexit"}
        for mine in (ours, theirs):
            mine[rank]["facts"]["environ"].pop("MASTER_PORT")
        assert ours[rank]["facts"] == theirs[rank]["facts"]
    drawn = [mine[rank]["drawn"] for mine in (ours, theirs) for rank in ("0", "1")]
    assert all(len(set(numbers)) == 4 for numbers in zip(*drawn, strict=True))  # as in fresh interpreters
    assert ours["0"]["facts"]["umask"] == 0o027
    assert ours["0"]["facts"]["threads"] == 1


def test_spawned_processes_find_the_script_again(runtime, folder):
    (folder / "spawning.py").write_text(
        "import torch.multiprocessing as mp\n"
        "def work(rank): print('spawned', rank, __name__, flush=True)\n"
        "if __name__ == '__main__': mp.spawn(work, nprocs=1)\n"
    )
    done = launch(runtime, folder, "--warm", "spawning.py")
    assert done.stdout == "spawned 0 __mp_main__\n", done.stderr


def test_two_launches_at_once_share_one_server(own_runtime, folder):
    command = [*LAUNCH, "--warm", "--nproc", "2", "facts.py"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [subprocess.Popen(command, cwd=folder, env=environment(own_runtime), **pipes) for _ in range(2)]
    answers = [process.communicate(timeout=150) for process in both]
    assert [len(facts(out)) for out, _ in answers] == [2, 2], answers
    assert sum("started" in err for _, err in answers) == 1
    shown = launch(own_runtime, folder, "--warm-server", "status").stdout
    assert re.fullmatch(r"pid \d+: \d+ s old, 2 launches(, \d running)?, \d+ s idle time left\n", shown)


def test_server_that_was_killed_is_replaced(own_runtime, folder):
    first = launch(own_runtime, folder, "--warm", "facts.py")
    assert "started" in first.stderr
    os.kill(server_of(own_runtime), signal.SIGKILL)
    assert socket_of(own_runtime).exists()
    again = launch(own_runtime, folder, "--warm", "facts.py")
    assert (again.returncode, "started" in again.stderr) == (0, True)


def test_stop_ends_the_server_and_not_its_launches(own_runtime, folder):
    with waiting(own_runtime, folder) as launcher:
        pid = server_of(own_runtime)
        assert f"pid {pid}" in stop(own_runtime).stdout
        assert list((own_runtime / "shardwise").iterdir()) == []
        wait_for(lambda: not Path(f"/proc/{pid}").exists())
        (folder / "go").touch()
        assert launcher.wait(60) == 0
    assert launch(own_runtime, folder, "--warm-server", "status").stdout == "no warm server\n"


def test_idle_server_ends_and_leaves_no_socket(own_runtime, folder):
    done = launch(own_runtime, folder, "--warm", "--warm-idle", "0.5", "facts.py")
    assert "ends after 0.5 s idle" in done.stderr
    wait_for(lambda: not list((own_runtime / "shardwise").iterdir()), 30)
    assert server_of(own_runtime) is None


def test_killed_launcher_leaves_no_process(runtime, folder):
    with waiting(runtime, folder) as launcher:
        launcher.kill()
        wait_for(lambda: working_in(folder) == [], 30)
    assert server_of(runtime)


def test_killed_fork_parent_is_named_and_leaves_no_process(runtime, folder):
    with waiting(runtime, folder) as launcher:
        parent = int((folder / "ready.0").read_text())
        assert parent not in {launcher.pid, server_of(runtime)}
        os.kill(parent, signal.SIGKILL)
        assert launcher.wait(25) == 1
        wait_for(lambda: working_in(folder) == [], 30)
    said = f"the fork parent of the ranks (pid {parent}) was killed, so all ranks were stopped"
    assert said in (folder / "out").read_text()


def test_server_holds_no_terminal_no_folder_and_no_secret(own_runtime, folder):
    launch(own_runtime, folder, "--warm", "facts.py", env=environment(own_runtime, AWS_SECRET="hunter2"))
    proc = Path(f"/proc/{server_of(own_runtime)}")
    assert (proc / "stat").read_text().rpartition(")")[2].split()[4] == "0"  # tty
    assert {str((proc / "fd" / n).readlink()) for n in "012"} == {"/dev/null"}
    assert (proc / "cwd").readlink() == Path("/")
    assert b"hunter2" not in (proc / "environ").read_bytes()
    assert stat.S_IMODE((own_runtime / "shardwise").stat().st_mode) == 0o700


def refused(runtime, folder, **options):
    done = launch(runtime, folder, "--warm", "facts.py", **options)
    assert done.returncode == 0, done.stderr
    assert len(facts(done.stdout)) == 1
    (line,) = [line for line in done.stderr.splitlines() if "[c10d]" not in line]
    assert line.startswith("shardwise: a cold start, since the warm server cannot be used: ")
    return line


def works(*prefix):
    return (
        shutil.which(prefix[0]) and subprocess.run([*prefix, "true"], check=False, capture_output=True).returncode == 0
    )


@pytest.mark.parametrize(
    ("prefix", "wall"),
    [
        (("unshare", "--net", "sh", "-c", 'ip link set lo up; exec "$@"', "sh"), "net namespace"),
        (("unshare", "--mount"), "mnt namespace"),
        (("setpriv", "--no-new-privs"), "NoNewPrivs"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else value,
)
def test_launcher_behind_another_wall_is_refused(runtime, folder, prefix, wall):
    if not works(*prefix):
        pytest.skip(f"{prefix[0]} does not work here")
    launch(runtime, folder, "--warm", "facts.py")
    assert wall in refused(runtime, folder, prefix=prefix)


@pytest.mark.parametrize("how", ["link", "open"])
def test_folder_that_is_not_private_is_refused(tmp_path, folder, how):
    runtime = tmp_path / "runtime"
    runtime.mkdir()
    if how == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        (runtime / "shardwise").symlink_to(tmp_path / "elsewhere")
    else:
        (runtime / "shardwise").mkdir(mode=0o755)
    assert str(runtime / "shardwise") in refused(runtime, folder)
    assert launch(runtime, folder, "--warm-server", "status").returncode == 2


def ask(path, request, uid=None):
    """Send one line to a server, as another user if told so, and return its answer."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            if uid is not None:
                os.setgroups([])
                os.setuid(uid)
            with socket.socket(socket.AF_UNIX) as end:
                end.connect(str(path))
                with contextlib.suppress(ConnectionError):
                    end.sendall(json.dumps(request).encode() + b"\n")
                os.write(writer, end.makefile("rb").readline())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        text = file.read()
    os.waitpid(pid, 0)
    return json.loads(text) if text else None


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_other_user_is_refused(runtime, folder):
    launch(runtime, folder, "--warm", "facts.py")
    path = Path(os.path.relpath(socket_of(runtime)))
    assert ask(path, {"type": "status"}, uid=65534) is None  # the folder alone keeps them out
    opened = [path.parent, *path.resolve().parents]
    before = {folder: stat.S_IMODE(folder.stat().st_mode) for folder in opened}
    try:
        for each in opened:
            each.chmod(before[each] | 0o055)
        path.chmod(0o777)
        answer = ask(path, {"type": "status"}, uid=65534)
    finally:
        for each in opened:
            each.chmod(before[each])
    assert answer["refusal"] == "it serves user 0 alone"


def test_other_interpreter_is_refused(runtime, folder):
    launch(runtime, folder, "--warm", "facts.py")
    answer = ask(Path(os.path.relpath(socket_of(runtime))), {"type": "join", "key": "another", "idle_s": 5})
    assert answer["refusal"] == "it was started with another interpreter, torch or environment"


def test_libraries_that_would_load_otherwise_get_another_server(own_runtime, folder):
    for more in ({}, {"PYTHONHASHSEED": "1"}):
        done = launch(own_runtime, folder, "--warm", "facts.py", env=environment(own_runtime, **more))
        assert "started" in done.stderr
    assert stop(own_runtime).stdout.count("stopped") == 2


def test_warm_contradicts_fresh_processes(runtime, folder):
    done = launch(runtime, folder, "--warm", "--start-method", "spawn", "facts.py")
    assert done.returncode == 2
    assert "--warm" in done.stderr
