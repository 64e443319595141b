"""`shardwise launch` beside torchrun: the same scripts, the same variables, and nothing left behind."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from e2e.processes import Command, shardwise, wait_for, working_in
from refusals import assert_refused

LAUNCH = [sys.executable, "-m", "shardwise", "launch"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]

SCRIPT = """
import atexit, os, signal, sys, time
import torch, torch.distributed as dist

atexit.register(lambda: os.write(1, f"atexit {os.environ['RANK']}\\n".encode()))
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group("gloo")
rank, total = dist.get_rank(), torch.ones(1)
dist.all_reduce(total)
os.write(1, f"sum {rank} {int(total)} {sys.argv[1:]} {__name__}\\n".encode())  # one write per line
if "kill" in sys.argv and rank == 1 and attempt < int(sys.argv[-1]):
    os.kill(os.getpid(), signal.SIGKILL)
if "raise" in sys.argv and rank == 1:
    raise ValueError("rank one is tired")
if "leave" in sys.argv and rank == 1:
    os._exit(7)
if "sleep" in sys.argv:
    time.sleep(100)
if "ignore" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("waiting", flush=True)
    time.sleep(200)
if "save" in sys.argv:
    def save(*_):
        print("saved", rank, flush=True)
        sys.exit(75)
    signal.signal(signal.SIGTERM, save)
    signal.signal(signal.SIGUSR1, save)
    print("waiting", flush=True)
    time.sleep(100)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path


def run(folder, command, **environ):
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, timeout=200, env={**os.environ, **environ}
    )


def launch(folder, *arguments, **environ):
    return shardwise(folder, "launch", *arguments, **environ)


def test_script_runs_as_under_torchrun_with_its_variables(folder):
    # One write per line: torchrun's ranks share a pipe.
    (folder / "variables.py").write_text(
        SCRIPT + "\nimport json; os.write(1, (json.dumps(dict(os.environ)) + chr(10)).encode())\n"
    )
    options = ["--nproc_per_node=2", "variables.py", "--lr", "1"]
    ours, theirs = run(folder, [*LAUNCH, *options]), run(folder, [*TORCHRUN, "--standalone", *options])
    assert ours.returncode == theirs.returncode == 0, ours.stderr
    assert printed_lines(ours) == printed_lines(theirs)
    assert "atexit 1" in ours.stdout
    assert not working_in(folder)
    ours, theirs = variables_by_rank(ours), variables_by_rank(theirs)
    names = {name for name in theirs["0"] if re.match(r"RANK|LOCAL_|WORLD_|GROUP_|ROLE_|MASTER_|TORCHELASTIC_", name)}
    missing = names - set(ours["0"]) - {"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE"}
    assert not missing
    same = (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "ROLE_RANK",
        "TORCHELASTIC_RESTART_COUNT",
    )
    assert all(ours[rank][name] == theirs[rank][name] for rank in ("0", "1") for name in same)


def printed_lines(done):
    return sorted(line for line in done.stdout.splitlines() if not line.startswith("{"))


def variables_by_rank(done):
    """Return the environment variables that each rank printed as JSON."""
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {environ["RANK"]: environ for environ in found}


def test_module_spawned_workers_and_pickles_find_their_way_back(folder):
    (folder / "spawning.py").write_text(
        "import multiprocessing as mp, os, sys, pickle\n"
        "def work(rank): print('spawned', rank, __name__, flush=True)\n"
        "class Thing: pass\n"
        "if __name__ == '__main__':\n"
        "    if sys.argv[1] == 'x':\n"
        "        import torch.multiprocessing as tmp\n"
        "        tmp.spawn(work, nprocs=1)\n"
        "    assert type(pickle.loads(pickle.dumps(Thing()))) is Thing\n"
        "    print('main', sys.argv[1:], __spec__ is not None, flush=True)\n"
    )
    as_script = launch(folder, "--nproc", "1", "spawning.py", "x")
    assert as_script.returncode == 0, as_script.stderr
    assert "spawned 0 __mp_main__" in as_script.stdout
    assert "main ['x'] False" in as_script.stdout
    as_module = launch(folder, "-m", "spawning", "y")
    assert "main ['y'] True" in as_module.stdout, as_module.stderr


def test_ranks_under_a_profiler_are_fresh_processes_and_a_note_reports_it(folder):
    (folder / "fresh.py").write_text("import sys; print('torch' in sys.modules)")
    done = launch(folder, "fresh.py", NSYS_PROFILING_SESSION_ID="1")
    assert done.stdout == "False\n", done.stderr
    assert "a profiler is attached (NSYS_PROFILING_SESSION_ID)" in done.stderr


def test_program_that_is_not_python(folder):
    done = launch(folder, "--nproc", "2", "--no-python", "sh", "-c", "echo rank $RANK of $WORLD_SIZE")
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2", "rank 1 of 2"], done.stderr


def test_restart_after_kill_and_then_success(folder):
    done = launch(folder, "--nproc", "2", "--max-restarts", "3", "script.py", "kill", "2")
    assert done.returncode == 0, done.stderr
    assert "rank 1 failed: SIGKILL; restart 2 of 3" in done.stderr
    assert not working_in(folder)


def test_fresh_processes_join_and_restart_too(folder):
    # The rank dies before it imports torch, which every fresh process does anew.
    dying = "import os, signal\nif os.environ['RANK'] + os.environ['TORCHELASTIC_RESTART_COUNT'] == '10':\n"
    (folder / "dying.py").write_text(dying + "    os.kill(os.getpid(), signal.SIGKILL)\n" + SCRIPT)
    done = launch(folder, "--nproc", "2", "--start-method", "spawn", "--max-restarts", "1", "dying.py")
    assert done.returncode == 0, done.stderr
    assert "rank 1 failed: SIGKILL; restart 1 of 1" in done.stderr
    assert done.stdout.count("sum") == 2
    assert not working_in(folder)


@pytest.mark.representative("raise", "kill")
@pytest.mark.parametrize(
    ("how", "last"),
    [
        ("raise", "rank 1 failed first: ValueError: rank one is tired"),
        ("kill", "rank 1 failed first: SIGKILL (usually the kernel when host memory runs out, or kill -9)"),
        ("leave", "rank 1 failed first: exit code 7"),
    ],
    ids=["raise", "kill", "leave"],
)
def test_report_ends_with_the_root_cause(folder, how, last):
    done = launch(folder, "--nproc", "2", "script.py", how, "9")
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-2].startswith(last), done.stderr
    assert done.stderr.count("in <module>") <= 2, done.stderr  # one traceback each, also of the rank that failed first
    assert done.stderr.count('raise ValueError("rank one is tired")') == (how == "raise"), done.stderr
    assert not working_in(folder)


@pytest.mark.representative("fork-15-130", "fork-9--9", "spawn-9--9")
@pytest.mark.parametrize(
    ("method", "number", "code"),  # every signal and method: test_launch_proofs, in `make prove`
    [
        ("fork", signal.SIGINT, 130),
        ("fork", signal.SIGTERM, 130),
        ("fork", signal.SIGHUP, 130),
        ("fork", signal.SIGKILL, -9),
        ("spawn", signal.SIGTERM, 130),
        ("spawn", signal.SIGKILL, -9),
    ],
)
def test_nothing_outlives_the_launcher(folder, method, number, code):
    output = folder / "out"
    with output.open("w") as file:
        launcher = subprocess.Popen(
            [*LAUNCH, "--nproc", "2", "--start-method", method, "script.py", "sleep"],
            cwd=folder,
            stdout=file,
            stderr=file,
        )
    wait_for(lambda: output.read_text().count("sum") == 2, seconds=120)
    launcher.send_signal(number)
    assert launcher.wait(25) == code
    wait_for(lambda: not working_in(folder), seconds=30)


def test_ranks_that_ignore_sigterm_are_killed_by_a_second_ctrl_c(folder):
    launcher = Command(folder, "launch", "--nproc", "2", "script.py", "ignore")
    wait_for(lambda: launcher.output().count("waiting") == 2, seconds=120)
    launcher.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert launcher.is_running()
    launcher.send_signal(signal.SIGINT)
    assert launcher.finish(25).returncode == 130  # asked once only, they would have 30 s
    assert not working_in(folder)


@pytest.mark.representative("15")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_stop_request_lets_ranks_save_and_ends_with_75(folder, number):
    launcher = Command(folder, "launch", "--nproc", "2", "script.py", "save")
    wait_for(lambda: launcher.output().count("waiting") == 2, seconds=120)
    launcher.send_signal(number)
    done = launcher.finish(25)
    assert done.returncode == 75
    assert done.stdout.count("saved") == 2


def open_files(pid):
    """Return what the open files of a process are; one that is closed meanwhile is left out."""
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            yield str(entry.readlink())


def test_only_loopback_listens(folder):
    launcher = Command(folder, "launch", "--nproc", "2", "script.py", "sleep")
    try:
        wait_for(lambda: launcher.output().count("sum") == 2, seconds=120)
        inodes = {link[8:-1] for pid in working_in(folder) for link in open_files(pid) if link.startswith("socket:")}
        rows = [
            line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
        ]
        listening = [row[1] for row in rows if row[3] == "0A" and row[9] in inodes]
        assert listening
        assert {address.partition(":")[0] for address in listening} == {"0100007F"}  # 127.0.0.1
    finally:
        launcher.send_signal(signal.SIGTERM)
        launcher.finish(60)


def test_output_goes_where_it_is_sent(folder):
    done = launch(folder, "--nproc", "2", "--tee", "3", "--log-dir", "logs", "script.py")
    assert "[rank1]: sum 1 2" in done.stdout, done.stderr
    assert "sum 1 2" in (folder / "logs" / "logs" / "rank1.out").read_text()
    quiet = launch(folder, "--nproc", "2", "--redirects", "3", "script.py")
    assert quiet.stdout == ""
    filtered = launch(folder, "--nproc", "2", "--local_ranks_filter", "0", "script.py")
    assert "sum 0" in filtered.stdout
    assert "sum 1" not in filtered.stdout


def test_options_may_come_from_torchruns_variables(folder):
    done = launch(folder, "script.py", PET_NPROC_PER_NODE="2")
    assert done.stdout.count("sum") == 2, done.stderr


def test_dry_run_prints_and_starts_nothing(folder):
    done = launch(folder, "--nproc", "2", "--dry-run", "script.py", "--lr", "1")
    assert "RANK=1" in done.stdout
    assert "script.py --lr 1" in done.stdout
    assert not (folder / "runs").exists()


BAD = {
    "no such script": (["nowhere.py"], "nowhere.py does not exist"),
    "no such module": (["-m", "no_such_module"], "no_such_module"),
    "no such program": (["--no-python", "no-such-program"], "[launch.program-not-found]"),
    "node rank beyond nnodes": (["--node_rank", "1", "script.py"], "[launch.node-rank-invalid]"),
    "several nodes without a rendezvous endpoint": (["--nnodes", "2", "script.py"], "[launch.endpoint-missing]"),
    "nproc that is not a number": (["--nproc_per_node", "many", "script.py"], "many"),
    "no GPU to count": (["--nproc_per_node", "gpu", "script.py"], "[launch.no-gpu]"),
    "contradictory flags": (["-m", "--no-python", "script.py"], "[cli.options-conflict]"),
    "two ports": (["--master_port", "1234", "--rdzv_endpoint", "h:1235", "script.py"], "1235"),
    "unknown rendezvous": (["--rdzv_backend", "etcd", "script.py"], "static or c10d"),
    "unknown option": (["--nproc_per_nodes", "2", "script.py"], "nproc-per-node"),
    "bad tee": (["--tee", "9", "script.py"], "--tee"),
    "run directory in use": (["--log-dir", ".", "script.py"], "not empty"),
}


@pytest.mark.parametrize(("arguments", "expected"), BAD.values(), ids=BAD)
def test_bad_input_is_refused_at_once(folder, arguments, expected):
    done = launch(folder, *arguments)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert expected in done.stderr
    assert not (folder / "runs").exists()


def test_port_that_is_taken_is_refused(folder):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = launch(folder, "--master_port", str(taken.getsockname()[1]), "script.py")
    assert done.returncode == 2
    assert_refused(done.stderr, "launch.port-in-use")
    assert not working_in(folder)


MEMORY = Path("/sys/fs/cgroup/memory")


@pytest.mark.skipif(not (MEMORY.is_dir() and os.access(MEMORY, os.W_OK)), reason="needs a writable memory cgroup (v1)")
def test_rank_that_the_kernel_kills_for_memory_is_reported_as_out_of_memory(folder):
    (folder / "hungry.py").write_text(
        "import os\nif os.environ['RANK'] == '1':\n    data = [bytearray(50_000_000) for _ in range(100)]\n"
    )
    group = MEMORY / f"shardwise-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(900 << 20))
        enter = f'echo $$ > {group}/cgroup.procs; exec "$@"'
        done = run(folder, ["sh", "-c", enter, "sh", *LAUNCH, "--nproc", "2", "hungry.py"])
        assert done.returncode == 1
        assert "rank 1 failed first: SIGKILL by the kernel, host memory ran out" in done.stderr
    finally:
        wait_for(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()


def test_spawned_data_loader_workers_read_for_a_forked_rank(folder):
    (folder / "loading.py").write_text(
        "import torch\nfrom torch.utils.data import DataLoader, Dataset\n"
        "class Numbers(Dataset):\n"
        "    def __len__(self): return 4\n"
        "    def __getitem__(self, index): return index\n"
        "if __name__ == '__main__':\n"
        "    loader = DataLoader(Numbers(), num_workers=1, multiprocessing_context='spawn')\n"
        "    print(sum(int(x) for x in loader))\n"
    )
    done = launch(folder, "--nproc", "1", "loading.py")
    assert done.stdout == "6\n", done.stderr


GALLERY = Path(__file__).resolve().parents[2] / "examples" / "01-ddp-basics"


@pytest.mark.representative("ddp_mnist.py-accuracy")
@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("train_ddp.py --epochs 1 --batch-size 64 --lr 0.001 --limit 256 --data none", "test accuracy"),
        ("ddp_mnist.py --epochs 1 --limit 256 --data none", "accuracy"),
        ("ddp_training.py --epochs 1 --limit 256 --data none --checkpoint {folder}/c.pt", "epoch"),
        ("train_byt5_ddp.py --steps 3 --report 1", "loss"),
    ],
    ids=lambda value: value.split()[0],
)
def test_gallery_scripts_run_unchanged(folder, command, expected):
    arguments = command.format(folder=folder).split()
    done = launch(GALLERY, "--nproc_per_node=2", "--log-dir", str(folder / "run"), *arguments, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout
