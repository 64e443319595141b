"""Arguments against variables, and places counted from hosts."""

import pytest

from refusals import refuses
from shardwise.dist.backends import find_identity, locate_by_hosts
from shardwise.environment import Identity

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")


@pytest.fixture
def launcher(monkeypatch):
    """Set the six variables of torchrun, or none of them."""

    def set_variables(*values):
        for name in NAMES:
            monkeypatch.delenv(name, raising=False)
        for name, value in zip(NAMES, values, strict=False):
            monkeypatch.setenv(name, str(value))

    set_variables()
    return set_variables


def test_arguments_that_agree_with_the_launcher_keep_its_places(launcher):
    launcher(3, 4, 1, 2, 1, 2)
    identity = find_identity(3, 4, None)
    assert (identity.source, identity.local_rank, identity.node_rank) == ("torchrun", 1, 1)


def test_arguments_that_differ_from_the_launcher_win(launcher):
    launcher(3, 4, 1, 2, 1, 2)
    identity = find_identity(0, 2, None)
    assert (identity.source, identity.rank, identity.world_size) == ("arguments", 0, 2)


def test_arguments_win_over_broken_variables(launcher):
    launcher("broken")
    assert find_identity(0, 2, None).source == "arguments"


def test_a_given_local_rank_stays(launcher):
    identity = find_identity(3, 4, 0)
    assert (identity.local_rank, identity.local_rank_assumed) == (0, False)


@pytest.mark.parametrize(
    ("rank", "world_size", "refusal"),
    [
        (0, None, ("world.rank-incomplete", "rank", "without world_size")),
        (None, 2, ("world.rank-incomplete", "world_size", "without rank")),
        (2, 2, ("world.rank-out-of-range", "rank 2", "world of 2")),
        (-1, 2, ("world.rank-out-of-range", "rank -1")),
    ],
)
def test_half_an_identity_is_refused(launcher, rank, world_size, refusal):
    with refuses(*refusal):
        find_identity(rank, world_size, None)


def test_local_ranks_are_counted_from_hosts_where_no_launcher_sets_them():
    hosts = ["a", "b", "a", "b", "b"]
    identity = Identity(rank=3, world_size=5, local_rank=3, source="arguments", local_rank_assumed=True)
    placed = locate_by_hosts(identity, hosts)
    assert (placed.local_rank, placed.local_world_size, placed.node_rank, placed.num_nodes) == (1, 3, 1, 2)


def test_a_local_rank_that_was_given_is_not_counted_again():
    identity = Identity(rank=1, world_size=2, local_rank=0, source="arguments")
    assert locate_by_hosts(identity, ["a", "a"]).local_rank == 0


def test_the_launcher_is_believed_over_hosts():
    identity = Identity(rank=1, world_size=2, local_rank=0, num_nodes=2, node_rank=1, source="torchrun")
    assert locate_by_hosts(identity, ["same", "same"]) == identity
