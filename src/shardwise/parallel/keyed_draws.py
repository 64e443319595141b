"""Counter-based random numbers: what a model draws in forward is a function of sample, module, call and element.

A generator gives a rank the next numbers of a stream, so a sample's noise depends on which samples came before it on
that rank. Here every operator of torch that draws from the default generator is intercepted below autograd and its
result computed by hashing (seed, epoch, sample, module, how often the module drew in this forward pass, element). The
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

DRAW = 'or Job(masks="drawn")'
"""What a refusal offers in the end."""
PLACE = "keyed_place"
"""Attribute of every prepared module: the draws of its model and its own name."""
_MIX_A = 0x85EBCA6B - (1 << 32)  # the 32-bit finaliser of MurmurHash3 (public domain, Austin Appleby), as int32
_MIX_B = 0xC2B2AE35 - (1 << 32)
_LOW_32 = (1 << 32) - 1


@torch.no_grad()
def keyed_bits(keys: Tensor, place: str, elements: int) -> Tensor:
    """Return 32 bits for each element, int32 [rows, elements], by `keys` (int32 [2, rows]) and `place`."""
    salt = hashlib.blake2b(place.encode(), digest_size=8).digest()
    first, second = (int.from_bytes(half, "little", signed=True) for half in (salt[:4], salt[4:]))
    # int32 wraps around when it overflows; shifts keep the sign, so their upper bits are cut off.
    bits = (keys[0] ^ first)[:, None] + torch.arange(elements, dtype=torch.int32, device=keys.device)
    bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF)).mul_(_MIX_A)
    # The second key comes in half-way: two samples share numbers, or a shift of them, when 64 bits agree, not 32.
    bits.bitwise_xor_((bits >> 13).bitwise_and_(0x7FFFF)).add_((keys[1] ^ second)[:, None]).mul_(_MIX_B)
    bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF)).mul_(_MIX_A)
    return bits.bitwise_xor_((bits >> 13).bitwise_and_(0x7FFFF))


@dataclass(frozen=True)
class DrawContext:
    """Where the draws of a forward pass were at one time."""

    keys: Tensor | None
    calls: Counter[str]
    path: tuple[str, ...]


@dataclass(eq=False)
class KeyedDraws:
    """What all modules of one model share while they draw; one forward pass at a time."""

    shared: frozenset[str] = frozenset()
    """Modules that stand in several places of a model which a pipeline splits: their calls cannot be counted."""
    keys: Tensor | None = None
    """int32 [2, rows]: two numbers for every row of the micro-batch. Set before each forward."""
    is_sharded: bool = False
    """Whether activations are sharded over tensor-parallel ranks now: a rank does not know which elements it has."""
    calls: Counter[str] = field(default_factory=Counter)
    """Draws in this forward pass, by module."""
    path: list[str] = field(default_factory=lambda: [""])
    """Modules whose forward runs now, outermost first."""
    is_on: bool = False
    """Whether draws are intercepted now."""
    looks: bool = True
    """Whether operators that may draw are looked at: in a first pass, since on a GPU a look waits for the device."""

    @contextmanager
    def intercepting(self, moment: DrawContext) -> Iterator[None]:
        """Key what is drawn from now on, continuing from `moment`."""
        before, was_on = self.moment(), self.is_on
        self._restore(moment)
        self.is_on = True
        try:
            with _Interception(self):
                yield
        finally:
            self._restore(before)
            self.is_on = was_on

    def moment(self) -> DrawContext:
        """Return where the draws are now, for a repetition of what follows."""
        return DrawContext(self.keys, Counter(self.calls), tuple(self.path))

    def _restore(self, moment: DrawContext) -> None:
        self.keys, self.calls, self.path = moment.keys, Counter(moment.calls), list(moment.path)

    def next_bits(self, shape: Sequence[int], operator: str, *, parts: int = 1) -> list[Tensor]:
        """Return bits for the elements of `shape`, int32 [rows, elements], as many times as `parts`; or refuse."""
        name = self.path[-1]
        keys = self._checked(name or "the model", shape, operator)
        self.calls[name] += 1
        place = f"{name}:{operator}:{self.calls[name]}"
        elements = math.prod(shape) // keys.shape[1]
        return [keyed_bits(keys, f"{place}:{part}", elements) for part in range(parts)]

    def _checked(self, name: str, shape: Sequence[int], operator: str) -> Tensor:
        """Return the keys of the rows of a draw, or refuse it."""
        if self.is_sharded:
            raise JobError(
                f"{name} draws by {operator} where tensor parallelism shards activations, and keyed draws need whole"
                " ones",
                code="support.keyed-draws-tp",
                fix=f"use tp = 1, {DRAW}",
            )
        if name in self.shared:
            raise JobError(
                f"{name} draws by {operator} and stands in several places, which may be on two stages",
                code="support.keyed-draws-shared-module",
                fix=f"make one for each place, use pp = 1, {DRAW}",
            )
        if self.keys is None:
            raise JobError(
                f"{name} draws by {operator} and does not know its samples, as of a stream, and masks are keyed",
                code="support.keyed-draws-no-index",
                fix=f"give a dataset that is read by index, {DRAW}",
            )
        rows = self.keys.shape[1]
        if not shape or shape[0] % rows:
            raise JobError(
                f"{name} draws {list(shape)} by {operator} in a micro-batch of {rows}, and keyed draws need rows first",
                code="support.keyed-draws-rows-first",
                fix=f"draw [rows, ...], numbers of its own for each sample, {DRAW}",
            )
        return self.keys


def assign_places(module: nn.Module, *, staged: bool) -> None:
    """Let every module know its name in the whole model, and what it draws with; `staged` for a pipeline."""
    names: dict[nn.Module, list[str]] = {}
    for name, part in module.named_modules(remove_duplicate=False):
        names.setdefault(part, []).append(name)
    shared = [name for found in names.values() if staged and len(found) > 1 for name in found]
    draws = KeyedDraws(shared=frozenset(shared))
    for part, (name, *_) in names.items():
        setattr(part, PLACE, (draws, name))


def draws_of(module: nn.Module) -> KeyedDraws | None:
    """Return what the modules inside `module` draw with; None where draws are not keyed."""
    places = (getattr(part, PLACE, None) for _, part in module.named_modules(_memo()))
    return next((place[0] for place in places if place is not None), None)


def follow_modules(module: nn.Module, looked: Callable[[], None]) -> list[Any]:
    """Keep the path of `draws_of(module)`; returns the hooks. `looked` is called before each change of it."""
    hooks = []
    for _, part in module.named_modules(_memo()):
        place = getattr(part, PLACE, None)
        if place is None or not place[1]:
            continue

        def enter(*_: Any, draws: KeyedDraws = place[0], name: str = place[1]) -> None:
            looked()
            draws.path.append(name)

        def leave(*_: Any, draws: KeyedDraws = place[0]) -> None:
            looked()
            if len(draws.path) > 1:
                draws.path.pop()

        hooks.append(part.register_forward_pre_hook(enter))
        hooks.append(part.register_forward_hook(leave, always_call=True))
    return hooks


def _memo() -> set[nn.Module]:
    """Return what a walk over modules begins with; a user's forward passes none, and a pipeline's stages refuse it."""
    return set()


class _Interception(TorchDispatchMode):
    """Answers the operators that draw; all others run as they are."""

    def __init__(self, draws: KeyedDraws) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws = draws

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
            name = self._draws.path[-1] or "the model"
            raise JobError(
                f"{name} draws by {operator} for a parameter, which belongs to no sample, and masks are keyed",
                code="support.keyed-draws-parameter",
                fix=f"draw for activations, [rows, ...], {DRAW}",
            )
        return _RULES[operator](self._draws, operator, given)

    def _unruled(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operator: str) -> Any:
        """Run an operator that may draw, such as attention with a rate of 0; refuse it if it did."""
        if not self._draws.looks:
            return func(*args, **kwargs)
        before = generator_states()
        result = func(*args, **kwargs)
        if not all(map(torch.equal, generator_states(), before)):
            raise drawing_error(self._draws.path[-1], operator)
        return result


def generator_states() -> list[Tensor]:
    """Return the states of torch's default generators."""
    states = [torch.default_generator.get_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return states


def drawing_error(name: str, operator: str = "") -> JobError:
    """Return the refusal of a module whose random numbers cannot be keyed."""
    how = f" by {operator}" if operator else ""
    fix = "use torch.nn.Dropout, torch.rand, torch.randn or bernoulli there"
    if "attention" in operator:  # a fused kernel, which drops inside
        fix = "call it under torch.nn.attention.sdpa_kernel(SDPBackend.MATH), or set its dropout_p to 0"
    return JobError(
        f"{name or 'the model'} draws random numbers of its own{how}, and masks are keyed by sample and place",
        code="support.keyed-draws-operator",
        fix=f"{fix}, {DRAW}",
    )


def _uniform(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Return numbers in [0, 1), fp64, with as many digits as `dtype` holds: rounding must not reach 1."""
    digits = min(32, 1 - round(math.log2(torch.finfo(dtype).eps))) if dtype.is_floating_point else 32
    return ((bits.long() & _LOW_32) >> (32 - digits)).double() * 2.0**-digits


def _open_uniform(bits: Tensor) -> Tensor:
    """Return numbers in (0, 1), fp64, whose logarithm is finite."""
    return ((bits.long() & _LOW_32).double() + 0.5) * 2.0**-32


def _empty(given: Mapping[str, Any], default: torch.dtype | None = None) -> Tensor:
    """Return the tensor that a draw fills: a new one, one like another, or the one that was passed."""
    if given.get("out") is not None:
        return given["out"]  # type: ignore[no-any-return]
    options = {name: given[name] for name in ("dtype", "device") if given.get(name) is not None}
    if "size" in given and "self" not in given:
        return torch.empty(given["size"], **{"dtype": default or torch.get_default_dtype(), **options})
    return torch.empty_like(given["self"], **options)


def _fill(out: Tensor, values: Tensor) -> Tensor:
    return out.copy_(values.view(out.shape))


def _draw_uniform(draws: KeyedDraws, operator: str, given: Mapping[str, Any]) -> Tensor:
    out = given["self"] if operator == "uniform_" else _empty(given)
    [bits] = draws.next_bits(out.shape, operator)
    low, high = given.get("from", 0.0), given.get("to", 1.0)
    return _fill(out, low + _uniform(bits, out.dtype) * (high - low))


def _draw_normal(draws: KeyedDraws, operator: str, given: Mapping[str, Any]) -> Tensor:
    """Box-Muller: two uniform numbers make one normal one."""
    mean, std = given.get("mean", 0.0), given.get("std", 1.0)
    if operator == "normal_":
        out = given["self"]
    elif operator == "normal" and given.get("out") is None and given.get("size") is None:
        out = torch.empty_like((mean + torch.zeros_like(std)) if isinstance(std, Tensor) else mean)
    else:
        out = _empty(given)
    radius, angle = (_open_uniform(bits) for bits in draws.next_bits(out.shape, operator, parts=2))
    values = ((-2 * radius.log()).sqrt() * (2 * math.pi * angle).cos()).view(out.shape)
    return _fill(out, values * std + mean)


def _draw_bernoulli(draws: KeyedDraws, operator: str, given: Mapping[str, Any]) -> Tensor:
    source = given["self"]
    # Without a rate of its own, bernoulli takes the values of its input as the rates.
    rate = given.get("p", source if operator == "bernoulli" else 0.5)
    out = source if operator == "bernoulli_" else _empty(given)
    [bits] = draws.next_bits(out.shape, operator)
    uniform = _uniform(bits, torch.float64).view(out.shape)
    return _fill(out, uniform < rate)


def _draw_exponential(draws: KeyedDraws, operator: str, given: Mapping[str, Any]) -> Tensor:
    out = given["self"]
    [bits] = draws.next_bits(out.shape, operator)
    return _fill(out, -_open_uniform(bits).log() / given.get("lambd", 1.0))


def _draw_integers(draws: KeyedDraws, operator: str, given: Mapping[str, Any]) -> Tensor:
    out = _empty(given, torch.int64)
    [bits] = draws.next_bits(out.shape, operator)
    low = given.get("low", 0)
    return _fill(out, (_uniform(bits, torch.float64) * (given["high"] - low)).floor() + low)


def _drop(draws: KeyedDraws, operator: str, given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return what dropout leaves of its input, and the mask that its backward takes."""
    source, rate = given["input"], given["p"]
    if given["train"] is False:
        return source.clone(), torch.ones_like(source, dtype=torch.bool)
    [bits] = draws.next_bits(source.shape, operator)
    mask = (_uniform(bits, torch.float64) >= rate).view(source.shape)
    return source * mask * (1 / (1 - rate) if rate < 1 else 0.0), mask


_RULES: dict[str, Callable[[KeyedDraws, str, Mapping[str, Any]], Any]] = {
    "rand": _draw_uniform,
    "rand_like": _draw_uniform,
    "uniform_": _draw_uniform,
    "randn": _draw_normal,
    "randn_like": _draw_normal,
    "normal": _draw_normal,
    "normal_": _draw_normal,
    "bernoulli": _draw_bernoulli,
    "bernoulli_": _draw_bernoulli,
    "exponential_": _draw_exponential,
    "randint": _draw_integers,
    "randint_like": _draw_integers,
    "native_dropout": _drop,
}
"""How each operator of torch is computed from keys; others that draw are refused."""
