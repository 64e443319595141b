"""Construction of the optimizer, with states sharded over ranks (ZeRO-1) or offloaded to the host."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardwise.errors import JobError
from shardwise.parallel.collectives import gather_flat, in_buckets
from shardwise.parallel.gradsync import local
from shardwise.parallel.mixed_adamw import MixedAdamW
from shardwise.parallel.muon import MuonAdamW
from shardwise.parallel.parameter_rules import check_optimizer, check_sharded_updates, copy_attributes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.optim import Optimizer

    from shardwise.job.optimizers import OptimizerFactory
    from shardwise.plans import Precision

Named = list[tuple[str, nn.Parameter]]


@dataclass(frozen=True, kw_only=True)
class Optimized:
    """An optimizer and the parameters that it updates."""

    optimizer: Optimizer
    named: Named
    """(name, parameter) pairs that the optimizer updates: the model's parameters, or this rank's rows of them."""
    refresh: Callable[[], None] = lambda: None
    """Copy the model's values to the optimizer's parameters, or masters to the model; call it on every rank after other
    code changed the former, or a checkpoint the latter."""
    masters: dict[str, Tensor] = field(default_factory=dict)
    """fp32 master copies of bf16 parameters by name, whose values checkpoints store; `refresh` rounds them."""
    groups: tuple[tuple[str, ...], ...] = ()
    """Parameter names of each group, for optimizers whose groups contain other tensors than `named`."""
    first_settings: tuple[dict[str, Any], ...] = field(init=False)
    """Initial settings of each group, to detect later changes by the optimizer."""

    def __post_init__(self) -> None:
        first = [dict(group) for group in self.param_groups]
        for settings in first:
            settings.pop("params", None)
        object.__setattr__(self, "first_settings", tuple(first))

    @property
    def kind(self) -> str:
        """The class name of the optimizer, as written to reports and checkpoints."""
        return getattr(self.optimizer, "saved_as", type(self.optimizer).__name__)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups, with the learning rate as "lr"."""
        return self.optimizer.param_groups

    def group_names(self) -> list[list[str]]:
        """Return the names of the parameters in each of the optimizer's groups."""
        if self.groups:
            return [list(group) for group in self.groups]
        names = {id(parameter): name for name, parameter in self.named}
        found = []
        for group in self.optimizer.param_groups:
            members = map(id, group["params"])
            found.append([names[member] for member in members])
        return found


def make_optimizer(
    factory: OptimizerFactory,
    named: Named,
    *,
    shard_mesh: DeviceMesh | None,
    on_host: bool,
    replica_mesh: DeviceMesh | None = None,
    precision: Precision | None = None,
    is_captured: bool = False,
) -> Optimized:
    """Return the job's optimizer over `named`; call on every rank.

    With `shard_mesh`, the optimizer updates this rank's rows of each parameter (ZeRO-1). With `on_host`, its parameters
    and states are on the CPU. In both cases every step writes the new full values to the model's parameters. If FSDP2
    shards parameters over `replica_mesh`, the parameters that it does not shard become replicated DTensors, because
    optimizers cannot mix tensors and DTensors. If `precision` stores parameters or moments below fp32, AdamW is
    replaced by `MixedAdamW`, and also if it updates large parameters in a captured step.
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
    owned = []
    for name, parameter in named:
        piece = pieces.get(name)
        owned.append((name, parameter if piece is None else piece.owned))
    optimizer = factory(owned)
    check_optimizer(optimizer)
    if not isinstance(optimizer, MuonAdamW):  # it gathers the shards that it needs
        check_sharded_updates(optimizer)
    mixed = None
    if precision is not None and (precision.needs_mixed_optimizer or (is_captured and is_faster_compiled(optimizer))):
        optimizer = mixed = mixed_optimizer(optimizer, owned, precision)
    bridge = None
    if pieces:
        bridge = _Bridge(list(pieces.values()), shard_mesh)
        bridge.attach(optimizer)
    masters = {} if mixed is None else mixed.masters_of(owned)
    refresh = partial(_refresh, optimizer, mixed, bridge)
    return Optimized(optimizer=optimizer, named=owned, refresh=refresh, masters=masters)


_LARGE = 2**22
"""Mean elements of large parameters, a judgement: at 4 TB/s their update takes 30 us, many times a kernel's launch."""


def is_faster_compiled(optimizer: Optimizer) -> bool:
    """Return whether MixedAdamW updates the parameters of an AdamW faster in a captured step than torch's fused kernel.

    Its compiled kernels move 4.1 TB/s of fp32 parameters, gradients and moments on an H200, torch's fused one 3.5 TB/s:
    8.2 and 9.5 ms for 1.2 billion elements, each as a CUDA graph. Small parameters do not fill the GPU.
    """
    is_fused = type(optimizer) is torch.optim.AdamW and optimizer.defaults.get("fused")
    if not is_fused or _unsupported_options(optimizer):
        return False
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not all(each.is_cuda and each.dtype == torch.float32 for each in parameters):
        return False
    return sum(local(each).numel() for each in parameters) >= _LARGE * max(1, len(parameters))


def _unsupported_options(optimizer: Optimizer) -> list[str]:
    """Return the options of an AdamW that MixedAdamW does not have; groups may differ in them."""
    found: set[str] = set()
    for group in optimizer.param_groups:
        found.update(name for name in ("amsgrad", "maximize") if group.get(name))
        if not group.get("decoupled_weight_decay", True):
            found.add("decoupled_weight_decay=False")
    return sorted(found)


def mixed_optimizer(optimizer: Optimizer, named: Named, precision: Precision) -> MixedAdamW:
    """Return `optimizer` as a MixedAdamW; raises JobError unless it is torch's AdamW."""
    options = _unsupported_options(optimizer)
    if type(optimizer) is not torch.optim.AdamW or options:
        used = " with ".join([type(optimizer).__name__, *options])
        raise JobError(
            f"precision ({precision}) requires AdamW, but the job's optimizer is {used}",
            code="optimizer.precision-unsupported",
            fix="use sw.adamw, or set precision.parameter and precision.optimizer to fp32",
        )
    return MixedAdamW(optimizer, named, precision)


def _refresh(optimizer: Optimizer, mixed: MixedAdamW | None, bridge: _Bridge | None) -> None:
    """Bring parameters, masters and states together after other code changed the model or loaded a checkpoint."""
    if mixed is None:
        widen_states(optimizer)
    else:
        mixed.publish()
        mixed.store_states()
    if bridge is not None:
        bridge.refresh(is_published=mixed is not None and bool(mixed.masters))


def widen_states(optimizer: Optimizer) -> None:
    """Convert states of AdamW that a checkpoint saved in a lower precision to the dtype of their parameter."""
    if type(optimizer) is not torch.optim.AdamW:
        return  # a custom optimizer may store bf16 states by design
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dtype == torch.bfloat16 and value.shape == parameter.shape:
                state[key] = value.to(parameter.dtype)


class _Piece:
    """This rank's rows of one parameter, as seen by the optimizer."""

    def __init__(
        self, parameter: nn.Parameter, mesh: DeviceMesh | None, *, on_host: bool, is_sharded: bool = True
    ) -> None:
        """Create the optimizer's parameter; with `mesh`, it is a DTensor, sharded by rows if `is_sharded`."""
        self.parameter = parameter
        self.is_sharded = mesh is not None and is_sharded
        self.on_host = on_host
        self.rows = parameter.shape[0] if parameter.ndim else 0
        num_shards, index = 1, 0
        if mesh is not None and is_sharded:
            num_shards, index = mesh.size(), mesh.get_local_rank()
        self.rows_per_rank = -(-self.rows // num_shards)
        self.first = min(self.rows, index * self.rows_per_rank)
        self.num_rows = min(self.rows, self.first + self.rows_per_rank) - self.first
        mine = self.mine(parameter.detach())
        owned = local(mine)
        if on_host:
            owned = owned.cpu().clone()
        wrapped: Tensor = owned
        if mesh is not None:
            placements = [Shard(0)] if is_sharded else [Replicate()] * mesh.ndim
            wrapped = _distributed(owned, mesh, placements, parameter, on_host=on_host)
        elif isinstance(mine, DTensor):
            wrapped = _distributed(owned, mine.device_mesh, mine.placements, mine, on_host=on_host)
        self.owned = nn.Parameter(wrapped, requires_grad=parameter.requires_grad)
        copy_attributes(vars(parameter), self.owned)
        self.owned.grad_dtype = parameter.grad_dtype

    def mine(self, whole: Tensor) -> Tensor:
        """Return this rank's rows of a tensor with the parameter's shape, as a view."""
        if not self.is_sharded:
            return whole
        return whole.narrow(0, self.first, self.num_rows)

    def take_values(self) -> None:
        """Copy this rank's rows of the model's parameter to the optimizer's if the latter is in host memory."""
        if self.on_host:
            local(self.owned.detach()).copy_(local(self.mine(self.parameter.detach())))

    def take_gradient(self) -> None:
        """Set the gradient of the optimizer's parameter to this rank's rows of the model's gradient."""
        if self.parameter.grad is None:
            self.owned.grad = None
            return
        rows = local(self.mine(self.parameter.grad))
        if self.on_host:
            rows = rows.to("cpu")
        if isinstance(self.owned, DTensor):
            rows = _distributed(rows, self.owned.device_mesh, self.owned.placements, self.owned, on_host=self.on_host)
        self.owned.grad = rows

    def write_back(self) -> None:
        """Copy the optimizer's parameter to the model's parameter if the former is in host memory."""
        self.owned.grad = None
        if self.on_host:
            local(self.mine(self.parameter.detach())).copy_(local(self.owned.detach()), non_blocking=True)


def _distributed(shard: Tensor, mesh: DeviceMesh, placements: Sequence[Any], like: Tensor, *, on_host: bool) -> DTensor:
    """Return a DTensor with the shape of `like` and this rank's `shard`; does not communicate."""
    if on_host:
        mesh = host_mesh(mesh)
    return DTensor.from_local(shard, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())


class _Bridge:
    """Optimizer step hooks that set the gradients of the pieces and all-gather the updated parameters."""

    def __init__(self, pieces: Sequence[_Piece], mesh: DeviceMesh | None) -> None:
        self._pieces = pieces
        self._group = None if mesh is None else mesh.get_group()

    def attach(self, optimizer: Optimizer) -> None:
        """Register the hooks on `optimizer`."""
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def refresh(self, *, is_published: bool = False) -> None:
        """Copy the model's values to the optimizer's parameters, or the other way round if `is_published`.

        The latter all-gathers the rows of masters that were loaded from a checkpoint; call on every rank.
        """
        if is_published:
            self._after()
            return
        for piece in self._pieces:
            piece.take_values()

    def _before(self, *_: Any) -> None:
        for piece in self._pieces:
            piece.take_gradient()

    @torch.no_grad()
    def _after(self, *_: Any) -> None:
        """All-gather the updated rows of all ranks; communicates over the shard axis."""
        for piece in self._pieces:
            piece.write_back()
        if self._group is None:
            return
        sharded = {id(piece.parameter): piece for piece in self._pieces if piece.is_sharded}
        for bucket in in_buckets(piece.parameter for piece in sharded.values()):
            _gather_rows([sharded[id(parameter)] for parameter in bucket], self._group)


def _gather_rows(pieces: Sequence[_Piece], group: dist.ProcessGroup) -> None:
    """All-gather the rows of all ranks in one collective for all pieces; communicates over `group`."""
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
    """Return a mesh of the same ranks for CPU tensors, without process groups, since it never communicates."""
    if mesh.device_type == "cpu":
        return mesh
    return DeviceMesh("cpu", mesh.mesh, mesh_dim_names=mesh.mesh_dim_names, _init_backend=False)
