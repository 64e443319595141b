"""Muon and AdamW as one optimizer, for parameters that are full, sharded by ZeRO or FSDP2, or tensor-parallel.

Muon orthogonalizes a whole matrix, so an update of shards needs the shards of all ranks. Momentum stays sharded. The
ranks of a mesh axis share the work: an all-to-all sends the shards of each matrix to one rank, which orthogonalizes it,
and a second all-to-all returns the shards of the result. With several sharded axes (fsdp and tp), this is repeated for
each axis. The matrices travel in the dtype of the Newton-Schulz iterations. The invariant: every update is computed
from the same full matrix as in one process. Reference: torch.optim.Muon and torch.optim.AdamW.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from shardwise.job.optimizers import Muon, fastest_kind
from shardwise.parallel.collectives import BUCKET_BYTES
from shardwise.parallel.gradsync import local
from shardwise.parallel.muon_matrices import find_matrices

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from shardwise.job.optimizers import OptimizerFactory
    from shardwise.parallel.muon_matrices import Matrix

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def for_model(factory: OptimizerFactory, module: nn.Module) -> OptimizerFactory:
    """Return `sw.muon` with the matrices of a model, and any other factory unchanged.

    `module` is the full model, before it is split into stages; the names of the parameters must be those of `module`.
    """
    if not isinstance(factory, Muon):
        return factory
    matrices = find_matrices(module, factory)
    return lambda named: MuonAdamW(named, factory, matrices)


class MuonAdamW(Optimizer):
    """Muon for the given matrices and AdamW for all other parameters; `step` communicates over sharded axes.

    It has the same three groups on every pipeline stage: matrices, other parameters with weight decay, and norms and
    biases without. A group may be empty.
    """

    def __init__(
        self, named: Iterable[tuple[str, nn.Parameter]], settings: Muon, matrices: Mapping[str, Matrix]
    ) -> None:
        self._matrices: dict[nn.Parameter, Matrix] = {}
        others: list[nn.Parameter] = []
        for name, parameter in named:
            if name in matrices:
                self._matrices[parameter] = matrices[name]
            else:
                others.append(parameter)
        kind = fastest_kind([{"params": others}], fused=settings.fused, fuses_shards=True)
        shared = {
            "lr": settings.adamw_lr,
            "betas": settings.adamw_betas,
            "eps": settings.adamw_eps,
            "fused": kind.get("fused"),
            "foreach": kind.get("foreach"),
        }
        decayed = [each for each in others if each.ndim > 1]
        vectors = [each for each in others if each.ndim <= 1]
        groups: list[dict[str, Any]] = [
            {
                "params": list(self._matrices),
                "lr": settings.lr,
                "weight_decay": settings.weight_decay,
                "momentum": settings.momentum,
                "nesterov": settings.nesterov,
                "eps": settings.eps,
                "ns_steps": settings.ns_steps,
                "ns_coefficients": list(settings.ns_coefficients),
                "ns_dtype": settings.ns_dtype,
                "adjust_lr": settings.adjust_lr,
            },
            {"params": decayed, "weight_decay": settings.adamw_weight_decay, **shared},
            {"params": vectors, "weight_decay": 0.0, **shared},
        ]
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters with gradients; communicates over the sharded axes of matrices, on every rank."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        matrices, *others = self.param_groups
        weights = [parameter for parameter in matrices["params"] if parameter.grad is not None]
        for batch in _batches([_Weight(each, self._matrices[each], matrices) for each in weights]):
            self._update_matrices(batch, matrices)
        for group in others:
            self._update_others(group)
        return loss

    def _update_matrices(self, weights: Sequence[_Weight], group: Mapping[str, Any]) -> None:
        """Update weights whose shards lie on the same axes by Muon; communicates over these axes."""
        updates = [self._momentum(weight).to(weight.dtype) for weight in weights]
        updates = _orthogonalized(updates, weights, 0)
        for weight, update in zip(weights, updates, strict=True):
            values = local(weight.parameter.detach())
            values.mul_(1 - group["lr"] * group["weight_decay"])
            for ratio, change in weight.scaled(update):
                values.add_(change, alpha=-(group["lr"] * ratio))

    def _momentum(self, weight: _Weight) -> Tensor:
        """Return this rank's shard of the momentum, after adding the gradient to it; does not communicate."""
        state = self.state[weight.parameter]
        gradient: Any = weight.parameter.grad
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        mean, change = local(state["momentum_buffer"]), local(gradient)
        mean.lerp_(change, 1 - weight.group["momentum"])
        return change.lerp(mean, weight.group["momentum"]) if weight.group["nesterov"] else mean

    def _update_others(self, group: Mapping[str, Any]) -> None:
        """Update a group by AdamW, elementwise."""
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        states = [self._moments(parameter, group) for parameter in parameters]
        adamw(
            parameters,
            [parameter.grad for parameter in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=group["fused"],
            foreach=group["foreach"],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _moments(self, parameter: nn.Parameter, group: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the state of a parameter, created as torch.optim.AdamW does: a fused step count is on the device."""
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            device = parameter.device if group["fused"] else torch.device("cpu")
            is_wide = not group["fused"] and torch.get_default_dtype() == torch.float64
            dtype = torch.float64 if is_wide else torch.float32
            state["step"] = torch.zeros((), dtype=dtype, device=device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state


def orthogonalize(matrix: Tensor, *, coefficients: Sequence[float], steps: int, eps: float) -> Tensor:
    """Return a matrix with the same singular vectors and singular values near 1, in the dtype of `matrix`.

    Each iteration maps a singular value s to a s + b s^3 + c s^5, with the products of torch.optim.Muon in their order.
    """
    a, b, c = coefficients
    is_tall = matrix.size(0) > matrix.size(1)
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=eps)  # all singular values at most 1
    for _ in range(steps):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.T if is_tall else x


# The shards of a weight: the axes that shard it, its shape after each gather, and exchanges over one axis.


class _Axis(NamedTuple):
    """A mesh axis that shards a weight."""

    group: dist.ProcessGroup
    size: int
    coordinate: int
    dim: int
    """The dimension of the weight that the axis shards."""

    def lengths(self, length: int) -> list[int]:
        """Return the size of each rank's shard of a dimension, as torch.chunk splits it."""
        longest = -(-length // self.size)
        return [max(0, min(longest, length - rank * longest)) for rank in range(self.size)]


@dataclass(frozen=True, eq=False)
class _Weight:
    """A weight that Muon updates, with the options of its group."""

    parameter: nn.Parameter
    matrix: Matrix
    group: Mapping[str, Any]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the Newton-Schulz iterations."""
        name = self.group["ns_dtype"]
        if name == "auto":
            name = "fp64" if self.parameter.dtype == torch.float64 else "bf16"
        return _DTYPES[name]

    @cached_property
    def axes(self) -> list[_Axis]:
        """The axes that shard the weight, in the order in which gathers undo them."""
        if not isinstance(self.parameter, DTensor):
            return []
        mesh, found, is_strided = self.parameter.device_mesh, [], False
        for index, placement in enumerate(self.parameter.placements):
            dim = getattr(placement, "dim", None)
            if dim is not None:
                found.append(_Axis(mesh.get_group(index), mesh.size(index), mesh.get_local_rank(index), dim))
                is_strided = is_strided or hasattr(placement, "split_factor")
        # FSDP2 shards the shards of tp along the same dimension (a strided shard), so the first axis is undone first.
        # Otherwise DTensor shards by the first axis first.
        return found if is_strided else found[::-1]

    @cached_property
    def shapes(self) -> list[list[int]]:
        """The shape of this rank's shard, then the shape after the gather over each axis."""
        shapes = [list(self.parameter.shape)]
        for axis in reversed(self.axes):
            shape = list(shapes[0])
            shape[axis.dim] = axis.lengths(shape[axis.dim])[axis.coordinate]
            shapes.insert(0, shape)
        return shapes

    def shard_shapes(self, depth: int) -> list[list[int]]:
        """Return the shapes of the shards of all ranks of the axis at `depth`."""
        axis, whole = self.axes[depth], self.shapes[depth + 1]
        shapes = []
        for length in axis.lengths(whole[axis.dim]):
            shape = list(whole)
            shape[axis.dim] = length
            shapes.append(shape)
        return shapes

    def orthogonalized(self, weight: Tensor) -> Tensor:
        """Return the full update; matrices of a fused weight are orthogonalized one by one."""
        result = torch.empty_like(weight)
        for part, target in zip(self.matrix.parts(weight), self.matrix.parts(result), strict=True):
            found = orthogonalize(
                part.flatten(0, 1),
                coefficients=self.group["ns_coefficients"],
                steps=self.group["ns_steps"],
                eps=self.group["eps"],
            )
            target.copy_(found.unflatten(0, target.shape[:2]))
        return result

    def scaled(self, update: Tensor) -> list[tuple[float, Tensor]]:
        """Return pairs of a factor of the learning rate and an update; this rank's shard adds them one by one.

        The matrices of a fused weight may have different factors. Each has its own update, which is 0 elsewhere.
        """
        ratios = self.matrix.ratios(self.parameter.shape, self.group["adjust_lr"])
        if len(set(ratios)) == 1:
            return [(ratios[0], update)]
        dim = self.matrix.outputs_dim
        indices = self.matrix.part_indices(self.parameter.shape)
        for axis in reversed(self.axes):
            if axis.dim == dim:
                indices = indices.split(axis.lengths(len(indices)))[axis.coordinate]
        factors = torch.tensor(ratios, dtype=torch.float64)[indices].to(update.device).unsqueeze(1 - dim)
        return [(ratio, torch.where(factors == ratio, update, 0)) for ratio in dict.fromkeys(ratios)]


def _batches(weights: Sequence[_Weight]) -> Iterator[list[_Weight]]:
    """Yield weights of one dtype and the same axes that are exchanged together, in the same order on every rank.

    Weights of similar size follow each other, since the ranks of an axis wait for the largest. A batch has a multiple
    of one weight per rank, and at most BUCKET_BYTES per rank unless one weight is larger.
    """
    groups: dict[tuple[Any, ...], list[_Weight]] = {}
    for weight in weights:
        key = (weight.dtype, *(axis.group.group_name for axis in weight.axes))
        groups.setdefault(key, []).append(weight)
    for members in groups.values():
        members.sort(key=lambda weight: weight.parameter.numel(), reverse=True)
        num_ranks = math.prod(axis.size for axis in members[0].axes)
        batch: list[_Weight] = []
        num_bytes = 0
        for first in range(0, len(members), num_ranks):
            added = members[first].parameter.numel() * members[first].dtype.itemsize
            if batch and (num_ranks == 1 or num_bytes + added > BUCKET_BYTES):
                yield batch
                batch, num_bytes = [], 0
            batch += members[first : first + num_ranks]
            num_bytes += added
        yield batch


def _orthogonalized(shards: list[Tensor], weights: Sequence[_Weight], depth: int) -> list[Tensor]:
    """Return this rank's shards of the orthogonalized weights; communicates over the axes from `depth` on.

    The ranks of an axis own the weights in turn. Each orthogonalizes its own.
    """
    if not weights or depth == len(weights[0].axes):
        return [weight.orthogonalized(shard) for weight, shard in zip(weights, shards, strict=True)]
    axis = weights[0].axes[depth]
    owned = weights[axis.coordinate :: axis.size]
    gathered = _to_owners(shards, weights, depth)
    return _from_owners(_orthogonalized(gathered, owned, depth + 1), weights, depth)


def _to_owners(shards: Sequence[Tensor], weights: Sequence[_Weight], depth: int) -> list[Tensor]:
    """Return the weights that this rank owns, gathered over the axis at `depth`; communicates over this axis."""
    axis = weights[0].axes[depth]
    sent = [list(shards[owner :: axis.size]) for owner in range(axis.size)]
    owned = weights[axis.coordinate :: axis.size]
    shapes = [weight.shard_shapes(depth) for weight in owned]
    wanted = [[each[rank] for each in shapes] for rank in range(axis.size)]
    by_rank = _exchanged(sent, wanted, axis.group, like=shards[0])
    return [
        torch.cat([received[index] for received in by_rank], dim=weight.axes[depth].dim)
        for index, weight in enumerate(owned)
    ]


def _from_owners(results: Sequence[Tensor], weights: Sequence[_Weight], depth: int) -> list[Tensor]:
    """Return this rank's shards of the weights that all ranks own; communicates over the axis at `depth`."""
    axis = weights[0].axes[depth]
    pieces = []
    for weight, result in zip(weights[axis.coordinate :: axis.size], results, strict=True):
        own = weight.axes[depth]
        pieces.append(result.split(own.lengths(result.shape[own.dim]), dim=own.dim))
    sent = [[each[rank] for each in pieces] for rank in range(axis.size)]
    wanted = [[weight.shapes[depth] for weight in weights[owner :: axis.size]] for owner in range(axis.size)]
    like = torch.empty(0, dtype=weights[0].dtype, device=weights[0].parameter.device)
    by_owner = _exchanged(sent, wanted, axis.group, like=like)
    return [by_owner[index % axis.size][index // axis.size] for index in range(len(weights))]


def _exchanged(
    sent: Sequence[Sequence[Tensor]],
    shapes: Sequence[Sequence[Sequence[int]]],
    group: dist.ProcessGroup,
    *,
    like: Tensor,
) -> list[list[Tensor]]:
    """Send the tensors sent[r] to each rank r and return those with shapes[r] from it; communicates over `group`.

    All tensors have the dtype and device of `like`.
    """
    flat = [[tensor.reshape(-1) for tensor in tensors] for tensors in sent]
    # A rank that owns no weight of a batch sends nothing, and torch.cat needs a tensor.
    buffer = torch.cat([like.new_empty(0), *(tensor for tensors in flat for tensor in tensors)])
    numels = [[math.prod(shape) for shape in wanted] for wanted in shapes]
    totals = [sum(each) for each in numels]
    received = buffer.new_empty(sum(totals))
    num_sent = [sum(tensor.numel() for tensor in tensors) for tensors in flat]
    dist.all_to_all_single(received, buffer, totals, num_sent, group=group)
    found = []
    for tensors, wanted, counts in zip(received.split(totals), shapes, numels, strict=True):
        found.append([each.view(*shape) for each, shape in zip(tensors.split(counts), wanted, strict=True)])
    return found
