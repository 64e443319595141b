"""Where a module is made parallel: this rank's device, its place in the layout, and the groups it talks to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from shardwise.layout import Coordinate, Layout


@dataclass(frozen=True, kw_only=True)
class Place:
    """One rank's place: what transforms need to know of the world, as arguments."""

    device: torch.device
    layout: Layout
    """How parameters are held: without a cp axis, whose peers count as shards (`Layout.folded`)."""
    rank: int
    mesh: DeviceMesh | None
    """Axes of degree over 1, by their names in the layout; None for a world of one."""
    readers: dist.ProcessGroup | None
    """The ranks that hold the same piece of the model and read other samples, or other tokens of them; None for one."""
    host_readers: dist.ProcessGroup | None = None
    """The ranks of `readers`, for small values of the host."""
    context: dist.ProcessGroup | None = None
    """The ranks that share the sequences of one reader, in the order of their slices; None where nothing is cut."""

    @property
    def coordinate(self) -> Coordinate:
        """Where this rank stands on every axis."""
        return self.layout.coordinate(self.rank)

    def axis(self, *names: str) -> DeviceMesh | None:
        """Return the sub-mesh of those axes that are cut at all; None when none is."""
        cut = tuple(name for name in names if getattr(self.layout, name) > 1)
        if not cut or self.mesh is None:
            return None
        return self.mesh[cut]
