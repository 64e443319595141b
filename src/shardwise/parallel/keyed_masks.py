"""Keyed masks: dropout that drops by sample and place, so that ranks, accumulation and resumes change nothing.

Modules of torch that drop are replaced by `KeyedDropout`, which costs no more than they do. What else a model draws in
forward (stochastic depth, noise, dropout inside of attention) is intercepted: see `keyed_draws`.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardwise.errors import JobError
from shardwise.parallel.keyed_draws import (
    DRAW,
    DrawContext,
    KeyedDraws,
    assign_places,
    drawing_error,
    draws_of,
    follow_modules,
    generator_states,
    keyed_bits,
)
from shardwise.torch_private.modules import own_modules

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from contextlib import AbstractContextManager

    import numpy as np
    import numpy.typing as npt

_CHANNELS = {nn.Dropout1d: 3, nn.Dropout2d: 4, nn.Dropout3d: 5}
"""Dropouts of whole channels, and the dimensions of a batch for each."""


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
                code="support.keyed-masks-tp",
                fix=f"use tp = 1 or no dropout there, {DRAW}",
            )
        if self.keys is None:
            raise JobError(
                f"{self.name} does not know its samples, as of a stream or outside of a step, and masks are keyed",
                code="support.keyed-masks-no-index",
                fix=f"give a dataset that is read by index, {DRAW}",
            )
        rows = self.keys.shape[1]
        if value.ndim == 0 or value.shape[0] % rows or (self.channels or value.ndim) != value.ndim:
            raise JobError(
                f"{self.name} gets {list(value.shape)} of a micro-batch of {rows}, and keyed masks need rows first",
                code="support.keyed-masks-rows-first",
                fix=f"give it [rows, ...], {DRAW}",
            )
        return self.keys


@torch.no_grad()
def keyed_mask(keys: Tensor, place: str, elements: int, p: float) -> Tensor:
    """Return which elements stay, bool [rows, elements]: each with probability 1 - p, by `keys` (int32 [2, rows])."""
    return keyed_bits(keys, place, elements) >= min(round(p * 2**32) - 2**31, 2**31 - 1)


def key_dropouts(module: nn.Module, *, staged: bool) -> None:
    """Put a keyed dropout in place of every one of torch's; `staged` for a whole model that a pipeline is to split.

    Alpha dropouts, classes derived from torch's and functions are left, and keyed where they draw: see `KeyedMasks`.
    """
    for prefix, parent in list(module.named_modules()):
        for name, child in own_modules(parent).items():
            if type(child) is nn.Dropout or type(child) in _CHANNELS:
                # One for each place, also where the model has one for several: it is the place that counts.
                own_modules(parent)[name] = _like(child, f"{prefix}.{name}" if prefix else name)
    if staged:
        parts = module.named_modules(remove_duplicate=False)
        for dropout, places in Counter(part for _, part in parts if isinstance(part, KeyedDropout)).items():
            if places > 1:
                raise JobError(
                    f"{dropout.name} is part of a module that stands in {places} places, which may be on two stages",
                    code="support.keyed-masks-shared-module",
                    fix=f"make one for each place, use pp = 1, {DRAW}",
                )
    assign_places(module, staged=staged)


def _like(dropout: Any, name: str) -> KeyedDropout:
    ours = KeyedDropout(dropout.p)
    ours.train(dropout.training)
    ours.name, ours.channels = name, _CHANNELS.get(type(dropout))
    return ours


def keyed_dropouts(module: nn.Module) -> list[KeyedDropout]:
    """Every keyed dropout inside a module."""
    return [child for child in module.modules() if isinstance(child, KeyedDropout)]


class CutRegion:
    """Marks for keyed dropouts and draws where activations are sharded, from `enter` to `leave`."""

    def __init__(self, dropouts: Iterable[KeyedDropout], draws: KeyedDraws) -> None:
        self._dropouts = list(dropouts)
        self._draws = draws

    def enter(self) -> None:
        """Begin a sharded region."""
        self._mark(is_sharded=True)

    def leave(self) -> None:
        """End it; nothing happens outside already."""
        self._mark(is_sharded=False)

    def _mark(self, *, is_sharded: bool) -> None:
        self._draws.is_sharded = is_sharded
        for dropout in self._dropouts:
            dropout.is_cut = is_sharded


def cut_region(module: nn.Module) -> CutRegion | None:
    """Return what marks sharded activations for a model whose masks are keyed; None for any other."""
    draws = draws_of(module)
    return None if draws is None else CutRegion(keyed_dropouts(module), draws)


class BlockMasks:
    """The keyed dropouts and draws of a block that is run again in backward."""

    def __init__(self, block: nn.Module) -> None:
        self._dropouts = keyed_dropouts(block)
        self._draws = draws_of(block)

    def replay(self) -> AbstractContextManager[None]:
        """Return what repeats the masks and draws from now on, to be entered when the block runs again."""
        moments = [(dropout, dropout.keys, dropout.calls) for dropout in self._dropouts]
        draws = self._draws.moment() if self._draws is not None and self._draws.is_on else None
        return self._repeated(moments, draws)

    @contextmanager
    def _repeated(
        self, moments: list[tuple[KeyedDropout, Tensor | None, int]], moment: DrawContext | None
    ) -> Iterator[None]:
        now = [(dropout, dropout.keys, dropout.calls) for dropout in self._dropouts]
        for dropout, keys, calls in moments:
            dropout.keys, dropout.calls = keys, calls
        try:
            with nullcontext() if self._draws is None or moment is None else self._draws.intercepting(moment):
                yield
        finally:
            for dropout, keys, calls in now:
                dropout.keys, dropout.calls = keys, calls


class KeyedMasks:
    """The keyed dropouts and draws of a model, given the keys of every micro-batch."""

    def __init__(self, model: nn.Module, device_type: str) -> None:
        """`device_type` is where forward runs."""
        self._dropouts = keyed_dropouts(model)
        self._device = torch.device(device_type)
        self._draws: dict[int, bool] = {}
        """Modules that had a first pass, and whether they drew in it."""

    @contextmanager
    def of(self, module: nn.Module, keys: npt.NDArray[np.uint64] | None, filled: int) -> Iterator[None]:
        """Surround one forward pass of `module` on a micro-batch: a key for each real row, None where not known."""
        rows = None if keys is None else self._on_device(keys, filled)
        for dropout in self._dropouts:
            dropout.keys, dropout.calls = rows, 0
        try:
            if rows is not None and torch.is_grad_enabled() and self._draws.get(id(module), True):
                with self._intercepted(module, DrawContext(rows, Counter(), ("",))):
                    yield
            else:
                yield
        finally:
            for dropout in self._dropouts:
                dropout.keys = None

    @contextmanager
    def _intercepted(self, module: nn.Module, start: DrawContext) -> Iterator[None]:
        """Key what `module` draws; in its first pass, also refuse what draws unseen."""
        draws = draws_of(module)
        if draws is None:  # of a model that nobody prepared there is nothing to name
            yield
            return
        if id(module) in self._draws:
            with draws.intercepting(start):
                yield
            return
        watch = FirstPass(module, draws)
        failed = False
        try:
            with draws.intercepting(start):
                try:
                    yield
                finally:
                    self._draws[id(module)] = watch.end(keeps_hooks=bool(draws.calls))
        except Exception:
            failed = True  # that is what must be reported; a stage of a pipeline is left by what is no Exception
            raise
        finally:
            if watch.drew and not failed:
                raise drawing_error(watch.drew[0])

    def _on_device(self, keys: npt.NDArray[np.uint64], filled: int) -> Tensor:
        """Return int32 [2, filled]; rows that fill up have the keys of those they repeat, or 0."""
        halves = torch.zeros(2, filled, dtype=torch.int32)
        if len(keys):
            halves = torch.from_numpy(keys.view("int32").reshape(-1, 2)).T[:, torch.arange(filled) % len(keys)]
        return halves.to(self._device, non_blocking=True)


class FirstPass:
    """Looks on while a module runs for the first time: which parts move torch's generators past the interception."""

    def __init__(self, module: nn.Module, draws: KeyedDraws) -> None:
        self.drew: list[str] = []
        """Names of modules, the innermost that ran at the time."""
        self._states = generator_states()
        self._draws = draws
        self._hooks = follow_modules(module, self._look)
        self._is_over = False

    def _look(self) -> None:
        if self._is_over:
            return
        before, self._states = self._states, generator_states()
        if not all(map(torch.equal, self._states, before)):
            self.drew.append(self._draws.path[-1])

    def end(self, *, keeps_hooks: bool = False) -> bool:
        """Look for the last time; returns whether the hooks that follow modules stay, for later passes."""
        self._look()
        self._is_over = True
        self._draws.looks = False
        if not keeps_hooks:
            for hook in self._hooks:
                hook.remove()
        return keeps_hooks
