"""Counter-based random numbers, which are functions of sample index, module, call and element.

A generator returns the next numbers of a stream, so the noise of a sample depends on the samples that the rank
processed earlier. Here every torch operator that samples from the default generator is intercepted below autograd,
and its result is a hash of (seed, epoch, sample index, module, call in this forward pass, element). The invariant: the
numbers of a sample are the same on any rank, in any micro-batch and after any resume. The idea is from Salmon et al.,
"Parallel random numbers: as easy as 1, 2, 3" (2011), with a cheaper hash.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardwise.errors import JobError
from shardwise.torch_private.dispatch import TorchDispatchMode, schema_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

DEFAULT_FIX = 'or set Job(masks="drawn")'
"""The last option in the `fix` of errors about counters: use torch's generators instead."""
COUNTER = "counter_random"
"""Attribute of every prepared module: a tuple of its model's `CounterRandom` and the module's name."""
MIX_A = 0x85EBCA6B - (1 << 32)  # the 32-bit finaliser of MurmurHash3 (public domain, Austin Appleby), as int32
MIX_B = 0xC2B2AE35 - (1 << 32)
_LOW_32 = (1 << 32) - 1


@torch.no_grad()
def counter_bits(keys: Tensor, salt: str, elements: int) -> Tensor:
    """Return 32 random bits per element, int32 [rows, elements], from `keys` (int32 [2, rows]) and `salt`."""
    digest = hashlib.blake2b(salt.encode(), digest_size=8).digest()
    first, second = (int.from_bytes(half, "little", signed=True) for half in (digest[:4], digest[4:]))
    # int32 wraps around on overflow; right shifts extend the sign, so their upper bits are masked off.
    bits = (keys[0] ^ first)[:, None] + torch.arange(elements, dtype=torch.int32, device=keys.device)
    bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF)).mul_(MIX_A)
    # The second key is added half-way, so that two samples share numbers or shifted numbers only if 64 bits agree.
    bits.bitwise_xor_((bits >> 13).bitwise_and_(0x7FFFF)).add_((keys[1] ^ second)[:, None]).mul_(MIX_B)
    bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF)).mul_(MIX_A)
    return bits.bitwise_xor_((bits >> 13).bitwise_and_(0x7FFFF))


@dataclass(frozen=True)
class RandomContext:
    """The counters at one point of a forward pass."""

    keys: Tensor | None
    calls: Counter[str]
    path: tuple[str, ...]


@dataclass(eq=False)
class CounterRandom:
    """The counters that all modules of one model share; one forward pass runs at a time."""

    shared: frozenset[str] = frozenset()
    """Modules registered several times in a pipeline-parallel model, whose calls a single stage cannot count."""
    keys: Tensor | None = None
    """int32 [2, rows]: two keys for every row of the micro-batch. Set before each forward."""
    is_sharded: bool = False
    """Whether activations are currently sharded over tensor-parallel ranks, so that element numbers are unknown."""
    calls: Counter[str] = field(default_factory=Counter)
    """Number of random operator calls in this forward pass, by module."""
    path: list[str] = field(default_factory=lambda: [""])
    """Names of the modules whose forward is running, outermost first."""
    is_on: bool = False
    """Whether random operators are intercepted now."""
    checks: bool = True
    """Whether to check operators that may sample; only in the first pass, since a check synchronizes with the GPU."""

    @contextmanager
    def intercepting(self, position: RandomContext) -> Iterator[None]:
        """Return a context in which random operators are computed from the counters, starting at `position`."""
        before, was_on = self.position(), self.is_on
        self._restore(position)
        self.is_on = True
        try:
            with _Interception(self):
                yield
        finally:
            self._restore(before)
            self.is_on = was_on

    def position(self) -> RandomContext:
        """Return a copy of the current counters, with which the next random numbers can be repeated."""
        return RandomContext(self.keys, Counter(self.calls), tuple(self.path))

    def _restore(self, position: RandomContext) -> None:
        self.keys, self.calls, self.path = position.keys, Counter(position.calls), list(position.path)

    def next_bits(self, shape: Sequence[int], operator: str, *, num_samples: int = 1) -> list[Tensor]:
        """Return `num_samples` tensors of random bits for the elements of `shape`, each int32 [rows, elements]."""
        name = self.path[-1]
        keys = self._checked(name or "the model", shape, operator)
        self.calls[name] += 1
        salt = f"{name}:{operator}:{self.calls[name]}"
        elements = math.prod(shape) // keys.shape[1]
        return [counter_bits(keys, f"{salt}:{index}", elements) for index in range(num_samples)]

    def _checked(self, name: str, shape: Sequence[int], operator: str) -> Tensor:
        """Return the keys of a random tensor's rows; raise JobError if its elements cannot be assigned to samples."""
        if self.is_sharded:
            raise JobError(
                f"counter-based random numbers require full activations, but {name} calls {operator} on activations"
                " that tensor parallelism shards",
                code="support.keyed-draws-tp",
                fix=f"set tp=1, {DEFAULT_FIX}",
            )
        if name in self.shared:
            raise JobError(
                f"{name}, which calls {operator}, is registered several times, possibly on two pipeline stages",
                code="support.keyed-draws-shared-module",
                fix=f"register a separate module for each use, set pp=1, {DEFAULT_FIX}",
            )
        if self.keys is None:
            raise JobError(
                f"counter-based random numbers require sample indices, but {name} calls {operator} without them",
                code="support.keyed-draws-no-index",
                fix=f"use a map-style dataset, {DEFAULT_FIX}",
            )
        rows = self.keys.shape[1]
        if not shape or shape[0] % rows:
            raise JobError(
                f"{name} calls {operator} with shape {list(shape)}, but masks='keyed' requires {rows} rows in dim 0",
                code="support.keyed-draws-rows-first",
                fix=f"sample a tensor of shape [rows, ...], {DEFAULT_FIX}",
            )
        return self.keys


def name_modules(module: nn.Module, *, staged: bool) -> None:
    """Attach the shared counters and its own name to every module; pass `staged` if a pipeline splits the model."""
    names: dict[nn.Module, list[str]] = {}
    for name, submodule in module.named_modules(remove_duplicate=False):
        names.setdefault(submodule, []).append(name)
    shared: set[str] = set()
    for found in names.values():
        if staged and len(found) > 1:
            shared.update(found)
    random = CounterRandom(shared=frozenset(shared))
    for submodule, (name, *_) in names.items():
        setattr(submodule, COUNTER, (random, name))


def random_of(module: nn.Module) -> CounterRandom | None:
    """Return the counters shared by the modules inside `module`; None if the modules use torch's generators."""
    for _, submodule in module.named_modules(_memo()):
        found: tuple[CounterRandom, str] | None = getattr(submodule, COUNTER, None)
        if found is not None:
            return found[0]
    return None


def follow_modules(module: nn.Module, on_change: Callable[[], None]) -> list[Any]:
    """Register and return hooks that maintain the `path` of `random_of(module)`.

    `on_change` is called before each change of the path.
    """
    hooks = []
    for _, submodule in module.named_modules(_memo()):
        found = getattr(submodule, COUNTER, None)
        if found is None or not found[1]:
            continue

        def enter(*_: Any, random: CounterRandom = found[0], name: str = found[1]) -> None:
            on_change()
            random.path.append(name)

        def leave(*_: Any, random: CounterRandom = found[0]) -> None:
            on_change()
            if len(random.path) > 1:
                random.path.pop()

        hooks.append(submodule.register_forward_pre_hook(enter))
        hooks.append(submodule.register_forward_hook(leave, always_call=True))
    return hooks


def _memo() -> set[nn.Module]:
    """Return an empty memo for `named_modules`; pipeline stages treat calls without a memo as user calls and raise."""
    return set()


class _Interception(TorchDispatchMode):
    """A dispatch mode that computes random operators from counters and runs all other operators unchanged."""

    def __init__(self, random: CounterRandom) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._random = random

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        operator = func.overloadpacket.__name__
        if operator not in _RULES:
            return self._unruled(func, args, kwargs, operator)
        names = [each.name for each in schema_of(func).arguments]
        arguments = dict(zip(names, args, strict=False)) | kwargs
        if isinstance(arguments.get("self"), nn.Parameter):
            name = self._random.path[-1] or "the model"
            raise JobError(
                f"counter-based random numbers require activations, but {name} calls {operator} on a parameter",
                code="support.keyed-draws-parameter",
                fix=f"sample a tensor of shape [rows, ...], {DEFAULT_FIX}",
            )
        return _RULES[operator](self._random, operator, arguments)

    def _unruled(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operator: str) -> Any:
        """Run an operator that may sample, such as attention; raise JobError if it advances a generator."""
        if not self._random.checks:
            return func(*args, **kwargs)
        before = generator_states()
        result = func(*args, **kwargs)
        if not all(map(torch.equal, generator_states(), before)):
            raise random_error(self._random.path[-1], operator)
        return result


def generator_states() -> list[Tensor]:
    """Return the states of torch's default generators."""
    states = [torch.default_generator.get_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return states


def random_error(name: str, operator: str = "") -> JobError:
    """Return the JobError for a module whose random numbers cannot be computed from counters."""
    how = ""
    if operator:
        how = f" with {operator}"
    fix = "use torch.nn.Dropout, torch.rand, torch.randn or torch.bernoulli in this module"
    if "attention" in operator:  # a fused kernel with internal dropout
        fix = "call it under torch.nn.attention.sdpa_kernel(SDPBackend.MATH), or set its dropout_p to 0"
    return JobError(
        f"masks='keyed' requires counter-based operators, but {name or 'the model'} uses torch's generator{how}",
        code="support.keyed-draws-operator",
        fix=f"{fix}, {DEFAULT_FIX}",
    )


def _uniform(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Return fp64 numbers in [0, 1) with the precision of `dtype`, so that a cast does not round them to 1."""
    digits = 32
    if dtype.is_floating_point:
        digits = min(32, 1 - round(math.log2(torch.finfo(dtype).eps)))
    return ((bits.long() & _LOW_32) >> (32 - digits)).double() * 2.0**-digits


def _open_uniform(bits: Tensor) -> Tensor:
    """Return fp64 numbers in (0, 1), whose logarithm is finite."""
    return ((bits.long() & _LOW_32).double() + 0.5) * 2.0**-32


def _empty(given: Mapping[str, Any], default: torch.dtype | None = None) -> Tensor:
    """Return the tensor that a random operator fills: `out`, a new tensor of `size`, or one like `self`."""
    if given.get("out") is not None:
        return given["out"]  # type: ignore[no-any-return]
    options = {name: given[name] for name in ("dtype", "device") if given.get(name) is not None}
    if "size" in given and "self" not in given:
        return torch.empty(given["size"], **{"dtype": default or torch.get_default_dtype(), **options})
    return torch.empty_like(given["self"], **options)


def _fill(out: Tensor, values: Tensor) -> Tensor:
    return out.copy_(values.view(out.shape))


def _sample_uniform(random: CounterRandom, operator: str, given: Mapping[str, Any]) -> Tensor:
    out = given["self"] if operator == "uniform_" else _empty(given)
    [bits] = random.next_bits(out.shape, operator)
    low, high = given.get("from", 0.0), given.get("to", 1.0)
    return _fill(out, low + _uniform(bits, out.dtype) * (high - low))


def _sample_normal(random: CounterRandom, operator: str, given: Mapping[str, Any]) -> Tensor:
    """Fill a tensor with normal numbers, each the Box-Muller transform of two uniform numbers."""
    mean, std = given.get("mean", 0.0), given.get("std", 1.0)
    if operator == "normal_":
        out = given["self"]
    elif operator == "normal" and given.get("out") is None and given.get("size") is None:
        out = torch.empty_like((mean + torch.zeros_like(std)) if isinstance(std, Tensor) else mean)
    else:
        out = _empty(given)
    radius, angle = (_open_uniform(bits) for bits in random.next_bits(out.shape, operator, num_samples=2))
    values = ((-2 * radius.log()).sqrt() * (2 * math.pi * angle).cos()).view(out.shape)
    return _fill(out, values * std + mean)


def _sample_bernoulli(random: CounterRandom, operator: str, given: Mapping[str, Any]) -> Tensor:
    source = given["self"]
    # Without `p`, bernoulli interprets the values of its input as probabilities.
    rate = given.get("p", source if operator == "bernoulli" else 0.5)
    out = source if operator == "bernoulli_" else _empty(given)
    [bits] = random.next_bits(out.shape, operator)
    uniform = _uniform(bits, torch.float64).view(out.shape)
    return _fill(out, uniform < rate)


def _sample_exponential(random: CounterRandom, operator: str, given: Mapping[str, Any]) -> Tensor:
    out = given["self"]
    [bits] = random.next_bits(out.shape, operator)
    return _fill(out, -_open_uniform(bits).log() / given.get("lambd", 1.0))


def _sample_integers(random: CounterRandom, operator: str, given: Mapping[str, Any]) -> Tensor:
    out = _empty(given, torch.int64)
    [bits] = random.next_bits(out.shape, operator)
    low = given.get("low", 0)
    return _fill(out, (_uniform(bits, torch.float64) * (given["high"] - low)).floor() + low)


def dropout_scale(p: float) -> float:
    """Return the factor by which dropout with rate `p` scales the elements that it keeps."""
    if p == 1:
        return 0.0
    return 1 / (1 - p)


def _drop(random: CounterRandom, operator: str, given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the output of dropout, and the mask for the backward pass."""
    source, rate = given["input"], given["p"]
    if given["train"] is False:
        return source.clone(), torch.ones_like(source, dtype=torch.bool)
    [bits] = random.next_bits(source.shape, operator)
    mask = (_uniform(bits, torch.float64) >= rate).view(source.shape)
    return source * mask * dropout_scale(rate), mask


_RULES: dict[str, Callable[[CounterRandom, str, Mapping[str, Any]], Any]] = {
    "rand": _sample_uniform,
    "rand_like": _sample_uniform,
    "uniform_": _sample_uniform,
    "randn": _sample_normal,
    "randn_like": _sample_normal,
    "normal": _sample_normal,
    "normal_": _sample_normal,
    "bernoulli": _sample_bernoulli,
    "bernoulli_": _sample_bernoulli,
    "exponential_": _sample_exponential,
    "randint": _sample_integers,
    "randint_like": _sample_integers,
    "native_dropout": _drop,
}
"""The counter-based implementation of each torch operator; other random operators raise an error."""
