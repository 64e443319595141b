"""What a world offers its ranks, and how it ends."""

import time

import pytest
import torch
import torch.distributed as dist

from refusals import refuses
from shardwise.dist import world
from shardwise.launcher.local.function import run_forked
from shardwise.layout import Layout
from shardwise.testing import run_ranks


def alone(body):
    return run_forked(lambda _: body(), 1, timeout_s=60)[0]


def test_sum_adds_in_double_precision():
    assert run_ranks(lambda me: me.sum({"x": 1.0 if me.is_main else 2.0**-40}), 2) == [{"x": 1.0 + 2.0**-40}] * 2


def test_sum_does_not_depend_on_the_order_of_names():
    def body(me):
        return me.sum({"a": 1.0, "b": 10.0} if me.is_main else {"b": 20.0, "a": 2.0})

    assert run_ranks(body, 2) == [{"a": 3.0, "b": 30.0}] * 2


def test_gather_gives_every_rank_every_value_by_rank():
    assert run_ranks(lambda me: me.gather(("rank", me.rank)), 3) == [[("rank", 0), ("rank", 1), ("rank", 2)]] * 3


def test_barrier_waits_for_the_last_rank(tmp_path):
    def body(me):
        if not me.is_main:
            time.sleep(0.3)
            (tmp_path / "came").touch()
        me.barrier()
        return (tmp_path / "came").exists()

    assert run_ranks(body, 2) == [True, True]


def test_group_joins_its_members_and_is_none_outside():
    def body(me):
        group = me.group([0, 2])
        if group is None:
            return None
        total = torch.tensor(me.rank)
        dist.all_reduce(total, group=group)
        return total.item()

    assert run_ranks(body, 3) == [2, None, 2]


@pytest.mark.parametrize("ranks", [[], [0, 0], [1], [-1]])
def test_ranks_that_make_no_group_are_refused(ranks):
    def body(me):
        me.group(ranks)

    with refuses("world.group-ranks-invalid", "world of 1"):
        run_ranks(body, 1)


def test_mesh_axes_are_those_of_the_layout_with_tp_innermost():
    def body(me):
        mesh = me.mesh(Layout(shard=2, tp=2))
        total = torch.tensor(me.rank)
        dist.all_reduce(total, group=mesh["tp"].get_group())
        return mesh.mesh_dim_names, mesh["shard"].get_local_rank(), total.item()

    names = ("shard", "tp")
    assert run_ranks(body, 4) == [(names, 0, 1), (names, 0, 1), (names, 1, 5), (names, 1, 5)]


def test_a_world_of_one_has_a_mesh_of_one():
    def body(me):
        mesh = me.mesh(Layout())
        return mesh.mesh_dim_names, mesh.size()

    assert run_ranks(body, 1) == [(("replicate",), 1)]


def test_what_a_rank_knows_of_itself():
    def body(me):
        return me.rank, me.size, me.local_size, me.node, me.num_nodes, me.is_main, me.is_initialized, me.backend

    assert run_ranks(body, 2) == [(0, 2, 2, 0, 1, True, True, "gloo"), (1, 2, 2, 0, 1, False, True, "gloo")]


def test_closing_twice_is_closing_once():
    def body():
        me = world(device="cpu")
        me.close()
        me.close()
        return me.is_initialized, dist.is_initialized()

    assert alone(body) == (False, False)


def test_a_closed_world_does_not_end_the_next_one():
    def body():
        first = world(device="cpu")
        first.close()
        with world(device="cpu") as second:
            first.close()
            return second.is_initialized, first.is_initialized

    assert alone(body) == (True, False)


def test_an_exception_ends_the_group_and_is_not_masked():
    def body():
        with pytest.raises(ValueError, match="mine"), world(device="cpu"):
            raise ValueError("mine")
        return dist.is_initialized()

    assert alone(body) is False


def test_a_rank_that_is_done_does_not_wait_for_one_that_failed():
    def body(me):
        me.barrier()
        if me.rank == 1:
            raise ValueError("rank 1 failed")

    start = time.monotonic()
    with pytest.raises(ValueError, match="rank 1 failed"):
        run_ranks(body, 2)
    assert time.monotonic() - start < 60  # collectives wait for half an hour


def test_timeout_is_what_was_asked():
    def body():
        with world(timeout_s=7, device="cpu") as me:
            return me.timeout_s

    assert alone(body) == 7.0
