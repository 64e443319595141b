"""Torch's ways to train on several ranks, over MPI, against one process: run under mpirun with the names of some.

    mpirun -n 2 python mpi_training.py ddp fsdp2 tensor pipeline checkpoint zero

Every rank computes what one process would, and compares. Prints "equal: <name>" on rank 0.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import shardwise as sw

STEPS = 3
BATCH = 8


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 6), nn.Tanh(), nn.Linear(6, 6)).double()


def batches():
    torch.manual_seed(1)
    return [(torch.randn(BATCH, 6).double(), torch.randn(BATCH, 6).double()) for _ in range(STEPS)]


def alone():
    """What one process has after training: its losses, and its model."""
    net = model()
    return train(net, torch.optim.AdamW(net.parameters(), lr=0.01), batches()), net


def train(net, optimizer, data):
    losses = []
    for inputs, targets in data:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def own_shard(world):
    return [tuple(tensor.chunk(world.size)[world.rank] for tensor in batch) for batch in batches()]


def mean_of_ranks(losses):
    dist.all_reduce(losses, dist.ReduceOp.AVG)
    return losses


def ddp(world):
    # Small buckets: several all-reduces are under way during one backward.
    net = DistributedDataParallel(model(), bucket_cap_mb=0.0005)
    return mean_of_ranks(train(net, torch.optim.AdamW(net.parameters(), lr=0.01), own_shard(world)))


def fsdp2(world):
    net = model()
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(net)
    return mean_of_ranks(train(net, torch.optim.AdamW(net.parameters(), lr=0.01), own_shard(world)))


def fsdp2_bf16(world):
    """Not equal, but finite and near: parameters and gradients travel in 16 bits."""
    net = model().float()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, output_dtype=torch.float32)
    fully_shard(net, mp_policy=policy)
    data = [tuple(tensor.float() for tensor in batch) for batch in own_shard(world)]
    losses = mean_of_ranks(train(net, torch.optim.AdamW(net.parameters(), lr=0.01), data)).double()
    wanted, _ = alone()
    assert (losses - wanted).abs().max() < 0.02, (losses, wanted)
    return wanted


def zero(world):
    net = DistributedDataParallel(model())
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=0.01)
    return mean_of_ranks(train(net, optimizer, own_shard(world)))


def tensor(world):
    net = model()
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("tp",))
    parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel(), "4": ColwiseParallel(
        output_layouts=torch.distributed.tensor.Replicate())})  # fmt: skip
    return train(net, torch.optim.AdamW(net.parameters(), lr=0.01, foreach=False), batches())


def pipeline(world):
    layers = list(model())
    bounds = [0, 2, 5] if world.size == 2 else [0, 1, 2, 3, 5]
    part = nn.Sequential(*layers[bounds[world.rank] : bounds[world.rank + 1]])
    stage = PipelineStage(part, world.rank, world.size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
    parameters = list(part.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=0.01) if parameters else None
    losses = torch.zeros(STEPS, dtype=torch.float64)
    for number, (inputs, targets) in enumerate(batches()):
        if optimizer:
            optimizer.zero_grad()
        micro = []
        if world.rank == world.size - 1:
            schedule.step(target=targets, losses=micro)
            losses[number] = torch.stack(micro).mean().detach()
        else:
            schedule.step(*([inputs] if world.is_main else []))
        if optimizer:
            optimizer.step()
    dist.broadcast(losses, world.size - 1)
    return losses


def checkpoint(world):
    """Sharded weights written by all ranks and read by all into whole ones."""
    folder = [tempfile.mkdtemp() if world.is_main else None]
    dist.broadcast_object_list(folder)
    net = model()
    fully_shard(net)
    losses = mean_of_ranks(train(net, torch.optim.AdamW(net.parameters(), lr=0.01), own_shard(world)))
    dcp.save({"model": net.state_dict()}, checkpoint_id=folder[0])
    read = {"model": model().state_dict()}
    dcp.load(read, checkpoint_id=folder[0])
    _, wanted = alone()
    for name, value in wanted.state_dict().items():
        torch.testing.assert_close(read["model"][name], value, rtol=1e-9, atol=1e-12)
    return losses


def main():
    with sw.world(backend="mpi", timeout_s=60) as world:
        wanted, _ = alone()
        for name in sys.argv[1:]:
            torch.testing.assert_close(globals()[name](world), wanted, rtol=1e-9, atol=1e-12)
            if world.is_main:
                print(f"equal: {name}", flush=True)


if __name__ == "__main__":
    main()
