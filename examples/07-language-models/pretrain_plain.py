"""Pretraining in plain PyTorch: a memory map, packed rows, a mixture, DDP, a checkpoint that any world size resumes.

    torchrun --nproc_per_node=2 pretrain_plain.py --save-every 8
    torchrun --nproc_per_node=3 pretrain_plain.py --save-every 8 --resume

Five things are done by hand, numbered below: 1 read documents from a memory map, 2 pack them into rows, 3 mix sources,
4 divide the loss by the tokens of the global batch, 5 save and resume. The idea of 2, 3 and 5: row number n of the
training is a function of n alone, so the position in the data is one integer, on any number of processes.
"""

import argparse
import os
from collections.abc import Callable
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from decoder import LENGTH, Decoder
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

STEPS, BATCH_SIZE, LEARNING_RATE, SEED = 40, 12, 3e-3, 0
MIXTURE = ("code", "code", "prose", "code")
"""The sources of four rows in order: three parts of code, one of prose."""
IGNORE = -100
"""The target of a token that has no next token in its document; `cross_entropy` leaves it out."""

Row = tuple[torch.Tensor, ...]
"""Tokens, position ids, document ids and targets, each int64 [LENGTH]."""


class Piece(NamedTuple):
    """Tokens of one document: all of them, or as many as a row has."""

    start: int
    size: int
    is_last: bool
    """Whether the document ends with this piece."""


class Source:
    """A corpus of one shard, as `shardwise data prepare` writes it."""

    # <map>
    def __init__(self, folder: Path) -> None:
        """1. Map the tokens: ranks share one copy in the page cache, and read only what they train on."""
        self.tokens = np.memmap(folder / "shard-00000.bin", dtype=np.uint16, mode="r")
        self.starts = np.fromfile(folder / "shard-00000.idx", dtype=np.int64)  # of documents, and the end of the last

    # </map>

    # <pack>
    @cached_property
    def packed(self) -> list[list[Piece]]:
        """2. Rows of whole documents: the longest document first, into the fullest row that has enough space."""
        pieces = []
        for start, end in pairwise(self.starts.tolist()):
            firsts = range(start, end, LENGTH)  # a document longer than a row is split: no token is lost
            pieces += [Piece(first, min(LENGTH, end - first), first == firsts[-1]) for first in firsts]
        by_space = [[] for _ in range(LENGTH + 1)]  # rows with 0, 1, 2, ... tokens left
        rows = []
        for piece in sorted(pieces, key=lambda piece: -piece.size):
            space = next((space for space in range(piece.size, LENGTH) if by_space[space]), None)
            row = [] if space is None else by_space[space].pop()
            if space is None:
                space = LENGTH
                rows.append(row)
            row.append(piece)
            by_space[space - piece.size].append(row)
        return rows

    # </pack>

    @lru_cache(maxsize=2)  # noqa: B019 - a source lives as long as the process
    def order(self, epoch: int) -> np.ndarray:
        """Return the rows of an epoch in their order, the same on every rank."""
        return np.random.default_rng((SEED, epoch)).permutation(len(self.packed))

    # <row>
    def row(self, number: int) -> Row:
        """Return row `number` of this source: epochs follow each other, each in an order of its own."""
        epoch, index = divmod(number, len(self.packed))
        tokens, positions, documents = (np.zeros(LENGTH, np.int64) for _ in range(3))
        targets = np.full(LENGTH, IGNORE, np.int64)
        filled = 0
        for document, (start, size, is_last) in enumerate(self.packed[self.order(epoch)[index]]):
            here = slice(filled, filled + size)
            tokens[here] = self.tokens[start : start + size]
            positions[here] = np.arange(size)  # again from 0 in each document
            documents[here] = document
            following = self.tokens[start + 1 : start + size + (not is_last)]  # never the next document's first token
            targets[filled : filled + len(following)] = following
            filled += size
        documents[filled:] = -1  # padding, which nothing attends to and no target counts
        return tuple(map(torch.from_numpy, (tokens, positions, documents, targets)))

    # </row>


# <mixture>
def mixed(sources: dict[str, Source], number: int) -> Row:
    """3. Return row `number` of the mixture: a function of the number alone, whatever ranks there are."""
    periods, place = divmod(number, len(MIXTURE))
    name = MIXTURE[place]
    earlier = periods * MIXTURE.count(name) + MIXTURE[:place].count(name)  # rows of this source before
    return sources[name].row(earlier)


# </mixture>


# <train>
def train(row: Callable[[int], Row], options: argparse.Namespace) -> list[float]:
    """Train on rows 0, 1, 2, ... and return the loss of each step; called on every rank, which have equal parts."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(SEED)
    model = DistributedDataParallel(Decoder())
    groups = [{"params": []}, {"params": [], "weight_decay": 0.0}]  # no decay of norms and biases
    for parameter in model.parameters():
        groups[parameter.ndim < 2]["params"].append(parameter)
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE)
    losses = load(options.folder, model.module, optimizer) if options.resume else []
    own = BATCH_SIZE // size
    for step in range(len(losses), STEPS):
        first = step * BATCH_SIZE + rank * own
        rows = [row(number) for number in range(first, first + own)]
        *inputs, targets = map(torch.stack, zip(*rows, strict=True))
        # 4. Packed rows have different numbers of targets: divide by those of all ranks, not by this rank's.
        count = (targets != IGNORE).sum()
        dist.all_reduce(count)
        loss = cross_entropy(model(*inputs).flatten(0, 1), targets.flatten(), reduction="sum") / count
        (loss * size).backward()  # DDP divides by the world size: undo that
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total)
        losses.append(total.item())
        if rank == 0 and options.save_every and (step + 1) % options.save_every == 0:
            save(options.folder, model.module, optimizer, losses)
    return losses


# </train>


# <save>
def save(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, losses: list[float]) -> None:
    """5. Write a checkpoint on rank 0: `checkpoint.pt` is always whole, even if this process is killed."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses}
    with (folder / "unfinished.pt").open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())  # on the disk before the name points to it
    (folder / "unfinished.pt").replace(folder / "checkpoint.pt")


def load(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Load the checkpoint on every rank, and return the losses so far: their number is the position in the data."""
    state = torch.load(folder / "checkpoint.pt")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["losses"]


# </save>


def main() -> None:
    """Train on the processes of a launcher."""
    parser = argparse.ArgumentParser(description="Pretraining in plain PyTorch.")
    parser.add_argument("--folder", type=Path, default=Path("runs/plain"), help="where the checkpoint is")
    parser.add_argument("--save-every", type=int, default=0, help="steps between checkpoints")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint")
    options = parser.parse_args()
    if "WORLD_SIZE" not in os.environ:
        raise SystemExit("start it by torchrun --nproc_per_node=2 pretrain_plain.py")
    if BATCH_SIZE % int(os.environ["WORLD_SIZE"]):
        raise SystemExit(f"{BATCH_SIZE} rows of a step cannot be divided by {os.environ['WORLD_SIZE']} processes")
    sources = {name: Source(Path("runs") / name) for name in MIXTURE}
    dist.init_process_group("gloo")
    losses = train(lambda number: mixed(sources, number), options)
    if dist.get_rank() == 0:
        for step in range(0, STEPS, 8):
            print(f"step {step + 1:>2}  loss {losses[step]:.6f}")
        print(f"step {STEPS:>2}  loss {losses[-1]:.6f}")
    dist.barrier()  # leave together: a rank that ends first closes connections that others still use
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
