"""The doctor on a machine with a GPU: what the driver reports, and what one rank of NCCL logs."""

import os
import subprocess
import sys

import pytest

from shardwise.diagnosis.machine.checks import check_machine
from shardwise.diagnosis.machine.observe import observe_machine
from shardwise.diagnosis.run.nccl_log import read_nccl_log
from shardwise.runs import RunDirectory

pytestmark = pytest.mark.gpu

ONE_RANK = """
import torch, torch.distributed as dist
torch.cuda.set_device(0)
dist.init_process_group("nccl")
dist.all_reduce(torch.ones(1, device="cuda"))
torch.cuda.synchronize()
dist.destroy_process_group()
"""


def test_driver_torch_and_nccl_agree():
    machine = observe_machine()
    assert machine.driver.version
    assert machine.gpus
    found = {verdict.name: verdict for verdict in check_machine(machine)}
    assert {name: found[name].state for name in ("driver", "torch", "cuda", "nccl")} == dict.fromkeys(
        ("driver", "torch", "cuda", "nccl"), "ok"
    )


def test_nccls_own_log_is_read(tmp_path):
    (tmp_path / "script.py").write_text(ONE_RANK)
    command = [sys.executable, "-m", "shardwise", "launch", "--run-dir", "run", "--preset", "workstation", "script.py"]
    environ = {**os.environ, "NCCL_DEBUG": "INFO"}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [path] = RunDirectory(tmp_path / "run").nccl_logs()
    log = read_nccl_log(path.read_text().splitlines())
    assert log.version
    assert log.read["NCCL_SOCKET_IFNAME"] == "lo"
