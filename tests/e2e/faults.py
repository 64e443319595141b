"""A training with a fault on rank 1 of two, by name; run by `shardwise launch` and by torchrun alike."""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

STEPS, AT = 60, 5


class Data(Dataset):
    """Sixty-four rows, of which one may never come."""

    def __init__(self, stuck):
        self.stuck = stuck

    def __len__(self):
        return STEPS

    def __getitem__(self, index):
        if self.stuck and index == AT:
            happened()
            time.sleep(1000)  # line: loader
        return torch.ones(4)


def happened():
    """Write down when the fault began."""
    Path("injected").write_text(str(time.time()))


def stuck_in_python():
    time.sleep(1000)  # line: python


def stuck_in_c():
    """Lock what is locked, for ever, while holding the interpreter lock."""
    lock = ctypes.create_string_buffer(64)
    libc = ctypes.PyDLL(None)
    libc.pthread_mutex_lock(lock)
    libc.pthread_mutex_lock(lock)  # line: c


def first(tensor):
    dist.all_reduce(tensor)  # line: first


def second(tensor):
    dist.all_reduce(tensor)  # line: second


def other_operation(tensor):
    dist.broadcast(tensor, 0)  # line: operation


def other_shape(_):
    dist.all_reduce(torch.ones(6))  # line: shape


def other_dtype(_):
    dist.all_reduce(torch.ones(4, dtype=torch.int32))  # line: dtype


def other_reduce_operation(tensor):
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)  # line: reduce


STUCK = {"python": stuck_in_python, "c": stuck_in_c, "dead": lambda: os.kill(os.getpid(), signal.SIGKILL)}
OTHER = {
    "operation": other_operation,
    "shape": other_shape,
    "dtype": other_dtype,
    "reduce": other_reduce_operation,
    "skip": lambda _: None,
}


def step(fault, rank, number, batch):
    """Two collectives; on rank 1 something else, once."""
    is_odd = rank == 1 and number == AT
    if is_odd and fault != "loader":
        happened()
    if is_odd and fault in STUCK:
        STUCK[fault]()
    if rank == 1 and fault == "slow":
        time.sleep(0.1)
    calls = [OTHER.get(fault, first) if is_odd else first, second]
    for call in reversed(calls) if rank == 1 and fault == "order" else calls:
        call(batch)


def main(fault):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    loader = DataLoader(Data(stuck=fault == "loader" and rank == 1), num_workers=2 if fault == "loader" else 0)
    for number, batch in enumerate(loader):  # line: loop
        time.sleep(0.1)
        step(fault, rank, number, batch[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
