"""Three ways to save a sharded training in plain PyTorch, and to go on from it with any number of processes.

    torchrun --nproc_per_node=2 fsdp_checkpoint.py --steps 10
    torchrun --nproc_per_node=1 fsdp_checkpoint.py --steps 20 --resume
    torchrun --nproc_per_node=2 fsdp_checkpoint.py --steps 10 --strategy whole

sharded  each rank writes its own shards (torch.distributed.checkpoint, "DCP"); any world size reads them back
async    the same, written by a thread while training goes on
whole    rank 0 gathers and writes one file: simple, read by any tool, needs the whole model in one host's memory

DCP's `.metadata` and a .pt file are pickles: load only what you or someone you trust has saved.
"""

import argparse
import os
from concurrent.futures import Future
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp_basics import global_batch, load_text, make_mesh, say, sharded_model, start_process_group, train_step
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True)


def main() -> None:
    options = parse_options()
    device = start_process_group()
    model = sharded_model(make_mesh(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    first = resume(model, optimizer, options.checkpoint) if options.resume else 0

    text = load_text().to(device)
    # The thread that writes talks to the others beside training, so not over training's group.
    writers = dist.new_group(backend="gloo") if options.strategy == "async" else None
    saving: Future | None = None
    for step in range(first, options.steps):
        loss = train_step(model, optimizer, global_batch(text, step, batch_size=256), accumulate=1)
        say(f"step {step + 1} of {options.steps}: loss {loss:.4f}")
        if (step + 1) % options.every == 0:
            finish(saving)  # at most one at a time
            saving = save(model, optimizer, options.checkpoint / f"step-{step + 1:06d}", options.strategy, writers)
    finish(saving)
    del model, optimizer  # before their group, as in fsdp_basics.py
    dist.destroy_process_group()


def save(model, optimizer, path: Path, strategy: str, writers: dist.ProcessGroup | None) -> Future | None:
    """Write a checkpoint (communicates, on every rank; async over `writers`, ending when its future does)."""
    # <save>
    if strategy == "whole":
        # EVERY rank takes part in the gathering; "rank 0 only" belongs around the writing.
        weights, states = get_state_dict(model, optimizer, options=WHOLE)
        if dist.get_rank() == 0:
            write_file({"model": weights, "optimizer": states}, path.with_suffix(".pt"))
        dist.barrier()  # nobody may look for the file before it is there
        return None
    weights, states = get_state_dict(model, optimizer)  # shards, under names that do not depend on the world size
    shards = {"model": weights, "optimizer": states}
    if strategy == "async":
        return dcp.async_save(shards, checkpoint_id=path, process_group=writers)
    dcp.save(shards, checkpoint_id=path)
    return None
    # </save>


def resume(model, optimizer, folder: Path) -> int:
    """Take over the newest whole checkpoint and return the steps it had done (communicates, on every rank)."""
    path = newest(folder)
    if path is None:
        say(f"no checkpoint in {folder}: starting from the beginning")
        return 0
    # <load>
    if path.suffix == ".pt":
        saved = {"model": {}, "optimizer": {}}
        if dist.get_rank() == 0:  # one rank reads, the others are sent their shards
            saved = torch.load(path, map_location="cpu", weights_only=True)
        options = WHOLE
    else:
        # DCP fills what is there: shards of THIS world, from files of another.
        weights, states = get_state_dict(model, optimizer)
        saved = {"model": weights, "optimizer": states}
        dcp.load(saved, checkpoint_id=path)
        options = None
    # One call each: set_state_dict takes an empty model dict for "optimizer only", and rank 0 then waits for ever.
    set_model_state_dict(model, saved["model"], options=options)
    set_optimizer_state_dict(model, optimizer, saved["optimizer"], options=options)
    # </load>
    say(f"resumed from {path} on {dist.get_world_size()} processes")
    return int(path.stem.removeprefix("step-"))


def newest(folder: Path) -> Path | None:
    """Return the last checkpoint that is whole: DCP writes `.metadata` when all shards are there."""
    whole = [path for path in folder.glob("step-*") if path.suffix == ".pt" or (path / ".metadata").exists()]
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


def finish(saving: Future | None) -> None:
    """Wait until a checkpoint begun earlier is whole; raise what went wrong with it."""
    if saving is not None:
        saving.result()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Three ways to save a sharded training in plain PyTorch")
    add = parser.add_argument
    add("--steps", type=int, default=10, help="in all, resumed ones counted")
    add("--every", type=int, default=5, help="steps from one checkpoint to the next")
    add("--strategy", choices=("sharded", "async", "whole"), default="sharded")
    add("--checkpoint", type=Path, default=Path("runs/fsdp_checkpoint"), help="folder of the checkpoints")
    add("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")
    return parser.parse_args()


if __name__ == "__main__":
    main()
