"""The repeated blocks of a model: what is recomputed, compiled and sharded as one unit."""

from __future__ import annotations

from collections import Counter

from torch import nn

_LISTS = (nn.ModuleList, nn.Sequential)


def find_blocks(module: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost repeated blocks by name, in the order of the module; a model may have none.

    A block is an entry of a ModuleList, or one of several of a class in a Sequential, that has parameters and
    parts of its own: a single Linear is too small to be worth a collective. A module without a forward (a ModuleDict)
    only holds parts that others call: the blocks are in it.
    """
    blocks: dict[str, nn.Module] = {}
    _collect(module, "", blocks)
    return blocks


def _collect(module: nn.Module, prefix: str, blocks: dict[str, nn.Module]) -> None:
    kinds = Counter(type(child) for child in module.children())
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        repeats = isinstance(module, nn.ModuleList) or (isinstance(module, nn.Sequential) and kinds[type(child)] > 1)
        if repeats and _is_block(child):
            blocks.setdefault(path, child)
        else:
            _collect(child, f"{path}.", blocks)


def _is_block(module: nn.Module) -> bool:
    has_parts = next(module.children(), None) is not None
    # A Linear with an adapter has parts, and is as small as without.
    is_called = getattr(type(module), "forward", nn.Module.forward) is not nn.Module.forward
    is_small = isinstance(module, (*_LISTS, nn.Linear))
    return has_parts and is_called and not is_small and next(module.parameters(), None) is not None
