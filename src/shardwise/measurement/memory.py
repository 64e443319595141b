"""Bytes of live tensors during a step on the CPU and on meta, and the module that allocated them."""

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
"""Who made a storage that was there before it was watched."""


@dataclass(frozen=True, kw_only=True)
class LiveMemory:
    """Storages alike in all but their bytes' values, alive at the peak."""

    num_bytes: int
    """Of all of them together."""
    count: int
    operator: str
    """Which made them, such as "aten.mm.default"; else the name passed to `watch`, or "outside"."""
    module: str
    """Qualified name of the module at work, "" for none."""
    phase: str
    """Of the graph: "forward", "backward" (recomputing is part of it), "" outside modules and backward."""
    shape: tuple[int, ...]
    """Of the first tensor seen on the storage."""
    dtype: torch.dtype


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensor storages alive on a device, each once, from first sight until the last view dies.

    >>> with LiveBytes("cpu") as live:
    ...     live.watch("parameters", model.parameters())
    ...     step(batch)              # optimizer states are made
    ...     live.reset_peak()
    ...     step(batch)
    >>> live.peak_bytes, live.at_peak()[:10]

    A storage is seen when an operator reads, makes or resizes it, in forward, backward, hooks and optimizers alike.
    DDP's buckets are seen where they are made while this is open. Not seen: what a kernel uses inside itself, and what
    C++ takes from the allocator without an operator.
    """

    def __init__(self, device: torch.device | str) -> None:
        """Count storages on `device`, one without an index means all of its kind; fake tensors lie on meta."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = torch.device(device)
        self._live: dict[int, _Storage] = {}
        self._gone: list[_Storage] = []
        """Were alive at the peak and are not any more."""
        self._clock = 0
        self._peak_at = 0
        self._modules = ModuleStack()
        self.current_bytes = 0
        self.peak_bytes = 0

    def __enter__(self) -> Self:
        """Begin to watch."""
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
        """End; figures stay readable, and storages that die later are still taken off."""
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._modules.close()
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator and look at what it read and made."""
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # it unwraps itself (DTensor), and the tensors inside come by here
        kwargs = kwargs or {}
        for tensor in _tensors((args, tuple(kwargs.values()))):
            self._see(tensor, OUTSIDE)
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            self._see(tensor, func)
        return result

    def watch(self, label: str, tensors: Iterable[Tensor]) -> None:
        """Count these from now on, under `label` unless they are known already."""
        with torch.no_grad():
            for tensor in tensors:
                self._see(local_tensor(tensor), label)

    def reset_peak(self) -> None:
        """Begin a new peak at what is alive now."""
        self._gone.clear()
        self.peak_bytes, self._peak_at = self.current_bytes, self._clock

    def at_peak(self) -> list[LiveMemory]:
        """Return what was alive at the peak, alike storages together, largest first; adds up to `peak_bytes`."""
        groups: dict[tuple[Any, ...], list[int]] = {}
        for storage in (*self._live.values(), *self._gone):
            if storage.born <= self._peak_at and storage.num_bytes:
                groups.setdefault(storage.maker, []).append(storage.num_bytes)
        return sorted(
            (
                LiveMemory(
                    num_bytes=sum(sizes),
                    count=len(sizes),
                    operator=str(operator),
                    module=module,
                    phase=phase,
                    shape=tuple(shape),
                    dtype=dtype,
                )
                for (operator, module, phase, shape, dtype), sizes in groups.items()
            ),
            key=lambda holding: -holding.num_bytes,
        )

    def _see(self, tensor: Tensor, operator: Any) -> None:
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        where = storage.device  # not the tensor's: DTensor works out shapes with fake tensors that claim to be here
        if where.type != self._device.type or self._device.index not in (None, where.index):
            return
        key = storage_id(storage)
        known = self._live.get(key)
        if known is None:
            maker = (operator, *self._modules.place(), tensor.shape, tensor.dtype)
            known = _Storage(weakref.ref(storage, partial(self._died, key)), maker)
            self._live[key] = known
        self._update(known, storage.nbytes())

    def _update(self, storage: _Storage, num_bytes: int) -> None:
        """Give a storage its size: one that changes counts as gone and born again."""
        if num_bytes == storage.num_bytes:
            return
        self._leave(storage)
        self._clock += 1
        storage.num_bytes, storage.born = num_bytes, self._clock
        self.current_bytes += num_bytes
        if self.current_bytes > self.peak_bytes:
            self.peak_bytes, self._peak_at = self.current_bytes, self._clock
            self._gone.clear()

    def _died(self, key: int, _: object) -> None:
        self._leave(self._live.pop(key))

    def _leave(self, storage: _Storage) -> None:
        self.current_bytes -= storage.num_bytes
        if storage.num_bytes and storage.born <= self._peak_at:
            self._gone.append(_Storage(None, storage.maker, storage.num_bytes, storage.born))


@dataclass(slots=True)
class _Storage:
    ref: weakref.ref[torch.UntypedStorage] | None
    """Calls back at the end; kept for that alone."""
    maker: tuple[Any, ...]
    num_bytes: int = 0
    born: int = 0


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


# Which module of a model is at work, in forward and in backward, without touching the graph.


class ModuleStack:
    """Knows the module at work: by hooks in forward, by the number of the autograd node in backward.

    Hooks on tensors would give the same, but add nodes to the graph and so change what is measured.
    """

    def __init__(self) -> None:
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._stack: list[str] = []
        self._numbers: list[int] = []
        """Of the first node after each entry and exit, rising; `_owners` has whose nodes follow."""
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
        if not is_in_backward():  # recomputed nodes are never run backward: the first ones are
            self._numbers.append(next_sequence_number())
            self._owners.append(self._stack[-1] if self._stack else "")
