"""What the scripts of this chapter share: a rank that knows itself and its device, and a drawing of all ranks."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Me:
    """This rank, of how many, and where its tensors live."""

    rank: int
    size: int
    device: torch.device
    control: dist.ProcessGroup
    """A second group of all ranks, on gloo: it carries what is drawn and never touches a GPU."""

    def piece(self, rank: int) -> torch.Tensor:
        """Return what `rank` brings along, int64 [2]: [1, 2] on rank 0, [3, 4] on rank 1, and so on."""
        return torch.arange(2, device=self.device) + 1 + 2 * rank

    def zeros(self, numel: int) -> torch.Tensor:
        """Return a buffer for `numel` integers. int64 as what is sent: torch.zeros(n) alone would be float32."""
        return torch.zeros(numel, dtype=torch.int64, device=self.device)


def start() -> Me:
    """Join the process group that the launcher describes (communicates, on every rank)."""
    if "RANK" not in os.environ:
        raise SystemExit(f"start it by torchrun --nproc_per_node=2 {Path(sys.argv[0]).name}")
    device = torch.device("cpu")
    if torch.cuda.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])):
        dist.init_process_group("gloo")
    else:
        # By local rank, not by rank: on the second of two machines with 4 GPUs each, rank 4 owns GPU 0.
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        # With its device NCCL connects now; without it, at the first collective, which then waits for all ranks.
        dist.init_process_group("nccl", device_id=device)
    return Me(dist.get_rank(), dist.get_world_size(), device, dist.new_group(backend="gloo"))


def finish(me: Me) -> None:
    """Leave together: a rank that ends first takes its connections along (communicates, on every rank)."""
    dist.barrier(me.control)
    dist.destroy_process_group()


def print_rank0(line: str = "") -> None:
    """Print on rank 0 only."""
    if dist.get_rank() == 0:
        print(line)


def draw(me: Me, name: str, before: object, after: object) -> None:
    """Show what each rank had and has (communicates over `me.control`, on every rank; rank 0 prints)."""
    rows: list = [None] * me.size
    dist.gather_object((plain(before), plain(after)), rows if me.rank == 0 else None, group=me.control)
    if me.rank == 0:
        left = ["Before:", *(f"Rank {rank}: {row[0]}" for rank, row in enumerate(rows))]
        right = [f"After {name}:", *(f"Rank {rank}: {row[1]}" for rank, row in enumerate(rows))]
        width = max(len(text) for text in left) + 4
        print(*(f"{old:<{width}}{new}" for old, new in zip(left, right, strict=True)), sep="\n", end="\n\n")


def plain(value: object) -> object:
    """Return tensors, also those in lists, as lists of numbers; "-" for nothing."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, list):
        return [plain(each) for each in value]
    return "-" if value is None else value
