"""Who am I among the ranks: the process group, its device, meshes, sub-groups and teardown; fake worlds for tests."""

import sys
from types import ModuleType

from shardwise.world.fake import fake_world
from shardwise.world.start import world
from shardwise.world.world import World

__all__ = ["World", "fake_world", "world"]


class _Room(ModuleType):
    """This room, which is also its main function: `sw.world()`."""

    __call__ = staticmethod(world)


sys.modules[__name__].__class__ = _Room
