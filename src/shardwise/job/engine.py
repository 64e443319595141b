"""Which engine a job's model is made for: a module of MLX is trained by MLX, any other by what the plan says."""

from __future__ import annotations

import sys
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from shardwise.job.job import Job

MadeFor = Literal["torch", "mlx"]


def engine_of(job: Job) -> MadeFor:
    """Return what the job's model is made for, before any process starts; imports neither torch nor MLX.

    Where the job's file has imported MLX, the model is made, which MLX does without computing a value. Where only the
    function that makes it speaks of MLX, its word is taken: ranks will see.
    """
    nn: Any = sys.modules.get("mlx.nn")
    if nn is None:
        return "mlx" if _speaks_of_mlx(job.model) else "torch"
    return "mlx" if isinstance(_made(job), nn.Module) else "torch"


def is_mlx(model: object) -> bool:
    """Return whether a model is a module of MLX; imports nothing."""
    nn: Any = sys.modules.get("mlx.nn")
    return nn is not None and isinstance(model, nn.Module)


def _made(job: Job) -> object:
    """Make the model, one of torch's without memory for values if it can; None if it fails, which ranks will tell."""
    torch: Any = sys.modules.get("torch")
    for place in (torch.device("meta") if torch is not None else nullcontext(), nullcontext()):
        with suppress(Exception), place:  # any model may fail in any way, one that reads its values only without memory
            return job.model()
    return None


def _speaks_of_mlx(function: object) -> bool:
    code = getattr(getattr(function, "func", function), "__code__", None)  # partial keeps its function in func
    names = code.co_names if code is not None else ()
    return any(name == "mlx" or name.startswith("mlx.") for name in names)
