"""What each sharding strategy stores on a rank and sends in a step, measured on real ranks: prints a table.

    torchrun --nproc_per_node=4 measure_strategies.py
    shardwise launch --nproc_per_node=2 measure_strategies.py

The same decoder trains under each plan. Stored bytes are those of the tensors. Sent bytes come twice: what
the kernel counted on this process's TCP sockets (gloo only), and what ring algorithms, as NCCL has them, send for the
collectives that were called. sharding_strategies.md shows the table.
"""

import os
import socket
import stat
import struct
from dataclasses import dataclass
from itertools import islice

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw

STRATEGIES = {
    "NO_SHARD, DDP": "ddp",
    "ZeRO-1": "zero1",
    "SHARD_GRAD_OP, ZeRO-2": "zero2",
    "FULL_SHARD, ZeRO-3": "zero3",
}
HYBRID = {"HYBRID_SHARD": "hsdp"}
"""Needs four ranks: two copies, each over half of them."""

WARM_UP, STEPS = 3, 2
"""The first steps make optimizer states and connections, and DDP orders its buckets anew. Then measure."""

LENGTH = 32

COLUMNS = (
    "parameters, between steps",
    "parameters, at most",
    "gradients",
    "optimizer states",
    "sum of the last three",
    "sent a step, NCCL's rings",
    "sent a step, gloo measured",
)


class Tokens(torch.utils.data.Dataset):
    """Random tokens and the same shifted by one: what is measured does not depend on them."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(256, (LENGTH + 1,), generator=torch.Generator().manual_seed(index))
        return tokens[:-1], tokens[1:]


job = sw.Job(
    model=lambda: sw.models.decoder("gpt2-tiny", width=128, num_layers=8, context=LENGTH),
    data=lambda split: Tokens() if split == "train" else None,
    loss=sw.losses.token_cross_entropy,
    optimizer=sw.adamw(lr=1e-3),
    batch_size=8,
    steps=WARM_UP + STEPS,
)


@dataclass
class Row:
    """Bytes of one strategy on one rank."""

    parameters: int = 0
    """Between steps."""
    most_parameters: int = 0
    """The most that was there at once, shards and gathered blocks together."""
    gradients: int = 0
    """After backward, before the optimizer."""
    optimizer: int = 0
    wire: int = 0
    """Sent on TCP in a step."""
    ring: int = 0
    """What ring collectives send in a step."""

    @property
    def total(self) -> int:
        """Parameters, gradients and optimizer states at most."""
        return self.most_parameters + self.gradients + self.optimizer


class RingBytes(TorchDispatchMode):
    """Counts what this rank sends, by ring algorithms, for every collective called inside."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.partition(".")[0]
        if name == "allreduce_":
            size = dist.ProcessGroup.unbox(args[1]).size()
            self.sent += 2 * (size - 1) / size * sum(tensor.nbytes for tensor in args[0])
        elif name in ("_allgather_base_", "_reduce_scatter_base_"):
            self.sent += abs(args[0].nbytes - args[1].nbytes)  # the whole less this rank's part
        elif func.namespace == "c10d" and name != "barrier":
            raise NotImplementedError(f"{name} is not counted")
        return func(*args, **(kwargs or {}))


def measure(preset: str, world: sw.World) -> Row:
    """Train one plan for some steps and return what this rank stored and sent (communicates, on every rank)."""
    row = Row()
    plan = sw.Plan.preset(preset, world.size, batch_size=job.batch_size)
    step = sw.build_step(job, plan, world, before_update=lambda: _note_gradients(row, step))
    row.parameters = sum(local(parameter).nbytes for _, parameter in step.named_parameters())
    watch_parameters(row, sw.unwrap(step.model))
    batches = iter(step.feed)
    for batch in islice(batches, WARM_UP):
        step(batch)
    world.barrier()
    before = tcp_bytes_sent()
    with RingBytes() as ring:
        for batch in batches:
            step(batch)
    world.barrier()
    row.wire = (tcp_bytes_sent() - before) // STEPS
    row.ring = round(ring.sent / STEPS)
    states = (value for state in step.optimizer.state.values() for value in state.values())
    row.optimizer = sum(local(value).nbytes for value in states if value.ndim)
    return row


def _note_gradients(row: Row, step) -> None:
    gradients = [parameter.grad for _, parameter in step.named_parameters() if parameter.grad is not None]
    row.gradients = max(row.gradients, sum(local(gradient).nbytes for gradient in gradients))


def watch_parameters(row: Row, model: torch.nn.Module) -> None:
    """Measure the parameters of the whole model whenever an MLP runs, in forward and in backward."""

    def measure_now(*_: object) -> None:
        parameters = list(model.parameters())
        whole = sum(parameter.nbytes for parameter in parameters if not isinstance(parameter, DTensor))
        # A gathered block's shards stay beside it. Without sharding, the parameters are the whole.
        is_sharded = row.parameters < sum(parameter.nbytes for parameter in parameters)
        row.most_parameters = max(row.most_parameters, whole + row.parameters if is_sharded else whole)

    for name, module in model.named_modules():
        if name.endswith(".mlp"):
            module.register_forward_pre_hook(measure_now)
            module.register_full_backward_pre_hook(measure_now)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def tcp_bytes_sent() -> int:
    """Return the bytes this process has sent on TCP sockets that are open now, as Linux counts them."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.stat(f"/proc/self/fd/{name}").st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:  # closed since, or no TCP socket
            continue
        if len(info) >= 208:
            total += struct.unpack_from("Q", info, 200)[0]  # tcpi_bytes_sent, since Linux 4.19
    return total


def table(rows: dict[str, Row], world_size: int) -> str:
    """Return the rows as Markdown, in MB."""
    lines = [
        f"| {world_size} ranks, MB per rank | {' | '.join(COLUMNS)} |",
        "|---" * (1 + len(COLUMNS)) + "|",
    ]
    for name, row in rows.items():
        numbers = (row.parameters, row.most_parameters, row.gradients, row.optimizer, row.total, row.ring, row.wire)
        lines.append(f"| {name} | " + " | ".join(f"{number / 1e6:.2f}" for number in numbers) + " |")
    return "\n".join(lines)


def main() -> None:
    with sw.world() as world:
        strategies = STRATEGIES | (HYBRID if world.size >= 4 and world.size % 2 == 0 else {})
        rows = {name: measure(preset, world) for name, preset in strategies.items()}
        if world.is_main:
            print(table(rows, world.size))


if __name__ == "__main__":
    main()
