"""Sharded parameters: FSDP2, one unit per repeated block, and gradients of parameters that only some ranks use."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from shardwise.errors import JobError, some_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from shardwise.plans import Plan


LOWER = {"bf16": torch.bfloat16, "fp16": torch.float16}
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, **LOWER}
"""Words of a plan -> dtypes."""


def shard_unit(module: nn.Module, plan: Plan, mesh: DeviceMesh, *, keep: bool = False) -> None:
    """Cut the parameters of one unit that are not yet cut; called on every rank of `mesh`, inner units first.

    On a mesh of two axes the first replicates and the second shards (HSDP). With `keep` they stay gathered from
    forward to backward; of the root unit, which backward needs first, that costs no memory.
    """
    options: dict[str, Any] = {}
    if plan.offload.parameters == "cpu":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    precision = plan.precision
    if precision.compute in LOWER or precision.reduce != precision.parameter:
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=LOWER.get(precision.compute), reduce_dtype=DTYPES[precision.reduce]
        )
    # ZeRO-2 keeps gathered parameters until backward is done; ZeRO-3 frees them after each use.
    fully_shard(
        module,
        mesh=mesh,
        reshard_after_forward=plan.zero == 3 and not keep,
        ignored_params=set(unshardable(module)),
        **options,
    )
    sharded: FSDPModule = module  # type: ignore[assignment]
    # The loss is divided by the global count already: gradients are summed, never averaged.
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)


def unshardable(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that FSDP2 cannot shard, which stay replicated: scalars, and those without elements."""
    return [parameter for parameter in module.parameters() if parameter.ndim == 0 or parameter.numel() == 0]


def check_sharded(module: nn.Module, plan: Plan, *, by_step: bool = True) -> None:
    """Refuse scalars, which FSDP2 cannot shard, where nobody would sum their gradients: with tp, and outside a step."""
    names = [name for name, parameter in module.named_parameters() if parameter.ndim == 0]
    if plan.zero < 2 or not names or (by_step and plan.layout.tp == 1):
        return
    why = "which tp has made DTensors already" if by_step else "and a loop of your own does not sum their gradients"
    raise JobError(
        f"FSDP2 does not shard scalar parameters ({some_of(names)}), {why}",
        code="support.fsdp-scalar-parameter",
        fix="give them one dimension" + (", or use tp without sharding" if by_step else ", or use build_step"),
    )


def set_prefetch(blocks: Sequence[nn.Module], depth: int) -> None:
    """Gather `depth` blocks ahead of use, forward and backward; 1 is what FSDP2 does by itself."""
    if depth == 1:
        return
    units: list[FSDPModule] = [block for block in blocks if isinstance(block, FSDPModule)]
    for order, prefetch in (
        (units, FSDPModule.set_modules_to_forward_prefetch),
        (units[::-1], FSDPModule.set_modules_to_backward_prefetch),
    ):
        for position, unit in enumerate(order):
            prefetch(unit, order[position + 1 : position + 1 + depth])


# One list of gradients on all data-parallel ranks of FSDP2, also where ranks use different parameters.
#
# FSDP2 packs the gradients that a rank has into one buffer and sums the buffers. Where ranks use different
# parameters of a unit (the experts of a mixture), it would add the gradient of one parameter to that of another, or
# wait for bytes that nobody sends. The invariant kept here: every rank reduces every trainable parameter of a unit,
# zeros for one that it did not use. A parameter that no rank used has no gradient afterwards, as in one process, so
# the optimizer passes it over.


class ReducedList:
    """Completes the gradients of every FSDP2 unit of a model before they are reduced."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None, *, by_itself: bool = False) -> None:
        """`group` joins on the host the ranks that sum gradients; None for one rank.

        With `by_itself` every backward that reduces ends with `finish`, for a loop that does not call it.
        """
        self._group = group
        self._by_itself = by_itself
        self._is_queued = False
        self._members: list[Any] = []
        """FSDP2's records of all trainable parameters, in the same order on every rank."""
        self._used: set[int] = set()
        """Ids of sharded parameters that this rank had a gradient for."""
        self._filled: set[int] = set()
        """Ids of those that got zeros, and had no gradient from an earlier micro-batch."""
        for unit in _units(model):
            self._members += _trainable(unit)
            unit.post_backward = partial(self._reduce, unit, unit.post_backward)

    def _reduce(self, unit: Any, post_backward: Callable[..., None], *unused: Any) -> None:
        """Run FSDP2's reduction of one unit, of the whole list where it reduces at all."""
        if unit.reduce_grads:
            self._complete(unit)
            if self._by_itself and not self._is_queued:
                # Runs after the callback that FSDP2 has queued already, which reduces what is left.
                torch.autograd.Variable._execution_engine.queue_callback(self.finish)  # noqa: SLF001
                self._is_queued = True
        post_backward(*unused)

    def _complete(self, unit: Any) -> None:
        """Give every trainable parameter of a unit a gradient, all of them in one dtype."""
        members = [member for member in _trainable(unit) if hasattr(member, "_unsharded_param")]
        for member in members:
            member.accumulate_unsharded_grad_if_needed()
        # Micro-batches that were not reduced left their gradients in the dtype of the reduction.
        are_accumulated = any(member.unsharded_accumulated_grad is not None for member in members)
        for member in members:
            whole = member._unsharded_param  # noqa: SLF001 - without a look at its state: it may be resharded already
            if member.unsharded_accumulated_grad is not None or whole.grad is not None:
                self._used.add(id(member.sharded_param))
            else:
                whole.grad = torch.zeros_like(whole)
                if member.sharded_param.grad is None:
                    self._filled.add(id(member.sharded_param))
            if are_accumulated:
                member.to_accumulated_grad_if_needed()

    def is_used(self, parameter: nn.Parameter) -> bool:
        """Whether this rank used a sharded parameter since the last `finish`."""
        return id(parameter) in self._used

    def finish(self) -> None:
        """Take zeros back where no rank used a parameter; communicates, on every rank after a step's backward."""
        used = torch.tensor([id(member.sharded_param) in self._used for member in self._members], dtype=torch.uint8)
        if self._group is not None:
            dist.all_reduce(used, dist.ReduceOp.MAX, group=self._group)
        for member, is_used in zip(self._members, used.tolist(), strict=True):
            if not is_used and id(member.sharded_param) in self._filled:
                member.sharded_param.grad = None
        self._is_queued = False
        self._used.clear()
        self._filled.clear()


def _units(model: nn.Module) -> Iterator[Any]:
    """Yield FSDP2's groups of parameters that are reduced together."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()  # noqa: SLF001 - no public way to what a unit reduces
            groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 has one or none
            found = [state._fsdp_param_group] if groups is None else groups  # noqa: SLF001
            yield from (each for each in found if each is not None)


def _trainable(unit: Any) -> list[Any]:
    return [member for member in unit.fsdp_params if member.sharded_param.requires_grad]


# Parameters of an FSDP2 unit that are used outside of its forward, where only shards of them are present.


_MIXED = "mixed torch.Tensor and DTensor"
"""What torch says of an operation on a whole tensor and a shard."""


@contextmanager
def naming_outside_use(model: nn.Module) -> Iterator[None]:
    """Surround a forward pass of a sharded `model`: name the module that computes with shards, and its unit."""
    try:
        yield
    except RuntimeError as error:
        if _MIXED not in str(error):
            raise
        raise _outside_use(model, error.__traceback__) from error


def _outside_use(model: nn.Module, traceback: TracebackType | None) -> JobError:
    modules = {id(module): name for name, module in model.named_modules()}
    name = ""
    while traceback is not None:  # from the outermost call to the one that failed
        caller = traceback.tb_frame.f_locals.get("self")
        name = modules.get(id(caller), name)
        traceback = traceback.tb_next
    kind = type(model.get_submodule(name)).__name__.removeprefix("FSDP")  # fully_shard adds that to the class
    used = f"{name or 'the model'} ({kind})"
    unit = _unit_of(model, name)
    if unit:
        fact = f"FSDP2 gathers {unit} for its own forward, and {used} is called outside of it"
    else:
        fact = f"FSDP2 gathers parameters for the forward of the model or of a repeated block, and {used} reads shards"
    return JobError(
        fact,
        code="support.fsdp-use-outside-block",
        fix="call the model, which calls its blocks, or use --plan ddp or zero1, which keep parameters whole",
    )


def _unit_of(model: nn.Module, name: str) -> str:
    """Return the innermost unit around a module, "" for the model itself."""
    while name and not isinstance(model.get_submodule(name), FSDPModule):
        name = name.rpartition(".")[0]
    return name
