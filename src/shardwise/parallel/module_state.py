"""State of a module that is neither a parameter nor a buffer: attributes, hooks, what was drawn while it was built."""

from __future__ import annotations

import random
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_REGISTERED = {"_parameters", "_buffers", "_modules"}
_DEPTH = 4
"""Levels of lists, tuples, sets and dicts inside an attribute that are looked into."""


def plain_values(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (place, value) of everything in the attributes of all modules, containers opened, modules left out."""
    for path, part in module.named_modules():
        for key, value in vars(part).items():
            if key not in _REGISTERED and not key.endswith(("_hooks", "_hooks_with_kwargs")):
                yield from _leaves(f"{path}.{key}" if path else key, value, _DEPTH)


def attribute_values(part: nn.Module, seen: set[int]) -> Iterator[tuple[str, list[Any]]]:
    """Yield (attribute, values in it) of one module and its buffers; containers and plain objects are opened.

    Each plain object is opened once: `seen` are the ids of those that were.
    """
    for key, value in {**vars(part), **part._buffers}.items():  # noqa: SLF001 - without the children's
        if key not in _REGISTERED and not key.endswith(("_hooks", "_hooks_with_kwargs")):
            leaves = [leaf for _, leaf in _leaves(key, value, _DEPTH)]
            opened: list[Any] = []
            for leaf in leaves:
                if _is_plain_object(leaf) and id(leaf) not in seen:
                    seen.add(id(leaf))
                    opened += [inner for _, inner in _leaves(key, vars(leaf), _DEPTH)]
            yield key, leaves + opened


def _is_plain_object(value: Any) -> bool:
    """Whether it is an instance of a class in Python that may carry values: neither tensor, class nor function."""
    return hasattr(value, "__dict__") and not isinstance(value, Tensor | type) and not callable(value)


def second_references(
    module: nn.Module, originals: Mapping[int, nn.Parameter] | None = None
) -> Iterator[tuple[str, str]]:
    """Yield (parameter, attribute) for every registered parameter that an attribute refers to as well.

    `originals` are the parameters that others have replaced in the module, by the id of the replacement.
    """
    names: dict[int, str] = {}
    for name, parameter in module.named_parameters():
        names[id(parameter)] = name
        if originals and id(parameter) in originals:
            names[id(originals[id(parameter)])] = name
    for place, value in plain_values(module):
        if id(value) in names:
            yield names[id(value)], place


def has_hooks(parameter: Tensor) -> bool:
    """Whether somebody registered a hook on the gradient of a parameter."""
    own = parameter._backward_hooks  # noqa: SLF001 - torch has no public name for it
    return bool(own or accumulation_hooks(parameter))


def accumulation_hooks(parameter: Tensor) -> bool:
    """Whether a hook runs when the gradient of a parameter has been accumulated."""
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def generator_states() -> tuple[Any, ...]:
    """Return the states of torch's CPU generator, of Python's and of NumPy's, to be compared."""
    numpy = sys.modules.get("numpy")
    own = torch.get_rng_state().numpy().tobytes(), random.getstate()
    if numpy is None:
        return own
    _, key, *rest = numpy.random.get_state()
    return (*own, key.tobytes(), *rest)


def differing_values(one: nn.Module, other: nn.Module) -> list[str]:
    """Name the attributes and buffers in which two models differ that should be the same but for their weights."""
    left, right = (dict([*plain_values(each), *each.named_buffers()]) for each in (one, other))
    places = dict.fromkeys([*left, *right])
    return [place for place in places if place not in left or place not in right or _differ(left[place], right[place])]


def _leaves(place: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    if depth and isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(f"{place}[{key!r}]", inner, depth - 1)
    elif depth and isinstance(value, list | tuple | set | frozenset):
        for index, inner in enumerate(value):
            yield from _leaves(f"{place}[{index}]", inner, depth - 1)
    elif not isinstance(value, nn.Module):
        yield place, value


def _differ(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape != other.shape or (not one.is_meta and not torch.equal(one, other))
    if hasattr(one, "__array__") and hasattr(other, "__array__"):
        return one.shape != other.shape or bool((one != other).any())
    if isinstance(one, int | float | str | bytes) and isinstance(other, int | float | str | bytes):
        are_nan = one != one and other != other  # noqa: PLR0124 - what NaN alone is
        return one != other and not are_nan
    return type(one) is not type(other)
