"""Four ways to save a sharded training and to resume it with any number of processes, timed beside each other.

    torchrun --nproc_per_node=2 fsdp_checkpoint.py --steps 10
    torchrun --nproc_per_node=1 fsdp_checkpoint.py --steps 20 --resume
    torchrun --nproc_per_node=2 fsdp_checkpoint.py --measure

full       all gather, rank 0 writes one file: simple, read by any tool, needs the whole state in one host's memory
sharded    each rank writes its own shards (torch.distributed.checkpoint, "DCP"); any world size reads them back
async      the same, written by a thread during training
shardwise  shardwise.checkpoint: written by a thread, checked byte by byte when it is read, no pickle

DCP's `.metadata` and a .pt file are pickles: load only what you or someone you trust has saved.
"""

import argparse
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp_basics import (
    NextByte,
    global_batch,
    load_text,
    make_mesh,
    print_rank0,
    sharded_model,
    start_process_group,
    train_step,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

from shardwise.checkpoint import AsyncSaver, load

STRATEGIES = ("full", "sharded", "async", "shardwise")
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True)

Wait = Callable[[], object]
"""Returns when a save that was begun is on disk; raises what went wrong with it."""


def main() -> None:
    options = parse_options()
    device = start_process_group()
    options.checkpoint.mkdir(parents=True, exist_ok=True)
    checkpoints = Checkpoints()
    if options.measure:
        measure(device, checkpoints, options.checkpoint)
    else:
        train(device, checkpoints, options)
    checkpoints.close()
    dist.destroy_process_group()


def train(device: torch.device, checkpoints: "Checkpoints", options: argparse.Namespace) -> None:
    model = sharded_model(make_mesh(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    first = checkpoints.resume(model, optimizer, options.checkpoint) if options.resume else 0

    text = load_text().to(device)
    wait: Wait = lambda: None  # noqa: E731 - no save has started yet
    for step in range(first, options.steps):
        loss = train_step(model, optimizer, global_batch(text, step, batch_size=256), accumulate=1)
        print_rank0(f"step {step + 1} of {options.steps}: loss {loss:.4f}")
        if (step + 1) % options.every == 0:
            wait()  # at most one at a time
            wait = checkpoints.save(model, optimizer, options.checkpoint / f"step-{step + 1:08d}", options.strategy)
    wait()


class Checkpoints:
    """Saves in any of the four ways, and resumes what any of them saved; on every rank."""

    def __init__(self) -> None:
        # Threads that write communicate during training, so not over training's group.
        self.writers = dist.new_group(backend="gloo")
        self.background = AsyncSaver(self.writers)

    def save(self, model, optimizer, path: Path, strategy: str) -> Wait:
        """Begin to write a checkpoint (communicates, on every rank), and return what waits for its end."""
        # <save>
        if strategy == "full":
            # EVERY rank takes part in the gathering; "rank 0 only" belongs around the writing.
            weights, states = get_state_dict(model, optimizer, options=FULL)
            if dist.get_rank() == 0:
                write_file({"model": weights, "optimizer": states}, path.with_suffix(".pt"))
            dist.barrier()  # nobody may look for the file before it is there
            return lambda: None
        weights, states = get_state_dict(model, optimizer)  # shards, under names that do not depend on the world size
        if strategy == "shardwise":
            step = int(path.name.removeprefix("step-"))
            self.background.save(path.parent, step, by_name(weights, states), {"step": step})
            return self.background.finish
        shards = {"model": weights, "optimizer": states}
        if strategy == "async":
            return dcp.async_save(shards, checkpoint_id=path, process_group=self.writers).result
        dcp.save(shards, checkpoint_id=path)
        return lambda: None
        # </save>

    def resume(self, model, optimizer, folder: Path) -> int:
        """Take over the newest whole checkpoint and return the steps it had done (communicates, on every rank)."""
        path = newest(folder)
        if path is None:
            print_rank0(f"no checkpoint in {folder}: starting from the beginning")
            return 0
        self.restore(model, optimizer, path)
        print_rank0(f"resumed from {path} on {dist.get_world_size()} processes")
        return int(path.stem.removeprefix("step-").partition("~")[0])  # shardwise adds ~2 to a step it saves again

    def restore(self, model, optimizer, path: Path) -> None:
        """Take over a checkpoint of any of the four kinds (communicates, on every rank)."""
        # <load>
        options = None
        if path.suffix == ".pt":
            saved = {"model": {}, "optimizer": {}}
            if dist.get_rank() == 0:  # one rank reads, the others are sent their shards
                saved = torch.load(path, map_location="cpu", weights_only=True)
            options = FULL
        else:
            # Both fill what is there: shards of THIS world, from files of another. That is all there is to resharding.
            weights, states = get_state_dict(model, optimizer)
            saved = {"model": weights, "optimizer": states}
            if (path / "manifest.json").exists():
                load(path, by_name(weights, states), group=self.writers)
            else:
                dcp.load(saved, checkpoint_id=path)
        # One call each: set_state_dict takes an empty model dict for "optimizer only", and rank 0 then waits for ever.
        set_model_state_dict(model, saved["model"], options=options)
        set_optimizer_state_dict(model, optimizer, saved["optimizer"], options=options)
        # </load>

    def close(self) -> None:
        """Give the memory for copies back."""
        self.background.close()


def by_name(weights: dict, states: dict) -> dict[str, torch.Tensor]:
    """Return all tensors of a state under one name each, as shardwise's checkpoints have them; no copies."""
    named = {f"model/{name}": tensor for name, tensor in weights.items()}
    for name, state in states["state"].items():
        named |= {f"optimizer/{name}/{key}": tensor for key, tensor in state.items()}
    return named


def newest(folder: Path) -> Path | None:
    """Return the last whole checkpoint: both writers of folders put their listing there when all shards are."""
    listings = (".metadata", "manifest.json")
    whole = [
        path
        for path in folder.glob("step-*")
        if path.suffix == ".pt" or any((path / each).exists() for each in listings)
    ]
    return max(whole, key=lambda path: path.stem, default=None)


def write_file(state: dict, path: Path) -> None:
    """Write one file under a name that appears only when it is whole (rank 0 only)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.unfinished")
    with unfinished.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def measure(device: torch.device, checkpoints: Checkpoints, folder: Path, width: int = 512) -> None:
    """Print what each way costs: save twice (the second counts), load, and load into shards of another mesh."""
    world_size = dist.get_world_size()
    model, optimizer = trained(device, width)
    other, its_optimizer = trained(device, width, replicate=world_size)
    tensors = by_name(*get_state_dict(model, optimizer))
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    print_rank0(f"{total / 1e6:.0f} MB over {world_size} processes, on {device.type}; seconds\n")
    print_rank0("| strategy | training waits | on disk after | load | reshard |\n|---|---|---|---|---|")
    for strategy in STRATEGIES:
        for attempt in (1, 2):
            path = folder / strategy / f"step-{attempt:08d}"
            wait, stall_s = timed(checkpoints.save, model, optimizer, path, strategy)
            _, rest_s = timed(wait)
        path = newest(folder / strategy)
        _, load_s = timed(checkpoints.restore, model, optimizer, path)
        # Sharded over all ranks when it was saved; here every rank has the whole state.
        _, reshard_s = timed(checkpoints.restore, other, its_optimizer, path)
        print_rank0(f"| {strategy} | {stall_s:.2f} | {stall_s + rest_s:.2f} | {load_s:.2f} | {reshard_s:.2f} |")
        if dist.get_rank() == 0:
            shutil.rmtree(folder / strategy)


def trained(device: torch.device, width: int, replicate: int = 1):
    """Return a model, sharded over the mesh, and its optimizer after one step (communicates, on every rank)."""
    mesh = make_mesh(device, replicate)
    torch.manual_seed(0)
    model = NextByte(width).to(device)
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    train_step(model, optimizer, global_batch(load_text().to(device), 0, batch_size=32), accumulate=1)
    return model, optimizer


def timed(work: Callable, *arguments) -> tuple:
    """Return what `work` returns and its seconds, the ranks beginning together."""
    dist.barrier()
    began = time.perf_counter()
    result = work(*arguments)
    return result, time.perf_counter() - began


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Four ways to save a sharded training")
    add = parser.add_argument
    add("--steps", type=int, default=10, help="in all, resumed ones counted")
    add("--every", type=int, default=5, help="steps from one checkpoint to the next")
    add("--strategy", choices=STRATEGIES, default="sharded")
    add("--checkpoint", type=Path, default=Path("runs/fsdp_checkpoint"), help="folder of the checkpoints")
    add("--resume", action="store_true", help="resume from the newest checkpoint, if there is one")
    add("--measure", action="store_true", help="time all four instead of training")
    return parser.parse_args()


if __name__ == "__main__":
    main()
