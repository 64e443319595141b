"""Counts bytes of live tensors during a step on CPU or meta devices, with the modules that allocated the tensors."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from shardwise.torch_private.dispatch import (
    TorchDispatchMode,
    is_in_backward,
    is_traceable_wrapper_subclass_type,
    next_sequence_number,
    running_sequence_number,
    storage_id,
)
from shardwise.torch_private.distributed import local_tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor, nn


OUTSIDE = "outside"
"""Operator name of a storage that was allocated before counting started."""


@dataclass(frozen=True, kw_only=True)
class LiveMemory:
    """Storages with the same operator, module, phase, shape and dtype that were alive at the peak."""

    num_bytes: int
    """Total bytes of these storages."""
    count: int
    operator: str
    """The operator that allocated them, such as "aten.mm.default"; or the label of `watch`, or "outside"."""
    module: str
    """Qualified name of the module that was running, empty for none."""
    phase: str
    """"forward", "backward" (which includes recomputation), or empty outside of modules and backward."""
    shape: tuple[int, ...]
    """Shape of the first tensor seen on the storage."""
    dtype: torch.dtype


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all live tensor storages on a device, each once, until its last view is freed.

    >>> with LiveBytes("cpu") as live:
    ...     live.watch("parameters", model.parameters())
    ...     step(batch)              # allocates optimizer states
    ...     live.reset_peak()
    ...     step(batch)
    >>> live.peak_bytes, live.at_peak()[:10]

    A storage is counted from the first operator that reads, allocates or resizes it, in forward, backward, hooks and
    optimizers. DDP's buckets are counted if they are allocated inside of this context. Not counted: workspaces of
    kernels, and memory that C++ allocates without an operator.
    """

    def __init__(self, device: torch.device | str) -> None:
        """Count storages on `device`; without an index, on all devices of its type. Fake tensors count as meta."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = torch.device(device)
        self._live: dict[int, _Storage] = {}
        self._freed_since_peak: list[_Storage] = []
        """Storages that were alive at the peak and were freed since."""
        self._clock = 0
        self._peak_at = 0
        self._modules = ModuleStack()
        self.current_bytes = 0
        self.peak_bytes = 0

    def __enter__(self) -> Self:
        """Start counting."""
        # FSDP2 frees and refills gathered parameters through this method, which is not an operator.
        self._resize = resize = torch.UntypedStorage.resize_

        def resize_and_count(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            known = self._live.get(storage_id(storage))
            if known is not None:
                self._update(known, storage.nbytes())
            return result

        torch.UntypedStorage.resize_ = resize_and_count  # type: ignore[method-assign, assignment]
        self._modules.open()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: object) -> None:
        """Stop counting; the figures stay readable, and storages that are freed later are still subtracted."""
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._modules.close()
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator and count the storages of its inputs and outputs."""
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # a subclass such as DTensor unwraps itself, and its inner tensors arrive here
        kwargs = kwargs or {}
        for tensor in _tensors((args, tuple(kwargs.values()))):
            self._see(tensor, OUTSIDE)
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            self._see(tensor, func)
        return result

    def watch(self, label: str, tensors: Iterable[Tensor]) -> None:
        """Count these tensors from now on, with `label` unless they were counted before."""
        with torch.no_grad():
            for tensor in tensors:
                self._see(local_tensor(tensor), label)

    def reset_peak(self) -> None:
        """Reset the peak to the current bytes."""
        self._freed_since_peak.clear()
        self.peak_bytes, self._peak_at = self.current_bytes, self._clock

    def at_peak(self) -> list[LiveMemory]:
        """Return the live storages at the peak, grouped and largest first; they add up to `peak_bytes`."""
        groups: dict[tuple[Any, ...], list[int]] = {}
        for storage in (*self._live.values(), *self._freed_since_peak):
            if storage.allocated_at <= self._peak_at and storage.num_bytes:
                groups.setdefault(storage.origin, []).append(storage.num_bytes)
        found = []
        for (operator, module, phase, shape, dtype), sizes in groups.items():
            memory = LiveMemory(
                num_bytes=sum(sizes),
                count=len(sizes),
                operator=str(operator),
                module=module,
                phase=phase,
                shape=tuple(shape),
                dtype=dtype,
            )
            found.append(memory)
        return sorted(found, key=lambda memory: -memory.num_bytes)

    def _see(self, tensor: Tensor, operator: Any) -> None:
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        where = storage.device  # not the tensor's: DTensor infers shapes with fake tensors that report this device
        if where.type != self._device.type or self._device.index not in (None, where.index):
            return
        key = storage_id(storage)
        known = self._live.get(key)
        if known is None:
            origin = (operator, *self._modules.place(), tensor.shape, tensor.dtype)
            known = _Storage(weakref.ref(storage, partial(self._free, key)), origin)
            self._live[key] = known
        self._update(known, storage.nbytes())

    def _update(self, storage: _Storage, num_bytes: int) -> None:
        """Set the size of a storage; a storage whose size changes counts as freed and allocated again."""
        if num_bytes == storage.num_bytes:
            return
        self._subtract(storage)
        self._clock += 1
        storage.num_bytes, storage.allocated_at = num_bytes, self._clock
        self.current_bytes += num_bytes
        if self.current_bytes > self.peak_bytes:
            self.peak_bytes, self._peak_at = self.current_bytes, self._clock
            self._freed_since_peak.clear()

    def _free(self, key: int, _: object) -> None:
        self._subtract(self._live.pop(key))

    def _subtract(self, storage: _Storage) -> None:
        self.current_bytes -= storage.num_bytes
        if storage.num_bytes and storage.allocated_at <= self._peak_at:
            self._freed_since_peak.append(_Storage(None, storage.origin, storage.num_bytes, storage.allocated_at))


@dataclass(slots=True)
class _Storage:
    ref: weakref.ref[torch.UntypedStorage] | None
    """Weak reference whose callback runs when the storage is freed."""
    origin: tuple[Any, ...]
    num_bytes: int = 0
    allocated_at: int = 0


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


# Tracking of the running module in forward and backward, without changing the autograd graph.


class ModuleStack:
    """Tracks the running module: by hooks in forward, by the sequence number of the autograd node in backward.

    Hooks on tensors would work as well, but they add nodes to the graph and thereby change the measurement.
    """

    def __init__(self) -> None:
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._stack: list[str] = []
        self._numbers: list[int] = []
        """Ascending sequence numbers of the first node after each entry and exit; `_owners` has their modules."""
        self._owners: list[str] = []
        self._handles: list[Any] = []

    def open(self) -> None:
        """Register hooks for every module of this process."""
        self._handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._stack.clear()

    def place(self) -> tuple[str, str]:
        """Return the qualified name of the innermost module, and "forward", "backward" or "" for neither."""
        in_backward = is_in_backward()
        if self._stack:
            return self._stack[-1], "backward" if in_backward else "forward"
        if not in_backward:
            return "", ""
        number = running_sequence_number()
        index = -1 if number is None else bisect_right(self._numbers, number) - 1
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
        if not is_in_backward():  # nodes of a recomputation do not run in backward, those of the first forward do
            self._numbers.append(next_sequence_number())
            self._owners.append(self._stack[-1] if self._stack else "")
