"""The global random generators that user code draws from: torch's, Python's and NumPy's.

One rule seeds them. What a job builds once and every rank must have alike (the job file, its model, its datasets) is
built under the job's seed; what each data-parallel rank draws for itself (dropout, augmentation) comes from that seed
and the rank's place in the layout. Nothing is drawn from what a process happened to start with.
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
"""32-bit words of a Mersenne Twister, which Python and NumPy both draw from."""


def seed_generators(seed: int) -> None:
    """Seed the global generators of torch, on every device, of Python and, where it is imported, of NumPy."""
    if torch.accelerator.current_accelerator() is not None:
        torch.manual_seed(seed)  # without any, it would format a stack for each kind of device, for 0.5 to 3 ms
    seed_host_generators(seed)


def seed_host_generators(seed: int, kinds: Collection[str] = KINDS) -> None:
    """Seed the same, without those of accelerators; or only some `kinds` of them."""
    if "torch" in kinds:
        torch.default_generator.manual_seed(seed)
    if "python" in kinds:
        random.seed(seed)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and "numpy" in kinds:
        numpy.random.seed(seed % 2**32)  # it takes 32 bits


@contextmanager
def untouched_host_generators(kinds: Collection[str] = KINDS) -> Iterator[None]:
    """Leave torch's generator of the host, Python's and NumPy's as they were on entry; or only some `kinds` of them.

    NumPy's takes 240 us to read and write, Python's 30, torch's 1.
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
    """Leave the generators of this process, and of its CUDA device, as they were on entry."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with untouched_host_generators(), torch.random.fork_rng(devices):
        yield


@contextmanager
def seeded_generators(seed: int) -> Iterator[None]:
    """Draw from fresh generators of `seed`, and leave those of this process as they were."""
    with untouched_generators():
        seed_generators(seed)
        yield


def host_states() -> dict[str, Tensor]:
    """Return the states of Python's and NumPy's generators, as bytes by name."""
    _, words, gauss = random.getstate()
    states = {"python": _packed(words[:_TWISTER], words[_TWISTER], gauss)}
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, position, has_gauss, cached = numpy.random.get_state()
        if kind == "MT19937":
            states["numpy"] = _packed(keys.tolist(), position, cached if has_gauss else None)
    return states


def host_generators() -> dict[str, bytes]:
    """Return the states of all generators of the host, to be compared."""
    states = {"torch": torch.get_rng_state(), **host_states()}
    return {name: state.numpy().tobytes() for name, state in states.items()}


def set_host_states(states: Mapping[str, Tensor]) -> None:
    """Draw on from where `host_states` was called; what the states do not name stays as it is."""
    if "python" in states:
        words, position, gauss = _unpacked(states["python"])
        random.setstate((3, (*words, position), gauss))
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and "numpy" in states:
        words, position, gauss = _unpacked(states["numpy"])
        numpy.random.set_state(("MT19937", words, position, int(gauss is not None), gauss or 0.0))


_FORM = struct.Struct(f"<{_TWISTER}II?d")
"""Words, position, whether a normal number is kept for the next call, and that number."""


def _packed(words: Any, position: int, gauss: float | None) -> Tensor:
    packed = _FORM.pack(*words, position, gauss is not None, gauss or 0.0)
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)


def _unpacked(state: Tensor) -> tuple[tuple[int, ...], int, float | None]:
    *words, position, has_gauss, gauss = _FORM.unpack(state.numpy().tobytes())
    return tuple(words), position, gauss if has_gauss else None
