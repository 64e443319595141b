"""Random masks under tensor parallelism: different where activations are cut over ranks, equal elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh


class CutRandom:
    """Gives each rank of a tensor-parallel mesh random numbers of its own between `enter` and `leave`.

    Outside, the default generators run on as if nothing had been drawn inside but one seed, equal on all ranks as
    long as their CPU generators are. Nothing is kept from one region to the next: a recomputed one draws the same.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._index = mesh.get_local_rank()
        self._on_gpu = mesh.device_type == "cuda"
        self._outside: list[Tensor] | None = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def enter(self) -> None:
        """Seed this rank's own numbers; nothing happens inside already."""
        if self._outside is not None:
            return
        seed = int(torch.randint(2**62, ()).item()) + 1 + self._index
        self._outside = [generator.get_state() for generator in self._generators()]
        for generator in self._generators():
            generator.manual_seed(seed)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def leave(self) -> None:
        """Go on with the numbers from before `enter`; nothing happens outside already."""
        if self._outside is None:
            return
        for generator, state in zip(self._generators(), self._outside, strict=True):
            generator.set_state(state)
        self._outside = None

    def _generators(self) -> Iterator[torch.Generator]:
        yield torch.default_generator
        if self._on_gpu:
            yield torch.cuda.default_generators[torch.cuda.current_device()]


def draws_masks(module: nn.Module) -> bool:
    """Whether a module drops anything at random: a Dropout, or a config attribute named after one, above 0."""
    for child in module.modules():
        if isinstance(child, _DropoutNd) and child.p > 0:
            return True
        for holder in (child, getattr(child, "config", None)):
            named = vars(holder) if hasattr(holder, "__dict__") else {}
            if any(_is_rate(value) for name, value in named.items() if "dropout" in name or "pdrop" in name):
                return True
    return False


def _is_rate(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
