"""Keyed masks: dropout that drops by sample and place, so that ranks, accumulation and resumes change nothing."""

from __future__ import annotations

import hashlib
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardwise.errors import JobError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy as np
    import numpy.typing as npt

_MIX_A = 0x85EBCA6B - (1 << 32)  # the 32-bit finaliser of MurmurHash3 (public domain, Austin Appleby), as int32
_MIX_B = 0xC2B2AE35 - (1 << 32)
_CHANNELS = {nn.Dropout1d: 3, nn.Dropout2d: 4, nn.Dropout3d: 5}
"""Dropouts of whole channels, and the dimensions of a batch for each."""
_DRAW = 'or Job(masks="drawn")'


class KeyedDropout(nn.Dropout):
    """Dropout whose mask is a function of sample, name, call and element: nothing is drawn, nothing kept."""

    name: str = ""
    """Where it stands in the whole model."""
    channels: int | None = None
    """Dimensions of the input where whole channels are dropped; None drops single elements."""
    keys: Tensor | None = None
    """int32 [2, rows]: two numbers for every row of the next input. Set before each forward."""
    calls: int = 0
    """Times it ran in this forward pass of the model: each has its own mask."""
    is_cut: bool = False
    """Whether ranks hold different parts of what it gets: of those it does not know the place."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name is torch's
        """Drop elements of [rows, ...] or [rows * n, ...] and scale up the others; no communication."""
        if not self.training or self.p == 0:
            return input
        keys, calls = self._checked(input), self.calls
        self.calls += 1
        shape = input.shape if self.channels is None else input.shape[:2]
        keep = keyed_mask(keys, f"{self.name}:{calls}", shape.numel() // keys.shape[1], self.p).view(shape)
        if self.channels is not None:
            keep = keep.view(*shape, *[1] * (input.ndim - 2))
        return input.masked_fill(~keep, 0) * (1 / (1 - self.p) if self.p < 1 else 0.0)

    def _checked(self, value: Tensor) -> Tensor:
        """Return the keys of the rows of an input, or refuse it."""
        if self.is_cut:
            raise JobError(
                f"{self.name} drops parts of an activation that tensor parallelism cuts, and keyed masks know no parts",
                fix=f"use tp = 1 or no dropout there, {_DRAW}",
            )
        if self.keys is None:
            raise JobError(
                f"{self.name} does not know its samples, as of a stream or outside of a step, and masks are keyed",
                fix=f"give a dataset that is read by index, {_DRAW}",
            )
        rows = self.keys.shape[1]
        if value.ndim == 0 or value.shape[0] % rows or (self.channels or value.ndim) != value.ndim:
            raise JobError(
                f"{self.name} gets {list(value.shape)} of a micro-batch of {rows}, and keyed masks need rows first",
                fix=f"give it [rows, ...], {_DRAW}",
            )
        return self.keys


@torch.no_grad()
def keyed_mask(keys: Tensor, place: str, elements: int, p: float) -> Tensor:
    """Return which elements stay, bool [rows, elements]: each with probability 1 - p, by `keys` (int32 [2, rows])."""
    salt = hashlib.blake2b(place.encode(), digest_size=8).digest()
    first, second = (int.from_bytes(half, "little", signed=True) for half in (salt[:4], salt[4:]))
    # int32 wraps around when it overflows; shifts keep the sign, so their upper bits are cut off.
    bits = (keys[0] ^ first)[:, None] + torch.arange(elements, dtype=torch.int32, device=keys.device)
    bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF)).mul_(_MIX_A)
    # The second key comes in half-way: two samples share a mask, or a shift of one, when 64 bits agree, not 32.
    bits.bitwise_xor_((bits >> 13).bitwise_and_(0x7FFFF)).add_((keys[1] ^ second)[:, None]).mul_(_MIX_B)
    bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF)).mul_(_MIX_A)
    bits.bitwise_xor_((bits >> 13).bitwise_and_(0x7FFFF))
    return bits >= min(round(p * 2**32) - 2**31, 2**31 - 1)


def key_dropouts(module: nn.Module, *, staged: bool) -> None:
    """Put a keyed dropout in place of every one of torch's; `staged` for a whole model that a pipeline is to cut.

    Alpha dropouts, classes derived from torch's and functions are left, and found when they draw: see `KeyedMasks`.
    """
    for prefix, parent in list(module.named_modules()):
        for name, child in parent._modules.items():  # noqa: SLF001 - named_children passes over repeats
            if type(child) is nn.Dropout or type(child) in _CHANNELS:
                # One for each place, also where the model has one for several: it is the place that counts.
                parent._modules[name] = _like(child, f"{prefix}.{name}" if prefix else name)  # noqa: SLF001
    if staged:
        parts = module.named_modules(remove_duplicate=False)
        for dropout, places in Counter(part for _, part in parts if isinstance(part, KeyedDropout)).items():
            if places > 1:
                raise JobError(
                    f"{dropout.name} is part of a module that stands in {places} places, which may be on two stages",
                    fix=f"make one for each place, use pp = 1, {_DRAW}",
                )


def _like(dropout: Any, name: str) -> KeyedDropout:
    ours = KeyedDropout(dropout.p)
    ours.train(dropout.training)
    ours.name, ours.channels = name, _CHANNELS.get(type(dropout))
    return ours


def keyed_dropouts(module: nn.Module) -> list[KeyedDropout]:
    """Every keyed dropout inside a module."""
    return [child for child in module.modules() if isinstance(child, KeyedDropout)]


class CutRegion:
    """Tells keyed dropouts when activations are cut, from `enter` to `leave`."""

    def __init__(self, dropouts: Iterable[KeyedDropout]) -> None:
        self._dropouts = list(dropouts)

    def enter(self) -> None:
        """Begin a cut region."""
        for dropout in self._dropouts:
            dropout.is_cut = True

    def leave(self) -> None:
        """End it; nothing happens outside already."""
        for dropout in self._dropouts:
            dropout.is_cut = False


@contextmanager
def same_masks(moments: Iterable[tuple[KeyedDropout, Tensor | None, int]]) -> Iterator[None]:
    """Go back to a moment, dropout by dropout with its keys and calls: what is run again drops the same."""
    moments = list(moments)
    now = [(dropout, dropout.keys, dropout.calls) for dropout, _, _ in moments]
    for dropout, keys, calls in moments:
        dropout.keys, dropout.calls = keys, calls
    try:
        yield
    finally:
        for dropout, keys, calls in now:
            dropout.keys, dropout.calls = keys, calls


class KeyedMasks:
    """The keyed dropouts of a model, told of every micro-batch; nothing else in it may draw."""

    def __init__(self, model: nn.Module, device_type: str) -> None:
        """`device_type` is where forward runs."""
        self._dropouts = keyed_dropouts(model)
        self._device = torch.device(device_type)
        self._watched: set[int] = set()

    @contextmanager
    def of(self, module: nn.Module, keys: npt.NDArray[np.uint64] | None, filled: int) -> Iterator[None]:
        """Surround one forward pass of `module` on a micro-batch: a key for each real row, None where not known."""
        rows = None if keys is None else self._on_device(keys, filled)
        for dropout in self._dropouts:
            dropout.keys, dropout.calls = rows, 0
        watches = rows is not None and torch.is_grad_enabled() and id(module) not in self._watched
        try:
            if watches:
                self._watched.add(id(module))
                with _nothing_drawn(module):
                    yield
            else:
                yield
        finally:
            for dropout in self._dropouts:
                dropout.keys = None

    def _on_device(self, keys: npt.NDArray[np.uint64], filled: int) -> Tensor:
        """Return int32 [2, filled]; rows that fill up have the keys of those they repeat, or 0."""
        halves = torch.zeros(2, filled, dtype=torch.int32)
        if len(keys):
            halves = torch.from_numpy(keys.view("int32").reshape(-1, 2)).T[:, torch.arange(filled) % len(keys)]
        return halves.to(self._device, non_blocking=True)


@contextmanager
def _nothing_drawn(module: nn.Module) -> Iterator[None]:
    """Refuse a forward pass that moves torch's generators, naming the innermost module that did."""
    path, drew, states = [""], [], _generator_states()

    def look(name: str | None) -> None:
        """Blame what ran until now, then enter `name`; None leaves."""
        nonlocal states
        before, states = states, _generator_states()
        if not all(map(torch.equal, states, before)):
            drew.append(path[-1])
        if name is not None:
            path.append(name)
        elif len(path) > 1:
            path.pop()

    hooks, failed = [], False
    for name, part in module.named_modules(set()):  # with a memo: a pipeline's stages refuse walks of the user's alone
        if name:
            hooks.append(part.register_forward_pre_hook(lambda *_, name=name: look(name)))
            hooks.append(part.register_forward_hook(lambda *_: look(None)))
    try:
        yield
    except Exception:
        failed = True  # that is what must be told; a stage of a pipeline is left by what is no Exception
        raise
    finally:
        for hook in hooks:
            hook.remove()
        look(None)
        if drew and not failed:
            raise JobError(
                f"{drew[0] or 'the model'} draws random numbers of its own, and masks are keyed by sample and place",
                fix=f"use torch.nn.Dropout there, {_DRAW}",
            )


def _generator_states() -> list[Tensor]:
    states = [torch.default_generator.get_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return states
