"""A process group that was running before is used and left as it is."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from refusals import refuses
from shardwise.dist import world
from shardwise.dist.rendezvous import HashStore
from shardwise.launcher.local.function import run_forked


def with_running_group(body):
    """Run `body` in a process that called init_process_group itself."""

    def child(_):
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=77))
        return body()

    return run_forked(child, 1, timeout_s=60)[0]


def test_a_running_group_is_adopted_and_outlives_the_world():
    def body():
        with world(device="cpu") as me:
            inside = (me.source, me.rank, me.size, me.backend, me.device, me.timeout_s, me.sum({"x": 2.0}))
        return inside, dist.is_initialized()

    inside, running = with_running_group(body)
    assert inside == ("adopted", 0, 1, "gloo", torch.device("cpu"), 77.0, {"x": 2.0})
    assert running


def test_an_exception_does_not_end_an_adopted_group():
    def body():
        with pytest.raises(ValueError, match="mine"), world(device="cpu"):
            raise ValueError("mine")
        return dist.is_initialized()

    assert with_running_group(body)


def test_arguments_that_are_true_of_the_group_are_accepted():
    def body():
        me = world(rank=0, world_size=1, backend="gloo", device="cpu", local_rank=0)
        return me.local_rank

    assert with_running_group(body) == 0


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        ({"rank": 1, "world_size": 2}, ("rank=1", "rank=0")),
        ({"backend": "nccl"}, ("backend=nccl", "backend=gloo")),
        ({"timeout_s": 5}, ("timeout_s=5",)),
        ({"init_method": "env://"}, ("init_method=env://",)),
    ],
)
def test_arguments_that_are_not_true_of_the_group_are_refused(arguments, values):
    with refuses("world.group-differs", *values):
        with_running_group(lambda: world(**arguments))
