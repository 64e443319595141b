"""The optimizer factory's partner: optimizer states sharded over ranks (ZeRO-1), or kept on the host (offload)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardwise.parallel.collectives import gather_flat, in_buckets
from shardwise.parallel.gradsync import local
from shardwise.parallel.parameter_rules import check_optimizer, check_sharded_updates, copy_attributes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from shardwise.job.optimizers import OptimizerFactory

Named = list[tuple[str, nn.Parameter]]


@dataclass(frozen=True, kw_only=True)
class Optimized:
    """An optimizer, and what it works on."""

    optimizer: Optimizer
    named: Named
    """Its parameters under their names in the model: the model's own, or this rank's rows of them."""
    refresh: Callable[[], None] = lambda: None
    """Take over the model's values, after something else has written them."""
    groups: tuple[tuple[str, ...], ...] = ()
    """Names of the parameters in each group, where its members are no longer those of `named`."""
    first_settings: tuple[dict[str, Any], ...] = field(init=False)
    """Settings of each group as the factory made them: what differs later, the optimizer has changed."""

    def __post_init__(self) -> None:
        first = [dict(group) for group in self.param_groups]
        for settings in first:
            settings.pop("params", None)
        object.__setattr__(self, "first_settings", tuple(first))

    @property
    def kind(self) -> str:
        """The optimizer's class, by which reports and checkpoints call it."""
        return type(self.optimizer).__name__

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups: parameters and settings, its learning rate as "lr"."""
        return self.optimizer.param_groups

    def group_names(self) -> list[list[str]]:
        """Return the names of the parameters in each of the optimizer's groups."""
        if self.groups:
            return [list(group) for group in self.groups]
        names = {id(parameter): name for name, parameter in self.named}
        return [[names[id(parameter)] for parameter in group["params"]] for group in self.optimizer.param_groups]


def make_optimizer(
    factory: OptimizerFactory,
    named: Named,
    *,
    shard_mesh: DeviceMesh | None,
    on_host: bool,
    replica_mesh: DeviceMesh | None = None,
) -> Optimized:
    """Return the job's optimizer over `named`; called on every rank.

    With `shard_mesh` its parameters, and so its states, are this rank's rows of each (ZeRO-1); `on_host` keeps them
    on the CPU. Either way a step leaves the model's own parameters whole and new. Where FSDP2 shards parameters over
    `replica_mesh`, those that it left whole become DTensors too: optimizers take one kind of tensor at a time.
    """
    pieces: dict[str, _Piece] = {}
    for name, parameter in named:
        is_plain = not isinstance(parameter, DTensor)
        if shard_mesh is not None and is_plain and parameter.ndim:
            pieces[name] = _Piece(parameter, shard_mesh, on_host=on_host)
        elif replica_mesh is not None and is_plain:
            pieces[name] = _Piece(parameter, replica_mesh, on_host=on_host, is_sharded=False)
        elif shard_mesh is not None or on_host:
            pieces[name] = _Piece(parameter, None, on_host=on_host)
    owned = [(name, pieces[name].owned if name in pieces else parameter) for name, parameter in named]
    optimizer = factory(owned)
    check_optimizer(optimizer)
    check_sharded_updates(optimizer)
    if not pieces:
        return Optimized(optimizer=optimizer, named=named)
    bridge = _Bridge(list(pieces.values()), shard_mesh)
    bridge.attach(optimizer)
    return Optimized(optimizer=optimizer, named=owned, refresh=bridge.refresh)


class _Piece:
    """This rank's rows of one parameter, as the optimizer sees them."""

    def __init__(
        self, parameter: nn.Parameter, mesh: DeviceMesh | None, *, on_host: bool, is_sharded: bool = True
    ) -> None:
        """With a `mesh` the optimizer sees a DTensor on it, of this rank's rows or, unless `is_sharded`, whole."""
        self.parameter = parameter
        self.is_sharded = mesh is not None and is_sharded
        self.on_host = on_host
        self.rows = parameter.shape[0] if parameter.ndim else 0
        size, place = (mesh.size(), mesh.get_local_rank()) if mesh is not None and is_sharded else (1, 0)
        self.rows_per_rank = -(-self.rows // size)
        self.first = min(self.rows, place * self.rows_per_rank)
        self.num_rows = min(self.rows, self.first + self.rows_per_rank) - self.first
        mine = self.mine(parameter.detach())
        owned = local(mine).cpu().clone() if on_host else local(mine)
        wrapped: Tensor = owned
        if mesh is not None:
            home = mesh if not on_host else host_mesh(mesh)
            placements = [Shard(0)] if is_sharded else [Replicate()] * mesh.ndim
            wrapped = DTensor.from_local(
                owned, home, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
            )
        elif isinstance(mine, DTensor):
            wrapped = DTensor.from_local(
                owned,
                host_mesh(mine.device_mesh) if on_host else mine.device_mesh,
                mine.placements,
                run_check=False,
                shape=mine.shape,
                stride=mine.stride(),
            )
        self.owned = nn.Parameter(wrapped, requires_grad=parameter.requires_grad)
        copy_attributes(vars(parameter), self.owned)

    def mine(self, whole: Tensor) -> Tensor:
        """Return this rank's rows of a tensor shaped like the parameter, as a view."""
        return whole.narrow(0, self.first, self.num_rows) if self.is_sharded else whole

    def take_values(self) -> None:
        """Copy the parameter's rows into the optimizer's, where they are not the same memory."""
        if self.on_host:
            local(self.owned.detach()).copy_(local(self.mine(self.parameter.detach())))

    def take_gradient(self) -> None:
        """Show the optimizer the gradient of these rows."""
        if self.parameter.grad is None:
            self.owned.grad = None
            return
        rows = local(self.mine(self.parameter.grad))
        rows = rows.to("cpu") if self.on_host else rows
        if isinstance(self.owned, DTensor):
            rows = DTensor.from_local(
                rows,
                self.owned.device_mesh,
                self.owned.placements,
                run_check=False,
                shape=self.owned.shape,
                stride=self.owned.stride(),
            )
        self.owned.grad = rows

    def give_back(self) -> None:
        """Copy the optimizer's rows into the parameter, where they are not the same memory."""
        self.owned.grad = None
        if self.on_host:
            local(self.mine(self.parameter.detach())).copy_(local(self.owned.detach()), non_blocking=True)


class _Bridge:
    """Hooks around the optimizer's step: gradients in, new parameters out to every rank."""

    def __init__(self, pieces: Sequence[_Piece], mesh: DeviceMesh | None) -> None:
        self._pieces = pieces
        self._group = mesh.get_group() if mesh is not None else None

    def attach(self, optimizer: Optimizer) -> None:
        """Have every step of `optimizer` pass through here."""
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def refresh(self) -> None:
        """Take over the model's values, after something else has written them."""
        for piece in self._pieces:
            piece.take_values()

    def _before(self, *_: Any) -> None:
        for piece in self._pieces:
            piece.take_gradient()

    @torch.no_grad()
    def _after(self, *_: Any) -> None:
        """Gather the new rows of all ranks; communicates over the shard axis."""
        for piece in self._pieces:
            piece.give_back()
        if self._group is None:
            return
        sharded = {id(piece.parameter): piece for piece in self._pieces if piece.is_sharded}
        for bucket in in_buckets(piece.parameter for piece in sharded.values()):
            _gather_rows([sharded[id(parameter)] for parameter in bucket], self._group)


def _gather_rows(pieces: Sequence[_Piece], group: dist.ProcessGroup) -> None:
    """Bring the rows of all ranks together, in one collective for all pieces; communicates over `group`."""
    size = dist.get_world_size(group)
    padded = []
    for piece in pieces:
        rows = piece.mine(piece.parameter.detach()).flatten()
        full = piece.rows_per_rank * (piece.parameter.numel() // max(1, piece.rows))
        padded.append(nn.functional.pad(rows, (0, full - rows.numel())))
    mine = torch.cat(padded)
    everyone = mine.new_empty(size * mine.numel())
    gather_flat(everyone, mine, group)
    columns = everyone.view(size, -1).split([part.numel() for part in padded], dim=1)
    for piece, column in zip(pieces, columns, strict=True):
        whole = piece.parameter.detach()
        whole.copy_(column.reshape(-1)[: whole.numel()].view_as(whole))


def host_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the same ranks with tensors on the CPU; makes no groups, since nothing is ever sent over it."""
    from torch.distributed.device_mesh import DeviceMesh as Mesh

    if mesh.device_type == "cpu":
        return mesh
    return Mesh("cpu", mesh.mesh, mesh_dim_names=mesh.mesh_dim_names, _init_backend=False)
