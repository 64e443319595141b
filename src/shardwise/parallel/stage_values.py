"""Values that layers leave on modules, and that another pipeline stage reads.

In one process a layer may store a value on itself (`self.aux_loss = ...`, as mixtures of experts do) or on another
module (`root.losses.append(...)`), and the model reads it after the layers. Between pipeline stages only the output of
a layer is sent, so another stage would find what the constructor left there: a loss without the auxiliary losses of
other stages, with no error. Storing alone is harmless, and so is reading alone (models read settings of layers). So
until the first step is done every stage notes what its own layers change, and what it reads of the layers it does not
run or, on the last stage after the layers, of all other modules. What is in both lists is refused by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from shardwise.errors import JobError
from shardwise.parallel.counter_random import COUNTER
from shardwise.parallel.skeleton import attribute_values
from shardwise.torch_private.dispatch import version_of
from shardwise.torch_private.modules import is_compiled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch.utils.hooks import RemovableHandle

    Modules = Mapping[str, nn.Module]
    """Modules by their path in the model."""
    Values = dict[tuple[str, str], list[tuple[Any, int]]]
    """By path and attribute: the values in it, and how often each tensor was written."""

Attribute = tuple[str, str]
"""Path of a module and one of its attributes."""


class Exchanged(NamedTuple):
    """What one stage knows of its first step."""

    changed: frozenset[Attribute]
    """What its layers have changed in forward, on themselves and, on stages before the last, on other modules."""
    read: frozenset[Attribute]
    """What it has read in forward of other stages' layers and, after the layers, of other modules."""


class StageValues:
    """Notes what the layers of one stage leave on modules, and what the stage reads of other stages."""

    def __init__(
        self, own: Modules, absent: Iterable[tuple[str, nn.Module]], outside: Modules, *, is_last: bool
    ) -> None:
        """`own` are the stage's layers with their submodules, `absent` those of other stages, `outside` all else."""
        self._own = own
        self._absent = list(absent)
        self._outside = outside
        self._is_last = is_last
        self._is_running = False
        self._is_behind = False
        """Whether the layers of the last stage have run in the forward that is running."""
        self._before: Values = {}
        self._outside_before: Values = {}
        self._changed: set[Attribute] = set()
        self._read: set[Attribute] = set()
        self._missing: Attribute | None = None
        self._kinds: list[tuple[nn.Module, type]] = []
        self._handles: list[RemovableHandle] = []

    def connect(self, first: nn.Module, last: nn.Module) -> None:
        """Begin to watch, after all transforms; `first` and `last` are layers of this stage.

        What layers change on other modules is what differs between the start of the first and the end of the last.
        Of compiled layers only what they change on themselves is seen: a hook would be compiled too.
        """
        for path, module in self._absent:
            self._watch(module, path, lambda: self._is_running)
        if is_compiled(first) or is_compiled(last):
            return
        if self._is_last:
            for path, module in self._outside.items():
                self._watch(module, path, lambda: self._is_behind)
        self._handles.append(first.register_forward_pre_hook(lambda *_: self._enter()))
        self._handles.append(last.register_forward_hook(lambda *_: self._leave()))

    def begin(self) -> None:
        """Begin a forward pass of the stage."""
        self._is_running, self._missing = True, None
        self._before = _values(self._own)

    def end(self) -> None:
        """End a forward pass of the stage, however it ended."""
        self._is_running = self._is_behind = False
        self._changed |= _changed(self._before, _values(self._own))
        self._before = {}

    def explain(self, error: AttributeError) -> None:
        """Refuse a forward pass that raised `error` because a layer of another stage lacks here what it sets there."""
        if self._missing is not None and f"'{self._missing[1]}'" in str(error):
            raise _refusal(*self._missing) from error

    def stop(self) -> Exchanged:
        """Stop watching and return what was noted."""
        for module, kind in self._kinds:
            module.__class__ = kind
        for handle in self._handles:
            handle.remove()
        self._kinds, self._handles = [], []
        return Exchanged(frozenset(self._changed), frozenset(self._read))

    def _enter(self) -> None:
        if self._is_running and not self._is_last:
            self._outside_before = _values(self._outside)

    def _leave(self) -> None:
        if not self._is_running:
            return  # a layer that backward runs again
        if self._is_last:
            self._is_behind = True
        else:
            self._changed |= _changed(self._outside_before, _values(self._outside))
            self._outside_before = {}

    def _watch(self, module: nn.Module, path: str, is_on: Callable[[], bool]) -> None:
        """Have every read of an attribute noted while `is_on`; the module keeps its class's name and methods."""
        kind = type(module)

        def read(module: nn.Module, name: str) -> Any:
            if is_on():
                self._read.add((path, name))
            return kind.__getattribute__(module, name)

        def read_missing(module: nn.Module, name: str) -> Any:
            try:
                return kind.__getattr__(module, name)
            except AttributeError:
                self._missing = (path, name) if is_on() else None
                raise

        methods = {"__getattribute__": read, "__getattr__": read_missing, "__module__": kind.__module__}
        try:
            module.__class__ = type(kind.__name__, (kind,), methods)
        except TypeError:
            return  # a class of another memory layout, such as a scripted module's
        self._kinds.append((module, kind))


def refuse_exchanged(stages: Iterable[Exchanged]) -> None:
    """Refuse what the layers of one stage have changed and another stage has read; the same on every rank."""
    found = list(stages)
    for index, owner in enumerate(found):
        for other, stage in enumerate(found):
            if index != other and owner.changed & stage.read:
                raise _refusal(*min(owner.changed & stage.read))


def _values(modules: Modules) -> Values:
    seen: set[int] = set()
    found: Values = {}
    for path, module in modules.items():
        for key, leaves in attribute_values(module, seen):
            if key == COUNTER:
                continue  # counters of random numbers: every stage keeps its own
            # Values themselves, not their ids: an id is only good while its object lives.
            found[path, key] = [(leaf, version_of(leaf) if isinstance(leaf, Tensor) else 0) for leaf in leaves]
    return found


def _changed(before: Values, after: Values) -> set[Attribute]:
    return {place for place, values in after.items() if not _are_same(before.get(place, []), values)}


def _are_same(before: list[tuple[Any, int]], after: list[tuple[Any, int]]) -> bool:
    if len(before) != len(after):
        return False
    for (old, old_version), (new, new_version) in zip(before, after, strict=True):
        is_plain = isinstance(old, int | float | str) and isinstance(new, int | float | str)
        if old is not new and not (is_plain and repr(old) == repr(new)):
            return False
        if old_version != new_version:
            return False
    return True


def _refusal(path: str, attribute: str) -> JobError:
    where = f"{path}.{attribute}" if path else attribute
    return JobError(
        f"layers of one pipeline stage set {where} in forward and another stage reads it, where that value never"
        " arrives",
        code="support.stage-side-value",
        fix="return it from the layers, whose outputs are sent from stage to stage, or use pp = 1",
    )
