"""Recording functional collectives, as DTensor makes them: they go to C++ past the methods of a process group."""

from __future__ import annotations

import functools
import inspect
import math
import sys
from typing import TYPE_CHECKING, Any

from shardwise.runs.calls import Operation

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from shardwise.recorder.torch_calls import CollectiveRecorder

_NAMES = (
    ("all_reduce",),
    ("broadcast",),
    ("all_to_all_single",),
    ("all_to_all_single_autograd",),
    ("all_reduce_coalesced",),
    ("all_gather_single", "all_gather_tensor"),
    ("all_gather_single_autograd", "all_gather_tensor_autograd"),
    ("all_gather_single_coalesced", "all_gather_into_tensor_coalesced"),
    ("reduce_scatter_single", "reduce_scatter_tensor"),
    ("reduce_scatter_single_autograd", "reduce_scatter_tensor_autograd"),
    ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
)
"""By what each is called in torch 2.13, and before: the newer one is what the older one calls there."""
_CHANNEL = "functional"
"""They are counted by themselves, apart from what is called on the process group."""


def record_functional(recorder: CollectiveRecorder, module: ModuleType) -> None:
    """Wrap the functions of torch's module of functional collectives."""
    for names in _NAMES:
        name = next((name for name in names if hasattr(module, name)), None)
        if name is not None:
            setattr(module, name, _wrap(recorder, module, getattr(module, name)))


def _wrap(recorder: CollectiveRecorder, module: ModuleType, real: Callable[..., Any]) -> Callable[..., Any]:
    """Return a functional collective with a record of when it is issued; torch's flight recorder knows when it is done.

    While torch.compile traces it, nothing is recorded, and nothing of this is in the graph.
    """
    from torch.compiler import is_compiling

    parameters = list(inspect.signature(real).parameters)

    def record(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = {**dict(zip(parameters, args, strict=False)), **kwargs}
        group = _group_of(module, given)
        if group is not None:
            operation = _describe(real.__name__, given)
            site = recorder.site_of(sys._getframe(2))  # noqa: SLF001 - inspect.currentframe takes no depth
            recorder.note(group, operation, site)

    @functools.wraps(real)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        if not is_compiling():
            record(args, kwargs)
        return real(*args, **kwargs)

    return recorded


def _group_of(module: ModuleType, given: dict[str, Any]) -> Any:
    """Return the process group that is meant by any of the ways to say so; None if torch has none."""
    from torch._C._distributed_c10d import ProcessGroup, _resolve_process_group

    group = given["group"]
    if isinstance(group, ProcessGroup):
        return group
    try:
        name = module._resolve_group_name(group, given.get("tag", ""))  # noqa: SLF001 - as the real one does
        return _resolve_process_group(name)
    except (RuntimeError, ValueError, TypeError, KeyError, AssertionError):
        return None  # the real one will say what is wrong


def _describe(name: str, given: dict[str, Any]) -> Operation:
    tensors = given["self"]
    shapes = [(item.shape, str(item.dtype).removeprefix("torch.")) for item in _listed(tensors)]
    reduce, root = str(given.get("reduceOp", "")).lower(), given.get("src")
    head = [word for word in (reduce, f"root {root}" if root is not None else "") if word]
    name = name.removesuffix("_autograd").removesuffix("_coalesced")
    if name == "all_to_all_single":  # members may exchange uneven parts
        parts = sorted({dtype for _, dtype in shapes})
    else:
        parts = [f"{dtype}*{math.prod(shape)}" for shape, dtype in shapes]
    shown = [f"{dtype}[{'x'.join(map(str, shape))}]" for shape, dtype in shapes[:4]]
    return Operation(name, _CHANNEL, " ".join([*head, *parts]), ", ".join([*head, *shown]))


def _listed(tensors: Any) -> list[Any]:
    return list(tensors) if isinstance(tensors, list | tuple) else [tensors]
