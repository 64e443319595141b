"""The four ways in which processes find each other: environment variables, a TCP address, a shared file, a store.

    torchrun --nproc_per_node=2 init_methods.py
    torchrun --nproc_per_node=2 init_methods.py --method file

Each way ends in the same process group. The script joins it, all-reduces one number, prints what
`torch.distributed` knows about the group, and leaves it again.
"""

import argparse
import os
import socket
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

TIMEOUT = timedelta(seconds=60)
"""Of every operation. The default is 10 minutes for NCCL and 30 for other backends: long, when a rank is missing."""


# <methods>
def by_environment(*_: object) -> None:
    """The usual way: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set by torchrun."""
    dist.init_process_group("gloo", init_method="env://", timeout=TIMEOUT)


def by_address(rank: int, world_size: int, endpoints: dict) -> None:
    """Rank 0 listens at a fixed address; you pass rank and world size."""
    # Under torchrun, whose own process serves a store, rank 0 would not listen but wait for somebody who does.
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    address = f"tcp://127.0.0.1:{endpoints['tcp_port']}"
    dist.init_process_group("gloo", init_method=address, world_size=world_size, rank=rank, timeout=TIMEOUT)


def by_file(rank: int, world_size: int, endpoints: dict) -> None:
    """A file on a disk that all nodes share. It must not exist before: a file of an earlier run misleads the ranks."""
    path = f"file://{endpoints['file']}"
    dist.init_process_group("gloo", init_method=path, world_size=world_size, rank=rank, timeout=TIMEOUT)


def by_store(rank: int, world_size: int, endpoints: dict) -> None:
    """A key-value store that the program has made itself, and may use for other things as well."""
    store = dist.TCPStore("127.0.0.1", endpoints["store_port"], world_size, is_master=rank == 0, timeout=TIMEOUT)
    dist.init_process_group("gloo", store=store, world_size=world_size, rank=rank, timeout=TIMEOUT)
    # </methods>


METHODS: dict[str, Callable[[int, int, dict], None]] = {
    "env": by_environment,
    "tcp": by_address,
    "file": by_file,
    "store": by_store,
}


def use_group() -> str:
    """All-reduce one number and describe the group (communicates, on every rank)."""
    total = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(total)
    return (
        f"is_initialized {dist.is_initialized()}, get_backend {dist.get_backend()}, get_rank {dist.get_rank()},"
        f" get_world_size {dist.get_world_size()}, sum of rank + 1 is {total.item():.0f}"
    )


def agree_on_endpoints(folder: str) -> dict:
    """Return two free ports and a file that does not exist, chosen by rank 0 (broadcasts)."""
    chosen = [{"tcp_port": free_port(), "store_port": free_port(), "file": str(Path(folder) / "rendezvous")}]
    dist.broadcast_object_list(chosen, src=0)
    return chosen[0]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main() -> None:
    parser = argparse.ArgumentParser(description="Four ways to initialize a process group")
    parser.add_argument("--method", choices=METHODS, help="only this one")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        raise SystemExit("start it by torchrun --nproc_per_node=2 init_methods.py")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    names = [options.method] if options.method else list(METHODS)
    with tempfile.TemporaryDirectory() as folder:
        # Once per launch: the store keeps the addresses of a group that has ended, and a second group would read them.
        by_environment()
        endpoints = agree_on_endpoints(folder)  # programs usually get these from their configuration
        if "env" in names:
            show_group("env", rank)
        leave_group()
        for name in names:
            if name != "env":
                METHODS[name](rank, world_size, endpoints)
                show_group(name, rank)
                leave_group()


def show_group(name: str, rank: int) -> None:
    """Use the group (communicates, on every rank); rank 0 prints a line."""
    line = use_group()
    if rank == 0:
        print(f"{name:<6}{line}")


def leave_group() -> None:
    """Leave together: the rank that serves the store must not be first."""
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
