"""Which backend a device takes, and the error of one that cannot work."""

import pytest
import torch
import torch.distributed as dist

from refusals import refuses
from shardwise.dist.backends import choose_backend, default_timeout_s

CPU = torch.device("cpu")
needs_cpu_wheel = pytest.mark.skipif(dist.is_nccl_available(), reason="this torch has nccl")


def test_the_cpu_takes_gloo():
    assert choose_backend(None, CPU) == "gloo"


def test_names_may_be_written_in_capitals():
    assert choose_backend("GLOO", CPU) == "gloo"


@pytest.mark.parametrize(
    ("backend", "refusal"),
    [
        ("glo", ("world.unknown-backend", "'gloo'")),
        ("ncll", ("world.unknown-backend", "'nccl'")),
        ("smoke signals", ("world.unknown-backend", "one of gloo")),
        ("fake", ("world.unknown-backend", "one of gloo")),
        ("cpu:glo", ("world.unknown-backend", "'gloo'")),
        ("cpu:gloo,", ("world.backend-syntax", "cpu:gloo,cuda:nccl")),
        ("cpu:gloo,cuda", ("world.backend-syntax", "cpu:gloo,cuda:nccl")),
        ("cpu:nccl", ("world.backend-device-mismatch", "cpu:gloo,cuda:nccl")),
        ("cpu:gloo,cpu:gloo", ("world.backend-device-repeated", "device cpu")),
    ],
)
def test_names_that_cannot_be_are_refused_with_what_to_write(backend, refusal):
    with refuses(*refusal):
        choose_backend(backend, CPU)


@needs_cpu_wheel
@pytest.mark.parametrize(
    ("backend", "where"),
    [
        ("nccl", "CUDA build of torch"),
        ("cpu:gloo,cuda:nccl", "CUDA build of torch"),
        ("ucc", "USE_UCC=1"),
    ],
)
def test_a_backend_this_torch_lacks_is_refused_with_where_to_get_it(backend, where):
    with refuses("world.backend-not-available", where):
        choose_backend(backend, CPU)


def test_a_backend_without_the_device_is_refused():
    with refuses("world.backend-device-mismatch", "cuda", "cpu"):
        choose_backend("cuda:gloo", CPU)


@pytest.mark.gpu
def test_nccl_on_the_cpu_is_refused_where_torch_has_it():
    with refuses("world.backend-device-mismatch", "cuda", "cpu"):
        choose_backend("nccl", CPU)


def test_gloo_waits_half_an_hour_as_in_torch():
    assert default_timeout_s("gloo") == 1800


@pytest.mark.gpu
def test_nccl_waits_ten_minutes_as_in_torch():
    assert default_timeout_s("nccl") == 600
