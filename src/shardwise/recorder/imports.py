"""Doing something once a module has been imported, whoever imports it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from typing import TYPE_CHECKING

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
        """Find one of the modules by everybody else, and have its loader tell us."""
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
