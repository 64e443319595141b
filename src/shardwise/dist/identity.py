"""Who this rank is: what the caller said, else what a launcher said."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardwise.environment import MPI_STARTERS, Identity, identify
from shardwise.errors import EnvironmentVariablesError, WorldError

if TYPE_CHECKING:
    from collections.abc import Sequence


def find_identity(rank: int | None, world_size: int | None, local_rank: int | None) -> Identity:
    """Return who this rank is; arguments win over variables, and half a pair is refused."""
    if rank is None and world_size is None:
        identity = identify()
    elif rank is None or world_size is None:
        given, other = ("rank", "world_size") if world_size is None else ("world_size", "rank")
        raise WorldError(
            f"{given} was given without {other}",
            code="world.rank-incomplete",
            fix="pass both, or leave both to the launcher",
        )
    elif not 0 <= rank < world_size:
        raise WorldError(
            f"rank {rank} is outside a world of {world_size}",
            code="world.rank-out-of-range",
            fix=f"use 0 to {world_size - 1}",
        )
    else:
        identity = _recall(rank, world_size)
    return identity if local_rank is None else replace(identity, local_rank=local_rank, local_rank_assumed=False)


def _recall(rank: int, world_size: int) -> Identity:
    """Return what a launcher says of `rank` if it means the same rank and world, else assume one node."""
    try:
        identity = identify()
    except EnvironmentVariablesError:
        identity = Identity()
    if identity.source != "alone" and (identity.rank, identity.world_size) == (rank, world_size):
        return identity
    return Identity(
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        local_world_size=world_size,
        source="arguments",
        local_rank_assumed=True,
    )


def place_by_hosts(identity: Identity, hosts: Sequence[str]) -> Identity:
    """Return `identity` with its place on its node counted from the host of every rank, by rank.

    Only what no launcher told: those of MPI tell the local rank, and number no nodes. A local rank that the caller gave
    stays.
    """
    host = hosts[identity.rank]
    nodes = list(dict.fromkeys(hosts))
    if identity.source in (*MPI_STARTERS, "mpi") and hosts.count(host) == identity.local_world_size:
        return replace(identity, node_rank=nodes.index(host), num_nodes=len(nodes))
    if not (identity.source == "arguments" or identity.local_rank_assumed):
        return identity
    local_rank = hosts[: identity.rank].count(host) if identity.local_rank_assumed else identity.local_rank
    return replace(
        identity,
        local_rank=local_rank,
        local_world_size=hosts.count(host),
        node_rank=nodes.index(host),
        num_nodes=len(nodes),
        local_rank_assumed=False,
    )
