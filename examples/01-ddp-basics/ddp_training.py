"""A template for real training with plain PyTorch DDP: mixed precision, accumulation, checkpoints, resume.

    torchrun --nproc_per_node=2 ddp_training.py --accumulate 4
    torchrun --nproc_per_node=2 ddp_training.py --epochs 5 --resume
    python ddp_training.py --spawn 2                  # mp.spawn instead of torchrun

Replace `build_model` and `load_images` by your own; the rest stays as it is.
"""

import argparse
import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from idx_data import Images, load_images
from resnet import resnet18
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

WARM_UP_STEPS = 20
"""Steps in which the learning rate climbs from near 0: Adam's first estimates are poor."""


@dataclass
class Training:
    """What one rank holds while it trains."""

    device: torch.device
    dtype: torch.dtype
    """What the forward pass computes in; the weights stay float32."""
    model: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    scaler: torch.amp.GradScaler
    """Does nothing unless dtype is float16, whose small gradients would vanish without it."""

    def state(self, epochs_done: int) -> dict:
        """Return all that a later start needs, in plain values and tensors (gathers: called on every rank)."""
        return {
            "epochs_done": epochs_done,
            "random": gather_random_states(self.device),  # else a resumed run would draw other dropout masks
            "model": self.model.module.state_dict(),  # without the wrapper's "module." before every name
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def restore(self, state: dict) -> int:
        """Take over a saved state on this rank, and return how many epochs it had done."""
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.scaler.load_state_dict(state["scaler"])
        if len(state["random"]) == dist.get_world_size():  # other ranks than before draw other masks in any case
            set_random_state(state["random"][dist.get_rank()], self.device)
        return state["epochs_done"]


def run(options: argparse.Namespace) -> None:
    """Train on this rank, from joining the process group to leaving it."""
    device = start_process_group()
    data = load_images(options.data, options.limit)
    training = build(options, device)
    say(data.note)
    say(describe(options, training))
    first_epoch = resume(training, options.checkpoint) if options.resume else 0
    train(training, data, options, first_epoch)
    del training  # before its group: freed after it, DDP can wait for gloo's thread for ever (seen with torch 2.13)
    dist.destroy_process_group()


def build_model() -> nn.Module:
    return resnet18(num_classes=10, in_channels=1)


def build(options: argparse.Namespace, device: torch.device) -> Training:
    """Make the model, its wrapper and its optimizer (broadcasts rank 0's weights)."""
    torch.manual_seed(0)  # so that the run can be repeated
    device_ids = [device.index] if device.type == "cuda" else None
    # Gradients become views into the communication buckets: one copy of them less in memory.
    model = DistributedDataParallel(build_model().to(device), device_ids=device_ids, gradient_as_bucket_view=True)
    torch.manual_seed(1 + dist.get_rank())  # from here on: with one seed, all ranks would drop out the same units
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    dtype = choose_dtype(options.precision, device)
    return Training(
        device=device,
        dtype=dtype,
        model=model,
        optimizer=optimizer,
        schedule=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / WARM_UP_STEPS)),
        scaler=torch.amp.GradScaler(device.type, enabled=dtype == torch.float16),
    )


def choose_dtype(precision: str, device: torch.device) -> torch.dtype:
    """Resolve "auto": bfloat16 on GPUs that have it, float16 on older ones, float32 on the CPU."""
    if precision != "auto":
        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    if device.type == "cpu":
        return torch.float32
    return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16


def train(training: Training, data: Images, options: argparse.Namespace, first_epoch: int) -> None:
    """Train, test and save, epoch by epoch (communicates: called on every rank)."""
    sampler = DistributedSampler(data.train, shuffle=True)
    pin = training.device.type == "cuda"
    loader = DataLoader(data.train, options.batch_size, sampler=sampler, pin_memory=pin)
    for epoch in range(first_epoch, options.epochs):
        sampler.set_epoch(epoch)
        loss = train_epoch(training, loader, options)
        accuracy = evaluate(training, data.test)
        say(f"epoch {epoch + 1} of {options.epochs}: loss {loss:.4f}, test accuracy {accuracy:.2%}")
        state = training.state(epochs_done=epoch + 1)
        # Only rank 0 writes: all ranks hold the same, and two writers of one file tear it. The others need not
        # wait here, since nobody reads the file before the next start.
        if dist.get_rank() == 0:
            save(state, options.checkpoint)


def train_epoch(training: Training, loader: DataLoader, options: argparse.Namespace) -> float:
    """Train for one epoch and return the mean loss over all ranks' samples (all-reduces)."""
    training.model.train()
    loss_sum, samples = torch.zeros((), dtype=torch.float64, device=training.device), 0
    for window in windows(loader, options.accumulate):
        loss_sum += optimizer_step(training, window, options.clip)
        samples += count_samples(window)
    return ratio_over_ranks(loss_sum, samples, training.device)


def windows(batches: Iterable, size: int) -> Iterator[list]:
    """Group `batches` into lists of `size`, the last one as short as it falls out."""
    batches = iter(batches)
    while window := list(islice(batches, size)):
        yield window


def count_samples(window: list) -> int:
    return sum(len(labels) for _, labels in window)


def optimizer_step(training: Training, window: list, clip: float) -> torch.Tensor:
    """Accumulate the gradients of a window of batches, step once, return this rank's loss sum (all-reduces)."""
    device, model, optimizer, scaler = training.device, training.model, training.optimizer, training.scaler
    # Dividing sums by the window's own samples is right for a short last window and a short last batch too;
    # dividing means by --accumulate is not. The sampler gives all ranks equally many, so DDP's mean over ranks
    # is then the mean over the global batch.
    samples = count_samples(window)
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    # <window>
    for index, batch in enumerate(window):
        images, labels = (part.to(device, non_blocking=True) for part in batch)
        is_last = index == len(window) - 1
        # Gradients travel once per window: with its last batch. Forward belongs inside of no_sync, too.
        with nullcontext() if is_last else model.no_sync():
            with torch.autocast(device.type, training.dtype, enabled=training.dtype != torch.float32):
                loss = cross_entropy(model(images), labels, reduction="sum")
            scaler.scale(loss / samples).backward()
        loss_sum += loss.detach()
    # </window>
    scaler.unscale_(optimizer)  # clipping must see the true gradients
    nn.utils.clip_grad_norm_(model.parameters(), clip)
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    if scaler.get_scale() >= scale:  # else float16 overflowed: the scaler skipped the step and halves its scale
        training.schedule.step()
    return loss_sum


@torch.no_grad()
def evaluate(training: Training, dataset: Dataset) -> float:
    """Return the accuracy over `dataset`, each sample counted exactly once (broadcasts, then all-reduces)."""
    device, model = training.device, training.model.module  # without the wrapper: no gradients to exchange
    model.eval()
    for buffer in model.buffers():  # batch norm's statistics differ between ranks; rank 0's get saved
        dist.broadcast(buffer, src=0)
    mine = Subset(dataset, range(dist.get_rank(), len(dataset), dist.get_world_size()))
    correct = torch.zeros((), dtype=torch.int64, device=device)
    for batch in DataLoader(mine, batch_size=500):
        images, labels = (part.to(device) for part in batch)
        with torch.autocast(device.type, training.dtype, enabled=training.dtype != torch.float32):
            correct += (model(images).argmax(dim=1) == labels).sum()
    return ratio_over_ranks(correct, len(mine), device)


def ratio_over_ranks(part: torch.Tensor, whole: int, device: torch.device) -> float:
    """Sum both numbers over all ranks, then divide (all-reduces)."""
    both = torch.tensor([part, whole], dtype=torch.float64, device=device)
    dist.all_reduce(both)
    return (both[0] / both[1]).item()


def gather_random_states(device: torch.device) -> list:
    """Return every rank's states of torch's generators, CPU and GPU (gathers)."""
    own = [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return everyone


def set_random_state(states: list, device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda" and len(states) > 1:
        torch.cuda.set_rng_state(states[1], device)


def save(state: dict, path: Path) -> None:
    """Write `state` so that `path` always names a whole checkpoint, even if this process is killed (rank 0 only)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())  # on the disk before the name points to it
    unfinished.replace(path)


def resume(training: Training, path: Path) -> int:
    """Restore rank 0's checkpoint on every rank and return the epochs it had done (broadcasts).

    Rank 0 reads and sends, so no shared disk is needed. A model too large for that wants a sharded checkpoint.
    """
    found = [None]
    if dist.get_rank() == 0 and path.exists():
        # weights_only: a checkpoint is data, and must not be able to run code.
        found = [torch.load(path, map_location="cpu", weights_only=True)]
    dist.broadcast_object_list(found, src=0)
    if found[0] is None:
        say(f"no checkpoint at {path}: starting from the beginning")
        return 0
    epochs_done = training.restore(found[0])
    say(f"resumed from {path} after epoch {epochs_done}")
    return epochs_done


def start_process_group() -> torch.device:
    """Join the process group that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe; return the device."""
    if "LOCAL_WORLD_SIZE" not in os.environ:
        raise SystemExit("start it by torchrun --nproc_per_node=2 ddp_training.py, or give it --spawn 2")
    if torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]):
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line)


def describe(options: argparse.Namespace, training: Training) -> str:
    world_size = dist.get_world_size()
    batch = options.batch_size * options.accumulate * world_size
    return (
        f"world size {world_size}, on {training.device.type} in {training.dtype}, global batch {batch} = "
        f"{options.batch_size} samples x {options.accumulate} accumulated x {world_size} processes"
    )


def run_spawned(local_rank: int, num_processes: int, port: int, options: argparse.Namespace) -> None:
    """Set what torchrun would have set, then train: mp.spawn gives a process its number and nothing else."""
    ranks = {"RANK": local_rank, "LOCAL_RANK": local_rank}
    sizes = {"WORLD_SIZE": num_processes, "LOCAL_WORLD_SIZE": num_processes}
    os.environ.update({name: str(value) for name, value in (ranks | sizes).items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    run(options)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def at_least_one(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return int(text)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A template for training with plain PyTorch DDP")
    add = parser.add_argument
    add("--epochs", type=at_least_one, default=3, help="in all, resumed ones counted")
    add("--batch-size", type=at_least_one, default=64, help="samples per forward of each process")
    add("--accumulate", type=at_least_one, default=1, help="batches per optimizer step")
    add("--lr", type=float, default=0.001)
    add("--clip", type=float, default=1.0, help="largest norm of the gradient")
    add("--precision", choices=("auto", "fp32", "bf16", "fp16"), default="auto")
    add("--checkpoint", type=Path, default=Path("runs/ddp_training.pt"), help="written after every epoch")
    add("--resume", action="store_true", help="go on from the checkpoint, if there is one")
    add("--data", default="data/mnist", help="folder of IDX files, plain or gzipped")
    add("--limit", type=at_least_one, help="train on the first LIMIT samples only, for a quick try")
    add("--spawn", type=at_least_one, metavar="N", help="start N processes from here instead of by torchrun")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    if options.spawn:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does: N processes share the cores
        mp.spawn(run_spawned, args=(options.spawn, free_port(), options), nprocs=options.spawn)
    else:
        run(options)


if __name__ == "__main__":
    main()
