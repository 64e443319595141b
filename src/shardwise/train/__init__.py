"""Training: wiring, the loop, evaluation and the report."""

import sys
from types import ModuleType

from shardwise.train.train import train

__all__ = ["train"]


class _Room(ModuleType):
    """This room, which is also the verb: `sw.train(job, plan, world)`."""

    __call__ = staticmethod(train)


sys.modules[__name__].__class__ = _Room
