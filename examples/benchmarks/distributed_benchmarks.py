"""Communication and training benchmarks: what DDP and FSDP must send, how long that takes, and what a step costs.

    torchrun --nproc_per_node=2 distributed_benchmarks.py
    torchrun --nproc_per_node=8 distributed_benchmarks.py --width 2048 --layers 16 --batch-size 16 --steps 30
    torchrun --nproc_per_node=2 distributed_benchmarks.py --profile ddp --trace runs/trace

First the collectives of each strategy alone, on tensors as large as the model's parameters; then whole training steps
of one process, of DDP and of FSDP. Both show how much of the communication overlaps with computing: a step
that takes as long as one process's overlaps all of it, one that is longer by "sent alone" none. `--profile` then
profiles a few more steps of one strategy with torch.profiler, and `--trace` writes them as a Chrome trace.
"""

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

# <sends>
SENDS = {  # collectives over the whole model, in one step
    "one process": (),
    "ddp": ("all_reduce",),  # gradients
    "fsdp": ("all_gather", "all_gather", "reduce_scatter"),  # weights for forward, again for backward, then gradients
}
# </sends>
PROFILED_STEPS = 3


@dataclass(frozen=True)
class Training:
    """A strategy's step, and its state between steps."""

    step: Callable[[], None]
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def state_bytes(self) -> int:
        """Return this rank's bytes of weights and Adam's moments."""
        states = [value for state in self.optimizer.state.values() for value in state.values() if value.ndim]
        return sum(local(tensor).nbytes for tensor in [*self.model.parameters(), *states])


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def network(width: int, layers: int) -> nn.Sequential:
    """Return a stack of Transformer layers, [N, tokens, width] to the same, with the same weights on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True) for _ in range(layers))
    )


def training(strategy: str, options: argparse.Namespace, device: torch.device) -> Training:
    """Return a strategy's training, ready to step (communicates, on every rank)."""
    model: nn.Module = network(options.width, options.layers).to(device)
    # <strategies>
    if strategy == "ddp":
        device_ids = [device.index] if device.type == "cuda" else None
        model = DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)
    if strategy == "fsdp":
        for layer in model:
            fully_shard(layer)  # each layer is gathered by itself, just before it runs
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # after sharding: it sees shards only
    # </strategies>
    x = torch.randn(options.batch_size, options.tokens, options.width, device=device)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return Training(step, model, optimizer)


def collectives(numel: int, device: torch.device) -> dict[str, Callable[[], object]]:
    """Return each collective on `numel` float32 numbers, of which every rank has or gets its part."""
    size = dist.get_world_size()
    part = torch.zeros(-(-numel // size), device=device)
    whole = torch.zeros(part.numel() * size, device=device)
    parts = list(whole.chunk(size))
    return {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather(parts, part),
        "reduce_scatter": lambda: dist.reduce_scatter(part, parts),
    }


def timed(
    calls: dict[str, Callable[[], object]], rounds: int, device: torch.device, control: dist.ProcessGroup
) -> dict[str, float]:
    """Return each call's median of the slowest rank's seconds; calls take turns (communicates, on every rank)."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 2):  # the first two warm up
        for name, call in calls.items():
            dist.barrier(control)
            began = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize()
            elapsed = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
            dist.all_reduce(elapsed, dist.ReduceOp.MAX, group=control)
            if turn >= 2:
                times[name].append(elapsed.item())
    return {name: median(values) for name, values in times.items()}


def communication_table(alone: dict[str, float], num_bytes: int, size: int) -> str:
    """Return the collectives' times and bandwidths, in GB/s as nccl-tests counts them."""
    lines = [f"{'collective':<16}{'ms':>10}{'algbw':>10}{'busbw':>10}"]
    for name, seconds in alone.items():
        rate = num_bytes / seconds / 1e9
        factor = (2 if name == "all_reduce" else 1) * (size - 1) / size
        lines.append(f"{name:<16}{1e3 * seconds:>10.1f}{rate:>10.3f}{rate * factor:>10.3f}")
    return "\n".join(lines)


def training_table(steps: dict[str, float], alone: dict[str, float], state: dict[str, int], tokens: int) -> str:
    """Return each strategy's step beside one process's, and beside what it sends; `tokens` are one rank's."""
    lines = [f"{'strategy':<14}{'ms a step':>10}{'tokens/s':>10}{'above one':>11}{'sent alone':>12}{'MB stored':>10}"]
    for name, seconds in steps.items():
        above = 1e3 * (seconds - steps["one process"])
        sent = 1e3 * sum(alone[collective] for collective in SENDS[name])
        num_ranks = 1 if name == "one process" else dist.get_world_size()
        lines.append(
            f"{name:<14}{1e3 * seconds:>10.1f}{num_ranks * tokens / seconds:>10.0f}"
            f"{above:>11.1f}{sent:>12.1f}{state[name] / 1e6:>10.1f}"
        )
    return "\n".join(lines)


def profiled(step: Callable[[], None], device: torch.device, trace: Path | None) -> str:
    """Profile three steps and return a table of the longest operations (communicates, on every rank)."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    # <profile>
    with profile(activities=activities) as profiler:
        for _ in range(PROFILED_STEPS):
            with record_function("step"):  # a name of one's own in the table and in the trace
                step()
    if trace is not None:
        trace.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(trace / f"rank{dist.get_rank()}.json"))  # for ui.perfetto.dev
    # </profile>
    return profile_table(profiler)


def profile_table(profiler: profile, most: int = 8) -> str:
    """Return the step, the operations with the most time of their own, and those that communicate, in ms a step."""
    events = sorted(profiler.key_averages(), key=lambda event: event.self_cpu_time_total, reverse=True)
    steps = [event for event in events if event.key == "step"]
    events = [event for event in events if event.key != "step"]
    sends = [event for event in events[most:] if event.key.startswith(("gloo:", "nccl:"))]
    lines = [f"{'operation':<60}{'calls a step':>14}{'own ms':>10}{'total ms':>10}"]
    for event in [*steps, *events[:most], *sends]:
        own, total = (1e-3 * each / PROFILED_STEPS for each in (event.self_cpu_time_total, event.cpu_time_total))
        lines.append(f"{event.key[:59]:<60}{event.count / PROFILED_STEPS:>14.1f}{own:>10.2f}{total:>10.2f}")
    return "\n".join(lines)


def main() -> None:
    options = parse_options()
    device = start_process_group()
    control = dist.new_group(backend="gloo")
    trainings = {name: training(name, options, device) for name in SENDS}
    numel = sum(parameter.numel() for parameter in trainings["one process"].model.parameters())
    alone = timed(collectives(numel, device), options.steps, device, control)
    steps = timed({name: each.step for name, each in trainings.items()}, options.steps, device, control)
    if dist.get_rank() == 0:
        state = {name: each.state_bytes() for name, each in trainings.items()}
        print(
            f"{dist.get_world_size()} processes on {device.type}, backend {dist.get_backend()}; {numel:,} parameters\n"
        )
        print(communication_table(alone, 4 * numel, dist.get_world_size()), end="\n\n")
        print(training_table(steps, alone, state, options.batch_size * options.tokens))
    if options.profile is not None:
        table = profiled(trainings[options.profile].step, device, options.trace)
        if dist.get_rank() == 0:
            print(f"\n{options.profile}, profiled on rank 0\n{table}")
    # Free what uses a group before the group: freed after it, it can wait for gloo's thread for ever.
    dist.barrier(control)
    trainings.clear()
    dist.destroy_process_group()


def start_process_group() -> torch.device:
    """Join the process group that the launcher describes, and return this rank's device."""
    if "RANK" not in os.environ:
        raise SystemExit("start it by torchrun --nproc_per_node=2 distributed_benchmarks.py")
    if torch.cuda.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])):
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Communication and training benchmarks")
    add = parser.add_argument
    add("--width", type=int, default=128, help="of the model; a multiple of 4")
    add("--layers", type=int, default=4)
    add("--batch-size", type=int, default=4, help="sequences of each process")
    add("--tokens", type=int, default=64, help="in a sequence")
    add("--steps", type=int, default=9, help="timed, of each strategy and collective")
    add("--profile", choices=SENDS, help="profile three steps of this strategy with torch.profiler")
    add("--trace", type=Path, help="folder for the Chrome trace of each rank, with --profile")
    return parser.parse_args()


if __name__ == "__main__":
    main()
