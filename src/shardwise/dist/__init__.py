"""Worlds: the identity of a rank, its device, process groups, meshes and teardown; fake worlds for tests."""

from shardwise.dist.start import fake_world, local_world, world
from shardwise.dist.world import World

__all__ = ["World", "fake_world", "local_world", "world"]
