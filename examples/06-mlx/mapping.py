"""Each row of the two tables in docs/guides/mlx.md: torch and MLX in two processes, results side by side.

`mlx.launch -n 2 --backend ring python mapping.py`
"""

import sys

import mlx.core as mx
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  torch's own custom
from mlx import nn, optimizers
from mlx.nn.layers.distributed import shard_linear
from mlx.utils import tree_map

GROUP = mx.distributed.init()
RANK, SIZE = GROUP.rank(), GROUP.size()
ROWS = {}


def row(title):
    """Register a function that returns torch's result and MLX's, which must be equal."""

    def register(function):
        ROWS[title] = function
        return function

    return register


def join_torch():
    """Join a gloo group of the same processes; MLX sends them rank 0's port."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True) if RANK == 0 else None
    port = mx.distributed.all_sum(mx.array(store.port if store else 0)).item()
    store = store or dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=SIZE)


def mine(count=4):
    """Return other values on every rank, for torch."""
    return torch.arange(float(count)) + 10 * RANK


def as_mlx(tensor):
    return mx.array(tensor.detach().numpy())


# <collectives>
@row("init_process_group, get_rank, get_world_size")
def init():
    group = mx.distributed.init()
    return [dist.get_rank(), dist.get_world_size()], [group.rank(), group.size()]


@row("all_reduce")
def all_reduce():
    found = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN):
        x = mine()
        dist.all_reduce(x, op)  # in place
        found.append(x)
    x = as_mlx(mine())
    return torch.stack(found), mx.stack(
        [f(x) for f in (mx.distributed.all_sum, mx.distributed.all_max, mx.distributed.all_min)]
    )


@row("all_gather")
def all_gather():
    parts = [torch.empty(4) for _ in range(SIZE)]
    dist.all_gather(parts, mine())
    return torch.cat(parts), mx.distributed.all_gather(as_mlx(mine()))


@row("reduce_scatter")
def reduce_scatter():
    part = torch.empty(4 // SIZE)
    dist.reduce_scatter(part, list(mine().chunk(SIZE)))
    return part, mx.distributed.all_sum(as_mlx(mine())).reshape(SIZE, -1)[RANK]


@row("broadcast")
def broadcast():
    x = mine()
    dist.broadcast(x, src=1)
    y = as_mlx(mine())
    return x, mx.distributed.all_sum(y if RANK == 1 else mx.zeros_like(y))


@row("send, recv")
def send_and_receive():
    x, y = mine(), as_mlx(mine())
    if RANK == 0:
        dist.send(x, 1)
        y = mx.distributed.send(y, 1)
    else:
        dist.recv(x, 0)
        y = mx.distributed.recv_like(y, 0)
    return x, y


@row("barrier")
def barrier():
    dist.barrier()
    mx.eval(mx.distributed.all_sum(mx.array(1)))
    return 0, 0


@row("async_op=True, work.wait()")
def in_the_background():
    x = mine()
    work = dist.all_reduce(x, async_op=True)
    y = mx.distributed.all_sum(as_mlx(mine()))  # nothing is sent yet
    mx.async_eval(y)  # now it is, and this thread continues
    work.wait()
    return x, y


# </collectives>


@row("new_group")
def sub_groups():
    """In torch there are some; MLX's ring has not."""
    groups = [dist.new_group([rank]) for rank in range(SIZE)]
    return dist.get_world_size(groups[RANK]) == 1, refuses(lambda: GROUP.split(RANK), "split not supported")


@row("DistributedSampler")
def sampler():
    rows = torch.utils.data.DistributedSampler(range(8), shuffle=False)
    return list(rows), mx.arange(8)[RANK::SIZE]


@row("DistributedDataParallel")
def data_parallel():
    model, other = layer(4, 2)
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    ddp(mine()[None]).square().sum().backward()
    _, gradients = nn.value_and_grad(other, lambda x: other(x).square().sum())(as_mlx(mine())[None])
    return model.weight.grad, nn.average_gradients(gradients, GROUP)["weight"]


@row("clip_grad_norm_")
def clipping():
    model, other = layer(4, 2)
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    ddp(mine()[None]).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    _, gradients = nn.value_and_grad(other, lambda x: other(x).sum())(as_mlx(mine())[None])
    clipped, _ = optimizers.clip_grad_norm(nn.average_gradients(gradients, GROUP), 1.0)
    return model.weight.grad, clipped["weight"]


@row("ColwiseParallel, RowwiseParallel")
def tensor_parallel():
    """A column of torch is all-to-sharded: the output is split. A row is sharded-to-all: the outputs are summed."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    (up, mlx_up), (down, mlx_down) = layer(4, 6), layer(6, 4)
    x = torch.ones(1, 4)
    model = torch.nn.Sequential(up, torch.nn.ReLU(), down)
    parallelize_module(model, init_device_mesh("cpu", (SIZE,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    first = shard_linear(mlx_up, "all-to-sharded", group=GROUP)
    second = shard_linear(mlx_down, "sharded-to-all", group=GROUP)
    assert first.weight.shape == (6 // SIZE, 4)
    return model(x), second(mx.maximum(first(as_mlx(x)), 0))


@row("fully_shard")
def fully_sharded():
    """Both gather for forward. MLX's backward wants sum_scatter, which the ring has not."""
    from torch.distributed.fsdp import fully_shard

    model, other = layer(4, 2)
    x = torch.ones(1, 4)
    fully_shard(model)
    sharded = nn.fully_shard(other, group=GROUP)
    _, gradients = nn.value_and_grad(sharded, lambda x: sharded(x).sum())(as_mlx(x))
    assert refuses(lambda: mx.eval(gradients), "sum_scatter not supported")
    return model(x), sharded(as_mlx(x))


@row("SyncBatchNorm")
def batch_norm():
    """MLX's batch norm knows its own rows alone. What all ranks' rows have is a gather away."""
    x = mine(6).reshape(3, 2)
    own = nn.BatchNorm(2)(as_mlx(x))
    shared = nn.BatchNorm(2)(mx.distributed.all_gather(as_mlx(x)))[3 * RANK : 3 * RANK + 3]
    parts = [torch.empty(3, 2) for _ in range(SIZE)]
    dist.all_gather(parts, x)
    assert not mx.allclose(own, shared).item()
    return F.batch_norm(torch.cat(parts), None, None, training=True)[3 * RANK : 3 * RANK + 3], shared


@row("broadcast_object_list")
def objects():
    """MLX sends arrays only: text goes as bytes."""
    received = ["run-7" if RANK == 0 else None]
    dist.broadcast_object_list(received, src=0)
    data = mx.array(list(b"run-7") if RANK == 0 else [0] * 5)
    return received[0], bytes(mx.distributed.all_sum(data).tolist()).decode()


@row("nccl, gloo, mpi")
def backends():
    """For CPUs torch has gloo, and MLX the ring."""
    return dist.is_gloo_available(), mx.distributed.is_available("ring")


@row("destroy_process_group")
def no_end():
    """MLX's group exists as long as its process: a second init returns the same one."""
    again = mx.distributed.init()
    return [RANK, SIZE], [again.rank(), again.size()]


@row("Memory")
def memory():
    """An MLX array has no device to be moved to: an operation has a stream to run on, or the default applies."""
    assert not hasattr(mx.array, "to")
    return mine() * 2, mx.multiply(as_mlx(mine()), 2, stream=mx.cpu)


@row("Communication")
def communication():
    """Processes have other values until they exchange them."""
    x = mine()
    dist.all_reduce(x)
    y = as_mlx(mine())
    assert y[0].item() == 10 * RANK
    return x, mx.distributed.all_sum(y)


@row("Gradient sync")
def gradient_sync():
    """Nothing averages by itself: without average_gradients the processes drift apart."""
    spread = {}
    for name, average in {"alone": lambda g: g, "averaged": lambda g: nn.average_gradients(g, GROUP)}.items():
        _, model = layer(4, 2)
        optimizer = optimizers.SGD(0.1)
        _, gradients = nn.value_and_grad(model, lambda x, model=model: model(x).sum())(as_mlx(mine())[None])
        optimizer.update(model, average(gradients))
        both = mx.distributed.all_gather(model.weight[None])
        spread[name] = mx.abs(both[0] - both[1]).max().item()
    assert spread["alone"] > 0.1
    return 0.0, spread["averaged"]


@row("Execution")
def execution():
    """A sum that nobody looks at is never made, so ranks must look at the same ones in the same order."""
    mx.distributed.all_sum(as_mlx(mine()))  # forgotten on every rank: nothing is sent
    x = mine()
    dist.all_reduce(x)
    return x, mx.distributed.all_sum(as_mlx(mine()))


@row("Images and convolutions")
def layout():
    torch.manual_seed(0)
    images, model = torch.randn(2, 3, 5, 5), torch.nn.Conv2d(3, 4, 3)
    other = nn.Conv2d(3, 4, 3)
    weights = {"weight": model.weight.movedim(1, -1).contiguous(), "bias": model.bias}  # (out, in, h, w) there
    other.update(tree_map(as_mlx, weights))
    return model(images), other(as_mlx(images.movedim(1, -1).contiguous())).transpose(0, 3, 1, 2)


@row("fp64")
def double():
    """MLX has it on the CPU only, and its convolutions take such numbers but compute in fp32."""
    nearly = mx.full((1, 1, 1, 1), 1 + 1e-12, mx.float64)
    assert mx.conv2d(nearly, nearly).item() == 1
    return torch.tensor(1 + 1e-12, dtype=torch.float64).square() - 1, (nearly.square() - 1).reshape(())


def layer(inputs, outputs):
    """Return one linear layer in both, with the same weights."""
    torch.manual_seed(0)
    model, other = torch.nn.Linear(inputs, outputs), nn.Linear(inputs, outputs)
    other.update({"weight": as_mlx(model.weight), "bias": as_mlx(model.bias)})
    return model, other


def refuses(action, message):
    """Return whether MLX refuses with this message."""
    try:
        action()
    except (RuntimeError, ValueError) as error:
        return message in str(error)
    return False


def same(left, right):
    left = left.full_tensor() if hasattr(left, "full_tensor") else left
    left = left.detach().numpy() if isinstance(left, torch.Tensor) else left
    return left == right if isinstance(left, str) else np.allclose(left, np.array(right), rtol=1e-5, atol=1e-6)


def main():
    if SIZE != 2:
        sys.exit("two processes do this: mlx.launch -n 2 --backend ring python mapping.py")
    join_torch()
    wrong = []
    for title, function in ROWS.items():
        found = function()
        mx.eval([each for each in found if isinstance(each, mx.array)])
        if not same(*found):
            wrong.append(title)
        if RANK == 0:
            print(f"{'same' if title not in wrong else 'OTHER':6} {title}", flush=True)
    dist.destroy_process_group()
    if wrong:
        sys.exit(f"rank {RANK}: not the same: {wrong}")


if __name__ == "__main__":
    main()
