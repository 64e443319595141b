"""Counter-based dropout: masks by sample index and module, so that ranks, accumulation and resumes change nothing.

torch's dropout modules are replaced by `CounterDropout`, which costs no more than they do: its mask is a hash of
(sample index, module name, call, element), see `counter_random`. The invariant: a sample gets the same mask on any
rank, in any micro-batch and after any resume. What else forward samples (stochastic depth, noise, dropout inside of
attention) is intercepted operator by operator. A job asks for it by `masks="keyed"`.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardwise.errors import JobError
from shardwise.parallel.counter_random import (
    DEFAULT_FIX,
    CounterRandom,
    RandomContext,
    counter_bits,
    follow_modules,
    generator_states,
    name_modules,
    random_error,
    random_of,
)
from shardwise.torch_private.modules import own_modules

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from contextlib import AbstractContextManager

    import numpy as np
    import numpy.typing as npt

_CHANNELS = {nn.Dropout1d: 3, nn.Dropout2d: 4, nn.Dropout3d: 5}
"""Dropouts of whole channels, and the dimensions of a batch for each."""


class CounterDropout(nn.Dropout):
    """Dropout whose mask is a function of sample index, name, call and element: no generator, no saved mask."""

    name: str = ""
    """Its name in the whole model."""
    channels: int | None = None
    """Dimensions of the input where whole channels are dropped; None drops single elements."""
    keys: Tensor | None = None
    """int32 [2, rows]: two numbers for every row of the next input. Set before each forward."""
    calls: int = 0
    """Times it ran in this forward pass of the model: each has its own mask."""
    is_sharded: bool = False
    """Whether its input is sharded over ranks: it does not know which elements are this rank's."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name is torch's
        """Drop elements of [rows, ...] or [rows * n, ...] and scale up the others; no communication."""
        if not self.training or self.p == 0:
            return input
        keys, calls = self._checked(input), self.calls
        self.calls += 1
        shape = input.shape if self.channels is None else input.shape[:2]
        keep = dropout_mask(keys, f"{self.name}:{calls}", shape.numel() // keys.shape[1], self.p).view(shape)
        if self.channels is not None:
            keep = keep.view(*shape, *[1] * (input.ndim - 2))
        return input.masked_fill(~keep, 0) * (1 / (1 - self.p) if self.p < 1 else 0.0)

    def _checked(self, value: Tensor) -> Tensor:
        """Return the keys of the rows of an input, or refuse it."""
        if self.is_sharded:
            raise JobError(
                f"{self.name} gets an activation that tensor parallelism shards, and keyed masks need whole ones",
                code="support.keyed-masks-tp",
                fix=f"use tp = 1 or no dropout there, {DEFAULT_FIX}",
            )
        if self.keys is None:
            raise JobError(
                f"{self.name} gets samples without an index, as of a stream or outside of a step, and masks are keyed",
                code="support.keyed-masks-no-index",
                fix=f"give a dataset that is read by index, {DEFAULT_FIX}",
            )
        rows = self.keys.shape[1]
        if value.ndim == 0 or value.shape[0] % rows or (self.channels or value.ndim) != value.ndim:
            raise JobError(
                f"{self.name} gets {list(value.shape)} of a micro-batch of {rows}, and keyed masks need rows first",
                code="support.keyed-masks-rows-first",
                fix=f"give it [rows, ...], {DEFAULT_FIX}",
            )
        return self.keys


@torch.no_grad()
def dropout_mask(keys: Tensor, salt: str, elements: int, p: float) -> Tensor:
    """Return which elements stay, bool [rows, elements]: each with probability 1 - p, by `keys` (int32 [2, rows])."""
    return counter_bits(keys, salt, elements) >= min(round(p * 2**32) - 2**31, 2**31 - 1)


def replace_dropouts(module: nn.Module, *, staged: bool) -> None:
    """Replace every dropout of torch by a counter-based one; `staged` for a whole model that a pipeline is to split.

    Alpha dropouts, classes derived from torch's and functions are left, and intercepted where they run: `CounterMasks`.
    """
    for prefix, parent in list(module.named_modules()):
        for name, child in own_modules(parent).items():
            if type(child) is nn.Dropout or type(child) in _CHANNELS:
                # One for each name, also where the model registers one several times: the mask depends on the name.
                own_modules(parent)[name] = _like(child, f"{prefix}.{name}" if prefix else name)
    if staged:
        submodules = module.named_modules(remove_duplicate=False)
        uses = Counter(submodule for _, submodule in submodules if isinstance(submodule, CounterDropout))
        for dropout, num_uses in uses.items():
            if num_uses > 1:
                raise JobError(
                    f"{dropout.name} is in a module that is registered {num_uses} times, which may be on two stages",
                    code="support.keyed-masks-shared-module",
                    fix=f"make one module for each, use pp = 1, {DEFAULT_FIX}",
                )
    name_modules(module, staged=staged)


def _like(dropout: Any, name: str) -> CounterDropout:
    ours = CounterDropout(dropout.p)
    ours.train(dropout.training)
    ours.name, ours.channels = name, _CHANNELS.get(type(dropout))
    return ours


def counter_dropouts(module: nn.Module) -> list[CounterDropout]:
    """Return every counter-based dropout inside a module."""
    return [child for child in module.modules() if isinstance(child, CounterDropout)]


class ShardedRegion:
    """Marks for counter-based dropouts where activations are sharded, from `enter` to `leave`."""

    def __init__(self, dropouts: Iterable[CounterDropout], random: CounterRandom) -> None:
        self._dropouts = list(dropouts)
        self._random = random

    def enter(self) -> None:
        """Begin a sharded region."""
        self._mark(is_sharded=True)

    def leave(self) -> None:
        """End it; nothing happens outside already."""
        self._mark(is_sharded=False)

    def _mark(self, *, is_sharded: bool) -> None:
        self._random.is_sharded = is_sharded
        for dropout in self._dropouts:
            dropout.is_sharded = is_sharded


def sharded_region(module: nn.Module) -> ShardedRegion | None:
    """Return what marks sharded activations for a model whose masks are keyed; None for any other."""
    random = random_of(module)
    return None if random is None else ShardedRegion(counter_dropouts(module), random)


class BlockDropout:
    """The counter-based dropouts of a block that is run again in backward."""

    def __init__(self, block: nn.Module) -> None:
        self._dropouts = counter_dropouts(block)
        self._random = random_of(block)

    def replay(self) -> AbstractContextManager[None]:
        """Return what repeats the random numbers from now on, to be entered when the block runs again."""
        moments = [(dropout, dropout.keys, dropout.calls) for dropout in self._dropouts]
        random = self._random.moment() if self._random is not None and self._random.is_on else None
        return self._repeated(moments, random)

    @contextmanager
    def _repeated(
        self, moments: list[tuple[CounterDropout, Tensor | None, int]], moment: RandomContext | None
    ) -> Iterator[None]:
        now = [(dropout, dropout.keys, dropout.calls) for dropout in self._dropouts]
        for dropout, keys, calls in moments:
            dropout.keys, dropout.calls = keys, calls
        try:
            with nullcontext() if self._random is None or moment is None else self._random.intercepting(moment):
                yield
        finally:
            for dropout, keys, calls in now:
                dropout.keys, dropout.calls = keys, calls


class CounterMasks:
    """The counter-based random numbers of a model, given the keys of every micro-batch."""

    def __init__(self, model: nn.Module, device_type: str) -> None:
        """`device_type` is where forward runs."""
        self._dropouts = counter_dropouts(model)
        self._device = torch.device(device_type)
        self._samples: dict[int, bool] = {}
        """Modules that had a first pass, and whether they called random operators in it."""

    @contextmanager
    def of(self, module: nn.Module, keys: npt.NDArray[np.uint64] | None, filled: int) -> Iterator[None]:
        """Surround one forward pass of `module` on a micro-batch: a key for each real row, None where not known."""
        rows = None if keys is None else self._on_device(keys, filled)
        for dropout in self._dropouts:
            dropout.keys, dropout.calls = rows, 0
        try:
            if rows is not None and torch.is_grad_enabled() and self._samples.get(id(module), True):
                with self._intercepted(module, RandomContext(rows, Counter(), ("",))):
                    yield
            else:
                yield
        finally:
            for dropout in self._dropouts:
                dropout.keys = None

    @contextmanager
    def _intercepted(self, module: nn.Module, start: RandomContext) -> Iterator[None]:
        """Intercept the random operators of `module`; in its first pass, refuse what samples past the interception."""
        random = random_of(module)
        if random is None:  # of a model that nobody prepared there is nothing to name
            yield
            return
        if id(module) in self._samples:
            with random.intercepting(start):
                yield
            return
        watch = FirstPass(module, random)
        failed = False
        try:
            with random.intercepting(start):
                try:
                    yield
                finally:
                    self._samples[id(module)] = watch.end(keeps_hooks=bool(random.calls))
        except Exception:
            failed = True  # that is what must be reported; a stage of a pipeline is left by what is no Exception
            raise
        finally:
            if watch.sampled and not failed:
                raise random_error(watch.sampled[0])

    def _on_device(self, keys: npt.NDArray[np.uint64], filled: int) -> Tensor:
        """Return int32 [2, filled]; rows that fill up have the keys of those they repeat, or 0."""
        halves = torch.zeros(2, filled, dtype=torch.int32)
        if len(keys):
            halves = torch.from_numpy(keys.view("int32").reshape(-1, 2)).T[:, torch.arange(filled) % len(keys)]
        return halves.to(self._device, non_blocking=True)


class FirstPass:
    """Watches the first pass of a module: which submodules advance torch's generators past the interception."""

    def __init__(self, module: nn.Module, random: CounterRandom) -> None:
        self.sampled: list[str] = []
        """Names of modules, the innermost that ran at the time."""
        self._states = generator_states()
        self._random = random
        self._hooks = follow_modules(module, self._check)
        self._is_over = False

    def _check(self) -> None:
        if self._is_over:
            return
        before, self._states = self._states, generator_states()
        if not all(map(torch.equal, self._states, before)):
            self.sampled.append(self._random.path[-1])

    def end(self, *, keeps_hooks: bool = False) -> bool:
        """Check for the last time; returns whether the hooks that follow modules stay, for later passes."""
        self._check()
        self._is_over = True
        self._random.checks = False
        if not keeps_hooks:
            for hook in self._hooks:
                hook.remove()
        return keeps_hooks
