"""The global random number generators of torch, Python and NumPy: seeding, saving and restoring.

The job file, its model and its datasets must be equal on every rank, so they are created under the job's seed. Random
numbers that differ between data-parallel ranks (dropout, augmentation) are seeded by that seed and the rank's
coordinate in the layout. No random number depends on the initial state of a process.
"""

from __future__ import annotations

import random
import struct
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from torch import Tensor

KINDS = frozenset({"torch", "python", "numpy"})

_TWISTER = 624
"""Number of 32-bit integers in the state of a Mersenne Twister, the generator of Python and NumPy."""


def seed_generators(seed: int) -> None:
    """Seed the global generators of torch (on every device), of Python and, if it is imported, of NumPy."""
    if torch.accelerator.current_accelerator() is not None:
        torch.manual_seed(seed)  # without an accelerator, it formats stacks for 0.5 to 3 ms
    seed_host_generators(seed)


def seed_host_generators(seed: int, kinds: Collection[str] = KINDS) -> None:
    """Seed the CPU generators of torch, Python and NumPy, or only those in `kinds`."""
    if "torch" in kinds:
        torch.default_generator.manual_seed(seed)
    if "python" in kinds:
        random.seed(seed)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and "numpy" in kinds:
        numpy.random.seed(seed % 2**32)  # NumPy accepts 32 bits


@contextmanager
def untouched_host_generators(kinds: Collection[str] = KINDS) -> Iterator[None]:
    """Restore the CPU generators of torch, Python and NumPy on exit, or only those in `kinds`.

    Saving and restoring takes 240 us for NumPy, 30 us for Python and 1 us for torch.
    """
    numpy: Any = sys.modules.get("numpy") if "numpy" in kinds else None
    drawn = torch.get_rng_state() if "torch" in kinds else None
    python = random.getstate() if "python" in kinds else None
    legacy = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        if drawn is not None:
            torch.set_rng_state(drawn)
        if python is not None:
            random.setstate(python)
        if legacy is not None:
            numpy.random.set_state(legacy)


@contextmanager
def untouched_generators() -> Iterator[None]:
    """Restore the generators of this process and of its CUDA device on exit."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with untouched_host_generators(), torch.random.fork_rng(devices):
        yield


@contextmanager
def seeded_generators(seed: int) -> Iterator[None]:
    """Seed all generators of this process within the context, and restore them on exit."""
    with untouched_generators():
        seed_generators(seed)
        yield


def host_states() -> dict[str, Tensor]:
    """Return the states of the generators of Python and NumPy as byte tensors, by name."""
    _, internal, gauss = random.getstate()
    states = {"python": _packed(internal[:_TWISTER], internal[_TWISTER], gauss)}
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, position, has_gauss, cached = numpy.random.get_state()
        if kind == "MT19937":
            states["numpy"] = _packed(keys.tolist(), position, cached if has_gauss else None)
    return states


def host_generators() -> dict[str, bytes]:
    """Return the states of all CPU generators as bytes by name, for comparison."""
    states = {"torch": torch.get_rng_state(), **host_states()}
    return {name: state.numpy().tobytes() for name, state in states.items()}


def set_host_states(states: Mapping[str, Tensor]) -> None:
    """Restore states that `host_states` returned; generators without an entry keep their state."""
    if "python" in states:
        keys, position, gauss = _unpacked(states["python"])
        random.setstate((3, (*keys, position), gauss))
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and "numpy" in states:
        keys, position, gauss = _unpacked(states["numpy"])
        numpy.random.set_state(("MT19937", keys, position, int(gauss is not None), gauss or 0.0))


_FORM = struct.Struct(f"<{_TWISTER}II?d")
"""Keys, position, whether a Gaussian number is cached for the next call, and that number."""


def _packed(keys: Any, position: int, gauss: float | None) -> Tensor:
    packed = _FORM.pack(*keys, position, gauss is not None, gauss or 0.0)
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)


def _unpacked(state: Tensor) -> tuple[tuple[int, ...], int, float | None]:
    *keys, position, has_gauss, gauss = _FORM.unpack(state.numpy().tobytes())
    return tuple(keys), position, gauss if has_gauss else None
