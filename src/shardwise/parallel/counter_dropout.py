"""Counter-based dropout, with masks that depend on sample index and module but not on rank or micro-batch.

torch's dropout modules are replaced by `CounterDropout`, which is equally fast. Its mask is a hash of (sample index,
module name, call, element), see `counter_random`. The invariant: a sample gets the same mask on any rank, in any
micro-batch and after any resume. Other random operators of the forward pass (stochastic depth, noise, attention
dropout) are intercepted one by one. A job enables counter-based dropout with `masks="keyed"`.
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
    dropout_scale,
    follow_modules,
    generator_states,
    name_modules,
    random_error,
    random_of,
)
from shardwise.torch_private.dispatch import own_modules

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from contextlib import AbstractContextManager

    import numpy as np
    import numpy.typing as npt

_CHANNELS = {nn.Dropout1d: 3, nn.Dropout2d: 4, nn.Dropout3d: 5}
"""torch's channel dropout classes, mapped to the number of dimensions of their batched input."""


class CounterDropout(nn.Dropout):
    """Dropout with a mask computed from sample index, module name, call and element, without a generator."""

    name: str = ""
    """The module's name in the full model."""
    channels: int | None = None
    """The number of input dimensions if whole channels are dropped; None to drop single elements."""
    keys: Tensor | None = None
    """int32 [2, rows]: two keys for every row of the next input. Set before each forward."""
    calls: int = 0
    """Number of calls in the current forward pass of the model; each call has its own mask."""
    is_sharded: bool = False
    """Whether the input is sharded over ranks, in which case the mask cannot be computed."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name is torch's
        """Drop elements of a tensor [rows, ...] or [rows * n, ...] and scale the others; does not communicate."""
        if not self.training or self.p == 0:
            return input
        keys, calls = self._checked(input), self.calls
        self.calls += 1
        shape = input.shape if self.channels is None else input.shape[:2]
        keep = dropout_mask(keys, f"{self.name}:{calls}", shape.numel() // keys.shape[1], self.p).view(shape)
        if self.channels is not None:
            keep = keep.view(*shape, *[1] * (input.ndim - 2))
        return input.masked_fill(~keep, 0) * dropout_scale(self.p)

    def _checked(self, value: Tensor) -> Tensor:
        """Return the keys of the input's rows; raise JobError if rows cannot be assigned to samples."""
        if self.is_sharded:
            raise JobError(
                f"counter-based dropout requires full activations, but the input of {self.name} is sharded over tp",
                code="support.keyed-masks-tp",
                fix=f"set tp=1 or remove this dropout, {DEFAULT_FIX}",
            )
        if self.keys is None:
            raise JobError(
                f"counter-based dropout requires sample indices from a training step, but {self.name} received none",
                code="support.keyed-masks-no-index",
                fix=f"use a map-style dataset, {DEFAULT_FIX}",
            )
        rows = self.keys.shape[1]
        if value.ndim == 0 or value.shape[0] % rows or (self.channels or value.ndim) != value.ndim:
            raise JobError(
                f"{self.name} received shape {list(value.shape)}, but masks='keyed' requires {rows} rows in dim 0",
                code="support.keyed-masks-rows-first",
                fix=f"move the batch dimension to the front, {DEFAULT_FIX}",
            )
        return self.keys


@torch.no_grad()
def dropout_mask(keys: Tensor, salt: str, elements: int, p: float) -> Tensor:
    """Return a bool mask [rows, elements] that keeps elements with probability 1 - p; `keys` is int32 [2, rows]."""
    return counter_bits(keys, salt, elements) >= min(round(p * 2**32) - 2**31, 2**31 - 1)


def replace_dropouts(module: nn.Module, *, staged: bool) -> None:
    """Replace torch's dropout modules with CounterDropout; pass `staged` if a pipeline will split the model.

    Alpha dropout, subclasses of torch's classes and functional dropout are not replaced. `CounterMasks` intercepts
    them.
    """
    for prefix, parent in list(module.named_modules()):
        for name, child in own_modules(parent).items():
            if type(child) is nn.Dropout or type(child) in _CHANNELS:
                # One module for each name, even if the model registers a module several times, because the mask
                # depends on the name.
                own_modules(parent)[name] = _like(child, f"{prefix}.{name}" if prefix else name)
    if staged:
        submodules = module.named_modules(remove_duplicate=False)
        uses = Counter(submodule for _, submodule in submodules if isinstance(submodule, CounterDropout))
        for dropout, num_uses in uses.items():
            if num_uses > 1:
                raise JobError(
                    f"{dropout.name} is in a module registered {num_uses} times, possibly on two pipeline stages",
                    code="support.keyed-masks-shared-module",
                    fix=f"register a separate module for each use, set pp=1, {DEFAULT_FIX}",
                )
    name_modules(module, staged=staged)


def _like(dropout: Any, name: str) -> CounterDropout:
    ours = CounterDropout(dropout.p)
    ours.train(dropout.training)
    ours.name, ours.channels = name, _CHANNELS.get(type(dropout))
    return ours


def counter_dropouts(module: nn.Module) -> list[CounterDropout]:
    """Return all CounterDropout modules inside `module`."""
    return [child for child in module.modules() if isinstance(child, CounterDropout)]


class ShardedRegion:
    """A region in which activations are sharded and counter-based dropout must not run."""

    def __init__(self, dropouts: Iterable[CounterDropout], random: CounterRandom) -> None:
        self._dropouts = list(dropouts)
        self._random = random

    def enter(self) -> None:
        """Start a region of sharded activations."""
        self._mark(is_sharded=True)

    def leave(self) -> None:
        """End the region; has no effect outside a region."""
        self._mark(is_sharded=False)

    def _mark(self, *, is_sharded: bool) -> None:
        self._random.is_sharded = is_sharded
        for dropout in self._dropouts:
            dropout.is_sharded = is_sharded


def sharded_region(module: nn.Module) -> ShardedRegion | None:
    """Return the sharded region of a model with counter-based dropout; None for other models."""
    random = random_of(module)
    if random is None:
        return None
    return ShardedRegion(counter_dropouts(module), random)


class BlockDropout:
    """The counter-based dropouts of a block that is recomputed in backward."""

    def __init__(self, block: nn.Module) -> None:
        self._dropouts = counter_dropouts(block)
        self._random = random_of(block)

    @property
    def is_needed(self) -> bool:
        """Whether the block may use random numbers of shardwise."""
        return bool(self._dropouts) or self._random is not None

    def replay(self) -> AbstractContextManager[None]:
        """Return a context that repeats the random numbers from the current position when the block is recomputed."""
        random = None
        if self._random is not None and self._random.is_on:
            random = self._random.position()
        return self._repeated(self._positions(), random)

    def _positions(self) -> list[tuple[CounterDropout, Tensor | None, int]]:
        return [(dropout, dropout.keys, dropout.calls) for dropout in self._dropouts]

    @contextmanager
    def _repeated(
        self, positions: list[tuple[CounterDropout, Tensor | None, int]], random: RandomContext | None
    ) -> Iterator[None]:
        before = self._positions()
        for dropout, keys, calls in positions:
            dropout.keys, dropout.calls = keys, calls
        interception: AbstractContextManager[None] = nullcontext()
        if self._random is not None and random is not None:
            interception = self._random.intercepting(random)
        try:
            with interception:
                yield
        finally:
            for dropout, keys, calls in before:
                dropout.keys, dropout.calls = keys, calls


class CounterMasks:
    """The counter-based random numbers of a model, keyed by the samples of each micro-batch."""

    def __init__(self, model: nn.Module, device_type: str) -> None:
        """Create the masks of `model`, whose forward runs on a device of type `device_type`."""
        self._dropouts = counter_dropouts(model)
        self._device = torch.device(device_type)
        self._samples: dict[int, bool] = {}
        """Module id -> whether the module called random operators in its first forward pass."""

    @contextmanager
    def of(self, module: nn.Module, keys: npt.NDArray[np.uint64] | None, filled: int) -> Iterator[None]:
        """Return a context for a forward pass; `keys` has a key per unpadded row, or is None if indices are unknown."""
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
        """Intercept the random operators of `module`; raise JobError if its first pass advanced a torch generator."""
        random = random_of(module)
        if random is None:  # the model was not prepared by `replace_dropouts`
            yield
            return
        if id(module) in self._samples:
            with random.intercepting(start):
                yield
            return
        first_pass = FirstPass(module, random)
        failed = False
        try:
            with random.intercepting(start):
                try:
                    yield
                finally:
                    self._samples[id(module)] = first_pass.end(keeps_hooks=bool(random.calls))
        except Exception:
            failed = True  # report this error; a pipeline stage exits by a BaseException, which is not a failure
            raise
        finally:
            if first_pass.sampled and not failed:
                raise random_error(first_pass.sampled[0])

    def _on_device(self, keys: npt.NDArray[np.uint64], filled: int) -> Tensor:
        """Return keys as int32 [2, filled] on the device; padding rows have the keys of the rows they repeat, or 0."""
        halves = torch.zeros(2, filled, dtype=torch.int32)
        if len(keys):
            halves = torch.from_numpy(keys.view("int32").reshape(-1, 2)).T[:, torch.arange(filled) % len(keys)]
        return halves.to(self._device, non_blocking=True)


class FirstPass:
    """Detects which submodules advance torch's generators in the first forward pass of a module."""

    def __init__(self, module: nn.Module, random: CounterRandom) -> None:
        self.sampled: list[str] = []
        """Names of the innermost modules that were running when a generator advanced."""
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
        """Check the generators one last time and remove the module hooks unless `keeps_hooks`; return `keeps_hooks`."""
        self._check()
        self._is_over = True
        self._random.checks = False
        if not keeps_hooks:
            for hook in self._hooks:
                hook.remove()
        return keeps_hooks
