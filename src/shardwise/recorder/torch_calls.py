"""Record the calls of torch's process groups and data loaders by wrapping their methods.

A hang is diagnosed from another process, since a rank that hangs cannot run Python. So each call writes a few numbers
(group, operation, source line, sequence) into a memory-mapped ring before it is issued and after it completes.
Invariants: the user's call runs even if it cannot be recorded, and a failed call is never marked as completed.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import sys
import threading
from collections import defaultdict
from types import FunctionType
from typing import TYPE_CHECKING, Any

from shardwise.recorder.flight import FlightThread
from shardwise.recorder.operations import (
    OPERATIONS,
    POINT_TO_POINT,
    Sites,
    describe_collective,
    describe_message,
    key_maker,
    message_key,
)
from shardwise.runs.calls import BACKWARD_BIT, STARTUP_GROUP, GroupKey, Operation, pack
from shardwise.torch_private.distributed import (
    backward_task_reader,
    groups_with_stores,
    loader_iterator,
    on_backend_registered,
    resolve_group,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import CodeType, ModuleType

    from shardwise.runs.calls import CallRing


_MOST_OPEN = 4096
"""Maximum number of open handles of asynchronous calls; beyond it the oldest are dropped."""
_MOST_KINDS = 1 << 14
_NOTHING: Mapping[str, Any] = {}


def record_collectives(ring: CallRing, world_size: int) -> CollectiveRecorder:
    """Wrap the methods of torch's ProcessGroup and Work and the functions that create groups; return the recorder."""
    from torch.distributed.distributed_c10d import ProcessGroup, Work

    recorder = CollectiveRecorder(ring)
    for method in OPERATIONS:
        if hasattr(ProcessGroup, method):
            setattr(ProcessGroup, method, recorder.wrap(method, getattr(ProcessGroup, method)))
    setattr(Work, "wait", recorder.wrap_wait(Work.wait))  # noqa: B010 - an assignment that mypy refuses
    flights = FlightThread(ring, recorder.group_by_name)

    def registered(group: Any) -> None:
        recorder.forget_group(group)
        flights.start()

    on_backend_registered(registered)
    _wrap_group_creation(recorder, world_size)
    return recorder


def _wrap_group_creation(recorder: CollectiveRecorder, world_size: int) -> None:
    """Wrap the functions that create groups, where ranks wait for other ranks, and the one that destroys them."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    group = recorder.ring.intern(GroupKey(STARTUP_GROUP, 0, tuple(range(world_size))))
    counts = itertools.count(1)
    for name in ("init_process_group", "new_group"):
        real = getattr(distributed_c10d, name)
        wrapped = recorder.wrap_creation(real, group, counts)
        setattr(distributed_c10d, name, wrapped)
        if hasattr(dist, name):
            setattr(dist, name, wrapped)
    destroy = distributed_c10d.destroy_process_group

    @functools.wraps(destroy)
    def destroy_recorded(group: Any = None) -> None:
        if group is None or group is dist.group.WORLD:
            recorder.ring.leave_world()
        destroy(group)

    for module in (distributed_c10d, dist):
        setattr(module, destroy.__name__, destroy_recorded)


def record_batches(ring: CallRing) -> None:
    """Wrap `__next__` of torch's DataLoader iterators, to record when this rank waits for a batch."""
    iterator_class = loader_iterator()
    real = iterator_class.__next__

    @functools.wraps(real)
    def next_batch(iterator: Any) -> Any:
        ring.begin_data()
        try:
            return real(iterator)
        finally:
            ring.end_data()

    iterator_class.__next__ = next_batch


class _GroupState:
    """One process group on this rank: its position in the table, and the number of calls per channel."""

    def __init__(self, place: int, key: GroupKey) -> None:
        self.place = pack(place, 0, 0)
        self.key = key
        self.counts: defaultdict[str, Iterator[int]] = defaultdict(lambda: itertools.count(1))


class CollectiveRecorder:
    """Records the calls of wrapped methods; thread-safe."""

    def __init__(self, ring: CallRing) -> None:
        import torch

        self.ring = ring
        self._groups: dict[int, _GroupState] = {}
        self._lives: dict[str, int] = {}
        self._lock = threading.Lock()
        self.sites = Sites(torch.__path__[0], ring.intern)
        self._kinds: dict[tuple[Any, ...], int] = {}
        self._messages: dict[tuple[Any, ...], tuple[int, str]] = {}
        self._open: dict[int, int] = {}
        self._own = _functions_of_torch()
        self._graph_task = backward_task_reader()

    def wrap(self, method: str, real: Callable[..., Any]) -> Callable[..., Any]:
        """Return a wrapper of `real`, a method of ProcessGroup, that records each call."""
        ring, open_, groups, kinds = self.ring, self._open, self._groups, self._kinds
        find, graph_task, getframe = self.sites.find, self._graph_task, sys._getframe  # noqa: SLF001 - the fastest
        key_of = key_maker(method)
        is_message = method in POINT_TO_POINT
        own = self._own

        @functools.wraps(real)
        def recorded(group: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                state = groups.get(id(group)) or self._learn_group(group)
                caller = getframe(1)
                variables = caller.f_locals if id(caller.f_code) in own else _NOTHING
                if is_message:
                    what, channel = self._message(state, method, args, kwargs)
                else:
                    key, channel = key_of(args, kwargs, variables), ""
                    what = kinds[key] if key in kinds else self._learn_kind(key)
                sequence = next(state.counts[channel])
                packed = state.place | what | find(caller)
                number = ring.issue(sequence, packed if graph_task() < 0 else packed | BACKWARD_BIT)
            except Exception:  # noqa: BLE001 - a call that cannot be recorded must still run
                return real(group, *args, **kwargs)
            try:
                work = real(group, *args, **kwargs)
            except BaseException:
                ring.cancel(number)
                state.counts[channel] = itertools.count(sequence)
                raise
            if work is None:
                ring.leave(number)
            else:
                if variables.get("async_op", True):  # otherwise torch waits for it at once
                    ring.release(number)
                open_[id(work)] = number
                if len(open_) > _MOST_OPEN:
                    open_.pop(next(iter(open_)), None)
            return work

        return recorded

    def wrap_wait(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Return a wrapper of `Work.wait` that records the start and the end of the wait for a recorded call."""
        ring, open_ = self.ring, self._open

        @functools.wraps(real)
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            number = open_.pop(id(work), None)
            if number is None:
                return real(work, *args, **kwargs)
            ring.wait(number)
            done = real(work, *args, **kwargs)
            ring.leave(number)  # not after an exception: the rank stopped in a call that failed
            return done

        return wait

    def wrap_creation(self, real: Callable[..., Any], group: int, counts: Iterator[int]) -> Callable[..., Any]:
        """Return a wrapper of `real`, a function that creates a group, that records each call."""
        what = pack(group, self.ring.intern(Operation(real.__name__, "", "", "")), 0)

        @functools.wraps(real)
        def create(*args: Any, **kwargs: Any) -> Any:
            number = self.ring.issue(next(counts), what | self.sites.find(sys._getframe(1)))  # noqa: SLF001
            made = real(*args, **kwargs)
            self.ring.leave(number)
            if real.__name__ == "init_process_group":
                self.ring.enter_world()
            return made

        return create

    def note(self, group: Any, operation: Operation, site: int) -> None:
        """Record a call whose completion is not visible in Python."""
        state = self._groups.get(id(group)) or self._learn_group(group)
        what = state.place | pack(0, self.ring.intern(operation), site)
        self.ring.leave(self.ring.issue(next(state.counts[operation.channel]), what))

    def group_by_name(self, name: str) -> int:
        """Return the table position of the process group named `name`; 0 if it does not exist."""
        for group, store in groups_with_stores():
            if store is not None and group.group_name == name:
                return self.ring.intern((self._groups.get(id(group)) or self._learn_group(group)).key)
        return 0

    def _learn_group(self, group: Any) -> _GroupState:
        from torch.distributed import distributed_c10d

        with self._lock:
            if id(group) in self._groups:
                return self._groups[id(group)]
            name = str(group.group_name)
            try:
                members = tuple(distributed_c10d.get_process_group_ranks(group))
            except (KeyError, ValueError, RuntimeError):  # a group that torch.distributed did not create
                members = ()
            life = self._lives[name] = self._lives.get(name, -1) + 1
            key = GroupKey(name, life, members)
            state = self._groups[id(group)] = _GroupState(self.ring.intern(key), key)
            return state

    def forget_group(self, group: Any) -> None:
        """Forget an earlier group at this address; the recorder keeps no reference, so that groups can be destroyed."""
        self._groups.pop(id(group), None)

    def _learn_kind(self, key: tuple[Any, ...]) -> int:
        if len(self._kinds) >= _MOST_KINDS:
            self._kinds.clear()
        what = self._kinds[key] = pack(0, self.ring.intern(describe_collective(key)), 0)
        return what

    def _message(
        self, state: _GroupState, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[int, str]:
        """Return the table index and the channel of a send or a receive, from `(tensors, peer in the group, tag)`."""
        key = (state.place, *message_key(method, args, kwargs))
        known = self._messages.get(key)
        if known is None:
            tensors, *numbers = (*args, *kwargs.values())
            at, tag = numbers if len(numbers) > 1 else (-1, numbers[0])
            peer = state.key.members[at] if at >= 0 and state.key.members else at
            operation = describe_message(method, tensors, _own_rank(), peer, tag)
            if len(self._messages) >= _MOST_KINDS:
                self._messages.clear()
            known = self._messages[key] = pack(0, self.ring.intern(operation), 0), operation.channel
        return known


def _functions_of_torch() -> dict[int, CodeType]:
    """Return the code objects of torch's functions that call a process group, by address, since they hash slowly."""
    from torch.distributed import distributed_c10d

    functions = [inspect.unwrap(value) for value in vars(distributed_c10d).values() if type(value) is FunctionType]
    own = [function.__code__ for function in functions if function.__module__ == distributed_c10d.__name__]
    return {id(code): code for code in own}


def _own_rank() -> int:
    import torch.distributed as dist

    return dist.get_rank() if dist.is_initialized() else -1


# Functional collectives, which DTensor uses, call C++ directly and bypass the methods of ProcessGroup.


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
"""Names in torch 2.13, then in earlier versions; in 2.13 the older function calls the newer one."""
_CHANNEL = "functional"
"""Channel of functional collectives, which are counted separately from calls of the process group's methods."""


def record_functional(recorder: CollectiveRecorder, module: ModuleType) -> None:
    """Wrap the functions of torch's module of functional collectives."""
    for names in _NAMES:
        name = next((name for name in names if hasattr(module, name)), None)
        if name is not None:
            setattr(module, name, _wrap(recorder, module, getattr(module, name)))


def _wrap(recorder: CollectiveRecorder, module: ModuleType, real: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper that records when a functional collective is issued; the flight recorder records its completion.

    While torch.compile traces it, the wrapper records nothing and adds nothing to the graph.
    """
    from torch.compiler import is_compiling

    parameters = list(inspect.signature(real).parameters)

    def record(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = {**dict(zip(parameters, args, strict=False)), **kwargs}
        group = resolve_group(module, given["group"], given.get("tag", ""))
        if group is not None:
            operation = _describe(real.__name__, given)
            site = recorder.sites.find(sys._getframe(2))  # noqa: SLF001 - inspect.currentframe takes no depth
            recorder.note(group, operation, site)

    @functools.wraps(real)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        if not is_compiling():
            record(args, kwargs)
        return real(*args, **kwargs)

    return recorded


def _describe(name: str, given: dict[str, Any]) -> Operation:
    tensors = given["self"]
    shapes = [(item.shape, str(item.dtype).removeprefix("torch.")) for item in _listed(tensors)]
    reduce, root = str(given.get("reduceOp", "")).lower(), given.get("src")
    settings = [reduce] if reduce else []
    if root is not None:
        settings.append(f"root {root}")
    name = name.removesuffix("_autograd").removesuffix("_coalesced")
    if name == "all_to_all_single":  # members may exchange uneven splits
        parts = sorted({dtype for _, dtype in shapes})
    else:
        parts = [f"{dtype}*{math.prod(shape)}" for shape, dtype in shapes]
    shown = [f"{dtype}[{'x'.join(map(str, shape))}]" for shape, dtype in shapes[:4]]
    return Operation(name, _CHANNEL, " ".join([*settings, *parts]), ", ".join([*settings, *shown]))


def _listed(tensors: Any) -> list[Any]:
    return list(tensors) if isinstance(tensors, list | tuple) else [tensors]
