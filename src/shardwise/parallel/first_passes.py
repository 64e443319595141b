"""Checks in the first steps that forward does not change parameters and that model-parallel ranks get equal batches.

A forward pass may write to parameters (momentum teachers, clamped weights, unit norms). If every rank stores full
parameters (DDP, ZeRO-1), all ranks write the same values. FSDP2 frees the gathered copy together with the values that
forward wrote to it, a pipeline runs further micro-batches before backward, and a CPU-offloaded optimizer overwrites the
values. FSDP2 and pipelines are rejected, and an offloaded optimizer copies the parameters before each step. With
gradient accumulation, a repeated write must have no further effect (a clamp, not a moving average).

The first two steps compare checksums of all parameters before and after each forward pass, at the cost of two
reductions per parameter. Version counters would not detect writes through `.data`.
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
"""Number of checked steps: a teacher initialized as a copy of its student first changes in the second step."""
_ROUNDINGS = 64
"""Number of rounding errors by which a repeated write may change a value, as when a norm is scaled to 1 again."""
_CHUNK = 1 << 20
"""Elements summed at once: their fp64 copy of 8 MiB must not be the peak of a step."""
_DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}

Checksums = dict[str, tuple[Tensor, int]]
"""Parameter name -> its sum and norm, and the address of its memory."""


def watch_forward(stages: Sequence[nn.Module], plan: Plan, optimized: Optimized) -> None:
    """Check in the first two steps whether forward changes parameters; call on every rank.

    If the optimizer runs on the host, the changed values are copied to it; otherwise unsupported changes raise
    JobError. A compiled forward is not checked, because the hooks would be compiled too.
    """
    if plan.compile != "none":
        return
    watch = _WriteCheck(plan, optimized)
    for stage in stages:
        for name, submodule in stage.named_modules():
            is_unit = isinstance(submodule, FSDPModule)
            if is_unit or (submodule is stage and plan.zero < 2):
                watch.attach(name, submodule)
    watch.end_after_steps(optimized.optimizer)


class _WriteCheck:
    """Compares the values of parameters before and after each forward pass."""

    def __init__(self, plan: Plan, optimized: Optimized) -> None:
        self._plan = plan
        self._optimized = optimized
        self._before: dict[str, Checksums] = {}
        self._handles: list[RemovableHandle] = []
        self._steps = 0
        self._passes: dict[str, int] = {}
        """Number of forward passes of each unit in this step."""
        self._refreshes_host = False

    def attach(self, name: str, module: nn.Module) -> None:
        """Check every forward pass of a unit; FSDP2 all-gathers before the pre-hook and frees after the post-hook."""

        def before(submodule: nn.Module, *_: Any) -> None:
            if submodule.training and torch.is_grad_enabled():
                self._before[name] = _checksums(submodule)

        def after(submodule: nn.Module, *_: Any) -> None:
            first = self._before.pop(name, None)
            if first is not None:
                self._check(name, first, _checksums(submodule))

        self._handles.append(module.register_forward_pre_hook(before))
        self._handles.append(module.register_forward_hook(after, prepend=True))

    def end_after_steps(self, optimizer: Optimizer) -> None:
        """Remove the hooks after the first optimizer steps."""

        def count(*_: Any) -> None:
            self._steps += 1
            self._passes.clear()
            if self._steps == _STEPS:
                for each in self._handles:
                    each.remove()

        optimizer.register_step_post_hook(count)  # stays: torch cannot remove hooks while it iterates

    def _check(self, unit: str, before: Checksums, after: Checksums) -> None:
        number = self._passes[unit] = self._passes.get(unit, 0) + 1
        changed = _changed(before, after, roundings=_ROUNDINGS * (number > 1))
        if not changed:
            return
        plan = self._plan
        names = some_of(f"{unit}.{name}" if unit else name for name in changed)
        if plan.zero >= 2:
            raise _write_error(names, f"zero = {plan.zero} gathers parameters for forward and frees the changed copy")
        if plan.layout.pp > 1:
            raise _write_error(names, "a pipeline runs forward of other micro-batches before backward")
        if plan.precision.has_masters:
            raise _write_error(names, "the optimizer overwrites bf16 parameters with its fp32 masters")
        if number > 1:
            raise _write_error(names, f"each of the {plan.accumulation} forward passes of a step changes them again")
        trained = {name for name, _ in self._optimized.named}
        moved = []
        for name in trained.intersection(changed):
            (_, old_address), (_, new_address) = before[name], after[name]
            if old_address != new_address:
                moved.append(name)
        on_host = plan.offload.optimizer != "none"
        if plan.zero == 1 and moved and not on_host:
            raise _write_error(some_of(moved), "zero = 1 updates the memory from before an assignment to `.data`")
        if on_host and not self._refreshes_host:
            self._refreshes_host = True
            self._optimized.optimizer.register_step_pre_hook(lambda *_: self._optimized.refresh())


def _write_error(names: str, fact: str) -> JobError:
    return JobError(
        f"forward changes the values of {names}, but {fact}",
        code="support.forward-changes-weights",
        fix="do not write to parameters in forward, or use --plan ddp with accumulation = 1",
    )


@torch.no_grad()
def written_parameters(module: nn.Module, forward: Callable[[nn.Module], object]) -> list[str]:
    """Return the names of the meta model's parameters to which forward writes in eval or training mode.

    Version counters detect writes to meta tensors. The result is empty for a model whose forward fails on meta
    tensors; the first training step checks such a model.
    """
    versions = {name: parameter._version for name, parameter in module.named_parameters()}  # noqa: SLF001 - documented
    was_training = module.training
    try:
        for mode in (False, True):
            module.train(mode)
            forward(module)
    except Exception:  # noqa: BLE001 - a model may raise any exception on meta tensors
        return []
    finally:
        module.train(was_training)
    return [name for name, parameter in module.named_parameters() if parameter._version != versions[name]]  # noqa: SLF001


@torch.no_grad()
def _checksums(module: nn.Module) -> Checksums:
    found = {}
    for name, parameter in module.named_parameters():
        if parameter.dtype in _DTYPES and not _is_shard(parameter):
            value = local(parameter.detach())
            if hasattr(value, "__tensor_flatten__"):
                continue  # torchao's float8 tensors have no such sums, and raise an error if forward writes to them
            found[name] = _sum_and_norm(value), value.data_ptr()
    return found


def _sum_and_norm(value: Tensor) -> Tensor:
    """Return the sum and the norm in fp64, computed in chunks because torch copies the input of a casting reduction."""
    chunks = value.reshape(-1).split(_CHUNK)
    sums = torch.stack([chunk.sum(dtype=torch.float64) for chunk in chunks])
    norms = torch.stack([torch.linalg.vector_norm(chunk, dtype=torch.float64) for chunk in chunks])
    return torch.stack([sums.sum(), torch.linalg.vector_norm(norms)])


def _is_shard(parameter: nn.Parameter) -> bool:
    """Return whether `parameter` is an FSDP2 shard; it then belongs to another unit, and writes to it persist."""
    if not isinstance(parameter, DTensor):
        return False
    return bool({"shard", "replicate"} & set(parameter.device_mesh.mesh_dim_names or ()))


def _changed(before: Checksums, after: Checksums, *, roundings: int) -> list[str]:
    """Return the names of parameters that differ by more than `roundings` rounding errors of fp32."""
    common = [name for name in before if name in after]
    if not common:
        return []
    first = torch.stack([before[name][0] for name in common]).cpu()
    last = torch.stack([after[name][0] for name in common]).cpu()
    allowed = roundings * torch.finfo(torch.float32).eps * first.abs().amax(dim=1, keepdim=True)
    is_same = ((last - first).abs() <= allowed) | (first.isnan() & last.isnan())
    changed = []
    for name, same in zip(common, is_same.all(dim=1).tolist(), strict=True):
        if not same:
            changed.append(name)
    return changed


# Inputs of model-parallel ranks, which must receive the same batch because they share one model.
#
# Tensor-parallel ranks sum partial results of the same rows. With different rows or labels, they train on a mixture,
# and their replicated parameters drift apart without an error. The first passes are compared on all ranks of the group,
# so that every rank raises the error.


CHECKED_PASSES = 3
"""Number of checked passes; different data streams differ in the first batch, or in one of the next batches."""

_CLOSE = 1e-3
"""Relative tolerance of gradients; the summation order of tensor-parallel ranks causes far smaller differences."""


def check_equal(what: str, mine: Any, group: dist.ProcessGroup, *, code: str, fix: str) -> None:
    """Raise JobError on every rank of `group` unless `mine` is equal on all ranks; communicates over `group`."""
    (first, value), *rest = gathered(mine, group)
    different = [rank for rank, theirs in rest if theirs != value]
    reject_ranks(different, f"{what} than rank {first}", code=code, fix=fix)


def reject_ranks(ranks: list[int], what: str, *, code: str, fix: str) -> None:
    """Raise JobError if `ranks` is not empty; call with the same `ranks` on every rank of their group."""
    if ranks:
        named = f"ranks {', '.join(map(str, ranks))}"
        if len(ranks) == 1:
            named = f"rank {ranks[0]}"
        raise JobError(f"{named} received {what}; model-parallel ranks must get the same batch", code=code, fix=fix)


def gathered(mine: Any, group: dist.ProcessGroup) -> list[tuple[int, Any]]:
    """Return (rank, value) for every rank of `group`, in host memory; communicates over `group`."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, mine, group=group)
    return list(zip(dist.get_process_group_ranks(group), values, strict=True))


def watch_inputs(module: nn.Module, group: dist.ProcessGroup, after_backward: Callable[[], None]) -> None:
    """Compare the inputs of `module` and the gradients of its outputs over `group` in the first passes.

    This check is for tensor parallelism in a custom training loop, which reads batches itself. Forward and backward
    of these passes communicate over `group`, a host group. `after_backward` is called after the first backward.
    """
    passes: Counter[bool] = Counter()
    waiting = [after_backward]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before(_module: nn.Module, args: Any, kwargs: Any) -> None:
        passes[module.training] += 1
        if passes[module.training] > CHECKED_PASSES:
            return
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        forms = [(tuple(leaf.shape), str(leaf.dtype)) for leaf in tensors]
        mine = forms, fingerprints(tensors)
        check_equal("a different input", mine, group, code="data.peer-inputs-differ", fix=_FIX)

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
    "pass the same batch to all tensor-parallel ranks: read samples by plan.layout.data_index(world.rank), or use"
    " build_step"
)


def _compare_gradient(gradient: Tensor, group: dist.ProcessGroup) -> None:
    """Raise JobError if the gradients of an output differ between ranks, which implies different labels or losses."""
    rows = gradient.detach().double()
    norms = rows.flatten(1).norm(dim=1) if rows.ndim > 1 else rows.flatten().abs()
    (first, value), *rest = gathered(norms.cpu(), group)
    different = [rank for rank, theirs in rest if not _is_close(value, theirs)]
    what = f"different labels or a different loss than rank {first}"
    reject_ranks(different, what, code="data.peer-labels-differ", fix=_FIX)


def _is_close(first: Tensor, other: Tensor) -> bool:
    if first.shape != other.shape:
        return False
    scale = float(first.abs().max()) if first.numel() else 0.0
    return torch.allclose(first, other, rtol=0.0, atol=_CLOSE * scale, equal_nan=True)
