"""The observers, on the machine that runs the tests."""

import os
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
import torch

from shardwise.diagnosis.machine.facts import Machine
from shardwise.diagnosis.machine.observe import (
    observe_clock,
    observe_cpu,
    observe_disk,
    observe_gpus,
    observe_interfaces,
    observe_limits,
    observe_memory,
    observe_network,
    observe_rdma,
    observe_torch,
    read_cpulist,
)
from shardwise.hardware import probe_gpus


def test_every_interface_is_seen_and_loopback_is_one():
    found = {interface.name: interface for interface in observe_interfaces()}
    assert set(found) == {name for _, name in socket.if_nameindex()}
    assert (found["lo"].loopback, found["lo"].up, "127.0.0.1" in found["lo"].addresses) == (True, True, True)


def test_the_host_is_called_what_it_is_called():
    network = observe_network()
    assert network.hostname == socket.gethostname()
    assert all(socket.getaddrinfo(address, None) for address in network.addresses)


def test_the_gpus_are_those_of_the_probe():
    driver, gpus, _ = observe_gpus()
    assert [gpu.name for gpu in gpus] == [gpu.name for gpu in probe_gpus()]
    assert bool(driver.version) or not gpus


def test_hidden_gpus_are_counted(monkeypatch):
    _, before, hidden = observe_gpus()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert observe_gpus()[1:] == ((), len(before) + hidden)


def test_limits_follow_the_process():
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert observe_limits().nofile == (None if soft == resource.RLIM_INFINITY else soft)


def test_shared_memory_is_the_folder_looked_at(tmp_path):
    memory = observe_memory(tmp_path)
    assert memory.shm_total_bytes == os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize
    assert 0 < memory.available_bytes <= memory.total_bytes
    assert observe_memory(tmp_path / "absent").shm_total_bytes == 0


def test_cores_are_those_of_the_affinity():
    cpu = observe_cpu()
    assert set(cpu.allowed) == os.sched_getaffinity(0)
    assert not cpu.nodes or set(cpu.allowed) <= {core for node in cpu.nodes for core in node}


def test_the_kernels_lists_of_cores_are_read():
    assert read_cpulist("0-2,8,10-11\n") == (0, 1, 2, 8, 10, 11)
    assert read_cpulist("\n") == ()


def test_a_disk_is_measured_and_left_clean(tmp_path):
    disk = observe_disk(tmp_path)
    assert disk.write_bytes_s > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_a_folder_that_cannot_be_written_is_an_error():
    disk = observe_disk(Path("/proc/self"))
    assert disk.error
    assert disk.write_bytes_s == 0


def test_the_clock_is_the_clock(tmp_path):
    clock = observe_clock(tmp_path)
    assert abs(clock.now - time.time()) < 60
    assert clock.newest_file <= clock.now


def test_rdma_devices_are_read_from_sysfs(tmp_path):
    for name, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        (tmp_path / name / "ports" / "1").mkdir(parents=True)
        (tmp_path / name / "ports" / "1" / "state").write_text(state)
    assert [(device.name, device.active) for device in observe_rdma(tmp_path)] == [("mlx5_0", True), ("mlx5_1", False)]
    assert list(observe_rdma(tmp_path / "absent")) == []


def test_torch_reports_its_version_and_devices():
    found = observe_torch()
    assert (found.version, found.cuda) == (torch.__version__, torch.version.cuda or "")
    assert bool(found.nccl) == torch.distributed.is_nccl_available()


def test_a_torch_that_cannot_be_imported_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch.so is gone')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert "libtorch.so is gone" in observe_torch().error


def test_the_command_reports_facts_and_verdicts_without_importing_torch_and_fails_with_three(tmp_path):
    code = (
        "import sys; from shardwise.cli.main import main; code = main(['doctor', '--json']);"
        " assert 'torch' not in sys.modules; sys.exit(code)"
    )
    # No limit on open files is too low for the command itself, and this one is too low for ranks.
    command = ["bash", "-c", 'ulimit -n 256; exec "$@"', "bash", sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    report = msgspec.json.decode(done.stdout)
    machine = msgspec.convert(report["facts"], Machine)
    assert (machine.network.hostname, machine.limits.nofile) == (socket.gethostname(), 256)
    [limits] = [verdict for verdict in report["verdicts"] if verdict["name"] == "limits"]
    assert (limits["state"], limits["fix"]) == ("fail", "ulimit -n 65536")
