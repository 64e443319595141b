"""A small network sharded by plain PyTorch FSDP2: the seven things one does by hand, numbered.

    torchrun --nproc_per_node=2 fsdp_basics.py
    torchrun --nproc_per_node=2 fsdp_basics.py --accumulate 4 --precision bf16
    torchrun --nproc_per_node=4 fsdp_basics.py --replicate 2

The network guesses the next byte of Python's own sources from the eight before it, so nothing is downloaded.
Every number of processes trains on the same global batches and so prints the same losses.
"""

import argparse
import os
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

CONTEXT = 8
"""Bytes the network sees."""


class Block(nn.Module):
    """A residual block, [N, width] to [N, width]: the unit in which FSDP gathers and frees weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x, changed a little."""
        return x + self.down(torch.relu(self.up(self.norm(x))))


class NextByte(nn.Module):
    """Bytes int64 [N, CONTEXT] to logits [N, 256]."""

    def __init__(self, width: int = 128, num_blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width // CONTEXT)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return the logits of the byte that follows."""
        x = self.embed(text).flatten(1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main() -> None:
    options = parse_options()
    device = start_process_group()

    # Step 1: lay the ranks out as a mesh. One axis shards; with two, the first one replicates (HSDP).
    mesh = make_mesh(device, options.replicate)

    # Steps 2 to 4: sharded weights; no rank but the first ever has the whole model.
    model = sharded_model(mesh, precision=options.precision, reshard=not options.keep_gathered)

    # Step 5: make the optimizer AFTER sharding. It then sees shards only, and so do its states: that is ZeRO.
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    print_rank0(f"world size {dist.get_world_size()}, on {device.type}; mesh {tuple(mesh.shape)} {mesh.mesh_dim_names}")

    text = load_text().to(device)
    for step in range(options.steps):
        loss = train_step(model, optimizer, global_batch(text, step, options.batch_size), options.accumulate)
        if step == 0 or (step + 1) % options.report == 0:
            print_rank0(f"step {step + 1} of {options.steps}: loss {loss:.4f}")
    print_rank0(describe_state(model, optimizer))

    # Step 7: gather the whole state dict. A collective: EVERY rank calls it, though only rank 0 gets tensors.
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        options.save.parent.mkdir(parents=True, exist_ok=True)
        torch.save(weights, options.save)
        reloaded = NextByte()
        reloaded.load_state_dict(torch.load(options.save, weights_only=True))  # a plain module again
        print(f"saved {len(weights)} whole tensors to {options.save}")

    # All leave together, and what holds the group goes before it: else gloo's threads can abort the process
    # while it exits (seen in 1 of 20 runs with torch 2.13).
    dist.barrier()
    del model, optimizer
    dist.destroy_process_group()


def make_mesh(device: torch.device, replicate: int = 1) -> DeviceMesh:
    """Return all ranks as one shard axis, or as replicate x shard (makes process groups, on every rank)."""
    world_size = dist.get_world_size()
    if world_size % replicate:
        raise SystemExit(f"--replicate {replicate} does not divide the world size {world_size}")
    if replicate == 1:
        return init_device_mesh(device.type, (world_size,), mesh_dim_names=("shard",))
    return init_device_mesh(device.type, (replicate, world_size // replicate), mesh_dim_names=("replicate", "shard"))


def sharded_model(mesh: DeviceMesh, precision: str = "fp32", *, reshard: bool = True) -> NextByte:
    """Return a model whose parameters are shards over `mesh`, with rank 0's values (broadcasts, on every rank)."""
    # <shard>
    # Step 2: build the structure on the meta device: shapes and names, no memory.
    with torch.device("meta"):
        model = NextByte()

    # Step 3: shard it, inner units first. A unit's weights are gathered just before it runs, and freed after.
    policy = MixedPrecisionPolicy()
    if precision == "bf16":  # gathered and computed in bf16; shards, optimizer and gradient sums stay float32
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)  # the rest: embedding and head

    # Step 4: give the shards memory, then values. Rank 0 alone builds a real model, and sends each rank its part.
    model.to_empty(device=mesh.device_type)
    torch.manual_seed(0)
    values = NextByte().state_dict() if dist.get_rank() == 0 else {}
    set_model_state_dict(model, values, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    # </shard>
    return model


def train_step(
    model: NextByte, optimizer: torch.optim.Optimizer, batch: torch.Tensor, accumulate: int, clip: float = 1.0
) -> float:
    """Take one step on this rank's part of a global batch, and return the loss over all of it (communicates)."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    micro_batches = batch.tensor_split(world_size)[rank].tensor_split(accumulate)
    loss_sum = torch.zeros((), device=batch.device)
    # <window>
    for index, rows in enumerate(micro_batches):
        # Step 6: sum gradients over ranks once per step, with the last micro-batch. FSDP2 has no no_sync().
        # Until then each rank keeps WHOLE gradients: memory for traffic. Leave it out to stay small.
        model.set_requires_gradient_sync(index == len(micro_batches) - 1)
        loss = cross_entropy(model(rows[:, :-1]).float(), rows[:, -1], reduction="sum")
        # Divide by the samples of the global batch, not by those at hand; FSDP averages over ranks, hence the factor.
        (loss * world_size / len(batch)).backward()
        loss_sum += loss.detach()
    # </window>
    nn.utils.clip_grad_norm_(model.parameters(), clip)  # knows DTensors: the norm is that of the whole gradient
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(loss_sum)
    return loss_sum.item() / len(batch)


def load_text(num_bytes: int = 1_000_000) -> torch.Tensor:
    """Return the first bytes of the Python sources that came with this interpreter, uint8."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)[:num_bytes]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def global_batch(text: torch.Tensor, step: int, batch_size: int) -> torch.Tensor:
    """Return the samples of a step, int64 [batch_size, CONTEXT + 1]: the same on every rank."""
    starts = torch.randint(len(text) - CONTEXT, (batch_size,), generator=torch.Generator().manual_seed(step))
    return text[starts.to(text.device)[:, None] + torch.arange(CONTEXT + 1, device=text.device)].long()


def describe_state(model: FSDPModule, optimizer: torch.optim.Optimizer) -> str:
    """Describe the bytes of parameters and optimizer states between two steps: on this rank, and of the whole model."""
    states = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
    shards = [*model.parameters(), *states]
    mine = sum(shard.to_local().nbytes for shard in shards if isinstance(shard, DTensor))
    return f"stored on rank 0: {mine:,} of {sum(shard.nbytes for shard in shards):,} bytes (weights and Adam's moments)"


def start_process_group() -> torch.device:
    """Join the process group that the launcher describes, and return this rank's device."""
    if "RANK" not in os.environ:
        raise SystemExit(f"start it by torchrun --nproc_per_node=2 {Path(__file__).name}")
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


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A small network sharded by plain PyTorch FSDP2")
    add = parser.add_argument
    add("--steps", type=int, default=40)
    add("--batch-size", type=int, default=512, help="samples per optimizer step over ALL processes")
    add("--accumulate", type=int, default=1, help="micro-batches per optimizer step")
    add("--lr", type=float, default=0.003)
    add("--precision", choices=("fp32", "bf16"), default="fp32", help="what forward and backward compute in")
    add("--replicate", type=int, default=1, help="copies of the sharded model (HSDP); divides the processes")
    add("--keep-gathered", action="store_true", help="keep gathered weights until backward: SHARD_GRAD_OP, ZeRO-2")
    add("--report", type=int, default=10, help="print the loss every so many steps")
    add("--save", type=Path, default=Path("runs/fsdp_basics.pt"), help="where the whole weights go")
    return parser.parse_args()


if __name__ == "__main__":
    main()
