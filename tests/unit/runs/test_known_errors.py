"""Known errors are recognised by the messages of torch, NCCL and the kernel; real ones where they can be made here."""

import signal
import socket
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from shardwise.runs.failure import KNOWN_ERRORS, translate
from shardwise.testing import run_ranks

MESSAGES = [
    (
        "same GPU twice",
        "NCCL error, invalid usage\nLast error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA",
    ),
    (
        "NCCL system error",
        "NCCL error in: NCCLUtils.cpp:77, unhandled system error, NCCL version 2.27.3\nncclSystemError: x",
    ),
    (
        "peer lost",
        "NCCL error: remote process exited or there was a network error\nncclRemoteError: a call failed",
    ),
    ("peer lost", "[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.5]:41234"),
    ("peer lost", "ncclSystemError: System call failed\nLast error:\nsocketProgress: Connection closed by remote peer"),
    (
        "device memory",
        "OutOfMemoryError\nCUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79",
    ),
    (
        "host memory",
        "RuntimeError\n[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes",
    ),
    ("host memory", "RuntimeError: DataLoader worker (pid 77) is killed by signal: Killed."),
    ("disk full", "OSError\n[Errno 28] No space left on device: '/data/runs/a/logs/rank0.out'"),
    ("disk full", "OSError\n[Errno 122] Disk quota exceeded"),
    ("shared memory", "DataLoader worker (pid 77) is killed by signal: Bus error. It is possible that dataloader's"),
    ("shared memory", "RuntimeError: unable to write to file </torch_123_456_0>: No space left on device (28)"),
    ("driver", "The NVIDIA driver on your system is too old (found version 11040)."),
    ("driver", "CUDA driver version is insufficient for CUDA runtime version"),
    ("no interface", "misc/socket.cc NCCL WARN Bootstrap : no socket interface found"),
    ("address in use", "DistNetworkError: The server socket has failed to listen. code: -98, name: EADDRINUSE"),
]


@pytest.mark.parametrize(("name", "message"), MESSAGES, ids=[f"{name}: {message[:30]}" for name, message in MESSAGES])
def test_messages_of_libraries_are_recognised(name, message):
    assert translate(message).name == name


@pytest.mark.parametrize(
    "message", ["ValueError: rank one is tired", "requests: Connection reset by peer", "KeyError: 'memory'", ""]
)
def test_other_errors_are_left_alone(message):
    assert translate(message) is None


def test_a_bus_error_means_shared_memory_and_other_signals_mean_nothing():
    assert translate("", -signal.SIGBUS).name == "shared memory"
    assert translate("", -signal.SIGSEGV) is None


def test_every_known_error_has_a_fix():
    assert len({error.name for error in KNOWN_ERRORS}) == len(KNOWN_ERRORS)
    assert all(error.means and error.todo for error in KNOWN_ERRORS)


def half_used(world):
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.ModuleDict({"used": torch.nn.Linear(2, 2), "idle": torch.nn.Linear(2, 2)}))
    model.module.forward = model.module["used"].forward
    try:
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_ddp_with_unused_parameters_is_recognised_by_the_message_of_torch():
    assert [translate(message).name for message in run_ranks(half_used, 2)] == ["unused parameters"] * 2


def test_a_port_in_use_is_recognised_by_the_message_of_torch():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(dist.DistNetworkError) as error:
            dist.TCPStore("127.0.0.1", taken.getsockname()[1], is_master=True, timeout=timedelta(seconds=5))
    assert translate(str(error.value)).name == "address in use"
    assert translate("OSError: [Errno 98] Address already in use").name == "address in use"
