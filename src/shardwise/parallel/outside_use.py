"""Parameters of an FSDP2 unit that are used outside of its forward, where only shards of them are present."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch.distributed.fsdp import FSDPModule

from shardwise.errors import JobError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from torch import nn

_MIXED = "mixed torch.Tensor and DTensor"
"""What torch says of an operation on a whole tensor and a shard."""


@contextmanager
def naming_outside_use(model: nn.Module) -> Iterator[None]:
    """Surround a forward pass of a sharded `model`: name the module that computes with shards, and its unit."""
    try:
        yield
    except RuntimeError as error:
        if _MIXED not in str(error):
            raise
        raise _outside_use(model, error.__traceback__) from error


def _outside_use(model: nn.Module, traceback: TracebackType | None) -> JobError:
    modules = {id(module): name for name, module in model.named_modules()}
    name = ""
    while traceback is not None:  # from the outermost call to the one that failed
        caller = traceback.tb_frame.f_locals.get("self")
        name = modules.get(id(caller), name)
        traceback = traceback.tb_next
    kind = type(model.get_submodule(name)).__name__.removeprefix("FSDP")  # fully_shard adds that to the class
    used = f"{name or 'the model'} ({kind})"
    unit = _unit_of(model, name)
    if unit:
        fact = f"FSDP2 gathers {unit} for its own forward, and {used} is called outside of it"
    else:
        fact = f"FSDP2 gathers parameters for the forward of the model or of a repeated block, and {used} reads shards"
    return JobError(
        fact,
        code="support.fsdp-use-outside-block",
        fix="call the model, which calls its blocks, or use --plan ddp or zero1, which keep parameters whole",
    )


def _unit_of(model: nn.Module, name: str) -> str:
    """Return the innermost unit around a module, "" for the model itself."""
    while name and not isinstance(model.get_submodule(name), FSDPModule):
        name = name.rpartition(".")[0]
    return name
