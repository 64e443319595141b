"""Who am I among the ranks: the process group, its device, meshes, sub-groups and teardown; fake worlds for tests."""

import importlib
import sys
from types import ModuleType
from typing import Any

from shardwise.world.fake import fake_world
from shardwise.world.local import local_world
from shardwise.world.start import world
from shardwise.world.world import World

__all__ = ["World", "fake_world", "local_world", "world"]


class _Room(ModuleType):
    """This room, which is also its main function: `sw.world()`."""

    __call__ = staticmethod(world)

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel by name, as modules do: functions that use this room are pickled on their way to ranks."""
        return importlib.import_module, (self.__name__,)


sys.modules[__name__].__class__ = _Room
