"""Machines made of facts, for checks."""

import msgspec

from shardwise.diagnosis.machine.facts import (
    Clock,
    Cpu,
    Disk,
    Driver,
    GpuFacts,
    HostMemory,
    Interface,
    Machine,
    Network,
    ProcessLimits,
    RdmaDevice,
    Torch,
)

GIB = 1 << 30
LOOPBACK = Interface(name="lo", up=True, loopback=True, addresses=("127.0.0.1",))
ETHERNET = Interface(name="eth0", up=True, addresses=("10.0.0.5",))
CARD = RdmaDevice(name="mlx5_0", driver="mlx5_core", active=True)
IDLE = GpuFacts(name="NVIDIA H100 80GB HBM3", total_bytes=80 * GIB, used_bytes=0)

HEALTHY = Machine(
    gpus=(IDLE, IDLE),
    hidden_gpus=0,
    driver=Driver(version="570.86", cuda=(12, 8)),
    torch=Torch(version="2.13.0+cu128", cuda="12.8", nccl="2.27.3", gloo=True, num_gpus=2),
    network=Network(
        interfaces=(LOOPBACK, ETHERNET),
        rdma=(CARD,),
        hostname="node7",
        addresses=("10.0.0.5",),
        back_name="node7.cluster",
    ),
    limits=ProcessLimits(nofile=65536, memlock_bytes=None, nproc=None),
    memory=HostMemory(
        total_bytes=512 * GIB, available_bytes=500 * GIB, shm_total_bytes=256 * GIB, shm_free_bytes=256 * GIB
    ),
    cpu=Cpu(cores=4, allowed=(0, 1, 2, 3), nodes=((0, 1), (2, 3))),
    disk=Disk(path="/data", total_bytes=1000 * GIB, free_bytes=500 * GIB, write_bytes_s=1e9),
    clock=Clock(now=1.8e9, newest_file=1.7e9, synchronised=True),
)


def changed(**parts):
    """HEALTHY with other facts: whole parts, or dictionaries of the fields to change in one."""
    return msgspec.structs.replace(
        HEALTHY,
        **{
            name: msgspec.structs.replace(getattr(HEALTHY, name), **part) if isinstance(part, dict) else part
            for name, part in parts.items()
        },
    )
