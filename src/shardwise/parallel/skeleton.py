"""The skeleton of a model, with meta parameters, real buffers and the recorded initialization of each weight.

Every parameter is replaced by a meta parameter when it is registered. Attributes and ties are preserved. State that
depends on the parameter object (gradient hooks, its class, another reference) or on its values (tensors computed from
them) cannot be preserved. `Skeleton.lost` lists this state, and such a model must be built in host memory.
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

from shardwise.torch_private.dispatch import (
    HOOK_ATTRIBUTE_ENDS,
    REGISTRIES,
    TorchDispatchMode,
    has_gradient_hooks,
    own_buffers,
    schema_of,
    share_gradient_hooks,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


_RANDOM = {"normal_", "uniform_", "exponential_", "bernoulli_", "log_normal_", "cauchy_", "geometric_", "random_"}
_PLAIN = {"zero_", "fill_", "mul_", "add_", "sub_", "div_", "clamp_", "erfinv_"}

Recipe = tuple["Write", ...]


@dataclass(frozen=True)
class Write:
    """A recorded in-place operation on a parameter, which can be repeated on any device."""

    name: str
    arguments: tuple[Any, ...]

    def __call__(self, value: Tensor, generator: torch.Generator) -> None:
        """Apply the operation to `value`, sampling from `generator`."""
        if self.name in _RANDOM:
            getattr(value, self.name)(*self.arguments, generator=generator)
        else:
            getattr(value, self.name)(*self.arguments)


class Skeleton(NamedTuple):
    """A model with its parameters on the meta device."""

    module: nn.Module
    recipes: Mapping[str, Recipe] | None
    """Parameter name -> its recorded initialization; None if the initialization of any parameter is unknown."""
    lost: tuple[str, ...]
    """Descriptions of the state that the model loses on the meta device."""
    sampled: bool = False
    """Whether building the model advanced a random generator; operations on meta tensors do not advance one."""
    references: tuple[tuple[str, str], ...] = ()
    """(parameter, attribute) for every registered parameter to which an attribute also refers."""


def skeleton(make_model: Callable[[], nn.Module]) -> Skeleton:
    """Build a model with meta parameters, and record the initialization of its weights.

    The initialization is known if the model has an `init_weights()` that sets every parameter with plain in-place
    operations, and if these were the last operations of `make_model` on each parameter.
    """
    recorder = _ParameterRecorder()
    with _parameters_on_meta() as originals, recorder, warnings.catch_warnings():
        # "copying to a meta parameter is a no-op": expected, and recorded.
        warnings.filterwarnings("ignore", message=".*meta parameter", category=UserWarning)
        model: Any = make_model()
    if not isinstance(model, nn.Module):
        return Skeleton(model, None, ())
    lost, references = tuple(_lost(model, originals)), tuple(second_references(model, originals))
    _copy_hooks(model, originals)
    if not callable(getattr(model, "init_weights", None)):
        return Skeleton(model, None, lost, references=references)
    built, recorder = recorder, _ParameterRecorder()
    try:
        with recorder:
            model.init_weights()  # type: ignore[operator]
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return Skeleton(model, None, lost, references=references)  # it reads weights, or needs arguments
    recipes: dict[str, Recipe] = {}
    for name, parameter in model.named_parameters():
        recipe = built.tail(parameter, recorder)
        if recipe is None:
            return Skeleton(model, None, lost, references=references)
        recipes[name] = recipe
    return Skeleton(model, recipes, lost, references=references)


def _lost(model: nn.Module, originals: Mapping[int, nn.Parameter]) -> Iterator[str]:
    """Yield a description of all state that depends on parameter objects or their values."""
    for name, parameter in model.named_parameters():
        if has_gradient_hooks(parameter) or has_gradient_hooks(originals.get(id(parameter), parameter)):
            yield f"a gradient hook on {name}"
        if type(parameter) is not nn.Parameter:
            yield f"{name}, a {type(parameter).__name__}"
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            yield f"buffer {name}, computed from weights"
    for path, value in plain_values(model):
        if isinstance(value, nn.Parameter):
            yield f"a parameter kept in {path}"
        elif isinstance(value, Tensor) and value.is_meta:
            yield f"a tensor in {path}, computed from weights"


def _copy_hooks(model: nn.Module, originals: Mapping[int, nn.Parameter]) -> None:
    """Copy gradient hooks from the original parameters, because the parameter rules check the meta model."""
    for parameter in model.parameters():
        original = originals.get(id(parameter))
        if original is not None and has_gradient_hooks(original):
            share_gradient_hooks(original, parameter)


def initialize(recipe: Recipe, value: Tensor, *, name: str, seed: int) -> None:
    """Initialize `value` by its recipe, with random numbers that depend only on `seed` and the parameter's name."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator(value.device).manual_seed(int.from_bytes(digest[:7], "big"))
    with torch.no_grad():
        for write in recipe:
            write(value, generator)


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[Mapping[int, nn.Parameter]]:
    """Move every parameter registered in this context to the meta device; buffers are not moved.

    Yields a mapping from the id of each replacement to the original parameter. A parameter that is registered twice has
    one replacement.
    """
    register = nn.Module.register_parameter
    moved: dict[int, nn.Parameter] = {}
    originals: dict[int, nn.Parameter] = {}  # also keeps them alive, so that ids stay valid

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
    """A dispatch mode that records writes to meta tensors by tensor id; None marks a write that cannot be repeated."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.writes: dict[int, list[Write | None]] = {}
        self._alive: list[Tensor] = []  # ids stay valid while the tensors exist

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        target = args[0] if args else None
        if not isinstance(target, Tensor) or not target.is_meta:
            return func(*args, **(kwargs or {}))
        result = target
        if func.overloadpacket.__name__ not in _RANDOM:  # torch decomposes normal_ on meta in Python: 50 ms per model
            result = func(*args, **(kwargs or {}))
        self._note(func, target, args[1:], kwargs or {})
        return result

    def tail(self, parameter: nn.Parameter, own: _ParameterRecorder) -> Recipe | None:
        """Return the writes to a parameter that `own` recorded; None if later writes exist or one is unrepeatable."""
        mine, theirs = self.writes.get(id(parameter), []), own.writes.get(id(parameter), [])
        if not theirs or mine[-len(theirs) :] != theirs or None in theirs:
            return None
        return tuple(filter(None, theirs))

    def _note(self, func: Any, target: Tensor, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        name, schema = func.overloadpacket.__name__, schema_of(func)
        if not name.endswith("_") and not schema.is_mutable:
            if any(entry.alias_info is not None for entry in schema.returns):
                # Writes through a view are not recorded, so a parameter with a view has no recipe.
                self.writes.setdefault(id(target), []).append(None)
                self._alive.append(target)
            return
        plain = all(isinstance(argument, int | float | bool) for argument in arguments)
        has_options = any(value is not None for value in keywords.values())
        write = None
        if name in _RANDOM | _PLAIN and plain and not has_options:
            write = Write(name, arguments)
        self.writes.setdefault(id(target), []).append(write)
        self._alive.append(target)


# State of a module other than parameters: attributes, values sampled by its constructor, and references to parameters.


_DEPTH = 4
"""Maximum depth of nested lists, tuples, sets and dicts that are searched in an attribute."""


def plain_values(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) for every value in the attributes of all modules, except submodules."""
    for path, submodule in module.named_modules():
        for key, value in vars(submodule).items():
            if key not in REGISTRIES and not key.endswith(HOOK_ATTRIBUTE_ENDS):
                yield from _leaves(joined(path, key), value, _DEPTH)


def joined(path: str, name: str) -> str:
    """Return the dotted name of attribute `name` in the module at `path`, which is "" for the root."""
    if not path:
        return name
    return f"{path}.{name}"


def attribute_values(module: nn.Module, seen: set[int]) -> Iterator[tuple[str, list[Any]]]:
    """Yield (attribute, contained values) of one module and its buffers, including values in plain objects.

    Each plain object is searched once; `seen` contains the ids of the searched objects.
    """
    for key, value in {**vars(module), **own_buffers(module)}.items():
        if key not in REGISTRIES and not key.endswith(HOOK_ATTRIBUTE_ENDS):
            leaves = [leaf for _, leaf in _leaves(key, value, _DEPTH)]
            inner: list[Any] = []
            for leaf in leaves:
                if _is_plain_object(leaf) and id(leaf) not in seen:
                    seen.add(id(leaf))
                    inner += [value for _, value in _leaves(key, vars(leaf), _DEPTH)]
            yield key, leaves + inner


def _is_plain_object(value: Any) -> bool:
    """Return whether `value` is an instance of a Python class with attributes: not a tensor, class or function."""
    return hasattr(value, "__dict__") and not isinstance(value, Tensor | type) and not callable(value)


def second_references(
    module: nn.Module, originals: Mapping[int, nn.Parameter] | None = None
) -> Iterator[tuple[str, str]]:
    """Yield (parameter, attribute) for every registered parameter to which an attribute also refers.

    `originals` maps the id of each replacement to the original parameter.
    """
    names: dict[int, str] = {}
    for name, parameter in module.named_parameters():
        names[id(parameter)] = name
        if originals and id(parameter) in originals:
            names[id(originals[id(parameter)])] = name
    for path, value in plain_values(module):
        if id(value) in names:
            yield names[id(value)], path


def generator_states() -> tuple[Any, ...]:
    """Return the states of the CPU generators of torch, Python and NumPy."""
    numpy = sys.modules.get("numpy")
    own = torch.get_rng_state().numpy().tobytes(), random.getstate()
    if numpy is None:
        return own
    _, key, *rest = numpy.random.get_state()
    return (*own, key.tobytes(), *rest)


def differing_values(one: nn.Module, other: nn.Module) -> list[str]:
    """Return the paths of attributes and buffers that differ between two models, ignoring their weights."""
    left = dict([*plain_values(one), *one.named_buffers()])
    right = dict([*plain_values(other), *other.named_buffers()])
    common = left.keys() & right.keys()
    return [path for path in left | right if path not in common or _differ(left[path], right[path])]


def _leaves(path: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    if depth and isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(f"{path}[{key!r}]", inner, depth - 1)
    elif depth and isinstance(value, list | tuple | set | frozenset):
        for index, inner in enumerate(value):
            yield from _leaves(f"{path}[{index}]", inner, depth - 1)
    elif not isinstance(value, nn.Module):
        yield path, value


def _differ(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape != other.shape or (not one.is_meta and not torch.equal(one, other))
    if hasattr(one, "__array__") and hasattr(other, "__array__"):
        return one.shape != other.shape or bool((one != other).any())
    if isinstance(one, int | float | str | bytes) and isinstance(other, int | float | str | bytes):
        are_nan = one != one and other != other  # noqa: PLR0124 - only NaN differs from itself
        return one != other and not are_nan
    return type(one) is not type(other)
