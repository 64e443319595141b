"""Sharded parameters: FSDP2 with one unit per repeated block, units and gradients in one order on all ranks."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from shardwise.errors import JobError, some_of
from shardwise.torch_private.dispatch import call_after_backward, tree_leaves, tree_map_only
from shardwise.torch_private.distributed import gather_without_forward, gathered_parameter, parameter_groups

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import TracebackType

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from shardwise.plans import Plan


LOWER = {"bf16": torch.bfloat16, "fp16": torch.float16}
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, **LOWER}
"""Words of a plan -> dtypes."""


def shard_unit(module: nn.Module, plan: Plan, mesh: DeviceMesh, *, keep: bool = False) -> None:
    """Shard the parameters of one unit that are not yet sharded; called on every rank of `mesh`, inner units first.

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
        for unit in parameter_groups(model):
            self._members += _trainable(unit)
            unit.post_backward = partial(self._reduce, unit, unit.post_backward)

    def _reduce(self, unit: Any, post_backward: Callable[..., None], *unused: Any) -> None:
        """Run FSDP2's reduction of one unit, of the whole list where it reduces at all."""
        if unit.reduce_grads:
            self._complete(unit)
            if self._by_itself and not self._is_queued:
                # Runs after the callback that FSDP2 has queued already, which reduces what is left.
                call_after_backward(self.finish)
                self._is_queued = True
        post_backward(*unused)

    def _complete(self, unit: Any) -> None:
        """Give every trainable parameter of a unit a gradient, all of them in one dtype."""
        members = [member for member in _trainable(unit) if gathered_parameter(member) is not None]
        for member in members:
            member.accumulate_unsharded_grad_if_needed()
        # Micro-batches that were not reduced left their gradients in the dtype of the reduction.
        are_accumulated = any(member.unsharded_accumulated_grad is not None for member in members)
        for member in members:
            whole: Any = gathered_parameter(member)
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


def _trainable(unit: Any) -> list[Any]:
    return [member for member in unit.fsdp_params if member.sharded_param.requires_grad]


# Parameters of an FSDP2 unit that are used outside of its forward, where only shards of them are present.


_MIXED = "mixed torch.Tensor and DTensor"
"""torch's message for an operation on a whole tensor and a shard."""


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


# One order of FSDP2 units on all data-parallel ranks, also where the data decides which units run.
#
# FSDP2 gathers a unit when its forward is called. A rank that skips one (an expert without tokens, a dropped layer)
# would pair its next all-gather with another unit's on the other ranks: wrong weights where sizes are equal, an
# abort or a wait where they are not. The invariant kept here: every rank makes the same sequence of unit calls. A
# rank that skips a unit makes a stand-in call, which runs FSDP2's own hooks and no forward: it gathers, and in
# backward gathers and reduces, when the others do. Autograd runs nodes in the reverse order of their creation, so
# backward keeps the order of forward.
#
# In the first passes ranks agree on the next unit before each call, one small collective on the host. If all of
# them ran all units, in one sequence, that is the list which each rank follows from then on by itself; else they
# agree in every pass.


_AGREED_PASSES = 2
"""A model that is called in two ways, one after the other, has shown both."""


def keep_unit_order(root: nn.Module, units: Mapping[str, FSDPModule], group: dist.ProcessGroup) -> None:
    """Have the ranks of the host `group` call the `units` of `root` in one sequence; forward then communicates."""
    order = _UnitOrder(root, units, group)
    root.register_forward_pre_hook(order.begin, prepend=True)
    root.register_forward_hook(order.end, prepend=True)  # before FSDP2's own, which ends the pass
    for index, unit in enumerate(units.values()):
        unit.register_forward_pre_hook(order.before(index), prepend=True, with_kwargs=True)  # type: ignore[attr-defined]


class _UnitCall(NamedTuple):
    """A call of a unit."""

    unit: int
    """Its index among the units as the model lists them; their number marks the end of a pass."""
    has_gradient: bool
    """Whether the unit's input has one. FSDP2 reduces the unit when that is there; without one, when backward ends."""


class _Sequence:
    """The units that ranks called in passes of one mode (training or evaluation)."""

    def __init__(self, num_units: int) -> None:
        self._num_units = num_units
        self.passes = 0
        self.varies = False
        """Ranks or passes differed, or left out a unit: ranks agree before every call."""
        self.calls: list[_UnitCall] = []

    def learn(self, calls: list[_UnitCall], *, differed: bool) -> None:
        """Take over what a pass called."""
        is_whole = len({call.unit for call in calls}) == self._num_units
        is_same = self.passes == 0 or calls == self.calls
        self.varies = self.varies or differed or not (is_whole and is_same)
        self.calls = calls
        self.passes += 1

    @property
    def is_fixed(self) -> bool:
        """Whether each rank can follow the list by itself."""
        return self.passes >= _AGREED_PASSES and not self.varies


class _UnitOrder:
    def __init__(self, root: nn.Module, units: Mapping[str, FSDPModule], group: dist.ProcessGroup) -> None:
        self._root = root
        self._names = list(units)
        self._units = list(units.values())
        self._group = group
        self._known = {is_training: _Sequence(len(units)) for is_training in (True, False)}
        self._is_running = False
        self._calls: list[_UnitCall] = []
        self._num_stand_ins = 0
        self._tokens: list[Tensor] = []
        """Outputs of stand-ins, which become part of the root's output so that backward reaches them."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begin(self, _module: nn.Module, _args: Any) -> None:
        """Start a pass of the root."""
        self._is_running = True
        self._calls, self._tokens, self._num_stand_ins = [], [], 0

    def before(self, index: int) -> Any:
        """Return the hook that runs before a unit's forward: the calls that other ranks make first."""

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
            if not self._is_running:
                return  # recomputed in backward, or called outside of the root's forward
            self._catch_up(_UnitCall(index, any(_differentiable(leaf) for leaf in tree_leaves((args, kwargs)))))

        return hook

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def end(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        """Make the calls that other ranks still make, and finish the pass."""
        if not self._is_running:
            return output
        self._catch_up(_UnitCall(len(self._units), has_gradient=False))
        self._is_running = False
        if not self._tokens:
            return output
        tokens, self._tokens = self._tokens, []
        if not any(_differentiable(leaf) for leaf in tree_leaves(output)):
            raise JobError(
                "the model returns no tensor with a gradient, and this rank skips repeated blocks that others run",
                code="support.fsdp-output-without-gradient",
                fix="return tensors in tuples, lists or dicts, or use --plan ddp or zero1",
            )
        return tree_map_only(Tensor, lambda leaf: _tie(leaf, tokens), output)

    def _catch_up(self, wanted: _UnitCall) -> None:
        """Make stand-in calls until it is the turn of `wanted`; communicates while the order is not fixed."""
        known = self._known[self._root.training]
        while True:
            turn = self._listed(known, wanted) if known.is_fixed else self._agreed(wanted)
            if turn.unit == len(self._units):
                break
            self._calls.append(turn)
            if turn.unit == wanted.unit:
                return
            self._stand_in(turn)
        if not known.is_fixed:
            differed = _smallest(-self._num_stand_ins, self._group) < 0
            known.learn(self._calls, differed=differed)

    def _agreed(self, wanted: _UnitCall) -> _UnitCall:
        """Return what all ranks call next: the first unit, as the model lists them, that any of them wants."""
        index, has_none = divmod(_smallest(2 * wanted.unit + (not wanted.has_gradient), self._group), 2)
        return _UnitCall(index, not has_none)

    def _listed(self, known: _Sequence, wanted: _UnitCall) -> _UnitCall:
        """Return what is next on the list."""
        rest = known.calls[len(self._calls) :]
        if wanted.unit != len(self._units) and all(wanted.unit != call.unit for call in rest):
            raise JobError(
                f"{self._names[wanted.unit]} runs at another place than in the first passes, and FSDP2 gathers units"
                " in one order on all ranks",
                code="support.fsdp-block-order",
                fix="run repeated blocks in the same order in every pass, or use --plan ddp or zero1",
            )
        return rest[0] if rest else _UnitCall(len(self._units), has_gradient=False)

    def _stand_in(self, call: _UnitCall) -> None:
        """Gather a unit as if it ran."""
        self._num_stand_ins += 1
        has_gradient = call.has_gradient and torch.is_grad_enabled()
        output = gather_without_forward(self._units[call.unit], has_gradient=has_gradient)
        if output.requires_grad:
            self._tokens.append(output)


class _Tie(torch.autograd.Function):
    """A copy of a tensor whose backward also reaches tokens, with a gradient of zero."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, *tokens: Tensor) -> Tensor:
        ctx.save_for_backward(*tokens)
        return tensor.clone()  # a view made here could not be changed in place by the loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return grad, *(torch.zeros_like(token) for token in ctx.saved_tensors)


def _tie(leaf: Tensor, tokens: list[Tensor]) -> Tensor:
    return _Tie.apply(leaf, *tokens) if _differentiable(leaf) else leaf  # type: ignore[no-untyped-call]


def _differentiable(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _smallest(value: int, group: dist.ProcessGroup) -> int:
    """Return the smallest value over the ranks of `group`; communicates."""
    everyone = torch.tensor(value)
    dist.all_reduce(everyone, dist.ReduceOp.MIN, group=group)
    return int(everyone)
