"""What a process group over MPI does besides its arithmetic: run under mpirun -n 2 or more. Prints "passed: <name>"."""

import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import shardwise as sw
from shardwise.layout import Layout


def data_moves_while_nobody_waits(world):
    """Neither rank calls MPI after the start: only the thread can have carried it on."""
    tensor = torch.ones(1_000_000)
    future = dist.all_reduce(tensor, async_op=True).get_future()
    end = time.monotonic() + 20
    while not future.done() and time.monotonic() < end:
        time.sleep(0.01)
    assert future.done()
    assert torch.equal(future.value()[0], torch.full((1_000_000,), float(world.size)))


def a_callback_may_wait_for_another_collective(world):
    """As PowerSGD's do; other large sums, which need a second step of each rank, continue meanwhile."""
    first, second, others = torch.ones(10), torch.ones(10), [torch.ones(300_000) for _ in range(3)]
    if world.rank == 1:
        time.sleep(0.2)
    future = dist.all_reduce(first, async_op=True).get_future()
    works = [dist.all_reduce(tensor, group=world.host_group, async_op=True) for tensor in others]

    def sum_more(_):
        if world.rank == 1:
            works[-1].wait()
        return dist.all_reduce(second, async_op=True).get_future().wait()[0]

    assert future.then(sum_more).wait().eq(world.size).all()
    for work in works:
        work.wait()
    assert all(tensor.eq(world.size).all() for tensor in (first, *others))


def inference_mode_holds_until_the_end_of_a_work(world):
    """The thread that ends a work has a mode of its own."""
    outside = torch.ones(4, dtype=torch.bfloat16)
    with torch.inference_mode():
        tensors = [torch.ones(8, dtype=torch.bfloat16), torch.ones(8), torch.ones(400_000)]
        works = [dist.all_reduce(tensor, dist.ReduceOp.AVG, async_op=True) for tensor in (*tensors, outside)]
        end = time.monotonic() + 20
        while not all(work._done for work in works) and time.monotonic() < end:
            time.sleep(0.01)
    for work in works:
        work.wait()
    assert all(tensor.eq(1).all() for tensor in (*tensors, outside))


def many_under_way_keep_their_order(world):
    # The large ones are summed in another way, by messages, in two steps.
    sizes = [300_000 if i % 8 == 3 else 50 * (i + 1) for i in range(40)]
    tensors = [torch.full((size,), float(i + world.rank)) for i, size in enumerate(sizes)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    for i, tensor in enumerate(tensors):
        assert tensor.eq(sum(i + rank for rank in range(world.size))).all()
    assert all(work.is_completed() and work.is_success() and work.exception() is None for work in works)


def groups_do_not_mix(world):
    """The same collectives in three groups at once, from three threads, in whatever order they come."""
    groups = [dist.group.WORLD, world.host_group, world.own_host_group()]
    assert all(dist.get_backend(group) == "mpi4py" for group in groups)
    sums = {}

    def use(number):
        total = torch.tensor([10.0**number])
        for _ in range(20):
            dist.all_reduce(total, group=groups[number])
            total /= world.size
        sums[number] = total.item()

    threads = [threading.Thread(target=use, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums == {0: 1.0, 1: 10.0, 2: 100.0}


def some_ranks_make_a_group(world):
    pair = world.group([world.size - 1, 0])  # torch sorts them
    alone = world.group([1])
    total = torch.tensor([world.rank + 1])
    if pair is not None:
        dist.all_reduce(total, group=pair)
        assert total.item() == 1 + world.size
    assert (pair is None) == (world.rank not in (0, world.size - 1))
    assert (alone is None) == (world.rank != 1)
    axis = world.axis_group(Layout(replicate=world.size), ("replicate",), on_host=True)
    dist.barrier(group=axis)


def objects_travel(world):
    assert world.gather({"rank": world.rank}) == [{"rank": rank} for rank in range(world.size)]
    box = [{"from": world.rank}]
    dist.broadcast_object_list(box, src=1)
    assert box == [{"from": 1}]
    got = [None]
    dist.scatter_object_list(got, [f"to {rank}" for rank in range(world.size)], src=0)
    assert got == [f"to {world.rank}"]
    if world.rank == 0:
        dist.send_object_list(["hello", 3], dst=1)
    if world.rank == 1:
        heard = [None, None]
        dist.recv_object_list(heard, src=0)
        assert heard == ["hello", 3]


def its_own_shard_may_lie_in_what_it_gathers(world):
    """As FSDP2 has it; MPI itself forbids it."""
    for count in (4, 300_000):
        whole = torch.arange(float(count * world.size))
        mine = whole[count * world.rank : count * (world.rank + 1)]
        dist.all_gather_into_tensor(whole, mine)
        assert torch.equal(whole, torch.arange(float(count * world.size)))
        dist.reduce_scatter_tensor(mine, whole)
        assert torch.equal(mine, torch.arange(float(count)).add(count * world.rank) * world.size)


def what_cannot_be_is_refused_and_changes_nothing(world):
    refusals = (
        (TypeError, "cannot reduce float8_e4m3fn by SUM", torch.ones(2).to(torch.float8_e4m3fn), dist.ReduceOp.SUM),
        (TypeError, "bitwise operations need integers", torch.ones(2), dist.ReduceOp.BAND),
        (ValueError, "got meta: use .cpu()", torch.ones(2, device="meta"), dist.ReduceOp.SUM),
        (ValueError, "got sparse_coo: use .to_dense()", torch.eye(2).to_sparse(), dist.ReduceOp.SUM),
    )
    for kind, message, tensor, operation in refusals:
        with pytest.raises(kind, match=message):
            dist.all_reduce(tensor, operation)
    one, wide = torch.ones(2), torch.ones(2 * world.size, dtype=torch.float64)
    with pytest.raises(ValueError, match="one dtype, got float32, float64"):
        dist.all_gather_into_tensor(wide, one)
    with pytest.raises(ValueError, match="one dtype, got float32, float64"):
        dist.reduce_scatter_tensor(one, wide)
    total = torch.ones(2)
    dist.all_reduce(total)
    assert total.tolist() == [world.size] * 2


def a_loader_with_workers_runs(world):
    data = TensorDataset(torch.arange(12.0))
    total = sum(batch.sum() for (batch,) in DataLoader(data, batch_size=4, num_workers=1))
    dist.all_reduce(total)
    assert total.item() == 66 * world.size


def the_world_is_known_as_mpi(world):
    assert (world.backend, world.init_method, world.device.type) == ("mpi", "mpi", "cpu")
    assert world.source in ("openmpi", "pmi")
    # Open MPI 5 numbers local ranks in an order of its own where there are fewer cores than ranks.
    assert sorted(world.gather(world.local_rank)) == list(range(world.size))
    assert (world.local_size, world.node, world.num_nodes) == (world.size, 0, 1)
    world.store.set(f"key {world.rank}", "value")
    assert world.store.get(f"key {(world.rank + 1) % world.size}") == b"value"
    adopted = sw.world(backend="mpi")
    assert (adopted.source, adopted.backend, adopted.timeout_s) == ("adopted", "mpi", world.timeout_s)


def messages_in_a_batch(world):
    ahead, behind = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    got = torch.zeros(3)
    operations = [
        dist.P2POp(dist.irecv, got, behind),
        dist.P2POp(dist.isend, torch.full((3,), float(world.rank)), ahead),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert got.tolist() == [behind] * 3


def a_wait_names_its_own_limit(world):
    tensor = torch.ones(2)
    if world.rank == 0:
        work = dist.all_reduce(tensor, async_op=True)
        with pytest.raises(dist.DistBackendError, match=r"waited 0\.05 s for the other ranks and timed out:"):
            work.wait(timedelta(seconds=0.05))
        world.store.set("waited", "")
    else:
        world.store.wait(["waited"])
        work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    assert tensor.tolist() == [world.size] * 2


CLAIMS = (
    the_world_is_known_as_mpi,
    data_moves_while_nobody_waits,
    a_callback_may_wait_for_another_collective,
    inference_mode_holds_until_the_end_of_a_work,
    a_wait_names_its_own_limit,
    many_under_way_keep_their_order,
    groups_do_not_mix,
    some_ranks_make_a_group,
    objects_travel,
    messages_in_a_batch,
    its_own_shard_may_lie_in_what_it_gathers,
    what_cannot_be_is_refused_and_changes_nothing,
    a_loader_with_workers_runs,
)


def main():
    if "serialized" in sys.argv:
        import mpi4py

        mpi4py.rc.thread_level = "serialized"
    for _ in range(2):  # a second world in the same processes
        with sw.world(backend="mpi", timeout_s=40) as world:
            for claim in CLAIMS:
                claim(world)
                world.barrier()
    for claim in CLAIMS:
        if world.is_main:
            print(f"passed: {claim.__name__}")


if __name__ == "__main__":
    main()
