"""A small network on MNIST with DDP, started by anything: torchrun, bare srun, mpirun, or python alone.

    torchrun --nproc_per_node=2 ddp_mnist.py
    srun --gpus=4 --ntasks=4 python ddp_mnist.py
    mpirun -n 2 python ddp_mnist.py --backend mpi
    python ddp_mnist.py

`sw.world()` reads who it is from whichever variables the launcher set, starts the process group on the right
device, and ends it with the block. The rest is PyTorch as usual.
"""

import argparse

import torch
from idx_data import load_images
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

import shardwise as sw


def network() -> nn.Module:
    """Return an untrained network, [N, 1, H, W] to [N, 10], for images of any size from 4 x 4."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def train_epoch(world, model: nn.Module, loader: DataLoader, optimizer: torch.optim.Optimizer) -> float:
    """Train for one epoch and return the mean loss over all ranks' samples (all-reduces)."""
    loss_sum, samples = torch.zeros((), dtype=torch.float64, device=world.device), 0
    for batch in loader:
        images, labels = (part.to(world.device) for part in batch)
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss_sum += loss.detach() * len(labels)
        samples += len(labels)
    total = world.sum({"loss": loss_sum.item(), "samples": samples})
    return total["loss"] / total["samples"]


@torch.no_grad()
def evaluate(world, model: nn.Module, dataset: Dataset) -> float:
    """Return the accuracy over `dataset`, each sample counted exactly once (all-reduces)."""
    mine = Subset(dataset, range(world.rank, len(dataset), world.size))
    correct = 0
    for batch in DataLoader(mine, batch_size=500):
        images, labels = (part.to(world.device) for part in batch)
        correct += (model(images).argmax(dim=1) == labels).sum().item()
    total = world.sum({"correct": correct, "samples": len(mine)})
    return total["correct"] / total["samples"]


def main() -> None:
    parser = argparse.ArgumentParser(description="A small network on MNIST with DDP, started by anything")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="samples per step of each process")
    parser.add_argument("--lr", type=float, default=0.002)
    parser.add_argument("--backend", help="gloo, nccl or mpi (default: nccl on GPUs, else gloo)")
    parser.add_argument("--data", default="data/mnist", help="folder of IDX files, plain or gzipped")
    parser.add_argument("--limit", type=int, help="train on the first LIMIT samples only, for a quick try")
    options = parser.parse_args()

    with sw.world(backend=options.backend) as world:
        data = load_images(options.data, options.limit)
        world.print(data.note)
        world.print(f"world size {world.size}, on {world.device.type}, over {world.backend}")

        sampler = DistributedSampler(data.train, num_replicas=world.size, rank=world.rank)
        loader = DataLoader(data.train, options.batch_size, sampler=sampler)
        model = DistributedDataParallel(network().to(world.device))
        optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)

        for epoch in range(options.epochs):
            sampler.set_epoch(epoch)
            loss = train_epoch(world, model, loader, optimizer)
            world.print(f"epoch {epoch + 1} of {options.epochs}: loss {loss:.4f}")
        world.print(f"test accuracy {evaluate(world, model.module, data.test):.2%}")


if __name__ == "__main__":
    main()
