"""Every collective on real ranks: what each rank has before and after, drawn and asserted.

    torchrun --nproc_per_node=2 collective_ops.py
    torchrun --nproc_per_node=4 collective_ops.py
    TORCH_DISTRIBUTED_DEBUG=DETAIL torchrun --nproc_per_node=2 collective_ops.py --mismatches

Each example returns this rank's tensors before and after, having asserted them. All of them are written for any
number of ranks. A collective is called by every rank of its group, in the same order; whoever is missing is waited for.
`--mismatches` instead breaks that rule, and prints what torch's own check reports.
"""

import argparse
from collections.abc import Callable
from functools import reduce as fold

import torch
import torch.distributed as dist
from ranks import Me, draw, finish, print_rank0, start
from torch.distributed.distributed_c10d import _get_default_store
from torch.testing import assert_close

Drawn = tuple[object, object]
"""What this rank had, and what it has."""


def all_reduce(me: Me) -> Drawn:
    """Everybody gets the sum, in place. DDP does this to gradients."""
    tensor = torch.arange(2, device=me.device) + 1 + 2 * me.rank  # rank 0: [1, 2], rank 1: [3, 4]
    before = tensor.clone()
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
    assert_close(tensor, sum(me.piece(rank) for rank in range(me.size)))
    return before, tensor


def broadcast(me: Me) -> Drawn:
    """Everybody gets what one rank has. DDP does this to the first weights."""
    # <broadcast>
    tensor = torch.tensor([1, 2, 3, 4], device=me.device) if me.rank == 0 else me.zeros(4)  # int64 on all ranks
    before = tensor.clone()
    dist.broadcast(tensor, src=0)
    # </broadcast>
    assert_close(tensor, torch.tensor([1, 2, 3, 4], device=me.device))
    return before, tensor


def all_gather(me: Me) -> Drawn:
    """Everybody gets everybody's. FSDP does this to weights."""
    tensor = me.piece(me.rank)
    tensor_list = [me.zeros(2) for _ in range(me.size)]
    dist.all_gather(tensor_list, tensor)
    assert_close(tensor_list, [me.piece(rank) for rank in range(me.size)])
    return tensor, tensor_list


def reduce_scatter(me: Me) -> Drawn:
    """Everybody gets one part of the sum. FSDP does this to gradients."""
    input_list = [me.piece(rank) for rank in range(me.size)]  # the same on all ranks
    output = me.zeros(2)
    dist.reduce_scatter(output, input_list)
    assert_close(output, me.size * me.piece(me.rank))
    return input_list, output


def reduce(me: Me) -> Drawn:
    """One rank gets the sum."""
    tensor = me.piece(me.rank)
    before = tensor.clone()
    dist.reduce(tensor, dst=0)
    if me.rank != 0:  # what the others are left with is undefined: each backend has its own partial sums there
        return before, None
    assert_close(tensor, sum(me.piece(rank) for rank in range(me.size)))
    return before, tensor


def gather(me: Me) -> Drawn:
    """One rank gets everybody's."""
    tensor = me.piece(me.rank)
    gathered = [me.zeros(2) for _ in range(me.size)] if me.rank == 0 else None
    dist.gather(tensor, gathered, dst=0)
    if me.rank == 0:
        assert_close(gathered, [me.piece(rank) for rank in range(me.size)])
    return tensor, gathered


def scatter(me: Me) -> Drawn:
    """Everybody gets one of one rank's parts."""
    parts = [me.piece(rank) for rank in range(me.size)] if me.rank == 0 else None
    output = me.zeros(2)
    dist.scatter(output, parts, src=0)
    assert_close(output, me.piece(me.rank))
    return parts, output


def all_to_all(me: Me) -> Drawn:
    """Everybody sends a part to everybody: rows become columns. Expert and context parallelism do this."""
    rows = torch.arange(me.size, device=me.device) + 10 * me.rank  # tens: from which rank, ones: to which
    columns = torch.empty_like(rows)
    dist.all_to_all_single(columns, rows)
    assert_close(columns, 10 * torch.arange(me.size, device=me.device) + me.rank)
    return rows, columns


def barrier(me: Me) -> Drawn:
    """No rank continues before all have arrived."""
    store = _get_default_store()  # the rendezvous' TCPStore, here to count
    store.add("arrived", 1)
    dist.barrier(device_ids=[me.device.index] if dist.get_backend() == "nccl" else None)  # gloo has no use for it
    arrived = store.add("arrived", 0)
    assert arrived == me.size
    return "arrives", f"continues, {arrived} of {me.size} have arrived"


def asynchronous(me: Me) -> Drawn:
    """Start now, wait later. Until then the tensor belongs to the collective: neither read nor write it."""
    tensor = me.piece(me.rank)
    before = tensor.clone()
    # The others come only after rank 0 has looked, so that there is something to see.
    if me.rank != 0:
        dist.barrier(me.control)
    # <async>
    work = dist.all_reduce(tensor, async_op=True)
    early = work.is_completed()  # does not wait
    # </async>
    if me.rank == 0:
        assert me.size == 1 or not early
        print(f"rank 0 alone has called all_reduce: is_completed() {early}")
        dist.barrier(me.control)
    # <wait>
    while not work.is_completed():
        pass  # other work goes here
    work.wait()  # raises if the collective failed. NCCL: makes this stream, not this thread, wait
    # </wait>
    assert_close(tensor, sum(me.piece(rank) for rank in range(me.size)))
    return before, tensor


def all_asynchronous(me: Me) -> Drawn:
    """Several collectives travel at once, while this rank computes; each has a Work of its own to wait for."""
    shared = me.piece(0) if me.rank == 0 else me.zeros(2)
    gathered = [me.zeros(2) for _ in range(me.size)]
    scattered, columns = me.zeros(2), me.zeros(me.size)
    # <all_async>
    works = [  # started in the same order on every rank
        dist.broadcast(shared, src=0, async_op=True),
        dist.all_gather(gathered, me.piece(me.rank), async_op=True),
        dist.reduce_scatter(scattered, [me.piece(rank) for rank in range(me.size)], async_op=True),
        dist.all_to_all_single(columns, torch.arange(me.size, device=me.device) + 10 * me.rank, async_op=True),
        dist.barrier(async_op=True),
    ]
    product = torch.ones(64, 64, device=me.device) @ torch.ones(64, 64, device=me.device)  # overlaps with them
    for work in works:
        work.wait()  # only now are the five results there
    # </all_async>
    assert product[0, 0] == 64
    assert_close(shared, me.piece(0))
    assert_close(gathered, [me.piece(rank) for rank in range(me.size)])
    assert_close(scattered, me.size * me.piece(me.rank))
    assert_close(columns, 10 * torch.arange(me.size, device=me.device) + me.rank)
    return "starts 5", [shared, gathered, scattered, columns]


def sub_group(me: Me) -> Drawn:
    """Three of four ranks sum among themselves; the fourth keeps its own."""
    # <sub_group>
    members = list(range(max(1, min(3, me.size - 1))))  # of four ranks: [0, 1, 2]
    group = dist.new_group(members)  # EVERY rank calls it, members or not
    tensor = me.piece(me.rank)
    before = tensor.clone()
    if me.rank in members:
        dist.all_reduce(tensor, group=group)
    # </sub_group>
    expected = sum(me.piece(rank) for rank in members) if me.rank in members else before
    assert_close(tensor, expected)
    assert (dist.get_rank(group) == -1) == (me.rank not in members)
    return before, tensor


EXAMPLES: dict[str, Callable[[Me], Drawn]] = {
    "all_reduce(SUM)": all_reduce,
    "broadcast(src=0)": broadcast,
    "all_gather": all_gather,
    "reduce_scatter(SUM)": reduce_scatter,
    "reduce(dst=0)": reduce,
    "gather(dst=0)": gather,
    "scatter(src=0)": scatter,
    "all_to_all": all_to_all,
    "barrier": barrier,
    "all_reduce(async_op=True)": asynchronous,
    "broadcast, all_gather, reduce_scatter, all_to_all, barrier (async_op=True)": all_asynchronous,
    "all_reduce(group=new_group(...))": sub_group,
}

OPERATIONS = {  # what each makes of all ranks' tensors, stacked
    "SUM": (dist.ReduceOp.SUM, torch.int64, lambda rows: rows.sum(0)),
    "AVG": (dist.ReduceOp.AVG, torch.float32, lambda rows: rows.mean(0)),
    "PRODUCT": (dist.ReduceOp.PRODUCT, torch.int64, lambda rows: rows.prod(0)),
    "MIN": (dist.ReduceOp.MIN, torch.int64, lambda rows: rows.amin(0)),
    "MAX": (dist.ReduceOp.MAX, torch.int64, lambda rows: rows.amax(0)),
    "BAND": (dist.ReduceOp.BAND, torch.int64, lambda rows: fold(torch.bitwise_and, rows)),
    "BOR": (dist.ReduceOp.BOR, torch.int64, lambda rows: fold(torch.bitwise_or, rows)),
    "BXOR": (dist.ReduceOp.BXOR, torch.int64, lambda rows: fold(torch.bitwise_xor, rows)),
    # Needs its factor, which ReduceOp.PREMUL_SUM alone has not: torch's documentation names this function.
    "PREMUL_SUM": (dist._make_nccl_premul_sum(0.5), torch.float32, lambda rows: (0.5 * rows).sum(0)),  # noqa: SLF001
}


def reduced(me: Me, name: str) -> torch.Tensor | None:
    """Return the all-reduce of [rank + 1, 6], asserted, or None where the backend has no such operation."""
    op, dtype, expected = OPERATIONS[name]
    tensor = torch.tensor([me.rank + 1, 6], dtype=dtype, device=me.device)
    try:
        dist.all_reduce(tensor, op)
    except (RuntimeError, TypeError, ValueError) as error:  # raised before anything was sent, on all ranks alike
        if not str(error).startswith("Cannot use ReduceOp"):
            raise
        return None
    rows = torch.tensor([[rank + 1, 6] for rank in range(me.size)], dtype=dtype, device=me.device)
    assert_close(tensor, expected(rows))
    return tensor


DTYPES = (torch.float32, torch.int64)

# <mismatches>
MISMATCHES: dict[str, Callable[[Me, dist.ProcessGroup], object]] = {  # rank 1 differs from the others
    "shape": lambda me, group: dist.all_reduce(torch.ones(3 if me.rank == 1 else 4), group=group),
    "dtype": lambda me, group: dist.all_reduce(torch.ones(4, dtype=DTYPES[me.rank == 1]), group=group),
    "collective": lambda me, group: (
        dist.broadcast(torch.ones(4), 1, group) if me.rank == 1 else dist.all_reduce(torch.ones(4), group=group)
    ),
    "reduce operation": lambda me, group: dist.all_reduce(
        torch.ones(4), dist.ReduceOp.MAX if me.rank == 1 else dist.ReduceOp.SUM, group=group
    ),
}
# </mismatches>


def detected(me: Me, name: str) -> str:
    """Return the difference that TORCH_DISTRIBUTED_DEBUG=DETAIL reports on this rank (communicates over gloo)."""
    group = dist.new_group(backend="gloo")  # of its own; DETAIL wraps groups when they are made
    try:
        MISMATCHES[name](me, group)
    except RuntimeError as error:  # raised on all ranks, before the collective starts
        what, _, aspects = str(error).partition("Collectives differ in the following aspects:")
        return f"{type(error).__name__}: {what.partition('.')[0]}: {' '.join(aspects.split())}"
    return "not detected: the result is wrong"


def show_mismatches(me: Me) -> None:
    """Print what torch's own check reports for each mismatch (communicates, on every rank)."""
    if dist.get_debug_level() != dist.DebugLevel.DETAIL or me.size == 1:
        raise SystemExit("start two ranks with TORCH_DISTRIBUTED_DEBUG=DETAIL: without it nothing compares the calls")
    for name in MISMATCHES:
        print_rank0(f"{name:<18}{detected(me, name)}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Every collective on real ranks")
    parser.add_argument("--mismatches", action="store_true", help="only collectives in which the ranks differ")
    options = parser.parse_args()
    me = start()
    print_rank0(f"{dist.get_world_size()} ranks, backend {dist.get_backend()}, tensors on {me.device.type}\n")
    if options.mismatches:
        show_mismatches(me)
    else:
        show_all(me)
    finish(me)


def show_all(me: Me) -> None:
    """Draw every collective and print every reduce operation (communicates, on every rank)."""
    for name, example in EXAMPLES.items():
        draw(me, name, *example(me))
    print_rank0("all_reduce of [rank + 1, 6] by each operation:")
    for name in OPERATIONS:
        tensor = reduced(me, name)
        print_rank0(f"{name:<12}{f'not on {dist.get_backend()}' if tensor is None else tensor.tolist()}")


if __name__ == "__main__":
    main()
