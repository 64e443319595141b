"""Which device a rank gets."""

import pytest
import torch

from refusals import refuses
from shardwise.dist.start import choose_device, gpu_index
from shardwise.environment import Identity

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is visible")


def place(local_rank, **more):
    return Identity(rank=local_rank, world_size=8, local_rank=local_rank, local_world_size=8, **more)


def test_the_local_rank_names_the_gpu():
    assert gpu_index(place(3), 8, own_gpu=False) == 3


def test_a_gpu_of_its_own_is_number_0_whatever_the_local_rank():
    assert gpu_index(place(3), 1, own_gpu=True) == 0


def test_several_visible_gpus_are_shared_out_by_local_rank():
    assert gpu_index(place(3), 4, own_gpu=True) == 3


def test_a_local_rank_beyond_the_gpus_is_refused_with_both_counts():
    with refuses("world.local-rank-without-gpu", "local rank 2", 2):
        gpu_index(place(2), 2, own_gpu=False)


def test_an_assumed_local_rank_beyond_the_gpus_names_the_missing_variable():
    with refuses("world.local-rank-without-gpu", "export LOCAL_RANK"):
        gpu_index(place(2, local_rank_assumed=True), 1, own_gpu=False)


def test_the_cpu_can_be_asked_for():
    assert choose_device("cpu", place(0)) == torch.device("cpu")


@needs_no_gpu
def test_without_a_gpu_the_cpu_is_taken():
    assert choose_device(None, place(5)) == torch.device("cpu")


@needs_no_gpu
@pytest.mark.parametrize("asked", ["cuda", "cuda:0"])
def test_a_gpu_that_does_not_exist_is_refused(asked):
    with refuses("world.no-gpu", f"device {asked}"):
        choose_device(asked, place(0))


@pytest.mark.parametrize("asked", ["gpu", "meta", "cuda:x"])
def test_a_device_no_world_runs_on_is_refused(asked):
    with refuses("world.unknown-device", f"device {asked}"):
        choose_device(asked, place(0))


@pytest.mark.gpu
def test_a_gpu_beyond_the_visible_ones_is_refused():
    with refuses("world.gpu-index-invalid", "cuda:99"):
        choose_device("cuda:99", place(0))


@pytest.mark.gpu
def test_the_chosen_gpu_becomes_the_current_one():
    assert choose_device(None, place(0)) == torch.device("cuda", 0)
    assert torch.cuda.current_device() == 0
