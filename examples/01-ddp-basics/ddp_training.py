"""A template for production training with plain PyTorch DDP: stop it anywhere, resume it to the same weights.

    torchrun --nproc_per_node=2 ddp_training.py --accumulate 4
    torchrun --nproc_per_node=2 ddp_training.py --save-every 50 --workers 2
    torchrun --nproc_per_node=2 ddp_training.py --epochs 5 --resume
    python ddp_training.py --spawn 2                  # mp.spawn instead of torchrun

It has mixed precision, gradient accumulation, clipping, a learning-rate schedule, loader workers, checkpoints inside an
epoch, and a stop signal: on SIGTERM (as SLURM and Kubernetes send it before they kill) or Ctrl-C all ranks finish the
same step, save and exit with code 0. `--resume` continues there, with the random numbers of the interrupted run.

Replace `build_model` and `load_images` by your own; the rest stays as it is.
"""

import argparse
import os
import signal
import socket
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from idx_data import Images, load_images
from resnet import resnet18
from stop_and_resume import (
    Progress,
    ResumableSampler,
    StopSignal,
    gather_random_states,
    seed_everything,
    set_random_state,
    write,
)
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Subset

WARM_UP_STEPS = 20
"""Steps in which the learning rate climbs from near 0: Adam's first estimates are poor."""


@dataclass
class Training:
    """The state of the training on one rank."""

    device: torch.device
    dtype: torch.dtype
    """What the forward pass computes in; the weights stay float32."""
    model: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    scaler: torch.amp.GradScaler
    """Does nothing unless dtype is float16, whose small gradients would vanish without it."""

    def state(self, progress: Progress, seed: int) -> dict:
        """Return all that a later start needs, in plain values and tensors (gathers: called on every rank)."""
        return {
            "progress": vars(progress),
            "seed": seed,
            "random": gather_random_states(self.device),  # else a resumed run would draw other dropout masks
            "model": self.model.module.state_dict(),  # without the wrapper's "module." before every name
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def restore(self, state: dict) -> Progress:
        """Load a saved state on this rank, and return the position it was saved at."""
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.scaler.load_state_dict(state["scaler"])
        if len(state["random"]) == dist.get_world_size():  # another number of ranks draws other masks in any case
            set_random_state(state["random"][dist.get_rank()], self.device)
        return Progress(**state["progress"])


def run(options: argparse.Namespace) -> None:
    """Train on this rank, from joining the process group to leaving it."""
    device = start_process_group()
    stop = StopSignal(dist.new_group(backend="gloo"))
    data = load_images(options.data, options.limit)
    training = build(options, device)
    print_rank0(data.note)
    print_rank0(describe(options, training))
    progress = resume(training, options) if options.resume else Progress()
    train(training, data, options, progress, stop)
    del training  # before its group: freed after it, DDP can wait for gloo's thread for ever (seen with torch 2.13)
    dist.destroy_process_group()


def build_model() -> nn.Module:
    return resnet18(num_classes=10, in_channels=1)


def build(options: argparse.Namespace, device: torch.device) -> Training:
    """Make the model, its wrapper and its optimizer (broadcasts rank 0's weights)."""
    torch.manual_seed(options.seed)  # so that the run can be repeated
    device_ids = [device.index] if device.type == "cuda" else None
    # Gradients become views into the communication buckets: one copy of them less in memory.
    model = DistributedDataParallel(build_model().to(device), device_ids=device_ids, gradient_as_bucket_view=True)
    # From here on each rank has random numbers of its own: with one seed, all would drop out the same units.
    seed_everything(options.seed + 1 + dist.get_rank())
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


def train(training: Training, data: Images, options: argparse.Namespace, progress: Progress, stop: StopSignal) -> None:
    """Train, test and save, epoch by epoch, until the end or a stop signal (communicates, on every rank)."""
    while progress.epoch < options.epochs:
        progress, was_stopped = train_epoch(training, data.train, options, progress, stop)
        if was_stopped:
            save(training, progress, options)
            print_rank0(
                f"stopped in epoch {progress.epoch + 1} after {progress.samples} samples: continue with --resume"
            )
            return
        accuracy = evaluate(training, data.test)
        loss = progress.loss_sum / progress.samples
        print_rank0(f"epoch {progress.epoch + 1} of {options.epochs}: loss {loss:.4f}, test accuracy {accuracy:.2%}")
        progress = Progress(epoch=progress.epoch + 1)
        save(training, progress, options)


def train_epoch(
    training: Training, dataset: Dataset, options: argparse.Namespace, begun: Progress, stop: StopSignal
) -> tuple[Progress, bool]:
    """Train from a position to the end of its epoch, or to a stop signal (communicates, on every rank)."""
    training.model.train()
    loader = make_loader(dataset, options, begun, pin_memory=training.device.type == "cuda")
    loss_sum, samples = torch.zeros((), dtype=torch.float64, device=training.device), 0

    def progress() -> Progress:
        """Return the position now (all-reduces)."""
        both = torch.tensor([loss_sum, samples], dtype=torch.float64, device=training.device)
        dist.all_reduce(both)
        loss_of_all, samples_of_all = both.tolist()
        return replace(begun, samples=begun.samples + int(samples_of_all), loss_sum=begun.loss_sum + loss_of_all)

    for step, window in enumerate(windows(loader, options.accumulate), start=1):
        loss_sum += optimizer_step(training, window, options.clip)
        samples += count_samples(window)
        if stop.on_any_rank():
            return progress(), True
        if options.save_every and step % options.save_every == 0:
            save(training, progress(), options)
    return progress(), False


def make_loader(dataset: Dataset, options: argparse.Namespace, begun: Progress, *, pin_memory: bool) -> DataLoader:
    """Return the batches that are left of an epoch on this rank."""
    sampler = ResumableSampler(dataset, shuffle=True, seed=options.seed)
    sampler.set_epoch(begun.epoch)  # or every epoch has the same order
    sampler.first = begun.samples // dist.get_world_size()
    # Workers are seeded from this generator and not from torch's, whose numbers then do not depend on their number.
    # Augmentations are repeated exactly by a resumed run if they depend on the sample's index, as data here does.
    generator = torch.Generator().manual_seed(hash((options.seed, begun.epoch, dist.get_rank())))
    return DataLoader(
        dataset,
        options.batch_size,
        sampler=sampler,
        num_workers=options.workers,
        generator=generator,
        pin_memory=pin_memory,
    )


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


def save(training: Training, progress: Progress, options: argparse.Namespace) -> None:
    """Save a checkpoint (gathers: called on every rank; rank 0 writes)."""
    state = training.state(progress, options.seed)
    # Only rank 0 writes: all ranks have the same state, and two writers of one file tear it. The others need not
    # wait here, since nobody reads the file before the next start.
    if dist.get_rank() == 0:
        write(state, options.checkpoint)


def resume(training: Training, options: argparse.Namespace) -> Progress:
    """Restore rank 0's checkpoint on every rank and return its position (broadcasts).

    Rank 0 reads and sends, so no shared disk is needed. A model too large for that wants a sharded checkpoint.
    """
    found, path = [None], options.checkpoint
    if dist.get_rank() == 0 and path.exists():
        # weights_only: a checkpoint is data, and must not be able to run code.
        found = [torch.load(path, map_location="cpu", weights_only=True)]
    dist.broadcast_object_list(found, src=0)
    if found[0] is None:
        print_rank0(f"no checkpoint at {path}: starting from the beginning")
        return Progress()
    if found[0]["seed"] != options.seed:
        raise SystemExit(f"{path} was trained with --seed {found[0]['seed']}: another seed has another sample order")
    progress = training.restore(found[0])
    print_rank0(f"resumed from {path} in epoch {progress.epoch + 1} after {progress.samples} samples")
    return progress


def start_process_group() -> torch.device:
    """Join the process group that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe; return the device."""
    if "RANK" not in os.environ:
        raise SystemExit("start it by torchrun --nproc_per_node=2 ddp_training.py, or give it --spawn 2")
    if torch.cuda.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])):
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def print_rank0(line: str) -> None:
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
    add("--seed", type=int, default=0, help="of weights, sample order and dropout")
    add("--workers", type=int, default=0, help="loader processes of each process; 0 loads in between")
    add("--checkpoint", type=Path, default=Path("runs/ddp_training.pt"), help="written after every epoch")
    add("--save-every", type=at_least_one, metavar="STEPS", help="and within an epoch every so many optimizer steps")
    add("--resume", action="store_true", help="continue from the checkpoint, if there is one")
    add("--data", default="data/mnist", help="folder of IDX files, plain or gzipped")
    add("--limit", type=at_least_one, help="train on the first LIMIT samples only, for a quick try")
    add("--spawn", type=at_least_one, metavar="N", help="start N processes from here instead of by torchrun")
    return parser.parse_args()


def spawn(options: argparse.Namespace) -> None:
    """Start the ranks by mp.spawn, and pass stop signals on to them."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does: N processes share the cores
    ranks = mp.spawn(run_spawned, args=(options.spawn, free_port(), options), nprocs=options.spawn, join=False)

    def forward(number: int, _: object) -> None:
        for pid in ranks.pids():
            os.kill(pid, number)

    signal.signal(signal.SIGTERM, forward)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to the ranks as well
    while not ranks.join():
        pass


def main() -> None:
    options = parse_options()
    if options.spawn:
        spawn(options)
    else:
        run(options)


if __name__ == "__main__":
    main()
