"""Process groups and FSDP2 from the inside: backends, stores, flight recorder, units; imports no torch by itself.

The flight recorder is a ring in C++ of the last collectives of every process group, also of those that C++ starts by
itself (DDP's buckets). It can be read from any thread while another one waits in a collective.
"""

from __future__ import annotations

import functools
import pickle
from typing import TYPE_CHECKING, Any

from shardwise.torch_private.runtime import required

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

    import torch
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import Store
    from torch.futures import Future


_FLIGHT_RECORDERS = {"": "_dump_fr_trace", "nccl ": "_dump_nccl_trace"}
"""One for NCCL, which a build without it does not have, and one for all others."""
_FLIGHT_VERSION = "2."


def backend_of(group: ProcessGroup, device: torch.device) -> Any:
    """Return the backend of a group for a device; RuntimeError where it has none."""
    return group._get_backend(device)


def timeout_s(group: ProcessGroup, device: torch.device) -> float | None:
    """Return the time limit of a group's collectives in seconds; None where its backend does not say."""
    try:
        limit = backend_of(group, device).options._timeout
    except (AttributeError, RuntimeError):
        return None
    return float(limit.total_seconds())


def finished_work(future: Future[Any]) -> Any:
    """Return a `Work` that is done when `future` is: what a process group in Python returns."""
    from torch._C import _distributed_c10d as c10d

    return required(c10d, "_create_work_from_future")(future)


def premultiplied_sum(factor: float) -> Any:
    """Return NCCL's operation that multiplies by `factor` before it sums; AttributeError where torch has none."""
    import torch.distributed as dist

    return dist._make_nccl_premul_sum(factor)  # type: ignore[attr-defined]


def fake_store() -> Store:
    """Register torch's fake backend, which torch's own tests use, and return its store; ImportError without it."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def innermost_store(store: Any) -> Any:
    """Return the store inside of the prefixes that torch puts around it."""
    return getattr(store, "_underlying_non_prefix_store", store)


def has_rpc_agent() -> bool:
    """Whether torch.distributed.rpc runs in this process; False on a torch without it."""
    from torch.distributed import rpc

    if not rpc.is_available():
        return False
    return bool(getattr(rpc.api, "_is_current_rpc_agent_set", lambda: False)())


# For the recorder, which wraps what every collective passes.


def backward_task_reader() -> Callable[[], int]:
    """Return torch's own function for the id of the backward that runs, -1 outside: the recorder calls it each time."""
    import torch

    task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)
    return task


def on_backend_registered(callback: Callable[[Any], None]) -> None:
    """Call back with every process group that gets a backend from now on: all that can communicate."""
    from torch.distributed import ProcessGroup

    register = required(ProcessGroup, "_register_backend")

    @functools.wraps(register)
    def register_backend(group: Any, *args: Any, **kwargs: Any) -> Any:
        callback(group)
        return register(group, *args, **kwargs)

    setattr(ProcessGroup, "_register_backend", register_backend)  # noqa: B010 - an assignment that mypy refuses


def groups_with_stores() -> Iterator[tuple[Any, Any]]:
    """Yield every process group of this process with its store; none on a torch that keeps them elsewhere."""
    from torch.distributed import distributed_c10d

    world = getattr(distributed_c10d, "_world", None)
    for group, (_, store) in list(getattr(world, "pg_map", {}).items()):
        yield group, store


def resolve_group(functional: ModuleType, group: Any, tag: str) -> Any:
    """Return the process group that an argument of a functional collective names; None if torch finds none."""
    from torch.distributed import ProcessGroup, distributed_c10d

    if isinstance(group, ProcessGroup):
        return group
    try:
        name = functional._resolve_group_name(group, tag)
        return required(distributed_c10d, "_resolve_process_group")(name)
    except (RuntimeError, ValueError, TypeError, KeyError, AssertionError, AttributeError):
        return None  # the functional collective itself will report what is wrong


def flight_records(*, entries: bool, stacks: bool) -> dict[str, dict[str, Any]]:
    """Return what torch's flight recorders have, by the prefix of their groups; ValueError for another version."""
    from torch._C import _distributed_c10d as c10d

    found = {}
    for kind, name in _FLIGHT_RECORDERS.items():
        dump: Callable[..., bytes] | None = getattr(c10d, name, None)
        if dump is not None:
            found[kind] = pickle.loads(dump(entries, stacks, False))  # noqa: FBT003, S301 - torch wrote it just now
            if not found[kind]["version"].startswith(_FLIGHT_VERSION):
                raise ValueError(found[kind]["version"])
    return found


# FSDP2 and DTensor from the inside: the units that are gathered and reduced together, and their hooks.
#
# A unit (`FSDPParamGroup`) holds one record (`FSDPParam`) per parameter. Its `post_backward` reduces the gradients,
# and FSDP2's pre- and post-forward hooks gather and free the whole parameters.


def parameter_groups(model: nn.Module) -> Iterator[Any]:
    """Yield the groups of parameters that FSDP2 gathers and reduces together, in the order of the modules.

    torch 2.11 has one group or none per module, 2.13 a list of them.
    """
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = required(module, "_get_fsdp_state")()
            groups = getattr(state, "_fsdp_param_groups", None)
            found = [required(state, "_fsdp_param_group")] if groups is None else groups
            yield from (each for each in found if each is not None)


def gathered_parameter(record: Any) -> nn.Parameter | None:
    """Return the whole parameter of a record, whether it is resharded already or not; None before the first gather."""
    whole: nn.Parameter | None = getattr(record, "_unsharded_param", None)
    return whole


def gather_without_forward(unit: Any, *, has_gradient: bool) -> Tensor:
    """Run FSDP2's hooks of a unit with no forward between them; communicates as a call of the unit does.

    Returns an output that backward may start from: backward then gathers and reduces the unit. With `has_gradient` the
    unit's input has a gradient too, on which FSDP2 reduces; without, it reduces when backward ends.
    """
    import torch

    state = required(unit, "_get_fsdp_state")()
    token = torch.zeros((), device=required(state, "_device"), requires_grad=torch.is_grad_enabled())
    given = token if has_gradient else token.detach()
    (entered,), _ = required(state, "_pre_forward")(unit, (given,), {})
    output = entered.clone() if has_gradient else entered + token
    hooked: Tensor = required(state, "_post_forward")(unit, (entered,), output)
    return hooked


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the local shard inside a DTensor, with no autograd node as `to_local` adds; other tensors as they are."""
    inner: Tensor = getattr(tensor, "_local_tensor", tensor)
    return inner
