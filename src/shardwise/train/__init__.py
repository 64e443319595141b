"""Training: wiring, the loop, evaluation and the report."""

import importlib
import sys
from types import ModuleType
from typing import Any

from shardwise.train.train import train

__all__ = ["train"]


class _Room(ModuleType):
    """This room, which is also the verb: `sw.train(job, plan, world)`."""

    __call__ = staticmethod(train)

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel by name, as modules do: functions that use this room are pickled on their way to ranks."""
        return importlib.import_module, (self.__name__,)


sys.modules[__name__].__class__ = _Room
