"""Hooks on imports, the requests of a launcher to a rank, and determinism."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import random
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.environment import adopt, variables

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import ModuleType


def when_imported(actions: Mapping[str, Callable[[], None]]) -> None:
    """Do each action after the module of its name was imported: now, if it was."""
    waiting = {}
    for name, action in actions.items():
        if name in sys.modules:
            action()
        else:
            waiting[name] = action
    if waiting:
        sys.meta_path.insert(0, _Finder(waiting))


class _Finder(importlib.abc.MetaPathFinder):
    """Leaves finding to the others, and hears when one of its modules is there."""

    def __init__(self, waiting: dict[str, Callable[[], None]]) -> None:
        self._waiting = waiting

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find one of the modules by everybody else, and have its loader call back."""
        action = self._waiting.pop(fullname, None)
        if action is None:
            return None
        spec = None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(fullname, path, target)) is not None:
                break
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, action)
        return spec


class _Loader(importlib.abc.Loader):
    """A loader that does something after the module is there; all else is asked of the real one."""

    def __init__(self, real: importlib.abc.Loader, action: Callable[[], None]) -> None:
        self._real = real
        self._action = action

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Make the module as the real loader does."""
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, then the action."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._real
        module.__loader__ = self._real
        self._real.exec_module(module)
        self._action()

    def __getattr__(self, name: str) -> object:
        return getattr(self._real, name)


# What a launcher asks of a rank beside its record, set by variables that the rank removes at once.


_DETERMINISTIC = "SHARDWISE_DETERMINISTIC"
_CHECK_REPLICAS = "SHARDWISE_CHECK_REPLICAS"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """How a rank is to run."""

    deterministic: bool = False
    check_replicas: int = 0
    """Optimizer steps between fingerprints of what DDP keeps equal; 0 takes none."""

    def variables(self) -> dict[str, str]:
        """Return the variables that set this for a rank."""
        values = {_DETERMINISTIC: "1" if self.deterministic else "", _CHECK_REPLICAS: str(self.check_replicas or "")}
        return {name: value for name, value in values.items() if value}


def take_asked() -> Asked:
    """Return what this process was asked for; its own children are not."""
    environ = variables("")
    found = {name: environ.pop(name) for name in (_DETERMINISTIC, _CHECK_REPLICAS) if name in environ}
    if found:
        adopt(environ)
    return Asked(deterministic=_DETERMINISTIC in found, check_replicas=int(found.get(_CHECK_REPLICAS) or 0))


# Determinism: two runs of one program come to the same bits, or the operation that cannot is refused by name.


_VARIABLES = {
    # cuBLAS takes whatever work space is free, and sums by what it has got; this gives each stream its own.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # NCCL chooses anew by size and topology, and switches that sum do so in the order of arrival; a ring has one order.
    "NCCL_ALGO": "Ring",
    # The iteration order of sets of strings; read when an interpreter starts.
    "PYTHONHASHSEED": "0",
}


def deterministic_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what a deterministic rank needs beside its own variables, which stay."""
    return {name: value for name, value in _VARIABLES.items() if name not in environ}


def be_deterministic(seed: int | None) -> None:
    """Have this process compute the same whenever it runs; before CUDA is touched, torch may be imported or not.

    Operations of torch without a deterministic form raise an error with their name. `seed` is for Python, numpy and
    torch; None leaves that to the program.
    """
    own = variables("")
    adopt({**own, **deterministic_variables(own)})
    actions = {"torch": lambda: _settle_torch(seed)}
    if seed is not None:
        random.seed(seed)
        actions["numpy"] = lambda: sys.modules["numpy"].random.seed(seed)
    when_imported(actions)


def _settle_torch(seed: int | None) -> None:
    import torch

    torch.use_deterministic_algorithms(True)  # noqa: FBT003 - torch's own signature
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    if seed is not None:
        torch.manual_seed(seed)
