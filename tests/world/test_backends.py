"""Which backend a device takes, and what is said of one that cannot work."""

import pytest
import torch
import torch.distributed as dist

from shardwise.errors import WorldError
from shardwise.world.backends import choose_backend, default_timeout_s

CPU = torch.device("cpu")
needs_cpu_wheel = pytest.mark.skipif(dist.is_nccl_available(), reason="this torch has nccl")


def test_the_cpu_takes_gloo():
    assert choose_backend(None, CPU) == "gloo"


def test_names_may_be_written_in_capitals():
    assert choose_backend("GLOO", CPU) == "gloo"


@pytest.mark.parametrize(
    ("backend", "fix"),
    [
        ("glo", "did you mean 'gloo'?"),
        ("ncll", "did you mean 'nccl'?"),
        ("smoke signals", "choose one of gloo"),
        ("fake", "choose one of gloo"),
        ("cpu:glo", "did you mean 'gloo'?"),
        ("cpu:gloo,", "cpu:gloo,cuda:nccl"),
        ("cpu:gloo,cuda", "cpu:gloo,cuda:nccl"),
        ("cpu:nccl", "cpu:gloo,cuda:nccl"),
        ("cpu:gloo,cpu:gloo", "name each device once"),
    ],
)
def test_names_that_cannot_be_are_refused_with_what_to_write(backend, fix):
    with pytest.raises(WorldError) as caught:
        choose_backend(backend, CPU)
    assert fix in caught.value.fix


@needs_cpu_wheel
@pytest.mark.parametrize(
    ("backend", "where"),
    [
        ("nccl", "CUDA build of torch"),
        ("cpu:gloo,cuda:nccl", "CUDA build of torch"),
        ("ucc", "torch built with UCC"),
    ],
)
def test_a_backend_this_torch_lacks_is_refused_with_where_to_get_it(backend, where):
    with pytest.raises(WorldError, match="the installed torch has no backend") as caught:
        choose_backend(backend, CPU)
    assert where in caught.value.fix


def test_a_backend_without_the_device_is_refused():
    with pytest.raises(WorldError, match="tensors of cuda only, and the device is cpu"):
        choose_backend("cuda:gloo", CPU)


@pytest.mark.gpu
def test_nccl_on_the_cpu_is_refused_where_torch_has_it():
    with pytest.raises(WorldError, match="tensors of cuda only, and the device is cpu"):
        choose_backend("nccl", CPU)


def test_gloo_waits_half_an_hour_as_in_torch():
    assert default_timeout_s("gloo") == 1800


@pytest.mark.gpu
def test_nccl_waits_ten_minutes_as_in_torch():
    assert default_timeout_s("nccl") == 600
