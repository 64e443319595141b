"""Checks that the gradients of replicated parameters are equal on all tensor-parallel ranks.

A parameter that is replicated on every tp rank and acts on replicated activations gets the same gradient on all ranks.
A parameter that acts on a sharded activation between a column and a row module (in an activation function or a norm of
heads) gets a partial gradient of this rank's columns, which must be summed over tp by the rule "summed". The first
gradients show which case applies, for any model and any rules.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.errors import JobError, some_of
from shardwise.parallel.gradsync import local
from shardwise.torch_private.dispatch import DropoutBase, own_parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch.distributed.device_mesh import DeviceMesh


_CLOSE = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Relative difference of gradients that summation order can cause; partial gradients differ by far more."""
_CLOSE_IN_LOWER = 5e-2
_SAME_LOSS = 1e-5
"""Relative tolerance of losses, which ranks compute from the same values in the same order."""
_SMALL = 1e-5
"""Share of the full gradient norm below which a gradient is rounding noise, such as for a bias before softmax."""


def unequal_gradients(
    named: Iterable[tuple[str, nn.Parameter]],
    group: dist.ProcessGroup,
    dtype: torch.dtype,
    losses: Sequence[Tensor] = (),
) -> list[str]:
    """Return the names of replicated parameters whose gradients differ over the tp ranks; communicates over `group`.

    `group` is a host group, and `dtype` is the compute dtype. If `losses` differ between ranks, the forward passes
    differ and no sum is missing, so the result is empty.
    """
    replicated = [(name, local(each.grad)) for name, each in named if each.grad is not None and _is_replicated(each)]
    if not replicated:
        return []
    loss = sum((each.double().cpu() for each in losses), torch.zeros((), dtype=torch.float64))
    mine = torch.stack([loss.expand(3), *(_summary(gradient).cpu() for _, gradient in replicated)])
    largest, smallest = mine.clone(), mine.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    dist.all_reduce(smallest, dist.ReduceOp.MIN, group=group)
    if not bool(largest.isfinite().all() and smallest.isfinite().all()):
        return []  # the step is skipped, and its gradients are not comparable
    if float(largest[0, 0] - smallest[0, 0]) > _SAME_LOSS * float(largest[0, 0].abs()):
        return []
    largest, smallest = largest[1:], smallest[1:]
    norms = largest[:, 0]
    noise = _SMALL * float(norms.square().sum().sqrt())
    bound = _CLOSE.get(dtype, _CLOSE_IN_LOWER) * norms.clamp(min=noise)
    is_unequal = ((largest - smallest) > bound[:, None]).any(dim=1)
    unequal = []
    for (name, _), differs in zip(replicated, is_unequal.tolist(), strict=True):
        if differs:
            unequal.append(name)
    return unequal


def reject_unequal(names: list[str]) -> None:
    """Raise JobError if `names` is not empty, with a fix that contains the rule "summed" for these parameters."""
    if not names:
        return
    modules = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name.rpartition(".")[0]) for name in names)
    rules = ", ".join(f'"{module}": "summed"' for module in list(modules)[:3])
    raise JobError(
        f"gradients of replicated parameters differ between tensor-parallel ranks ({some_of(names)}), because"
        " these parameters are applied to sharded activations",
        code="support.tp-unequal-gradients",
        fix=f"add {{{rules}}} to Job(tensor_rules=...), which sums their gradients, or set tp=1",
    )


def _is_replicated(parameter: nn.Parameter) -> bool:
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ("tp",)
    placements = dict(zip(names, parameter.placements, strict=True))
    return "tp" in placements and placements["tp"].is_replicate()


def _summary(gradient: Tensor) -> Tensor:
    """Return the norm, sum and alternating sum of a gradient; partial gradients of two ranks differ in at least one."""
    flat = gradient.detach().double().flatten()
    signs = 1.0 - 2.0 * (torch.arange(len(flat), device=flat.device) % 2)
    root = max(1, len(flat)) ** 0.5  # scales sums to at most the norm, the unit of differences
    return torch.stack([flat.norm(), flat.sum() / root, (flat * signs).sum() / root])


# Dropout with tensor parallelism: masks of sharded activations differ between ranks, and all other masks are equal.


class ShardedRandom:
    """Uses different random numbers on each rank of a tensor-parallel mesh between `enter` and `leave`.

    Afterwards, the default generators continue as if one seed had been sampled, equally on all ranks if their CPU
    generators were equal. No state persists between regions, so a recomputed region samples the same numbers.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._index = mesh.get_local_rank()
        self._on_gpu = mesh.device_type == "cuda"
        self._outside: list[Tensor] | None = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def enter(self) -> None:
        """Seed the generators with a seed of this rank; has no effect inside a region."""
        if self._outside is not None:
            return
        seed = int(torch.randint(2**62, ()).item()) + 1 + self._index
        self._outside = [generator.get_state() for generator in self._generators()]
        for generator in self._generators():
            generator.manual_seed(seed)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def leave(self) -> None:
        """Restore the generator states from before `enter`; has no effect outside a region."""
        if self._outside is None:
            return
        for generator, state in zip(self._generators(), self._outside, strict=True):
            generator.set_state(state)
        self._outside = None

    def _generators(self) -> Iterator[torch.Generator]:
        yield torch.default_generator
        if self._on_gpu:
            yield torch.cuda.default_generators[torch.cuda.current_device()]


def uses_dropout(module: nn.Module) -> bool:
    """Return whether a module has a Dropout module or a config attribute with a dropout rate above 0."""
    for child in module.modules():
        if isinstance(child, DropoutBase) and child.p > 0:
            return True
        for owner in (child, getattr(child, "config", None)):
            for name, value in getattr(owner, "__dict__", {}).items():
                if ("dropout" in name or "pdrop" in name) and _is_rate(value):
                    return True
    return False


def _is_rate(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


# Tensor parallelism for torch's transformer layers, which read the parameters of their submodules.


def expose_parameters(module: nn.Module, plain: Callable[[Tensor | None], Tensor | None]) -> None:
    """Make torch's attention layers in `module` read the parameters of their output projection through `plain`.

    Disables the fused inference kernel of encoder layers, which reads the parameters of all submodules.
    """
    for child in module.modules():
        if isinstance(child, nn.TransformerEncoderLayer):
            child.activation_relu_or_gelu = 0  # an activation that is neither, which disables the fused kernel
        if isinstance(child, nn.MultiheadAttention):
            child.forward = _with_plain(child.out_proj, child.forward, plain)  # type: ignore[method-assign]


def _with_plain(
    projection: nn.Module, inner: Callable[..., Any], plain: Callable[[Tensor | None], Tensor | None]
) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        own = dict(own_parameters(projection))  # read by the attention as out_proj.weight
        for kind, parameter in own.items():
            own_parameters(projection)[kind] = plain(parameter)  # type: ignore[assignment]
        try:
            return inner(*args, **kwargs)
        finally:
            own_parameters(projection).update(own)

    return forward
