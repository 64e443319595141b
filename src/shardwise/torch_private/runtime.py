"""Modules of torch by name, and what torch keeps once per process; this file imports no torch by itself."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from shardwise.errors import WorldError

if TYPE_CHECKING:
    from collections.abc import Iterator

DYNAMO = "torch._dynamo"
"""The front end of torch.compile, which the first DDP and every optimizer import: 800 modules, 1.5 s."""
FUNCTIONAL_COLLECTIVES = "torch.distributed._functional_collectives"
"""The module of the collectives that DTensor calls."""
SHARDED_TENSOR_METADATA = "torch.distributed._shard.sharded_tensor.metadata"
"""Where checkpoints that torch 2.3 and earlier wrote say that `TensorProperties` is."""


def required(owner: object, name: str) -> Any:
    """Return an attribute of torch that nothing can stand in for; a torch without it is refused by name."""
    try:
        return getattr(owner, name)
    except AttributeError as error:
        version = sys.modules["torch"].__version__
        raise WorldError(
            f"torch {version} has no {name} in {getattr(owner, '__name__', owner)!s}, which shardwise needs",
            code="world.torch-name-missing",
            fix="pip install torch==2.13.0",
        ) from error


def was_cuda_used() -> bool:
    """Whether this process initialized CUDA, or was forked from one that used it, if only to ask whether there is any.

    A fork of a process that called `is_available()` cannot use CUDA, and `is_initialized()` is False there. False where
    torch is not imported; the value of `is_initialized()` on a torch that lacks the name.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return False
    return bool(torch.cuda.is_initialized() or getattr(torch.cuda, "_is_in_bad_fork", lambda: False)())


def is_inductor_imported() -> bool:
    """Whether the back end of torch.compile is imported: torch imports it to name the lines of compiled code."""
    return "_inductor" in vars(sys.modules["torch"])


def graph_break() -> None:
    """End the graph that torch.compile is tracing here; does nothing in eager mode."""
    import torch._dynamo

    torch._dynamo.graph_break()


def disable_autograd_cache() -> None:
    """Have torch.compile make the backward of every graph anew; the cache of kernels stays in use.

    A torch without that cache needs nothing.
    """
    try:
        from torch._functorch import config
    except ImportError:
        return
    config.enable_autograd_cache = False


@contextmanager
def no_worker_info() -> Iterator[None]:
    """Have `torch.utils.data.get_worker_info()` return None in here, as in a process that is not a loader's worker."""
    from torch.utils.data._utils import worker

    before = required(worker, "_worker_info")
    worker._worker_info = None
    try:
        yield
    finally:
        worker._worker_info = before


def loader_iterator() -> Any:
    """Return the base class of all iterators of `DataLoader`: every batch passes its `__next__`."""
    from torch.utils.data import dataloader

    return required(dataloader, "_BaseDataLoaderIter")
