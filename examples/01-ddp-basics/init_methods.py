"""The four ways in which processes find each other: environment variables, a TCP address, a shared file, a store.

    torchrun --nproc_per_node=2 init_methods.py
    torchrun --nproc_per_node=2 init_methods.py --method file

Each way ends in the same process group. The script joins it, all-reduces one number, prints what
`torch.distributed` knows about the group, and leaves it again. It then passes every parameter of
`init_process_group`, lists the keys of a store, and lets the timeout of a group expire.
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
SHORT_TIMEOUT = timedelta(seconds=2)
"""Of the group in which one rank does not join a collective."""


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


def by_store(rank: int, world_size: int, endpoints: dict) -> dist.Store:
    """A key-value store that the program has made itself, and may use for other things as well."""
    store = dist.TCPStore("127.0.0.1", endpoints["store_port"], world_size, is_master=rank == 0, timeout=TIMEOUT)
    dist.init_process_group("gloo", store=store, world_size=world_size, rank=rank, timeout=TIMEOUT)
    # </methods>
    return store


METHODS: dict[str, Callable[[int, int, dict], dist.Store | None]] = {
    "env": by_environment,
    "tcp": by_address,
    "file": by_file,
    "store": by_store,
}


def with_every_parameter(rank: int, world_size: int, endpoints: dict) -> str:
    """Join a group by all parameters of init_process_group, and return what became of the last three."""
    # <parameters>
    options = dist.ProcessGroupGloo.Options("gloo", timedelta(seconds=1))  # NCCL: dist.ProcessGroupNCCL.Options()
    dist.init_process_group(
        backend="gloo",
        init_method=f"file://{endpoints['file']}-of-parameters",
        timeout=TIMEOUT,
        world_size=world_size,
        rank=rank,
        store=None,  # not together with init_method
        group_name="trainers",  # deprecated and ignored: torch numbers its groups
        pg_options=options,  # read by NCCL; gloo accepts and ignores them
        device_id=None,  # a GPU such as torch.device("cuda", local_rank); gloo has none
    )
    # </parameters>
    name = dist.group.WORLD.group_name
    return f"group_name: 'trainers' passed, {name!r} used; pg_options: {options.backend} ignores them"


def use_store(store: dist.Store, rank: int, world_size: int) -> str:
    """Set, add, wait, get and list keys of a store that all ranks share, and return what they found."""
    # <store>
    if rank == 0:
        store.set("course/run", "run-7")
    arrived = store.add("course/arrived", 1)  # atomic: the ranks get 1, 2, ... in the order in which they come
    if arrived == world_size:
        store.set("course/all", "here")
    store.wait(["course/run", "course/all"], TIMEOUT)  # until both keys exist
    run = store.get("course/run").decode()  # get waits, too; values are bytes
    total = store.add("course/arrived", 0)
    # </store>
    # torch 2.11 may lack list_keys. num_keys also counts a key of TCPStore's own.
    names = sorted(store.list_keys()) if hasattr(store, "list_keys") else []
    ours = [name for name in names if name.startswith("course/")]
    gloos = sum("/cpu/" in name for name in names)
    return (
        f"run {run!r}, {total} arrived, num_keys {store.num_keys()}: {', '.join(ours)}, and {gloos} addresses of gloo"
    )


def let_timeout_expire(rank: int, world_size: int) -> str:
    """Leave one rank out of an all_reduce, and return the error of those that waited (on every rank)."""
    ends: list[str] = [""] * world_size
    end = "did not join"
    # <timeout>
    group = dist.new_group(timeout=SHORT_TIMEOUT)  # init_process_group(timeout=...) limits the default group alike
    if rank != world_size - 1:
        try:
            dist.all_reduce(torch.ones(1), group=group)
        except RuntimeError as error:  # NCCL instead ends the process, by its watchdog
            end = f"{type(error).__name__}: {error}"
    # </timeout>
    # By the default group: the connections of a group that has timed out are closed.
    dist.all_gather_object(ends, end)
    timed_out = [each for each in ends if "Timed out" in each]  # others may see a closed connection only
    kind, _, message = timed_out[0].partition(": ")
    return f"{kind}: {message.partition('] ')[2]}"


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


def built_backends() -> str:
    """Return which backends this torch is built with; `init_process_group` raises an error for the others."""
    available = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
        "ucc": dist.is_ucc_available(),
    }
    return ", ".join(f"{name} {is_available}" for name, is_available in available.items())


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
        show("built", built_backends())
        endpoints = agree_on_endpoints(folder)  # programs usually get these from their configuration
        if "env" in names:
            show_group("env")
        leave_group()
        for name in names:
            if name != "env":
                store = METHODS[name](rank, world_size, endpoints)
                show_group(name)
                if store is not None:
                    show("keys", use_store(store, rank, world_size))
                leave_group()
        if options.method is None:
            show_parameters(rank, world_size, endpoints)


def show_parameters(rank: int, world_size: int, endpoints: dict) -> None:
    """Join by every parameter, then let a timeout expire (communicates, on every rank; rank 0 prints)."""
    line = with_every_parameter(rank, world_size, endpoints)
    show_group("all")
    show("names", line)
    if world_size > 1:
        show("late", let_timeout_expire(rank, world_size))
    leave_group()


def show(name: str, line: str) -> None:
    """Print a line on rank 0 only."""
    if dist.get_rank() == 0:
        print(f"{name:<6}{line}")


def show_group(name: str) -> None:
    """Use the group (communicates, on every rank); rank 0 prints a line."""
    show(name, use_group())


def leave_group() -> None:
    """Leave together: the rank that serves the store must not be first."""
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
