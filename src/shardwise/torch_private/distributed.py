"""Private APIs of process groups, FSDP2 and the runtime: backends, stores, flight recorder, FSDP2 units.

The flight recorder is a ring buffer in C++ of the last collectives of every process group, including those started in
C++ (DDP's buckets). Any thread can read it while another waits in a collective.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import pickle
import sys
from typing import TYPE_CHECKING, Any

from shardwise.errors import WorldError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

    import torch
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import Store
    from torch.futures import Future

_FLIGHT_RECORDERS = {"": "_dump_fr_trace", "nccl ": "_dump_nccl_trace"}
"""Group name prefix -> private function that dumps the records: one for NCCL (if built), one for all other backends."""
_FLIGHT_VERSION = "2."


def backend_of(group: ProcessGroup, device: torch.device) -> Any:
    """Return the backend of a group for a device; raises RuntimeError if it has none."""
    return group._get_backend(device)


def timeout_s(group: ProcessGroup, device: torch.device) -> float | None:
    """Return the timeout of a group's collectives in seconds; None if its backend has none."""
    try:
        limit = backend_of(group, device).options._timeout
    except (AttributeError, RuntimeError):
        return None
    return float(limit.total_seconds())


def finished_work(future: Future[Any]) -> Any:
    """Return a `Work` that completes with `future`, for process groups implemented in Python."""
    from torch._C import _distributed_c10d as c10d

    return required(c10d, "_create_work_from_future")(future)


def premultiplied_sum(factor: float) -> Any:
    """Return NCCL's reduce operation that multiplies by `factor` and sums; raises AttributeError without NCCL."""
    import torch.distributed as dist

    return dist._make_nccl_premul_sum(factor)  # type: ignore[attr-defined]


def fake_store() -> Store:
    """Register the fake backend of torch's tests and return its store; raises ImportError if torch lacks it."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def innermost_store(store: Any) -> Any:
    """Return the store inside nested PrefixStores."""
    return getattr(store, "_underlying_non_prefix_store", store)


def clear_dtensor_caches() -> None:
    """Clear DTensor's caches of sharding propagation; does nothing if DTensor is not imported.

    Meshes of the same ranks compare equal. Without this, a rank would get cached results on the mesh of an earlier
    world. The process groups of that mesh are closed, or, after a fork, it has the coordinate of another rank.
    """
    api = sys.modules.get("torch.distributed.tensor")
    if api is None:
        return
    import torch

    dispatcher = required(api.DTensor, "_op_dispatcher")
    dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", lambda: None)()
    redistribute = sys.modules.get("torch.distributed.tensor._redistribute")
    getattr(redistribute, "clear_redistribute_planner_cache", lambda: None)()
    required(redistribute, "_gen_transform_infos").cache_clear()


def import_dynamo() -> None:
    """Import Dynamo, if this torch has it, and clear what it cached on import; call before ranks are forked.

    Starting a process group clears these caches: every fork would free 300 dicts, and copy a page for each.
    """
    with contextlib.suppress(ImportError):
        importlib.import_module(DYNAMO)
        rules = sys.modules.get(f"{DYNAMO}.trace_rules")
        getattr(rules, "clear_lru_cache", lambda: None)()


def has_rpc_agent() -> bool:
    """Whether an RPC agent is running in this process; False if torch was built without RPC."""
    from torch.distributed import rpc

    if not rpc.is_available():
        return False
    return bool(getattr(rpc.api, "_is_current_rpc_agent_set", lambda: False)())


# For the recorder, which wraps the functions that every collective calls.


def backward_task_reader() -> Callable[[], int]:
    """Return torch's function that returns the id of the running backward pass, or -1 outside backward."""
    import torch

    task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)
    return task


def on_backend_registered(callback: Callable[[Any], None]) -> None:
    """Call `callback` with every process group for which a backend is registered from now on."""
    from torch.distributed import ProcessGroup

    register = required(ProcessGroup, "_register_backend")

    @functools.wraps(register)
    def register_backend(group: Any, *args: Any, **kwargs: Any) -> Any:
        callback(group)
        return register(group, *args, **kwargs)

    setattr(ProcessGroup, "_register_backend", register_backend)  # noqa: B010 - an assignment that mypy refuses


def groups_with_stores() -> Iterator[tuple[Any, Any]]:
    """Yield every process group of this process with its store; nothing if torch lacks the private attribute."""
    from torch.distributed import distributed_c10d

    world = getattr(distributed_c10d, "_world", None)
    for group, (_, store) in list(getattr(world, "pg_map", {}).items()):
        yield group, store


def resolve_group(functional: ModuleType, group: Any, tag: str) -> Any:
    """Return the process group of the `group` argument of a functional collective; None if it cannot be resolved."""
    from torch.distributed import ProcessGroup, distributed_c10d

    if isinstance(group, ProcessGroup):
        return group
    try:
        name = functional._resolve_group_name(group, tag)
        return required(distributed_c10d, "_resolve_process_group")(name)
    except (RuntimeError, ValueError, TypeError, KeyError, AssertionError, AttributeError):
        return None  # the functional collective raises the error


def flight_records(*, entries: bool, stacks: bool) -> dict[str, dict[str, Any]]:
    """Return the dumps of torch's flight recorders by group name prefix; raises ValueError for an unknown version."""
    from torch._C import _distributed_c10d as c10d

    found = {}
    for kind, name in _FLIGHT_RECORDERS.items():
        dump: Callable[..., bytes] | None = getattr(c10d, name, None)
        if dump is not None:
            found[kind] = pickle.loads(dump(entries, stacks, False))  # noqa: FBT003, S301 - torch wrote it just now
            if not found[kind]["version"].startswith(_FLIGHT_VERSION):
                raise ValueError(found[kind]["version"])
    return found


# FSDP2 and DTensor: the parameter groups that are gathered and reduced together, and their hooks.
#
# An `FSDPParamGroup` has an `FSDPParam` per parameter. Its `post_backward` reduces the gradients, and FSDP2's pre- and
# post-forward hooks gather and free the unsharded parameters.


def parameter_groups(model: nn.Module) -> Iterator[Any]:
    """Yield the `FSDPParamGroup`s of a model in the order of its modules.

    In torch 2.11 a module has at most one group, in 2.13 a list of groups.
    """
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = required(module, "_get_fsdp_state")()
            groups = getattr(state, "_fsdp_param_groups", None)
            found = [required(state, "_fsdp_param_group")] if groups is None else groups
            yield from (each for each in found if each is not None)


def gathered_parameter(record: Any) -> nn.Parameter | None:
    """Return the unsharded parameter of an `FSDPParam`, even after resharding; None before the first all-gather."""
    unsharded: nn.Parameter | None = getattr(record, "_unsharded_param", None)
    return unsharded


def gather_without_forward(unit: Any, *, has_gradient: bool) -> Tensor:
    """Run the pre- and post-forward hooks of an FSDP2 module without its forward. Communicates as its forward does.

    Returns an output; backward from this output all-gathers the parameters and reduces the gradients of the
    module. With `has_gradient`, the input requires a gradient and FSDP2 reduces when backward reaches it; otherwise
    FSDP2 reduces at the end of backward.
    """
    import torch

    state = required(unit, "_get_fsdp_state")()
    token = torch.zeros((), device=required(state, "_device"), requires_grad=torch.is_grad_enabled())
    given = token if has_gradient else token.detach()
    (entered,), _ = required(state, "_pre_forward")(unit, (given,), {})
    output = entered.clone() if has_gradient else entered + token
    hooked: Tensor = required(state, "_post_forward")(unit, (entered,), output)
    return hooked


def extend_all_gather(record: Any, before: Callable[..., Any], after: Callable[..., Any]) -> None:
    """Make FSDP2 gather what `before` returns for an `FSDPParam`, and make `after` create the unsharded parameter.

    FSDP2 looks up these extensions (`fsdp_pre_all_gather`, `fsdp_post_all_gather`) on the local tensor, and documents
    tensor subclasses for them. Attributes of a plain tensor do the same: the parameter stays a DTensor of a plain
    tensor, so that optimizers and checkpoints need no support for a subclass.
    """
    shard: Any = required(record, "_sharded_local_tensor")
    shard.fsdp_pre_all_gather = before
    shard.fsdp_post_all_gather = after
    required(record, "_init_extensions")()


def padded_shard(record: Any) -> Tensor:
    """Return the local shard of an `FSDPParam` with the padding rows that all-gather needs."""
    flat: Tensor = required(record, "_sharded_param_data")
    return flat.view(required(record, "padded_sharded_param_size"))


def modules_of(record: Any) -> list[nn.Module]:
    """Return the modules that use the parameter of an `FSDPParam`: several if it is tied."""
    owner = required(record, "_module_info")
    return [owner.module, *owner.shared_modules]


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the local shard of a DTensor without the autograd node of `to_local`; other tensors are unchanged."""
    inner: Tensor = getattr(tensor, "_local_tensor", tensor)
    return inner


DYNAMO = "torch._dynamo"
"""Module of the front end of torch.compile, which the first DDP and every optimizer import (800 modules, 1.5 s)."""
FUNCTIONAL_COLLECTIVES = "torch.distributed._functional_collectives"
"""Module of the functional collectives, which DTensor uses."""
SHARDED_TENSOR_METADATA = "torch.distributed._shard.sharded_tensor.metadata"
"""Module of `TensorProperties` in checkpoints of torch 2.3 and earlier."""


def required(owner: object, name: str) -> Any:
    """Return a private attribute of torch that has no fallback; raises WorldError if it does not exist."""
    try:
        return getattr(owner, name)
    except AttributeError as error:
        version = sys.modules["torch"].__version__
        raise WorldError(
            f"shardwise requires {name} of {getattr(owner, '__name__', owner)!s}, which torch {version} does not have",
            code="world.torch-name-missing",
            fix="pip install torch==2.13.0",
        ) from error


def was_cuda_used() -> bool:
    """Whether CUDA was used in this process, or in the process from which it was forked.

    A fork of a process that called `torch.cuda.is_available()` cannot use CUDA, although `is_initialized()` is False.
    Returns False if torch is not imported, and `is_initialized()` if torch lacks the private API.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return False
    return bool(torch.cuda.is_initialized() or getattr(torch.cuda, "_is_in_bad_fork", lambda: False)())


def is_inductor_imported() -> bool:
    """Whether torch._inductor, the default backend of torch.compile, is imported."""
    return "_inductor" in vars(sys.modules["torch"])


@contextlib.contextmanager
def no_worker_info() -> Iterator[None]:
    """Make `torch.utils.data.get_worker_info()` return None in this context, as outside DataLoader workers."""
    from torch.utils.data._utils import worker

    before = required(worker, "_worker_info")
    worker._worker_info = None
    try:
        yield
    finally:
        worker._worker_info = before


def loader_iterator() -> Any:
    """Return the base class of all iterators of `DataLoader`, whose `__next__` returns every batch."""
    from torch.utils.data import dataloader

    return required(dataloader, "_BaseDataLoaderIter")
