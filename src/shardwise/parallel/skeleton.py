"""A model without its weights: parameters on the meta device, buffers real, and how each weight is initialized.

Every parameter is replaced by one on meta as it is registered. Attributes and ties go with it. What cannot go with it,
because it belongs to the parameter as an object (gradient hooks, its class, another reference to it) or to its values
(tensors computed from them), is listed by name in `Skeleton.lost`: such a model has to be built for real.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import sys
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.torch_private.dispatch import TorchDispatchMode, has_gradient_hooks, schema_of, share_gradient_hooks
from shardwise.torch_private.modules import HOOK_ATTRIBUTE_ENDS, REGISTRIES, own_buffers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


_RANDOM = {"normal_", "uniform_", "exponential_", "bernoulli_", "log_normal_", "cauchy_", "geometric_", "random_"}
_PLAIN = {"zero_", "fill_", "mul_", "add_", "sub_", "div_", "clamp_", "erfinv_"}

Recipe = tuple["Write", ...]


@dataclass(frozen=True)
class Write:
    """One in-place operation on a parameter that can be done again on any device: its name and plain arguments."""

    name: str
    arguments: tuple[Any, ...]

    def __call__(self, value: Tensor, generator: torch.Generator) -> None:
        """Do it to `value`, sampling from `generator`."""
        keywords = {"generator": generator} if self.name in _RANDOM else {}
        getattr(value, self.name)(*self.arguments, **keywords)


class Skeleton(NamedTuple):
    """A model with its parameters on the meta device."""

    module: nn.Module
    recipes: Mapping[str, Recipe] | None
    """How each weight is initialized, where that is known of all of them."""
    lost: tuple[str, ...]
    """What the model that is built for real has and this one has not."""
    sampled: bool = False
    """Whether building it advanced a random generator, as nothing on meta does."""
    references: tuple[tuple[str, str], ...] = ()
    """(parameter, attribute) for every registered parameter that an attribute refers to as well."""


def skeleton(make_model: Callable[[], nn.Module]) -> Skeleton:
    """Build a model without memory for its parameters; also the recipe of each weight, where all are known.

    They do when the model has `init_weights()` that sets every parameter by plain in-place operations, and the last
    thing `make_model` did to each was that. None otherwise: the weights then come from a real model.
    """
    recorder = _ParameterRecorder()
    with _parameters_on_meta() as originals, recorder, warnings.catch_warnings():
        # "copying to a meta parameter is a no-op": known, and noticed by the recorder.
        warnings.filterwarnings("ignore", message=".*meta parameter", category=UserWarning)
        model: Any = make_model()
    if not isinstance(model, nn.Module):
        return Skeleton(model, None, ())
    lost, references = tuple(_lost(model, originals)), tuple(second_references(model, originals))
    _take_over_hooks(model, originals)
    if not callable(getattr(model, "init_weights", None)):
        return Skeleton(model, None, lost, references=references)
    made, recorder = recorder, _ParameterRecorder()
    try:
        with recorder:
            model.init_weights()  # type: ignore[operator]
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return Skeleton(model, None, lost, references=references)  # it reads weights, or wants arguments
    recipes = {name: made.tail(parameter, recorder) for name, parameter in model.named_parameters()}
    known = {name: recipe for name, recipe in recipes.items() if recipe is not None}
    return Skeleton(model, known if len(known) == len(recipes) else None, lost, references=references)


def _lost(model: nn.Module, originals: Mapping[int, nn.Parameter]) -> Iterator[str]:
    """Yield what belongs to parameters as objects, or to their values, each with its name."""
    for name, parameter in model.named_parameters():
        if has_gradient_hooks(parameter) or has_gradient_hooks(originals.get(id(parameter), parameter)):
            yield f"a gradient hook on {name}"
        if type(parameter) is not nn.Parameter:
            yield f"{name}, a {type(parameter).__name__}"
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            yield f"buffer {name}, computed from weights"
    for place, value in plain_values(model):
        if isinstance(value, nn.Parameter):
            yield f"a parameter kept in {place}"
        elif isinstance(value, Tensor) and value.is_meta:
            yield f"a tensor in {place}, computed from weights"


def _take_over_hooks(model: nn.Module, originals: Mapping[int, nn.Parameter]) -> None:
    """Show on a parameter the hooks that its original has: rules search the model on meta for them."""
    for parameter in model.parameters():
        original = originals.get(id(parameter))
        if original is not None and has_gradient_hooks(original):
            share_gradient_hooks(original, parameter)


def initialize(recipe: Recipe, value: Tensor, *, name: str, seed: int) -> None:
    """Fill `value` as its recipe says, from random numbers that depend on `seed` and the parameter's name only."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator(value.device).manual_seed(int.from_bytes(digest[:7], "big"))
    with torch.no_grad():
        for write in recipe:
            write(value, generator)


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[Mapping[int, nn.Parameter]]:
    """Have every parameter that is registered in here moved to the meta device; buffers stay as they are.

    Yields the original of each by the id of what replaced it. One that is registered twice is replaced by one.
    """
    register = nn.Module.register_parameter
    moved: dict[int, nn.Parameter] = {}
    originals: dict[int, nn.Parameter] = {}  # also keeps them alive: an id is only good while its tensor lives

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.device.type != "meta":
            if id(param) not in moved:
                replacement = type(param)(param.to("meta"), requires_grad=param.requires_grad)
                vars(replacement).update(vars(param))
                moved[id(param)], originals[id(replacement)] = replacement, param
            param = moved[id(param)]
        register(self, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield originals
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


class _ParameterRecorder(TorchDispatchMode):
    """Notes what is written to tensors on the meta device, by identity; None marks what cannot be done again."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.writes: dict[int, list[Write | None]] = {}
        self._alive: list[Tensor] = []  # an id is only good while its tensor lives

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        target = args[0] if args else None
        if not isinstance(target, Tensor) or not target.is_meta:
            return func(*args, **(kwargs or {}))
        result = target
        if func.overloadpacket.__name__ not in _RANDOM:  # torch decomposes normal_ on meta in Python: 50 ms for a model
            result = func(*args, **(kwargs or {}))
        self._note(func, target, args[1:], kwargs or {})
        return result

    def tail(self, parameter: nn.Parameter, own: _ParameterRecorder) -> Recipe | None:
        """Return what `own` recorded of a parameter if this record ends with just that; else None."""
        mine, theirs = self.writes.get(id(parameter), []), own.writes.get(id(parameter), [])
        if not theirs or mine[-len(theirs) :] != theirs or None in theirs:
            return None
        return tuple(write for write in theirs if write is not None)

    def _note(self, func: Any, target: Tensor, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        name, schema = func.overloadpacket.__name__, schema_of(func)
        if not name.endswith("_") and not schema.is_mutable:
            if any(entry.alias_info is not None for entry in schema.returns):
                # A view: what is written through it would be missed, so that parameter has no recipe.
                self.writes.setdefault(id(target), []).append(None)
                self._alive.append(target)
            return
        plain = all(isinstance(argument, int | float | bool) for argument in arguments)
        keywords = {key: value for key, value in keywords.items() if value is not None}
        known = name in _RANDOM | _PLAIN and plain and not keywords
        self.writes.setdefault(id(target), []).append(Write(name, arguments) if known else None)
        self._alive.append(target)


# State of a module that is neither a parameter nor a buffer: attributes, hooks, what was sampled while it was built.


_DEPTH = 4
"""Levels of lists, tuples, sets and dicts inside an attribute that are looked into."""


def plain_values(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (place, value) of everything in the attributes of all modules, containers opened, modules left out."""
    for path, submodule in module.named_modules():
        for key, value in vars(submodule).items():
            if key not in REGISTRIES and not key.endswith(HOOK_ATTRIBUTE_ENDS):
                yield from _leaves(f"{path}.{key}" if path else key, value, _DEPTH)


def attribute_values(module: nn.Module, seen: set[int]) -> Iterator[tuple[str, list[Any]]]:
    """Yield (attribute, values in it) of one module and its buffers; containers and plain objects are opened.

    Each plain object is opened once: `seen` are the ids of those that were.
    """
    for key, value in {**vars(module), **own_buffers(module)}.items():
        if key not in REGISTRIES and not key.endswith(HOOK_ATTRIBUTE_ENDS):
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
