"""Private APIs of torch.compile: its errors, its record of graph breaks and recompilations, and its caches."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple

from shardwise.torch_private.distributed import required

if TYPE_CHECKING:
    from traceback import FrameSummary


class GraphBreak(NamedTuple):
    """A place at which torch.compile could not continue a graph."""

    reason: str
    frames: tuple[FrameSummary, ...]
    """The frames of the compiled function, from the outermost to the one that broke the graph."""


def graph_break() -> None:
    """Insert a graph break for torch.compile; does nothing in eager mode."""
    import torch._dynamo

    torch._dynamo.graph_break()


def fix_size(size: int, expected: int) -> None:
    """Make a size a constant for torch.compile, also of a dynamic dimension; raises RuntimeError if it differs."""
    import torch

    torch._check(size == expected)


def graph_breaks() -> list[GraphBreak]:
    """Return the graph breaks of this process in their order; empty if torch does not record them."""
    import torch._dynamo

    recorded: Any = getattr(torch._dynamo, "graph_break_reasons", [])
    return [GraphBreak(str(each.reason), tuple(each.user_stack)) for each in recorded]


def num_compiled() -> tuple[int, int]:
    """Return the numbers of graphs and of graph breaks of this process, which change when torch compiles something."""
    from torch import _dynamo

    counters: Any = getattr(_dynamo.utils, "counters", {})
    return counters.get("stats", {}).get("unique_graphs", 0), len(getattr(_dynamo, "graph_break_reasons", []))


def recompile_reasons(since_s: float) -> list[str]:
    """Return why torch.compile compiled functions again since a time; empty if torch does not record it."""
    from torch import _dynamo

    read: Any = getattr(_dynamo.utils, "get_compilation_metrics", list)
    recent = [each for each in read() if (getattr(each, "start_time_us", None) or 0) >= since_s * 1e6]
    return [str(each.recompile_reason) for each in recent if getattr(each, "recompile_reason", None)]


def compile_errors() -> type[Exception]:
    """Return the base class of the errors of torch.compile itself, as opposed to those of the compiled function."""
    from torch._dynamo import exc

    error: type[Exception] = required(exc, "TorchDynamoException")
    return error


def has_compiler(device_type: str) -> bool:
    """Return whether torch.compile finds the C++ compiler that it requires on a CPU; True if that is unknown."""
    if device_type != "cpu":
        return True
    from torch._inductor import cpp_builder, exc

    find, error = getattr(cpp_builder, "get_cpp_compiler", None), getattr(exc, "InvalidCxxCompiler", None)
    if find is None or error is None:
        return True
    try:
        find()
    except error:
        return False
    return True


def omit_checkpoint_warning() -> None:
    """Omit torch's warning of in-place operators in compiled blocks with selective recompute, on every rank."""
    logging.getLogger("torch._higher_order_ops.wrap").addFilter(_is_other_warning)


def _is_other_warning(record: logging.LogRecord) -> bool:
    return "context_fn is passed to torch.utils.checkpoint" not in record.getMessage()


def disable_autograd_cache() -> None:
    """Disable the AOTAutograd cache of torch.compile; the cache of compiled kernels stays enabled.

    Does nothing if torch has no such cache.
    """
    try:
        from torch._functorch import config
    except ImportError:
        return
    config.enable_autograd_cache = False
