"""The norm of the whole gradient, however its pieces are spread: whole, cut, on other stages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardwise.parallel.gradsync import local

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor, nn

    from shardwise.layout import Layout


class GradNorm:
    """Computes the norm over every parameter of the model once, and scales this rank's pieces."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        layout: Layout,
        cut_axes: Sequence[str],
        group: dist.ProcessGroup | None,
        device: torch.device,
        copies: Iterable[nn.Parameter] = (),
    ) -> None:
        """`cut_axes` are those that may cut a parameter; `group` joins the ranks that together hold one model.

        None: this rank holds all of it. `copies` are those of `parameters` that another rank of the group counts.
        """
        self._parameters = parameters
        self._group = group
        # A piece that several ranks of the group hold alike counts once: each brings its share of the square.
        self._shares = [1.0 / _copies(parameter, layout, cut_axes) for parameter in parameters]
        uncounted = {id(parameter) for parameter in copies}
        for place, parameter in enumerate(parameters):
            if id(parameter) in uncounted:
                self._shares[place] = 0.0
        self._device = device

    def __call__(self) -> Tensor:
        """Return the norm before any clipping; communicates over the group."""
        used = [
            (local(p.grad), share)
            for p, share in zip(self._parameters, self._shares, strict=True)
            if p.grad is not None
        ]
        if not used:
            norms, shares = torch.zeros(1, device=self._device), [0.0]
        else:
            pieces, shares = [piece for piece, _ in used], [share for _, share in used]
            by_piece = torch._foreach_norm(pieces)  # noqa: SLF001 - torch's own clipping calls it
            widest = max((norm.dtype for norm in by_piece), key=lambda dtype: dtype.itemsize)
            norms = torch.stack([norm.to(self._device, widest) for norm in by_piece])
        if self._group is None:
            alone: Tensor = torch.linalg.vector_norm(norms)
            return alone
        square = (norms.square() * torch.tensor(shares, dtype=norms.dtype, device=norms.device)).sum()
        dist.all_reduce(square, group=self._group)
        whole: Tensor = square.sqrt()
        return whole

    def scale(self, factor: Tensor) -> None:
        """Multiply every gradient with a factor that is equal on all ranks."""
        pieces = [local(p.grad) for p in self._parameters if p.grad is not None]
        if pieces:
            torch._foreach_mul_(pieces, factor.to(pieces[0].device))


def _copies(parameter: nn.Parameter, layout: Layout, cut_axes: Sequence[str]) -> int:
    """How many ranks along the axes that cut parameters hold the same piece of this one."""
    cut = set()
    if isinstance(parameter, DTensor):
        names = parameter.device_mesh.mesh_dim_names or ()
        cut = {
            name for name, placement in zip(names, parameter.placements, strict=True) if not placement.is_replicate()
        }
    number = 1
    for axis in cut_axes:
        number *= 1 if axis in cut else int(getattr(layout, axis))
    return number
