"""Which module of a model is at work, in forward and in backward, without touching the graph."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

if TYPE_CHECKING:
    from torch import nn

# No public names tell which autograd node runs; without them backward is not seen as such.
_graph_task = getattr(torch._C, "_current_graph_task_id", lambda: -1)  # noqa: SLF001
_running_node = getattr(torch._C, "_current_autograd_node", lambda: None)  # noqa: SLF001
_next_number = getattr(torch._C._autograd, "_get_sequence_nr", lambda: 0)  # noqa: SLF001


class ModuleStack:
    """Knows the module at work: by hooks in forward, by the number of the autograd node in backward.

    Hooks on tensors would tell the same, but add nodes to the graph and so change what is measured.
    """

    def __init__(self) -> None:
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._stack: list[str] = []
        self._numbers: list[int] = []
        """Of the first node after each entry and exit, rising; `_owners` says whose nodes follow."""
        self._owners: list[str] = []
        self._handles: list[Any] = []

    def open(self) -> None:
        """Begin to listen to every module of this process."""
        self._handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]

    def close(self) -> None:
        """Listen no more."""
        for handle in self._handles:
            handle.remove()
        self._stack.clear()

    def place(self) -> tuple[str, str]:
        """Return the qualified name of the innermost module, and "forward", "backward" or "" for neither."""
        in_backward = _graph_task() != -1
        if self._stack:
            return self._stack[-1], "backward" if in_backward else "forward"
        if not in_backward:
            return "", ""
        node = _running_node()
        index = bisect_right(self._numbers, node._sequence_nr()) - 1 if node is not None else -1  # noqa: SLF001
        return self._owners[index] if index >= 0 else "", "backward"

    def _enter(self, module: nn.Module, _: Any) -> None:
        if module not in self._names:
            for name, part in module.named_modules():
                self._names.setdefault(part, name or type(part).__name__)
        self._stack.append(self._names[module])
        self._mark()

    def _leave(self, _module: nn.Module, _input: Any, _output: Any) -> None:
        if self._stack:
            self._stack.pop()
        self._mark()

    def _mark(self) -> None:
        if _graph_task() == -1:  # recomputed nodes are never run backward: the first ones are
            self._numbers.append(_next_number())
            self._owners.append(self._stack[-1] if self._stack else "")
