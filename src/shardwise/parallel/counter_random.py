"""Counter-based random numbers: what forward samples is a function of sample index, module, call and element.

A generator gives a rank the next numbers of a stream, so a sample's noise depends on which samples came before it on
that rank. Here every operator of torch that samples from the default generator is intercepted below autograd and its
result computed by hashing (seed, epoch, sample index, module, call in this forward pass, element). The
invariant: the numbers of a sample are the same on any rank, in any micro-batch and after any resume. The idea is that
of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011), with a cheaper hash.
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

DEFAULT_FIX = 'or Job(masks="drawn")'
"""The last way out that every refusal names."""
COUNTER = "counter_random"
"""Attribute of every prepared module: the `CounterRandom` of its model and the module's own name."""
_MIX_A = 0x85EBCA6B - (1 << 32)  # the 32-bit finaliser of MurmurHash3 (public domain, Austin Appleby), as int32
_MIX_B = 0xC2B2AE35 - (1 << 32)
_LOW_32 = (1 << 32) - 1


@torch.no_grad()
def counter_bits(keys: Tensor, salt: str, elements: int) -> Tensor:
    """Return 32 bits for each element, int32 [rows, elements], by `keys` (int32 [2, rows]) and `salt`."""
    digest = hashlib.blake2b(salt.encode(), digest_size=8).digest()
    first, second = (int.from_bytes(half, "little", signed=True) for half in (digest[:4], digest[4:]))
    # int32 wraps around when it overflows; shifts keep the sign, so their upper bits are masked off.
    bits = (keys[0] ^ first)[:, None] + torch.arange(elements, dtype=torch.int32, device=keys.device)
    bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF)).mul_(_MIX_A)
    # The second key comes in half-way: two samples share numbers, or a shift of them, when 64 bits agree, not 32.
    bits.bitwise_xor_((bits >> 13).bitwise_and_(0x7FFFF)).add_((keys[1] ^ second)[:, None]).mul_(_MIX_B)
    bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF)).mul_(_MIX_A)
    return bits.bitwise_xor_((bits >> 13).bitwise_and_(0x7FFFF))


@dataclass(frozen=True)
class RandomContext:
    """The counters of a forward pass at one time."""

    keys: Tensor | None
    calls: Counter[str]
    path: tuple[str, ...]


@dataclass(eq=False)
class CounterRandom:
    """The counters that all modules of one model share; one forward pass at a time."""

    shared: frozenset[str] = frozenset()
    """Modules that are registered several times in a model which a pipeline splits: their calls cannot be counted."""
    keys: Tensor | None = None
    """int32 [2, rows]: two numbers for every row of the micro-batch. Set before each forward."""
    is_sharded: bool = False
    """Whether activations are sharded over tensor-parallel ranks now: a rank does not know which elements it has."""
    calls: Counter[str] = field(default_factory=Counter)
    """Calls of random operators in this forward pass, by module."""
    path: list[str] = field(default_factory=lambda: [""])
    """Modules whose forward runs now, outermost first."""
    is_on: bool = False
    """Whether random operators are intercepted now."""
    checks: bool = True
    """Whether operators that may sample are checked: in a first pass, since on a GPU a check waits for the device."""

    @contextmanager
    def intercepting(self, moment: RandomContext) -> Iterator[None]:
        """Compute what is sampled in here from the counters, continuing from `moment`."""
        before, was_on = self.moment(), self.is_on
        self._restore(moment)
        self.is_on = True
        try:
            with _Interception(self):
                yield
        finally:
            self._restore(before)
            self.is_on = was_on

    def moment(self) -> RandomContext:
        """Return the counters now, for a repetition of what follows."""
        return RandomContext(self.keys, Counter(self.calls), tuple(self.path))

    def _restore(self, moment: RandomContext) -> None:
        self.keys, self.calls, self.path = moment.keys, Counter(moment.calls), list(moment.path)

    def next_bits(self, shape: Sequence[int], operator: str, *, num_draws: int = 1) -> list[Tensor]:
        """Return bits for the elements of `shape`, int32 [rows, elements], as many times as `num_draws`; or refuse."""
        name = self.path[-1]
        keys = self._checked(name or "the model", shape, operator)
        self.calls[name] += 1
        salt = f"{name}:{operator}:{self.calls[name]}"
        elements = math.prod(shape) // keys.shape[1]
        return [counter_bits(keys, f"{salt}:{index}", elements) for index in range(num_draws)]

    def _checked(self, name: str, shape: Sequence[int], operator: str) -> Tensor:
        """Return the keys of the rows of a random tensor, or refuse it."""
        if self.is_sharded:
            raise JobError(
                f"{name} calls {operator} where tensor parallelism shards activations, and counter-based random numbers"
                " need whole ones",
                code="support.keyed-draws-tp",
                fix=f"use tp = 1, {DEFAULT_FIX}",
            )
        if name in self.shared:
            raise JobError(
                f"{name} calls {operator} and is registered several times, which may be on two stages",
                code="support.keyed-draws-shared-module",
                fix=f"make one module for each, use pp = 1, {DEFAULT_FIX}",
            )
        if self.keys is None:
            raise JobError(
                f"{name} calls {operator} on samples without an index, as of a stream, and masks are keyed",
                code="support.keyed-draws-no-index",
                fix=f"give a dataset that is read by index, {DEFAULT_FIX}",
            )
        rows = self.keys.shape[1]
        if not shape or shape[0] % rows:
            raise JobError(
                f"{name} samples {list(shape)} by {operator} in a micro-batch of {rows}; keyed masks need rows first",
                code="support.keyed-draws-rows-first",
                fix=f"sample [rows, ...], numbers of its own for each sample, {DEFAULT_FIX}",
            )
        return self.keys


def name_modules(module: nn.Module, *, staged: bool) -> None:
    """Give every module its name in the whole model and the shared counters; `staged` for a pipeline."""
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
    """Return the counters that the modules inside `module` share; None where they sample from generators."""
    for _, submodule in module.named_modules(_memo()):
        found: tuple[CounterRandom, str] | None = getattr(submodule, COUNTER, None)
        if found is not None:
            return found[0]
    return None


def follow_modules(module: nn.Module, on_change: Callable[[], None]) -> list[Any]:
    """Keep the path of `random_of(module)`; returns the hooks. `on_change` is called before each change of it."""
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
    """Return what a walk over modules begins with; a user's forward passes none, and a pipeline's stages refuse it."""
    return set()


class _Interception(TorchDispatchMode):
    """Computes random operators from counters; all others run as they are."""

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
        given = dict(zip(names, args, strict=False)) | kwargs
        if isinstance(given.get("self"), nn.Parameter):
            name = self._random.path[-1] or "the model"
            raise JobError(
                f"{name} calls {operator} on a parameter, which belongs to no sample, and masks are keyed",
                code="support.keyed-draws-parameter",
                fix=f"sample for activations, [rows, ...], {DEFAULT_FIX}",
            )
        return _RULES[operator](self._random, operator, given)

    def _unruled(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operator: str) -> Any:
        """Run an operator that may sample, such as attention with a rate of 0; refuse it if it did."""
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
    """Return the refusal of a module whose random numbers cannot be computed from counters."""
    how = f" by {operator}" if operator else ""
    fix = "use torch.nn.Dropout, torch.rand, torch.randn or bernoulli there"
    if "attention" in operator:  # a fused kernel, which drops inside
        fix = "call it under torch.nn.attention.sdpa_kernel(SDPBackend.MATH), or set its dropout_p to 0"
    return JobError(
        f"{name or 'the model'} samples from a generator of torch{how}, and masks are keyed by sample index",
        code="support.keyed-draws-operator",
        fix=f"{fix}, {DEFAULT_FIX}",
    )


def _uniform(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Return numbers in [0, 1), fp64, with as many digits as `dtype` has: rounding must not reach 1."""
    digits = min(32, 1 - round(math.log2(torch.finfo(dtype).eps))) if dtype.is_floating_point else 32
    return ((bits.long() & _LOW_32) >> (32 - digits)).double() * 2.0**-digits


def _open_uniform(bits: Tensor) -> Tensor:
    """Return numbers in (0, 1), fp64, whose logarithm is finite."""
    return ((bits.long() & _LOW_32).double() + 0.5) * 2.0**-32


def _empty(given: Mapping[str, Any], default: torch.dtype | None = None) -> Tensor:
    """Return the tensor that a random operator fills: a new one, one like another, or the one that was passed."""
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
    """Box-Muller: two uniform numbers make one normal one."""
    mean, std = given.get("mean", 0.0), given.get("std", 1.0)
    if operator == "normal_":
        out = given["self"]
    elif operator == "normal" and given.get("out") is None and given.get("size") is None:
        out = torch.empty_like((mean + torch.zeros_like(std)) if isinstance(std, Tensor) else mean)
    else:
        out = _empty(given)
    radius, angle = (_open_uniform(bits) for bits in random.next_bits(out.shape, operator, num_draws=2))
    values = ((-2 * radius.log()).sqrt() * (2 * math.pi * angle).cos()).view(out.shape)
    return _fill(out, values * std + mean)


def _sample_bernoulli(random: CounterRandom, operator: str, given: Mapping[str, Any]) -> Tensor:
    source = given["self"]
    # Without a rate of its own, bernoulli takes the values of its input as the rates.
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


def _drop(random: CounterRandom, operator: str, given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return what dropout leaves of its input, and the mask that its backward takes."""
    source, rate = given["input"], given["p"]
    if given["train"] is False:
        return source.clone(), torch.ones_like(source, dtype=torch.bool)
    [bits] = random.next_bits(source.shape, operator)
    mask = (_uniform(bits, torch.float64) >= rate).view(source.shape)
    return source * mask * (1 / (1 - rate) if rate < 1 else 0.0), mask


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
"""How each operator of torch is computed from counters; other random operators are refused."""
