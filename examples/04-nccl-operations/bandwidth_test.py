"""How fast tensors travel: collectives over all ranks, and each pair of ranks, in the numbers of nccl-tests.

    torchrun --nproc_per_node=2 bandwidth_test.py
    torchrun --nproc_per_node=2 bandwidth_test.py --largest 64 --calls 20

A time is that of the slowest rank, per call, the mean over `--calls` calls after one that warms up. Two bandwidths:

algorithm bandwidth = bytes / time, what the caller sees;
bus bandwidth = algorithm bandwidth x factor, what a link carries. The factor depends on the collective and on the
number of ranks (see FACTORS), so that bus bandwidths of any two rows can be compared, and with what the link promises.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from ranks import Me, finish, print_rank0, start

# <factors>
FACTORS: dict[str, Callable[[int], float]] = {  # of n ranks
    "all_reduce": lambda n: 2 * (n - 1) / n,  # a ring sends each byte twice, except the part a rank has already
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda _: 1.0,  # a chain: every link carries all of it once
    "reduce": lambda _: 1.0,
    "send": lambda _: 1.0,
}
# </factors>


@dataclass(frozen=True)
class Collective:
    """One collective on one size of tensor."""

    call: Callable[[], object]
    num_bytes: int
    """Of the whole tensor: what is gathered, or what is scattered."""
    result: torch.Tensor
    expected: torch.Tensor


def prepare(name: str, num_bytes: int, me: Me) -> Collective:
    """Return a collective whose ranks bring along their number plus one: [1, 1, ...], [2, 2, ...], float32."""
    part = torch.full((max(1, num_bytes // 4 // me.size),), me.rank + 1.0, device=me.device)
    whole = part.repeat(me.size)
    other = torch.zeros_like(whole)
    first, numbers = torch.ones_like(whole), torch.arange(me.size, device=me.device) + 1.0
    each, total = numbers.repeat_interleave(part.numel()), whole.new_full((), numbers.sum())
    calls = {
        "all_reduce": (lambda: dist.all_reduce(whole), whole, total),
        "all_gather": (lambda: dist.all_gather(list(other.chunk(me.size)), part), other, each),
        "reduce_scatter": (lambda: dist.reduce_scatter(part, list(whole.chunk(me.size))), part, total),
        "all_to_all": (lambda: dist.all_to_all_single(other, whole), other, each),
        "broadcast": (lambda: dist.broadcast(whole, src=0), whole, first),
        "reduce": (lambda: dist.reduce(whole, dst=0), whole, total if me.rank == 0 else whole),
    }
    call, result, expected = calls[name]
    return Collective(call, whole.nbytes, result, expected)


def wrong_numbers(collective: Collective, me: Me) -> int:
    """Call it once, and return how many numbers are wrong over all ranks (communicates, on every rank)."""
    collective.call()
    wrong = (collective.result != collective.expected).sum().cpu()
    dist.all_reduce(wrong, group=me.control)
    return int(wrong)


def seconds_per_call(call: Callable[[], object], calls: int, me: Me) -> float:
    """Return the slowest rank's time for one call (communicates, on every rank)."""
    call()  # connections of a pair are made at its first one
    wait(me)
    dist.barrier(me.control)
    # <timed>
    began = time.perf_counter()
    for _ in range(calls):
        call()
    wait(me)  # so far the calls are only queued on the GPU: without this one measures how fast Python is
    elapsed = torch.tensor((time.perf_counter() - began) / calls, dtype=torch.float64)
    dist.all_reduce(elapsed, dist.ReduceOp.MAX, group=me.control)
    # </timed>
    return elapsed.item()


def wait(me: Me) -> None:
    if me.device.type == "cuda":
        torch.cuda.synchronize(me.device)


def collectives(me: Me, sizes: list[int], calls: int) -> None:
    """Print a row for each collective and size (communicates, on every rank)."""
    print_rank0(f"{'collective':<16}{'bytes':>12}{'us':>12}{'algbw GB/s':>12}{'busbw GB/s':>12}{'#wrong':>8}")
    for name in [name for name in FACTORS if name != "send"]:
        for size in sizes:
            collective = prepare(name, size, me)
            wrong = wrong_numbers(collective, me)
            seconds = seconds_per_call(collective.call, calls, me)
            algorithm = collective.num_bytes / seconds / 1e9
            bus = algorithm * FACTORS[name](me.size)
            print_rank0(
                f"{name:<16}{collective.num_bytes:>12,}{1e6 * seconds:>12.1f}{algorithm:>12.3f}{bus:>12.3f}{wrong:>8}"
            )


def ping_pong(me: Me, first: int, second: int, tensor: torch.Tensor) -> None:
    """Send a tensor from one rank to another and back (communicates, those two only)."""
    if me.rank == first:
        dist.send(tensor, dst=second)
        dist.recv(tensor, src=second)
    elif me.rank == second:
        dist.recv(tensor, src=first)
        dist.send(tensor, dst=first)


def pairs(me: Me, num_bytes: int, calls: int) -> dict[tuple[int, int], tuple[float, float]]:
    """Return latency in seconds and bytes per second of every pair, one by one (communicates, on every rank)."""
    found = {}
    small, large = torch.ones(1, device=me.device), torch.ones(max(1, num_bytes // 4), device=me.device)
    for second in range(me.size):
        for first in range(second):
            latency, seconds = (
                seconds_per_call(lambda: ping_pong(me, first, second, tensor), calls, me) / 2  # noqa: B023 - called now
                for tensor in (small, large)
            )
            found[first, second] = (latency, large.nbytes / seconds)
    return found


def matrix(size: int, found: dict[tuple[int, int], float], title: str) -> str:
    """Return the values of all pairs as a triangle, a row for each second rank."""
    head = f"{title:<24}" + "".join(f"{f'rank {rank}':>10}" for rank in range(size - 1))
    rows = [
        f"{f'rank {second}':>24}" + "".join(f"{found[first, second]:>10.2f}" for first in range(second))
        for second in range(1, size)
    ]
    return "\n".join([head, *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description="Bandwidth of collectives and of pairs")
    parser.add_argument("--largest", type=float, default=4, help="MiB of the largest tensor")
    parser.add_argument("--calls", type=int, default=5, help="of each size, timed together")
    options = parser.parse_args()
    me = start()
    largest = int(options.largest * 2**20)
    print_rank0(f"{me.size} ranks, backend {dist.get_backend()}, float32 on {me.device.type}\n")
    collectives(me, [max(4, largest // 4096), max(4, largest // 64), largest], options.calls)
    found = pairs(me, largest, options.calls)
    if me.rank == 0 and found:
        print()
        print(matrix(me.size, {pair: 1e6 * latency for pair, (latency, _) in found.items()}, "us, 4 bytes one way"))
        print(matrix(me.size, {pair: rate / 1e9 for pair, (_, rate) in found.items()}, f"GB/s, {largest:,} bytes"))
    finish(me)


if __name__ == "__main__":
    main()
