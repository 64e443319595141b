"""Fake worlds: the meshes of a big job in one process."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

from refusals import refuses
from shardwise.dist import fake_world
from shardwise.launcher.local.function import run_forked
from shardwise.layout import Layout
from shardwise.testing import run_ranks


def in_a_process_of_its_own(body):
    return run_forked(lambda _: body(), 1, timeout_s=60)[0]


@pytest.mark.parametrize(
    ("size", "rank", "layout"),
    [
        (8, 5, Layout(pp=2, replicate=2, tp=2)),
        (64, 63, Layout(pp=2, replicate=2, shard=2, cp=2, tp=4)),
        (512, 0, Layout(shard=64, tp=8)),
        (512, 300, Layout(replicate=2, shard=32, tp=8)),
    ],
    ids=str,
)
def test_the_mesh_of_a_fake_world_agrees_with_the_layout(size, rank, layout):
    def body():
        with fake_world(size, rank=rank) as me:
            mesh = me.mesh(layout)
            groups = {axis: dist.get_process_group_ranks(mesh[axis].get_group()) for axis in mesh.mesh_dim_names}
            return mesh.mesh_dim_names, groups

    names, groups = in_a_process_of_its_own(body)
    assert ".".join(f"{axis}{getattr(layout, axis)}" for axis in names) == str(layout)
    for axis in names:
        assert tuple(groups[axis]) == next(group for group in layout.groups(axis) if rank in group)


def test_collectives_of_a_fake_world_return_at_once():
    def body():
        with fake_world(64) as me:
            me.barrier()
            dist.all_reduce(torch.ones(2))
            return me.source, me.size, me.group([0, 63]) is not None, me.group([1, 2])

    assert in_a_process_of_its_own(body) == ("fake", 64, True, None)


def test_a_fake_world_ends():
    def body():
        with fake_world(4):
            pass
        return dist.is_initialized()

    assert in_a_process_of_its_own(body) is False


@pytest.mark.parametrize(
    ("layout", "fix"), [(Layout(tp=2), "set replicate=32"), (Layout(tp=3, shard=2), "start a multiple of 6 ranks")]
)
def test_a_layout_of_another_size_is_refused_with_what_fits(layout, fix):
    def body():
        with fake_world(64) as me:
            me.mesh(layout)

    with refuses("layout.world-size-mismatch", "64") as caught:
        in_a_process_of_its_own(body)
    assert caught.value.fix == fix


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_a_fake_world_is_refused(rank):
    with refuses("world.rank-out-of-range", "4"):
        fake_world(4, rank=rank)


def test_a_second_group_is_refused():
    def body():
        with fake_world(2):
            fake_world(2)

    with refuses("world.already-running"):
        in_a_process_of_its_own(body)


def coordinate_of_a_result(world):
    """Double a sharded tensor and return the coordinate of the mesh that the result names."""
    mesh = world.mesh(Layout(shard=world.size))["shard"]
    doubled = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)], src_data_rank=None) * 2
    return doubled.device_mesh.get_coordinate()


def test_ranks_forked_after_a_fake_world_get_their_own_coordinate_from_dtensor():
    with fake_world(2) as world:
        assert list(coordinate_of_a_result(world)) == [0]
    assert [list(each) for each in run_ranks(coordinate_of_a_result, 2)] == [[0], [1]]
