"""ResNet-18 on MNIST with plain PyTorch DDP: the six things one does by hand, numbered.

    torchrun --nproc_per_node=2 train_ddp.py --epochs 3 --batch-size 128 --lr 0.001
    torchrun --nproc_per_node=2 train_ddp.py --model resnet50 --epochs 1 --batch-size 32 --limit 512

Steps 1 to 4 are in the code below. Two are outside of it:

Step 5, launch. The line above starts two processes on this machine and sets RANK, LOCAL_RANK, WORLD_SIZE,
    MASTER_ADDR and MASTER_PORT for each; use one process per GPU. With several machines, run it once on
    each: ./launch_multinode_ddp.sh prints the lines.
Step 6, infrastructure. Every machine has this folder, the data and the same torch, and reaches MASTER_ADDR
    on MASTER_PORT. torchrun needs no SSH between them; you need some way to type a line on each.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from idx_data import load_images
from resnet import resnet18, resnet50
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

MODELS = {"resnet18": resnet18, "resnet50": resnet50}


def main() -> None:
    options = parse_options()
    torch.manual_seed(0)  # so that the run can be repeated

    # Step 1: join the process group, and leave it at the end.
    device = start_process_group()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    print_rank0 = print if rank == 0 else lambda *_: None

    data = load_images(options.data, options.limit)
    print_rank0(data.note)
    print_rank0(f"world size {world_size}, on {device.type}, global batch {options.batch_size * world_size}")

    # Step 2: give each rank its own part of the samples. The sampler shuffles, so the loader does not.
    sampler = DistributedSampler(data.train, shuffle=True)
    loader = DataLoader(data.train, options.batch_size, sampler=sampler, pin_memory=device.type == "cuda")

    # Step 4 (3 is in the loop below): wrap the model. All ranks now have rank 0's weights.
    device_ids = [device.index] if device.type == "cuda" else None
    model = DistributedDataParallel(MODELS[options.model]().to(device), device_ids=device_ids)

    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.epochs * len(loader))

    for epoch in range(options.epochs):
        # Step 3: set the epoch of the sampler, or every epoch has the same order.
        sampler.set_epoch(epoch)
        started = time.perf_counter()
        loss = train_epoch(model, loader, optimizer, schedule, device)
        print_rank0(f"epoch {epoch + 1} of {options.epochs}: loss {loss:.4f}, {time.perf_counter() - started:.1f} s")

    # model.module is the network without its wrapper: testing has no gradients to exchange.
    accuracy = evaluate(model.module, data.test, device)
    print_rank0(f"test accuracy {accuracy:.2%}")

    # Step 1, second half. Not in a `finally`: a rank that failed should die at once, for torchrun to see.
    # The wrapper goes first: freed after its group, it can wait for gloo's thread for ever (seen with torch 2.13).
    del model, optimizer, schedule
    dist.destroy_process_group()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="ResNet-18 on MNIST with plain PyTorch DDP")
    parser.add_argument("--model", choices=MODELS, default="resnet18")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=128, help="samples per step of each process")
    parser.add_argument("--lr", type=float, default=0.001, help="Adam's first learning rate, falling to 0")
    parser.add_argument("--data", default="data/mnist", help="folder of IDX files, plain or gzipped")
    parser.add_argument("--limit", type=int, help="train on the first LIMIT samples only, for a quick try")
    return parser.parse_args()


def start_process_group() -> torch.device:
    """Join the process group that torchrun describes, and return this rank's device."""
    if "RANK" not in os.environ:
        raise SystemExit("start it by torchrun --nproc_per_node=2 train_ddp.py")
    # GPUs if each process of this machine can have its own: NCCL refuses to share one.
    if torch.cuda.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])):
        dist.init_process_group("gloo")
        return torch.device("cpu")
    # By local rank, not by rank: on the second of two machines with 4 GPUs each, rank 4 owns GPU 0.
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def train_epoch(model: DistributedDataParallel, loader: DataLoader, optimizer, schedule, device) -> float:
    """Train for one epoch and return the mean loss over all ranks' samples (all-reduces)."""
    model.train()
    loss_sum, samples = torch.zeros((), dtype=torch.float64, device=device), 0
    for batch in loader:
        images, labels = (part.to(device, non_blocking=True) for part in batch)
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()  # while this runs, DDP averages the gradients over the ranks
        optimizer.step()
        schedule.step()
        loss_sum += loss.detach() * len(labels)  # stays on the device: .item() would make every step wait
        samples += len(labels)
    return ratio_over_ranks(loss_sum, samples, device)


@torch.no_grad()
def evaluate(model: nn.Module, dataset: Dataset, device: torch.device) -> float:
    """Return the accuracy over `dataset`, each sample counted exactly once (broadcasts, then all-reduces)."""
    model.eval()
    # Batch norm's running statistics differ between ranks; those of rank 0 are the ones one would save.
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    # A DistributedSampler would repeat samples until every rank has equally many, and count those twice.
    mine = Subset(dataset, range(dist.get_rank(), len(dataset), dist.get_world_size()))
    correct = torch.zeros((), dtype=torch.int64, device=device)
    for batch in DataLoader(mine, batch_size=500):
        images, labels = (part.to(device) for part in batch)
        correct += (model(images).argmax(dim=1) == labels).sum()
    return ratio_over_ranks(correct, len(mine), device)


def ratio_over_ranks(part: torch.Tensor, whole: int, device: torch.device) -> float:
    """Sum both numbers over all ranks, then divide (all-reduces)."""
    both = torch.tensor([part, whole], dtype=torch.float64, device=device)
    dist.all_reduce(both)
    return (both[0] / both[1]).item()


if __name__ == "__main__":
    main()
