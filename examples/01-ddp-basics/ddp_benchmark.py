"""Scaling efficiency of plain PyTorch DDP: how much of N processes one gets, measured in one run.

    torchrun --nproc_per_node=2 ddp_benchmark.py
    torchrun --nproc_per_node=8 ddp_benchmark.py --batch-size 256 --steps 30

The first 1, 2, 4, ... ranks train a ResNet-18 on random images while the others wait; then all of them. Twice:

strong scaling: the global batch stays, each rank gets its part of it. N processes should take 1/N of the time.
weak scaling: every rank keeps `--batch-size` samples, the global batch grows. N processes should take the same time.

Worlds take turns, one step each, so that a busy machine slows all of them alike. Medians of the slowest rank's times.
"""

import argparse
import os
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from resnet import resnet18
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

Key = tuple[str, int]
"""("strong" or "weak", processes)."""


def main() -> None:
    options = parse_options()
    device = start_process_group()
    if options.batch_size < 2 * dist.get_world_size():  # batch norm needs two samples
        raise SystemExit(f"--batch-size {options.batch_size} is less than two samples for each process")
    # Waiting ranks wait here, on gloo and the CPU: a barrier of NCCL would keep their GPUs busy.
    control = dist.new_group(backend="gloo")
    steps = make_steps(options.batch_size, device)
    times = measure(steps, options.steps, device, control)
    if dist.get_rank() == 0:
        print(f"ResNet-18, batch {options.batch_size}, on {device.type}, backend {dist.get_backend()}")
        print(report(times, options.batch_size))
    dist.barrier(control)
    steps.clear()  # the wrappers go before their groups, see train_ddp.py
    dist.destroy_process_group()


def world_sizes(most: int) -> list[int]:
    """Return 1, 2, 4, ... and `most` itself."""
    return sorted({1 << power for power in range(most.bit_length())} | {most})


def make_steps(batch_size: int, device: torch.device) -> dict[Key, Callable[[], None] | None]:
    """Return a training step for each world, None where this rank only waits (makes groups, on every rank)."""
    rank, steps = dist.get_rank(), {}
    for size in world_sizes(dist.get_world_size()):
        group = dist.new_group(list(range(size)))  # every rank calls it, members or not
        model = training_model(size, group, device) if rank < size else None
        # Parts of a batch that do not divide evenly differ by one sample; DDP waits for the larger.
        strong = len(range(rank, batch_size, size))
        weak = batch_size
        for kind, samples in (("strong", strong), ("weak", weak)):
            steps[kind, size] = None if model is None else training_step(model, samples, device)
    return steps


def training_model(size: int, group: dist.ProcessGroup, device: torch.device) -> nn.Module:
    """Return the network: plain for one process, the yardstick; wrapped for more (communicates over `group`)."""
    torch.manual_seed(0)
    model = resnet18().to(device)
    if size == 1:
        return model
    return DistributedDataParallel(
        model, device_ids=[device.index] if device.type == "cuda" else None, process_group=group
    )


def training_step(model: nn.Module, samples: int, device: torch.device) -> Callable[[], None]:
    """Return forward, backward and update on `samples` random images."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    images = torch.randn(samples, 1, 28, 28, device=device)
    labels = torch.randint(10, (samples,), device=device)

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def measure(
    steps: dict[Key, Callable[[], None] | None], rounds: int, device: torch.device, control: dist.ProcessGroup
) -> dict[Key, float]:
    """Return the median over rounds of the slowest rank's seconds (communicates over `control`, on every rank)."""
    times: dict[Key, list[float]] = {key: [] for key in steps}
    for turn in range(rounds + 2):  # the first two warm up: memory, and DDP's order of buckets
        for key, step in steps.items():
            dist.barrier(control)
            began = time.perf_counter()
            if step is not None:
                step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            elapsed = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
            dist.all_reduce(elapsed, dist.ReduceOp.MAX, group=control)
            if turn >= 2:
                times[key].append(elapsed.item())
    return {key: median(values) for key, values in times.items()}


def report(times: dict[Key, float], batch_size: int) -> str:
    """Return the table: what N processes gain over one, as a share of N."""
    lines = [
        f"{'scaling':<10}{'processes':>10}{'global batch':>14}{'ms a step':>11}{'samples/s':>11}{'efficiency':>12}"
    ]
    for (kind, size), seconds in sorted(times.items()):
        # <efficiency>
        samples = batch_size * (size if kind == "weak" else 1)
        throughput = samples / seconds
        efficiency = throughput / (size * batch_size / times[kind, 1])  # 1.0: N processes do N times the work of one
        # </efficiency>
        lines.append(f"{kind:<10}{size:>10}{samples:>14}{1e3 * seconds:>11.1f}{throughput:>11.1f}{efficiency:>12.1%}")
    return "\n".join(lines)


def start_process_group() -> torch.device:
    """Join the process group that torchrun describes, and return this rank's device."""
    if "RANK" not in os.environ:
        raise SystemExit("start it by torchrun --nproc_per_node=2 ddp_benchmark.py")
    if torch.cuda.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])):
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Scaling efficiency of plain PyTorch DDP")
    parser.add_argument("--batch-size", type=int, default=32, help="strong: of all ranks together; weak: of each")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each world")
    return parser.parse_args()


if __name__ == "__main__":
    main()
