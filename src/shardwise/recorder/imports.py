"""Import hooks, recorder options that the launcher passes to a rank, and deterministic execution."""

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
    """Run each action after the module named by its key is imported, or immediately if it is already imported."""
    waiting = {}
    for name, action in actions.items():
        if name in sys.modules:
            action()
        else:
            waiting[name] = action
    if waiting:
        sys.meta_path.insert(0, _Finder(waiting))


class _Finder(importlib.abc.MetaPathFinder):
    """A meta path finder that delegates to the other finders and wraps the loaders of the awaited modules."""

    def __init__(self, waiting: dict[str, Callable[[], None]]) -> None:
        self._waiting = waiting

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of an awaited module with a loader that runs its action; None for other modules."""
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
    """A loader that runs an action after the module is loaded, and otherwise delegates to the real loader."""

    def __init__(self, real: importlib.abc.Loader, action: Callable[[], None]) -> None:
        self._real = real
        self._action = action

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Create the module with the real loader."""
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


# Options that a launcher passes to the recorder of a rank, in environment variables that the rank removes at its start.


_DETERMINISTIC = "SHARDWISE_DETERMINISTIC"
_CHECK_REPLICAS = "SHARDWISE_CHECK_REPLICAS"


@dataclass(frozen=True, kw_only=True)
class RecorderOptions:
    """Options of the recorder of a rank."""

    deterministic: bool = False
    check_replicas: int = 0
    """Optimizer steps between fingerprints of the parameters that DDP replicates; 0 disables them."""

    def variables(self) -> dict[str, str]:
        """Return the environment variables that pass these options to a rank."""
        values = {}
        if self.deterministic:
            values[_DETERMINISTIC] = "1"
        if self.check_replicas:
            values[_CHECK_REPLICAS] = str(self.check_replicas)
        return values


def take_options() -> RecorderOptions:
    """Return the options of this process and remove their variables, so that its children do not inherit them."""
    environ = variables("")
    found = {name: environ.pop(name) for name in (_DETERMINISTIC, _CHECK_REPLICAS) if name in environ}
    if found:
        adopt(environ)
    return RecorderOptions(deterministic=_DETERMINISTIC in found, check_replicas=int(found.get(_CHECK_REPLICAS) or 0))


# Determinism: two runs of a program produce identical bits, or a non-deterministic operation raises an error.


_VARIABLES = {
    # The order of sums in cuBLAS depends on the size of its workspace; this assigns a fixed workspace to each stream.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # NCCL chooses an algorithm by size and topology, and in-network reduction sums in order of arrival; a ring sums in
    # a fixed order.
    "NCCL_ALGO": "Ring",
    # Fixes the iteration order of sets of strings; Python reads this variable when an interpreter starts.
    "PYTHONHASHSEED": "0",
}


def deterministic_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables for deterministic execution that `environ` does not set."""
    return {name: value for name, value in _VARIABLES.items() if name not in environ}


def be_deterministic(seed: int | None) -> None:
    """Make this process deterministic; call before CUDA is initialized, before or after torch is imported.

    Operations of torch without a deterministic implementation raise an error with their name. `seed` seeds Python,
    numpy and torch; None leaves seeding to the program.
    """
    own = variables("")
    adopt({**own, **deterministic_variables(own)})
    actions = {"torch": lambda: _make_torch_deterministic(seed)}
    if seed is not None:
        random.seed(seed)
        actions["numpy"] = lambda: sys.modules["numpy"].random.seed(seed)
    when_imported(actions)


def _make_torch_deterministic(seed: int | None) -> None:
    import torch

    torch.use_deterministic_algorithms(True)  # noqa: FBT003 - torch's own signature
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    if seed is not None:
        torch.manual_seed(seed)
