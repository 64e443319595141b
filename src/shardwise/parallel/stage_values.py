"""Detection of attributes that the layers of one pipeline stage set and that another stage reads.

In one process a layer may set an attribute of itself (`self.aux_loss = ...`, as mixtures of experts do) or of another
module (`root.losses.append(...)`), and the model reads it after the layers. Pipeline stages send only layer outputs, so
another stage would read the initial value, and the loss would silently omit the auxiliary losses of other stages.
Attributes that are set but not read are harmless, and so are constant attributes. Until the end of the first step every
stage records the attributes that its layers change, and the attributes that it reads from layers of other stages or, on
the last stage after the layers, from all other modules. An attribute in both lists raises an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from shardwise.errors import JobError
from shardwise.parallel.counter_random import COUNTER
from shardwise.parallel.skeleton import attribute_values, joined
from shardwise.torch_private.dispatch import is_compiled, version_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch.utils.hooks import RemovableHandle

    Modules = Mapping[str, nn.Module]
    """Path in the model -> module."""
    Values = dict[tuple[str, str], list[tuple[Any, int]]]
    """(path, attribute) -> the contained values, each with its version counter if it is a tensor."""

Attribute = tuple[str, str]
"""The path of a module and the name of one of its attributes."""


class AttributeAccesses(NamedTuple):
    """The attributes that one stage changed and read in its first step."""

    changed: frozenset[Attribute]
    """Attributes of the stage's layers and, except on the last stage, of other modules that its layers changed."""
    read: frozenset[Attribute]
    """Attributes that the stage read from layers of other stages and, after the layers, from other modules."""


class StageValues:
    """Records the attributes that a stage's layers change, and those that the stage reads from other stages."""

    def __init__(
        self, own: Modules, absent: Iterable[tuple[str, nn.Module]], outside: Modules, *, is_last: bool
    ) -> None:
        """Record accesses to the modules in this stage's layers, in other stages' layers and outside all layers."""
        self._own = own
        self._absent = list(absent)
        self._outside = outside
        self._is_last = is_last
        self._is_running = False
        self._is_behind = False
        """Whether the layers of the last stage have run in the current forward."""
        self._before: Values = {}
        self._outside_before: Values = {}
        self._changed: set[Attribute] = set()
        self._read: set[Attribute] = set()
        self._missing: Attribute | None = None
        self._kinds: list[tuple[nn.Module, type]] = []
        self._handles: list[RemovableHandle] = []

    def connect(self, first: nn.Module, last: nn.Module) -> None:
        """Start recording, after all transforms; `first` and `last` are layers of this stage.

        Changes on other modules are the differences between the start of `first` and the end of `last`. For compiled
        layers, only changes on the layers are recorded, because a hook would be compiled too.
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
        """Start a forward pass of the stage."""
        self._is_running, self._missing = True, None
        self._before = _values(self._own)

    def end(self) -> None:
        """Finish a forward pass of the stage, whether it succeeded or not."""
        self._is_running = self._is_behind = False
        self._changed |= _changed(self._before, _values(self._own))
        self._before = {}

    def explain(self, error: AttributeError) -> None:
        """Raise JobError if `error` is about an attribute that a layer of another stage sets in forward."""
        if self._missing is not None and f"'{self._missing[1]}'" in str(error):
            raise _unsupported(*self._missing) from error

    def stop(self) -> AttributeAccesses:
        """Stop recording and return the recorded accesses."""
        for module, kind in self._kinds:
            module.__class__ = kind
        for handle in self._handles:
            handle.remove()
        self._kinds, self._handles = [], []
        return AttributeAccesses(frozenset(self._changed), frozenset(self._read))

    def _enter(self) -> None:
        if self._is_running and not self._is_last:
            self._outside_before = _values(self._outside)

    def _leave(self) -> None:
        if not self._is_running:
            return  # recomputation of a layer in backward
        if self._is_last:
            self._is_behind = True
        else:
            self._changed |= _changed(self._outside_before, _values(self._outside))
            self._outside_before = {}

    def _watch(self, module: nn.Module, path: str, is_on: Callable[[], bool]) -> None:
        """Record every attribute that is read while `is_on()`, by replacing the module's class with a subclass."""
        kind = type(module)

        def read(module: nn.Module, name: str) -> Any:
            if is_on():
                self._read.add((path, name))
            return kind.__getattribute__(module, name)

        def read_missing(module: nn.Module, name: str) -> Any:
            try:
                return kind.__getattr__(module, name)
            except AttributeError:
                if is_on():
                    self._missing = (path, name)
                else:
                    self._missing = None
                raise

        methods = {"__getattribute__": read, "__getattr__": read_missing, "__module__": kind.__module__}
        try:
            module.__class__ = type(kind.__name__, (kind,), methods)
        except TypeError:
            return  # a class with a different memory layout, such as a scripted module
        self._kinds.append((module, kind))


def check_accesses(stages: Iterable[AttributeAccesses]) -> None:
    """Raise JobError if one stage changed an attribute that another stage read; `stages` is equal on every rank."""
    found = list(stages)
    for index, owner in enumerate(found):
        for other, stage in enumerate(found):
            if index != other and owner.changed & stage.read:
                raise _unsupported(*min(owner.changed & stage.read))


def _values(modules: Modules) -> Values:
    seen: set[int] = set()
    found: Values = {}
    for path, module in modules.items():
        for key, leaves in attribute_values(module, seen):
            if key == COUNTER:
                continue  # counters of random numbers: each stage has its own
            # Stores the values instead of their ids, which are valid only while the objects exist.
            found[path, key] = [(leaf, _version(leaf)) for leaf in leaves]
    return found


def _version(value: Any) -> int:
    return version_of(value) if isinstance(value, Tensor) else 0


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


def _unsupported(path: str, attribute: str) -> JobError:
    return JobError(
        f"pipeline stages exchange only layer outputs, but layers of one stage set {joined(path, attribute)} in forward"
        " and another stage reads it",
        code="support.stage-side-value",
        fix="return the value from the layers, or set pp=1",
    )
