"""Gradients of replicated parameters under tensor parallelism: equal on all tp ranks, or a sum over them is missing.

A parameter that is whole on every tp rank and acts on whole activations gets the same gradient on all of them. One that
acts on an activation between a column and a row module (inside an activation function, a norm of heads) gets a partial
gradient, that of the rank's own columns, which has to be summed over tp: by the rule "summed". The first gradients show
which is which, whatever the model and whoever wrote its rules.
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
from shardwise.torch_private.modules import DropoutBase, own_parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch.distributed.device_mesh import DeviceMesh


_CLOSE = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Relative difference that another order of summation explains; partial gradients differ by themselves."""
_CLOSE_IN_LOWER = 5e-2
_SAME_LOSS = 1e-5
"""Ranks compute their loss from the same numbers, in the same order."""
_SMALL = 1e-5
"""Of the norm of the whole gradient: gradients below are rounding noise, as that of a bias before a softmax."""


def unequal_gradients(
    named: Iterable[tuple[str, nn.Parameter]],
    group: dist.ProcessGroup,
    dtype: torch.dtype,
    losses: Sequence[Tensor] = (),
) -> list[str]:
    """Return the replicated parameters whose gradients differ over the tp ranks of `group`; communicates over it.

    `group` is on the host, and `dtype` what the model computes in. Where ranks do not even agree on their `losses`, it
    is forward that differs, not a sum that is missing: then there are none.
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
        return []  # the step is skipped, and its gradients show nothing
    if float(largest[0, 0] - smallest[0, 0]) > _SAME_LOSS * float(largest[0, 0].abs()):
        return []
    largest, smallest = largest[1:], smallest[1:]
    norms = largest[:, 0]
    noise = _SMALL * float(norms.square().sum().sqrt())
    bound = _CLOSE.get(dtype, _CLOSE_IN_LOWER) * norms.clamp(min=noise)
    is_unequal = ((largest - smallest) > bound[:, None]).any(dim=1)
    return [name for (name, _), unequal in zip(replicated, is_unequal.tolist(), strict=True) if unequal]


def refuse_unequal(names: list[str]) -> None:
    """Raise if there are such parameters, with the rule that sums their gradients."""
    if not names:
        return
    modules = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name.rpartition(".")[0]) for name in names)
    rules = ", ".join(f'"{module}": "summed"' for module in list(modules)[:3])
    raise JobError(
        f"under tp the gradients of whole parameters differ between ranks ({some_of(names)}): they act on activations"
        " that are split over ranks",
        code="support.tp-unequal-gradients",
        fix=f"add {{{rules}}} to the rules in Job(tensor_rules=...), which sums their gradients, or use tp 1",
    )


def _is_replicated(parameter: nn.Parameter) -> bool:
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ("tp",)
    places = dict(zip(names, parameter.placements, strict=True))
    return "tp" in places and places["tp"].is_replicate()


def _summary(gradient: Tensor) -> Tensor:
    """Return norm, sum, and sum with alternating signs: partial gradients of two ranks do not have all in common."""
    flat = gradient.detach().double().flatten()
    signs = 1.0 - 2.0 * (torch.arange(len(flat), device=flat.device) % 2)
    root = max(1, len(flat)) ** 0.5  # so that a sum is at most the norm, in whose units differences are measured
    return torch.stack([flat.norm(), flat.sum() / root, (flat * signs).sum() / root])


# Random masks under tensor parallelism: different where activations are split over ranks, equal elsewhere.


class ShardedRandom:
    """Gives each rank of a tensor-parallel mesh random numbers of its own between `enter` and `leave`.

    Outside, the default generators run on as if only one seed had been sampled inside, equal on all ranks as
    long as their CPU generators are. Nothing is kept from one region to the next: a recomputed one samples the same.
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
        """Continue with the generators from before `enter`; nothing happens outside already."""
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
    """Whether a module drops anything at random: a Dropout, or a config attribute named after one, above 0."""
    for child in module.modules():
        if isinstance(child, DropoutBase) and child.p > 0:
            return True
        for holder in (child, getattr(child, "config", None)):
            named = vars(holder) if hasattr(holder, "__dict__") else {}
            if any(_is_rate(value) for name, value in named.items() if "dropout" in name or "pdrop" in name):
                return True
    return False


def _is_rate(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


# torch's own transformer layers under tensor parallelism: they read the parameters of modules inside them.


def lend_parameters(module: nn.Module, plain: Callable[[Tensor | None], Tensor | None]) -> None:
    """Let torch's attention layers in `module` find plain parameters in their projection, made by `plain` at each call.

    Encoder layers lose their fused inference kernel, which reads the parameters of all modules inside.
    """
    for child in module.modules():
        if isinstance(child, nn.TransformerEncoderLayer):
            child.activation_relu_or_gelu = 0  # what the layer takes for "neither", and so for "not fused"
        if isinstance(child, nn.MultiheadAttention):
            child.forward = _with_plain(child.out_proj, child.forward, plain)  # type: ignore[method-assign]


def _with_plain(
    projection: nn.Module, inner: Callable[..., Any], plain: Callable[[Tensor | None], Tensor | None]
) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        own = dict(own_parameters(projection))  # what the attention reads as out_proj.weight
        for kind, parameter in own.items():
            own_parameters(projection)[kind] = plain(parameter)  # type: ignore[assignment]
        try:
            return inner(*args, **kwargs)
        finally:
            own_parameters(projection).update(own)

    return forward
