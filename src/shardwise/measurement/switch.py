"""A world whose collectives can be recorded, skipped and replayed, to measure a step without its communication."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.futures import Future

from shardwise.dist import World
from shardwise.layout import AXES
from shardwise.torch_private.dispatch import tree_leaves, tree_map
from shardwise.torch_private.distributed import backend_of, finished_work

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from shardwise.layout import Layout

_BACKEND = "shardwise_switched"
_METHODS = (
    "allreduce",
    "allreduce_coalesced",
    "allgather",
    "_allgather_base",
    "all_gather_single",  # _allgather_base in torch 2.13
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced",
    "alltoall",
    "alltoall_base",
    "all_to_all_single",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "barrier",
)
"""Process group methods that can be skipped. send and recv are not among them, since ranks need the received data."""


@dataclass(frozen=True, kw_only=True)
class SwitchedCall:
    """One recorded collective: its group and the shapes of its tensors."""

    group: dist.ProcessGroup
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def num_bytes(self) -> int:
        """Bytes of the largest argument of the call: the gathered, scattered or reduced tensor."""
        sizes = [_bytes(arg) for arg in self.args]
        return max(sizes, default=0)


@dataclass(kw_only=True)
class CommunicationSwitch:
    """Turns the collectives of a `SwitchedWorld` on or off, and records them."""

    on: bool = True
    calls: list[SwitchedCall] | None = None
    """Recorded calls; None if calls are not recorded."""

    def record(self, step: Callable[[], object]) -> list[SwitchedCall]:
        """Return the collectives that `step` calls, in order."""
        calls: list[SwitchedCall] = []
        self.calls = calls
        try:
            step()
        finally:
            self.calls = None
        return calls


class SwitchedWorld(World):
    """A world whose collectives can be turned off, except those on host groups and on the default group.

    The switch costs about 10 us per collective in Python, whether it is on or off.
    """

    switch: CommunicationSwitch
    plain: World
    """The wrapped world, whose collectives always run."""

    @classmethod
    def around(cls, here: World) -> SwitchedWorld:
        """Wrap the world `here`, with collectives turned on; the caller closes `here`."""
        if _BACKEND not in dist.Backend.backend_list:
            dist.Backend.register_backend(_BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
        values = {part.name: getattr(here, part.name) for part in dataclasses.fields(World) if part.init}
        switched = cls(**{**values, "created": False, "_groups": {}})
        object.__setattr__(switched, "switch", CommunicationSwitch())
        object.__setattr__(switched, "plain", here)
        return switched

    def axis_group(self, layout: Layout, axes: Sequence[str], *, on_host: bool = False) -> dist.ProcessGroup | None:
        """Return the group of the ranks that differ only along `axes`. Communicates; call on every rank."""
        group = super().axis_group(layout, axes, on_host=on_host)
        if group is None or on_host:
            return group
        key = ("switched", group.group_name)
        if key not in self._groups:
            self._groups[key] = dist.new_group(
                dist.get_process_group_ranks(group),
                backend=_BACKEND,
                pg_options=_Inside(group=group, switch=self.switch),
                use_local_synchronization=True,
            )
        return self._groups[key]

    def mesh(self, layout: Layout) -> DeviceMesh:
        """Return the device mesh of `layout` with switched groups. Communicates; call on every rank."""
        split = [axis for axis, degree in zip(AXES, layout.degrees, strict=True) if degree > 1]
        groups: list[Any] = [self.axis_group(layout, (axis,)) for axis in split]
        ranks = torch.arange(self.size).reshape([getattr(layout, axis) for axis in split])
        one = len(groups) == 1
        return DeviceMesh.from_group(
            groups[0] if one else groups,
            self.device.type,
            mesh=None if one else ranks,
            mesh_dim_names=tuple(split),
        )


def replay(calls: Sequence[SwitchedCall]) -> Callable[[], None]:
    """Return a function that runs recorded collectives one after the other; it communicates, call it on every rank.

    Calls share the tensors of each shape and argument position, to save memory.
    """
    buffers: dict[Any, Tensor] = {}

    def allocate(position: int) -> Callable[[Any], Any]:
        def tensor_for(leaf: Any) -> Any:
            if not isinstance(leaf, _Shape):
                return leaf
            key = (position, leaf)
            if key not in buffers:
                buffers[key] = torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device)
            return buffers[key]

        return tensor_for

    ready = [
        (
            getattr(call.group, call.method),
            [tree_map(allocate(position), arg) for position, arg in enumerate(call.args)],
            call.kwargs,
        )
        for call in calls
    ]

    def play() -> None:
        for method, args, kwargs in ready:
            method(*args, **kwargs).wait()

    return play


@dataclass(frozen=True)
class _Shape:
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, kw_only=True)
class _Inside:
    """Process group options of a switched group: the wrapped group and the switch."""

    group: dist.ProcessGroup
    switch: CommunicationSwitch


class _SwitchedGroup(dist.ProcessGroup):
    """Forwards every collective to the wrapped group while the switch is on, otherwise returns completed work."""

    def __init__(self, rank: int, size: int, name: str, inside: _Inside) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch's stub has only the form with a store
        self._name = name
        self._group = inside.group
        self._switch = inside.switch

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return _BACKEND

    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802 - torch's name
        self._name = name

    @property
    def group_name(self) -> str:  # type: ignore[override]  # a NewType of str since torch 2.13
        return self._name

    def _get_backend(self, device: torch.device) -> Any:
        """Return the wrapped backend, which torch needs to create a group in a world that is bound to GPUs."""
        return backend_of(self._group, device)

    def pass_on(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        switch = self._switch
        if switch.calls is not None:
            shapes = tuple(tree_map(_shape, arg) for arg in args)
            switch.calls.append(SwitchedCall(group=self._group, method=method, args=shapes, kwargs=kwargs))
        return getattr(self._group, method)(*args, **kwargs) if switch.on else _done(args)


def _passing(method: str) -> Callable[..., Any]:
    def call(self: _SwitchedGroup, *args: Any, **kwargs: Any) -> Any:
        return self.pass_on(method, args, kwargs)

    return call


for _method in _METHODS:
    if hasattr(dist.ProcessGroup, _method):  # names differ between versions of torch
        setattr(_SwitchedGroup, _method, _passing(_method))


def _create(options: Any, inside: _Inside) -> _SwitchedGroup:
    return _SwitchedGroup(options.group_rank, options.group_size, options.group_id, inside)


def _done(args: tuple[Any, ...]) -> Any:
    """Return completed work whose result is the unchanged first argument, which DDP uses as the reduced bucket."""
    result = args[0] if args and isinstance(args[0], list | torch.Tensor) else []
    devices = {leaf.device for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.is_cuda}
    future: Future[Any] = Future(devices=list(devices))
    future.set_result(result)
    return finished_work(future)


def _shape(leaf: Any) -> Any:
    return _Shape(tuple(leaf.shape), leaf.dtype, leaf.device) if isinstance(leaf, torch.Tensor) else leaf


def _bytes(arg: Any) -> int:
    shapes = [leaf for leaf in tree_leaves(arg) if isinstance(leaf, _Shape)]
    return sum(torch.Size(each.shape).numel() * each.dtype.itemsize for each in shapes)
