"""`shardwise launch` and variables: presets, NCCL's logs by rank, what cannot work, and common failures."""

import json
import os
import socket
import subprocess
import sys

import pytest

from e2e.processes import Command

LAUNCH = ["launch", "--run-dir", "run"]
SPAWN = ("--start-method", "spawn")  # quick: nothing here needs torch
SHOW = "import os; print({k: v for k, v in os.environ.items() if k.startswith(('NCCL', 'OMP', 'CUDA_DEV', 'RANK'))})"
DDP = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.ModuleDict({"used": torch.nn.Linear(2, 2), "idle": torch.nn.Linear(2, 2)}))
model.module.forward = model.module["used"].forward
for _ in range(2):
    model(torch.ones(1, 2)).sum().backward()
"""
FILL = """
import mmap, os
with open("/dev/shm/segment", "w+b") as file:
    file.truncate(8 << 20)
    memory = mmap.mmap(file.fileno(), 8 << 20)
    memory[:] = bytes(8 << 20)
"""


def launch(folder, script, *options, command=(), **environ):
    (folder / "script.py").write_text(script)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("NCCL", "OMP"))}
    argv = [*LAUNCH, *options, "script.py"]
    if not command:
        return Command(folder, *argv, environ={**kept, **environ}).finish()
    return subprocess.run(
        [*command, sys.executable, "-m", "shardwise", *argv],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        env={**kept, **environ},
    )


def shown(done):
    return [eval(line) for line in done.stdout.splitlines()]


def test_a_preset_reaches_every_rank_and_the_users_own_variables_win(tmp_path):
    done = launch(tmp_path, SHOW, "--nproc", "2", "--preset", "gcp", NCCL_DEBUG="WARN")
    assert done.returncode == 0, done.stderr
    ranks = shown(done)
    assert len(ranks) == 2
    for found in ranks:
        assert (found["NCCL_IB_DISABLE"], found["NCCL_BUFFSIZE"]) == ("1", "4194304")
        assert found["NCCL_DEBUG"] == "WARN"
    assert "preset gcp sets NCCL_IB_DISABLE=1" in done.stderr
    assert "NCCL_DEBUG=WARN is already set" in done.stderr
    assert "set NCCL_DEBUG=INFO" in done.stderr
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["NCCL_SOCKET_NTHREADS"] == "4"


def test_the_nccl_log_goes_to_a_file_for_every_rank_and_is_read_after_the_run(tmp_path):
    script = """
import os, socket
path = os.environ["NCCL_DEBUG_FILE"].replace("%h", socket.gethostname()).replace("%p", str(os.getpid()))
open(path, "w").write("vm:1:1 [0] NCCL INFO NCCL_BUFFSIZE set by environment to 4194304.\\n")
"""  # as NCCL fills the pattern in
    done = launch(tmp_path, script, *SPAWN, "--nproc", "2", "--preset", "gcp")
    assert done.returncode == 0, done.stderr
    logs = sorted((tmp_path / "run" / "logs").glob("rank*.nccl.*"))
    assert [path.name.split(".")[0] for path in logs] == ["rank0", "rank1"]
    assert "preset gcp: NCCL_SOCKET_NTHREADS: 4: NCCL never read it" in done.stderr
    command = [sys.executable, "-m", "shardwise", "doctor", "env", "--run", "run", "--json"]
    report = json.loads(subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout)
    assert {verdict["name"]: verdict["state"] for verdict in report["verdicts"]}["NCCL_BUFFSIZE"] == "ok"


def test_a_log_file_that_the_user_names_is_kept(tmp_path):
    done = launch(tmp_path, SHOW, *SPAWN, NCCL_DEBUG="INFO", NCCL_DEBUG_FILE="/tmp/mine.%p")
    assert shown(done)[0]["NCCL_DEBUG_FILE"] == "/tmp/mine.%p"


def test_without_nccl_debug_no_log_file_is_named(tmp_path):
    assert "NCCL_DEBUG_FILE" not in shown(launch(tmp_path, SHOW, *SPAWN))[0]


@pytest.mark.parametrize(
    ("script", "environ", "expected"),
    [
        (DDP, {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "CUDA_VISIBLE_DEVICES": ""}, "SIGSEGV"),
        (SHOW, {"GLOO_SOCKET_IFNAME": "nowhere0"}, "nowhere0 is not an interface of this machine"),
    ],
    ids=["DETAIL with DDP on gloo", "no such interface"],
)
def test_variables_that_cannot_work_are_refused_before_anything_starts(tmp_path, script, environ, expected):
    done = launch(tmp_path, script, **environ)
    assert done.returncode == 2
    assert expected in done.stderr
    assert not (tmp_path / "run").exists()


def test_detail_without_ddp_may_run(tmp_path):
    assert launch(tmp_path, SHOW, *SPAWN, TORCH_DISTRIBUTED_DEBUG="DETAIL").returncode == 0


@pytest.mark.parametrize("options", [(), ("--hosts", "a,b"), ("--kubernetes", "image=i")], ids=["here", "ssh", "pods"])
def test_an_unknown_preset_is_refused(tmp_path, options):
    done = launch(tmp_path, SHOW, "--preset", "gpc", *options)
    assert (done.returncode, "choose one of gcp" in done.stderr) == (2, True)


def test_a_preset_goes_along_to_every_machine(tmp_path):
    done = launch(tmp_path, SHOW, "--preset", "gcp", "--nnodes", "2", "--master-addr", "a", "--dry-run")
    assert done.stdout.count("--preset=gcp") == 2


def last_verdict(done):
    return next(line for line in done.stderr.splitlines() if "failed first" in line)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small /dev/shm needs root")
def test_a_full_shared_memory_is_reported(tmp_path):
    small = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"'
    done = launch(tmp_path, FILL, *SPAWN, command=["unshare", "--mount", "sh", "-c", small, "sh"])
    assert done.returncode == 1
    assert "SIGBUS" in last_verdict(done)
    assert "--shm-size=16g" in last_verdict(done)


def test_a_port_in_use_is_reported(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        script = f"import socket; socket.create_server(('127.0.0.1', {taken.getsockname()[1]}))"
        done = launch(tmp_path, script, *SPAWN)
    assert "ss -ltnp" in last_verdict(done)


@pytest.mark.prove
def test_unused_parameters_are_reported(tmp_path):
    done = launch(tmp_path, DDP, "--nproc", "2")
    assert "find_unused_parameters=True" in last_verdict(done).partition("DDP waits")[2]
