"""Every collective, reduce operation and dtype over MPI against what one process computes: run under mpirun.

    mpirun -n 4 python mpi_matrix.py            all of it
    mpirun -n 2 python mpi_matrix.py 12 3       every 12th case, from the 3rd

Every rank knows what all ranks give, so that each checks what it gets by itself. Prints how many cases passed.
"""

import itertools
import sys

import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.engines.mpi.types import CARRIED, THROUGH, why_not

DTYPES = (*CARRIED, *THROUGH)
OPERATIONS = ("SUM", "AVG", "PREMUL_SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
SMALL = {"one": (1,), "odd": (3, 5), "empty": (0, 4), "strided": (6, 4)}
LARGE = (1200, 500)
"""Over 1 MB also in 16 bits: sums of this size go another way."""
SHAPES = {**SMALL, "large": LARGE}
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
MOVED = (*DTYPES, torch.float8_e4m3fn)


def given(rank, shape, dtype, part=0):
    """What `rank` brings: small whole numbers, so that sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(100 * rank + part)
    values = torch.randint(1, 4, shape, generator=generator)
    return values.bool() if dtype == torch.bool else values.to(torch.float32).to(dtype)


def in_layout(tensor, name):
    """The same values in memory that is not in a row, where the shape is the strided one."""
    if name != "strided":
        return tensor.clone()
    wide = torch.zeros(tensor.shape[1] * 2, tensor.shape[0], dtype=tensor.dtype)
    view = wide[::2].t()
    view.copy_(tensor)
    return view


def reduced(tensors, operation, dtype):
    if dtype == torch.bool:
        joins = operation in ("SUM", "MAX", "BOR")
        fold = torch.logical_or if joins else torch.logical_xor if operation == "BXOR" else torch.logical_and
    else:
        fold = {
            "PRODUCT": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum,
            "BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor,
        }.get(operation, torch.add)  # fmt: skip
    wide = {torch.float16: torch.float32, torch.bfloat16: torch.float32}.get(dtype, dtype)
    wide = torch.int64 if dtype in (torch.uint16, torch.uint32, torch.uint64) else wide
    total = tensors[0].to(wide)
    for tensor in tensors[1:]:
        total = fold(total, tensor.to(wide))
    if operation == "PREMUL_SUM":
        total = total * 2
    if operation == "AVG":
        total = total / len(tensors)
        total = total if dtype.is_floating_point or dtype.is_complex else total.trunc()
    return total.to(dtype)


def reduce_op(operation):
    return dist._make_nccl_premul_sum(2.0) if operation == "PREMUL_SUM" else getattr(dist.ReduceOp, operation)


def same(got, wanted):
    bits = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
    got, wanted = (item.view(bits.get(item.dtype, item.dtype)).to(torch.complex128) for item in (got, wanted))
    assert torch.equal(got, wanted), f"got {got.flatten()[:8]}, wanted {wanted.flatten()[:8]}"


class Cases:
    """One method for each collective that reduces, and one for each that moves."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size

    def of_all(self, shape, dtype, part=0):
        return [given(rank, shape, dtype, part) for rank in range(self.size)]

    def all_reduce(self, name, dtype, operation):
        every = self.of_all(SHAPES[name], dtype)
        tensor = in_layout(every[self.rank], name)
        dist.all_reduce(tensor, reduce_op(operation))
        same(tensor, reduced(every, operation, dtype))

    def all_reduce_coalesced(self, name, dtype, operation):
        parts = [self.of_all(SHAPES[name], dtype, part) for part in range(3)]
        tensors = [in_layout(every[self.rank], name) for every in parts]
        opts = dist.AllreduceCoalescedOptions()
        opts.reduceOp = reduce_op(operation)
        dist.group.WORLD.allreduce_coalesced(tensors, opts).wait()
        for tensor, every in zip(tensors, parts, strict=True):
            same(tensor, reduced(every, operation, dtype))

    def reduce(self, name, dtype, operation):
        every, root = self.of_all(SHAPES[name], dtype), self.size - 1
        tensor = in_layout(every[self.rank], name)
        dist.reduce(tensor, root, reduce_op(operation))
        if self.rank == root:
            same(tensor, reduced(every, operation, dtype))

    def reduce_scatter(self, name, dtype, operation):
        parts = [self.of_all(SHAPES[name], dtype, part) for part in range(self.size)]
        output = in_layout(torch.zeros(SHAPES[name], dtype=dtype), name)
        dist.reduce_scatter(output, [in_layout(every[self.rank], name) for every in parts], reduce_op(operation))
        same(output, reduced(parts[self.rank], operation, dtype))

    def reduce_scatter_tensor(self, name, dtype, operation):
        shape = SHAPES[name]
        every = self.of_all((shape[0] * self.size, *shape[1:]), dtype)
        output = in_layout(torch.zeros(shape, dtype=dtype), name)
        dist.reduce_scatter_tensor(output, in_layout(every[self.rank], name), reduce_op(operation))
        rows = slice(self.rank * shape[0], (self.rank + 1) * shape[0])
        same(output, reduced([whole[rows] for whole in every], operation, dtype))

    def rounding_once(self, count):
        """1 and numbers too small to change it one by one, yet not together: 1.0078125 on four ranks."""
        mine = torch.full((count * self.size,), 1.0 if self.rank == 0 else 2**-9, dtype=torch.bfloat16)
        wanted = torch.full((count * self.size,), 1 + (self.size - 1) * 2**-9).bfloat16()
        part = torch.zeros(count, dtype=torch.bfloat16)
        dist.reduce_scatter_tensor(part, mine)
        same(part, wanted[:count])
        dist.reduce(rooted := mine.clone(), 0)
        if self.rank == 0:
            same(rooted, wanted)
        dist.all_reduce(mine)
        same(mine, wanted)

    def broadcast(self, name, dtype):
        every, root = self.of_all(SHAPES[name], dtype), self.size - 1
        tensor = in_layout(every[self.rank], name)
        dist.broadcast(tensor, root)
        same(tensor, every[root])

    def all_gather(self, name, dtype):
        every = self.of_all(SHAPES[name], dtype)
        outputs = [in_layout(torch.zeros_like(item), name) for item in every]
        dist.all_gather(outputs, in_layout(every[self.rank], name))
        for output, item in zip(outputs, every, strict=True):
            same(output, item)

    def all_gather_uneven(self, name, dtype):
        shape = SHAPES[name]
        every = [given(rank, (shape[0] + rank, *shape[1:]), dtype) for rank in range(self.size)]
        outputs = [torch.zeros_like(item) for item in every]
        dist.all_gather(outputs, in_layout(every[self.rank], name))
        for output, item in zip(outputs, every, strict=True):
            same(output, item)

    def all_gather_into_tensor(self, name, dtype):
        every = self.of_all(SHAPES[name], dtype)
        output = in_layout(torch.zeros((SHAPES[name][0] * self.size, *SHAPES[name][1:]), dtype=dtype), name)
        dist.all_gather_into_tensor(output, in_layout(every[self.rank], name))
        same(output, torch.cat(every))

    def gather(self, name, dtype):
        every, root = self.of_all(SHAPES[name], dtype), self.size - 1
        outputs = [in_layout(torch.zeros_like(item), name) for item in every] if self.rank == root else None
        dist.gather(in_layout(every[self.rank], name), outputs, dst=root)
        for output, item in zip(outputs or [], every, strict=False):
            same(output, item)

    def scatter(self, name, dtype):
        every, root = self.of_all(SHAPES[name], dtype), self.size - 1
        output = in_layout(torch.zeros_like(every[0]), name)
        dist.scatter(output, [in_layout(item, name) for item in every] if self.rank == root else None, src=root)
        same(output, every[self.rank])

    def all_to_all(self, name, dtype):
        shape = SHAPES[name]
        outputs = [in_layout(torch.zeros(shape, dtype=dtype), name) for _ in range(self.size)]
        dist.all_to_all(outputs, [in_layout(given(self.rank, shape, dtype, part), name) for part in range(self.size)])
        for rank, output in enumerate(outputs):
            same(output, given(rank, shape, dtype, self.rank))

    def all_to_all_single(self, name, dtype):
        """Rank r sends r + 1 rows to everybody."""
        shape = SHAPES[name]
        whole = given(self.rank, ((self.rank + 1) * self.size, *shape[1:]), dtype)
        rows = [rank + 1 for rank in range(self.size)]
        output = torch.zeros((sum(rows), *shape[1:]), dtype=dtype)
        dist.all_to_all_single(output, in_layout(whole, name), rows, [self.rank + 1] * self.size)
        every = [given(rank, ((rank + 1) * self.size, *shape[1:]), dtype) for rank in range(self.size)]
        same(
            output, torch.cat([item[self.rank * n : (self.rank + 1) * n] for item, n in zip(every, rows, strict=True)])
        )

    def ring(self, name, dtype):
        """Each sends to the next, by tags that cross."""
        ahead, behind = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        first, second = (given(self.rank, SHAPES[name], dtype, part) for part in (0, 1))
        sent = [dist.isend(in_layout(first, name), ahead, tag=7), dist.isend(in_layout(second, name), ahead, tag=8)]
        got = [in_layout(torch.zeros_like(first), name) for _ in range(2)]
        dist.recv(got[1], behind, tag=8)
        dist.recv(got[0], behind, tag=7)
        for work in sent:
            work.wait()
        for part in (0, 1):
            same(got[part], given(behind, SHAPES[name], dtype, part))

    def from_anybody(self, name, dtype):
        if self.rank == 0:
            for _ in range(self.size - 1):
                got = in_layout(torch.zeros(SHAPES[name], dtype=dtype), name)
                source = dist.recv(got)
                same(got, given(source, SHAPES[name], dtype))
        else:
            dist.send(in_layout(given(self.rank, SHAPES[name], dtype), name), 0)
        dist.barrier()


REDUCING = ("all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_tensor")
MOVING = (
    "broadcast", "all_gather", "all_gather_uneven", "all_gather_into_tensor", "gather", "scatter", "all_to_all",
    "all_to_all_single", "ring", "from_anybody",
)  # fmt: skip


def all_cases():
    for method, name, dtype, operation in itertools.product(REDUCING, SMALL, DTYPES, OPERATIONS):
        if not why_not(dtype, operation):
            yield method, name, dtype, operation
    for method, name, dtype in itertools.product(MOVING, SMALL, MOVED):
        yield method, name, dtype
    yield from (("rounding_once", count) for count in (4, 300_000))
    yield from itertools.product(REDUCING, ["large"], FLOATS, ["SUM", "AVG", "PREMUL_SUM", "MAX"])


def main():
    step, first = (int(text) for text in sys.argv[1:3]) if len(sys.argv) > 2 else (1, 0)
    with sw.world(backend="mpi", timeout_s=60) as world:
        cases = Cases(world.rank, world.size)
        count = 0
        for method, *arguments in itertools.islice(all_cases(), first, None, step):
            try:
                getattr(cases, method)(*arguments)
            except Exception as error:
                error.add_note(f"rank {world.rank}: {method} {arguments}")
                raise
            count += 1
        if world.is_main:
            print(f"{count} cases passed on {world.size} ranks")


if __name__ == "__main__":
    main()
