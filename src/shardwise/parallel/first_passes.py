"""Checks of the first passes: weights that forward changes, and batches of model-parallel peers.

In one process a forward pass may write to parameters: momentum teachers, clamped weights, unit norms. Where every rank
has them whole (ddp, ZeRO-1) that stays right, since all ranks write the same. FSDP2 frees what a unit's forward wrote
with the gathered copy, a pipeline runs other micro-batches before backward, and an optimizer on the host overwrites it:
the first two are refused by name, the third takes the values over before each step. With gradient accumulation, forward
may write only what it would write once (a clamp), not what adds up (a moving average).

The first two steps are watched by fingerprints of all values around each forward pass, two reductions per parameter:
version counters miss what is written through `.data`.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardwise.errors import JobError, some_of
from shardwise.parallel.gradsync import local
from shardwise.recorder.fingerprint import fingerprints
from shardwise.torch_private.dispatch import call_after_backward, tree_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

    from shardwise.parallel.optimizer import Optimized
    from shardwise.plans import Plan


_STEPS = 2
"""A teacher that starts as a copy of its student changes in the second step only."""
_ROUNDINGS = 64
"""Rounding errors by which writing the same once more may move a value: a norm of 1 is 1 but for those."""
_CHUNK = 1 << 22
_DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}

Prints = dict[str, tuple[Tensor, int]]
"""Sum and norm of each parameter, and where its memory begins."""


def watch_forward(stages: Sequence[nn.Module], plan: Plan, optimized: Optimized) -> None:
    """Have the first two steps refuse, or make right, a forward pass that changes parameters; on every rank.

    A compiled forward is not watched: a hook in it would be compiled too.
    """
    if plan.compile != "none":
        return
    watch = _VersionWatch(plan, optimized)
    for stage in stages:
        for name, submodule in stage.named_modules():
            is_unit = isinstance(submodule, FSDPModule)
            if is_unit or (submodule is stage and plan.zero < 2):
                watch.attach(name, submodule)
    watch.end_after_steps(optimized.optimizer)


class _VersionWatch:
    """Compares the values of parameters before and after forward."""

    def __init__(self, plan: Plan, optimized: Optimized) -> None:
        self._plan = plan
        self._optimized = optimized
        self._before: dict[str, Prints] = {}
        self._handles: list[RemovableHandle] = []
        self._steps = 0
        self._passes: dict[str, int] = {}
        """Forward passes of each unit in this step."""
        self._takes_over = False

    def attach(self, name: str, module: nn.Module) -> None:
        """Watch every forward pass of a unit; FSDP2 gathers before the first hook here and frees after the second."""

        def before(submodule: nn.Module, *_: Any) -> None:
            if submodule.training and torch.is_grad_enabled():
                self._before[name] = _prints(submodule)

        def after(submodule: nn.Module, *_: Any) -> None:
            first = self._before.pop(name, None)
            if first is not None:
                self._judge(name, first, _prints(submodule))

        self._handles.append(module.register_forward_pre_hook(before))
        self._handles.append(module.register_forward_hook(after, prepend=True))

    def end_after_steps(self, optimizer: Optimizer) -> None:
        """Stop watching when the optimizer has made its first steps."""

        def count(*_: Any) -> None:
            self._steps += 1
            self._passes.clear()
            if self._steps == _STEPS:
                for each in self._handles:
                    each.remove()

        optimizer.register_step_post_hook(count)  # stays: one cannot be removed while torch goes through them

    def _judge(self, unit: str, before: Prints, after: Prints) -> None:
        number = self._passes[unit] = self._passes.get(unit, 0) + 1
        changed = _changed(before, after, roundings=0 if number == 1 else _ROUNDINGS)
        if not changed:
            return
        plan = self._plan
        names = some_of(f"{unit}.{name}" if unit else name for name in changed)
        if plan.zero >= 2:
            raise _refusal(names, f"zero = {plan.zero} gathers them for forward and frees that copy")
        if plan.layout.pp > 1:
            raise _refusal(names, "a pipeline runs forward of other micro-batches before backward")
        if number > 1:
            raise _refusal(names, f"again in each of the {plan.accumulation} forward passes of a step")
        trained = {name for name, _ in self._optimized.named}
        moved = [name for name in changed if before[name][1] != after[name][1] and name in trained]
        on_host = plan.offload.optimizer != "none"
        if plan.zero == 1 and moved and not on_host:
            raise _refusal(some_of(moved), "by new memory (`.data = ...`), where zero = 1 keeps the old")
        if on_host and not self._takes_over:
            self._takes_over = True
            self._optimized.optimizer.register_step_pre_hook(lambda *_: self._optimized.refresh())


def _refusal(names: str, fact: str) -> JobError:
    return JobError(
        f"forward changes the values of {names}: {fact}",
        code="support.forward-changes-weights",
        fix="leave weights as they are in forward, or use --plan ddp with accumulation = 1",
    )


@torch.no_grad()
def written_parameters(module: nn.Module, forward: Callable[[nn.Module], object]) -> list[str]:
    """Return the parameters of a meta model that a forward pass writes to, in eval or in train mode.

    A version counter shows what is written, which needs no values. Empty for a model that cannot run without them: the
    first step of training looks again.
    """
    versions = {name: parameter._version for name, parameter in module.named_parameters()}  # noqa: SLF001 - documented
    was_training = module.training
    try:
        for mode in (False, True):
            module.train(mode)
            forward(module)
    except Exception:  # noqa: BLE001 - any model may fail in any way on tensors without values
        return []
    finally:
        module.train(was_training)
    return [name for name, parameter in module.named_parameters() if parameter._version != versions[name]]  # noqa: SLF001


@torch.no_grad()
def _prints(module: nn.Module) -> Prints:
    found = {}
    for name, parameter in module.named_parameters():
        if parameter.dtype in _DTYPES and not _is_shard(parameter):
            value = local(parameter.detach())
            found[name] = _sum_and_norm(value), value.data_ptr()
    return found


def _sum_and_norm(value: Tensor) -> Tensor:
    """Return both in fp64, a chunk at a time: torch casts what it reduces into a copy."""
    chunks = value.reshape(-1).split(_CHUNK)
    sums = torch.stack([chunk.sum(dtype=torch.float64) for chunk in chunks])
    norms = torch.stack([torch.linalg.vector_norm(chunk, dtype=torch.float64) for chunk in chunks])
    return torch.stack([sums.sum(), torch.linalg.vector_norm(norms)])


def _is_shard(parameter: nn.Parameter) -> bool:
    """Whether FSDP2 shows its shard now: that belongs to another unit, and what is written to it stays."""
    if not isinstance(parameter, DTensor):
        return False
    return bool({"shard", "replicate"} & set(parameter.device_mesh.mesh_dim_names or ()))


def _changed(before: Prints, after: Prints, *, roundings: int) -> list[str]:
    """Name what differs by more than `roundings` rounding errors of fp32 or, for fp64, of that."""
    common = [name for name in before if name in after]
    if not common:
        return []
    first, last = (torch.stack([each[name][0] for name in common]).cpu() for each in (before, after))
    allowed = roundings * torch.finfo(torch.float32).eps * first.abs().amax(dim=1, keepdim=True)
    is_same = ((last - first).abs() <= allowed) | (first.isnan() & last.isnan())
    return [name for name, same in zip(common, is_same.all(dim=1).tolist(), strict=True) if not same]


# Inputs of model-parallel peers: ranks that share one model must be fed one batch.
#
# Tensor-parallel ranks add up partial results of the same rows. With different rows, or different labels, each of
# them trains on a mixture and their replicated parameters drift apart, with no error. The first passes are compared
# on all peers at once, so that every one of them refuses.


CHECKED_PASSES = 3
"""Peers that read different streams differ in the first batch; a few more find those that diverge after it."""

_CLOSE = 1e-3
"""Gradients of peers may differ by the order of a sum, those of different labels differ by themselves."""


def refuse_different(what: str, mine: Any, group: dist.ProcessGroup, *, code: str, fix: str) -> None:
    """Raise on every rank of `group` if `mine` is not equal on all of them; communicates over it, on the host."""
    (first, value), *rest = gathered(mine, group)
    refuse_peers([rank for rank, theirs in rest if theirs != value], f"{what} than rank {first}", code=code, fix=fix)


def refuse_peers(ranks: list[int], what: str, *, code: str, fix: str) -> None:
    """Raise if there are such ranks; called with the same ones on all of their peers."""
    if ranks:
        named = f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} are"
        raise JobError(f"{named} fed {what}, and they share one model", code=code, fix=fix)


def gathered(mine: Any, group: dist.ProcessGroup) -> list[tuple[int, Any]]:
    """Return what every rank of `group` hands in, with its rank; communicates over it, on the host."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, mine, group=group)
    return list(zip(dist.get_process_group_ranks(group), values, strict=True))


def watch_inputs(module: nn.Module, group: dist.ProcessGroup, after_backward: Callable[[], None]) -> None:
    """Compare what `module` is called with, and the gradients of what it returns, over `group` in the first passes.

    For tensor parallelism in a loop of one's own, where nothing else knows the batch; forward and backward of these
    passes communicate over the group, on the host. `after_backward` is called when the first backward ends.
    """
    passes: Counter[bool] = Counter()
    waiting = [after_backward]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before(_module: nn.Module, args: Any, kwargs: Any) -> None:
        passes[module.training] += 1
        if passes[module.training] > CHECKED_PASSES:
            return
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        forms = [(tuple(leaf.shape), str(leaf.dtype)) for leaf in given]
        refuse_different("another input", (forms, fingerprints(given)), group, code="data.peer-inputs-differ", fix=_FIX)

    def compare(gradient: Tensor) -> None:
        _compare_gradient(gradient, group)
        while waiting:
            call_after_backward(waiting.pop())

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def after(_module: nn.Module, _args: Any, output: Any) -> None:
        if passes[module.training] > CHECKED_PASSES:
            return
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(compare)

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after)


_FIX = (
    "feed tensor-parallel ranks the same batch: read samples by plan.layout.data_index(world.rank), or use build_step"
)


def _compare_gradient(gradient: Tensor, group: dist.ProcessGroup) -> None:
    """Refuse gradients of an output that differ: peers computed their losses from different labels."""
    rows = gradient.detach().double()
    norms = rows.flatten(1).norm(dim=1) if rows.ndim > 1 else rows.flatten().abs()
    (first, value), *rest = gathered(norms.cpu(), group)
    others = [rank for rank, theirs in rest if not _is_close(value, theirs)]
    refuse_peers(others, f"other labels or another loss than rank {first}", code="data.peer-labels-differ", fix=_FIX)


def _is_close(first: Tensor, other: Tensor) -> bool:
    if first.shape != other.shape:
        return False
    scale = float(first.abs().max()) if first.numel() else 0.0
    return torch.allclose(first, other, rtol=0.0, atol=_CLOSE * scale, equal_nan=True)
