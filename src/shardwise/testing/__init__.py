"""What tests of distributed code need, in this project and in its users'."""

from shardwise.testing.ranks import run_ranks
from shardwise.world import fake_world

__all__ = ["fake_world", "run_ranks"]
