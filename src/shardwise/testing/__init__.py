"""What tests of distributed code need, in this project and in its users'."""

from shardwise.dist import fake_world
from shardwise.testing.ranks import run_ranks

__all__ = ["fake_world", "run_ranks"]
