"""Device meshes made from layouts: the axes that cut the world, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.device_mesh import init_device_mesh

from shardwise.errors import WorldError
from shardwise.layout import AXES

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from shardwise.layout import Layout


def build_mesh(layout: Layout, *, world_size: int, device_type: str) -> DeviceMesh:
    """Communicate to make the mesh of `layout`, called on every rank; its axes are those of degree over 1.

    A layout of one rank gives a mesh of one, named "replicate".
    """
    if layout.world_size != world_size:
        others = layout.world_size // layout.replicate
        fits = world_size % others == 0
        raise WorldError(
            f"layout {layout} needs {layout.world_size} ranks, the world has {world_size}",
            code="layout.world-size-mismatch",
            fix=f"set replicate={world_size // others}" if fits else f"start a multiple of {others} ranks",
        )
    cut = {axis: degree for axis, degree in zip(AXES, layout.degrees, strict=True) if degree > 1} or {"replicate": 1}
    return init_device_mesh(device_type, tuple(cut.values()), mesh_dim_names=tuple(cut))
