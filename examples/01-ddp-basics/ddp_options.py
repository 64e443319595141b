"""Every argument of DistributedDataParallel and of its sampler, with an effect that can be seen on two CPU processes.

    torchrun --nproc_per_node=2 ddp_options.py

The table of all arguments and when to set them is in docs/reference/ddp.md of the repository.
"""

import os
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler


class TwoBranches(nn.Module):
    """A network with a buffer, whose second branch is used only if asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, *, both: bool = True) -> torch.Tensor:
        """Return [N, 64]."""
        self.calls += 1
        return self.second(self.first(x)) if both else self.first(x)


def backward(model: nn.Module, *, both: bool = True) -> None:
    """Run one forward and backward on samples of this rank (all-reduces)."""
    torch.manual_seed(dist.get_rank())
    model(torch.randn(2, 64), both=both).square().mean().backward()


def unused_parameters() -> str:
    """find_unused_parameters: parameters that get no gradient make the next forward fail, unless it is set."""
    model = DistributedDataParallel(TwoBranches())
    try:
        for _ in range(2):
            backward(model, both=False)
        without = "no error"
    except RuntimeError as error:
        without = str(error).split(".")[0]
    model = DistributedDataParallel(TwoBranches(), find_unused_parameters=True)
    for _ in range(2):
        backward(model, both=False)
    return f"without it: {without!r}; with it: trains"


def buckets() -> str:
    """bucket_cap_mb: how many bytes are reduced together; a hook counts the buckets of a backward."""
    counts = {}
    for megabytes in (25, 0.01):
        model, seen = DistributedDataParallel(TwoBranches(), bucket_cap_mb=megabytes), []
        model.register_comm_hook(seen, count_bucket)
        backward(model)  # in its first backward DDP learns the order of gradients
        seen.clear()
        backward(model)
        counts[megabytes] = len(seen)
    return ", ".join(f"{megabytes} MiB: {count} all-reduces" for megabytes, count in counts.items())


def count_bucket(seen: list, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket as DDP does, and note that it came (all-reduces)."""
    seen.append(bucket.index())
    future = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


def bucket_views() -> str:
    """gradient_as_bucket_view: gradients are views into the buckets, so that they are not stored twice."""
    shared = {}
    for view in (False, True):
        model = DistributedDataParallel(TwoBranches(), gradient_as_bucket_view=view)
        backward(model)
        backward(model)
        shared[view] = len({each.grad.untyped_storage().data_ptr() for each in model.parameters()})
    return f"False: 4 gradients in {shared[False]} storages; True: in {shared[True]}"


def buffers() -> str:
    """broadcast_buffers: rank 0's buffers replace those of all ranks before each forward in training."""
    warnings.filterwarnings("ignore", "`broadcast_buffers`", FutureWarning)  # torch 2.13 adds forward_sync_buffers
    values = {}
    for broadcast in (True, False):
        model = DistributedDataParallel(TwoBranches(), broadcast_buffers=broadcast)
        model.module.calls.fill_(10.0 * dist.get_rank())
        backward(model)
        everyone = [torch.zeros(()) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, model.module.calls)
        values[broadcast] = [value.item() for value in everyone]
    return f"True: {values[True]} on the ranks; False: {values[False]}"


def static_graph() -> str:
    """static_graph: the graph is the same in every step; unused parameters are then found once, in the first."""
    model = DistributedDataParallel(TwoBranches(), static_graph=True)
    for _ in range(2):
        backward(model, both=False)
    return "trains with unused parameters, without searching for them in every step"


def process_group() -> str:
    """process_group: gradients are averaged over its ranks only, here over each rank alone."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]  # every rank makes all of them
    model = DistributedDataParallel(TwoBranches(), process_group=groups[dist.get_rank()])
    backward(model)
    everyone = [torch.zeros(()) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, model.module.first.weight.grad.sum())
    return f"gradients {'differ' if everyone[0] != everyone[-1] else 'are equal'} between ranks"


def devices() -> str:
    """device_ids, output_device, dim: one GPU for each process; None on CPUs. Old forms with several GPUs are gone."""
    device_ids = [int(os.environ["LOCAL_RANK"])] if torch.cuda.is_available() else None
    model = DistributedDataParallel(TwoBranches(), device_ids=None, output_device=None, dim=0)
    backward(model)
    return f"device_ids would be {device_ids} here"


def samples_of_ranks(*, epoch: int | None = None, **arguments: bool) -> list[list[int]]:
    """Return the sample indices that a DistributedSampler gives to each rank, of 7 samples (communicates)."""
    sampler = DistributedSampler(range(7), seed=0, **arguments)
    if epoch is not None:
        sampler.set_epoch(epoch)
    everyone: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, list(sampler))
    return everyone


def padding() -> str:
    """drop_last of DistributedSampler: 7 samples do not divide by 2; it repeats one of them, or leaves one out."""
    # <padding>
    padded = samples_of_ranks(shuffle=False, drop_last=False)  # the default: sample 0 comes twice
    dropped = samples_of_ranks(shuffle=False, drop_last=True)
    # </padding>
    counts = [sum(map(len, each)) for each in (padded, dropped)]
    return f"of 7 samples, False: {counts[0]} drawn, {padded}; True: {counts[1]} drawn, {dropped}"


def epochs() -> str:
    """set_epoch of DistributedSampler: without it every epoch has the order of the first."""
    # <epochs>
    without = [samples_of_ranks(shuffle=True)[0] for _ in range(2)]
    with_it = [samples_of_ranks(shuffle=True, epoch=epoch)[0] for epoch in range(2)]
    # </epochs>
    return f"rank 0 without it: {without[0]}, then {without[1]}; with it: {with_it[0]}, then {with_it[1]}"


OPTIONS = {
    "find_unused_parameters": unused_parameters,
    "bucket_cap_mb": buckets,
    "gradient_as_bucket_view": bucket_views,
    "broadcast_buffers": buffers,
    "static_graph": static_graph,
    "process_group": process_group,
    "device_ids": devices,
    "drop_last": padding,
    "set_epoch": epochs,
}


def main() -> None:
    if "RANK" not in os.environ:
        raise SystemExit("start it by torchrun --nproc_per_node=2 ddp_options.py")
    dist.init_process_group("gloo")
    for name, show in OPTIONS.items():
        line = show()
        if dist.get_rank() == 0:
            print(f"{name:<24} {line}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
