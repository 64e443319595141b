"""Parameters sharded by FSDP2, with one unit per repeated block and the same order of units on all ranks."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from shardwise.errors import JobError, some_of
from shardwise.parallel.float8 import zero_gradient
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
"""Name in a plan -> torch dtype."""


def shard_unit(module: nn.Module, plan: Plan, mesh: DeviceMesh, *, keep: bool = False) -> None:
    """Shard the parameters of one unit with FSDP2; call on every rank of `mesh`, inner units first.

    On a mesh of two axes, the first replicates and the second shards (HSDP). With `keep`, parameters stay gathered from
    forward to backward. This costs no extra memory for the root unit, whose parameters backward needs first.
    """
    options: dict[str, Any] = {}
    if plan.offload.parameters == "cpu":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    precision = plan.precision
    if precision.activations in LOWER or precision.reduce != precision.parameter:
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=LOWER.get(precision.activations), reduce_dtype=DTYPES[precision.reduce]
        )
    # ZeRO-2 keeps parameters gathered until the end of backward; ZeRO-3 frees them after each use.
    fully_shard(
        module,
        mesh=mesh,
        reshard_after_forward=plan.zero == 3 and not keep,
        ignored_params=set(unshardable(module)),
        **options,
    )
    sharded: FSDPModule = module  # type: ignore[assignment]
    # The loss is divided by the global count, so gradients are summed, not averaged.
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)


def unshardable(module: nn.Module) -> list[nn.Parameter]:
    """Return the scalar and empty parameters, which FSDP2 cannot shard and which stay replicated."""
    return [parameter for parameter in module.parameters() if parameter.ndim == 0 or parameter.numel() == 0]


def check_sharded(module: nn.Module, plan: Plan, *, by_step: bool = True) -> None:
    """Raise JobError for scalar parameters, which FSDP2 cannot shard, if tp > 1 or `by_step` (build_step) is False."""
    names = [name for name, parameter in module.named_parameters() if parameter.ndim == 0]
    if plan.zero < 2 or not names or (by_step and plan.layout.tp == 1):
        return
    why = "so they stay replicated, but a custom training loop does not sum their gradients"
    fix = "reshape them to one dimension, or use build_step"
    if by_step:
        why = "so they stay replicated, which is not supported with tp"
        fix = "reshape them to one dimension, or use a tp plan that does not shard parameters"
    raise JobError(
        f"FSDP2 does not shard scalar parameters ({some_of(names)}), {why}",
        code="support.fsdp-scalar-parameter",
        fix=fix,
    )


def set_prefetch(units: Sequence[FSDPModule], depth: int) -> None:
    """Make FSDP2 prefetch `depth` units in forward and backward; 1 is its default."""
    if depth == 1:
        return
    for order, prefetch in (
        (units, FSDPModule.set_modules_to_forward_prefetch),
        (units[::-1], FSDPModule.set_modules_to_backward_prefetch),
    ):
        for position, unit in enumerate(order):
            prefetch(unit, list(order[position + 1 : position + 1 + depth]))


# Gradients of FSDP2 units on data-parallel ranks that use different parameters.
#
# FSDP2 packs the gradients of a rank into one buffer and sums the buffers. If ranks use different parameters of a unit
# (the experts of a mixture), it would sum the gradients of different parameters, or wait for bytes that no rank sends.
# The invariant: every rank reduces every trainable parameter of a unit, with zeros for unused parameters. A parameter
# that no rank used has no gradient afterwards, as in one process, so the optimizer skips it.


class ReducedList:
    """Sets zero gradients for the unused parameters of every FSDP2 unit before the reduction."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None, *, by_itself: bool = False) -> None:
        """Attach to the FSDP2 units of `model`; `group` is a host group of the ranks that sum gradients, or None.

        With `by_itself`, every backward that reduces ends with `finish`, for training loops that do not call `finish`.
        """
        self._group = group
        self._by_itself = by_itself
        self._is_queued = False
        self._members: list[Any] = []
        """FSDP2's records of all trainable parameters, in the same order on every rank."""
        self._used: set[int] = set()
        """Ids of sharded parameters for which this rank computed a gradient."""
        self._filled: set[int] = set()
        """Ids of parameters with a zero gradient set here and no gradient from an earlier micro-batch."""
        for unit in parameter_groups(model):
            self._members += _trainable(unit)
            unit.post_backward = partial(self._reduce, unit, unit.post_backward)

    def _reduce(self, unit: Any, post_backward: Callable[..., None], *unused: Any) -> None:
        """Run FSDP2's `post_backward` of a unit; if it reduces, first set gradients for all trainable parameters."""
        if unit.reduce_grads:
            self._complete(unit)
            if self._by_itself and not self._is_queued:
                # This callback runs after the callback of FSDP2, which reduces the remaining gradients.
                call_after_backward(self.finish)
                self._is_queued = True
        post_backward(*unused)

    def _complete(self, unit: Any) -> None:
        """Set a gradient for every trainable parameter of a unit, all in one dtype."""
        members = [member for member in _trainable(unit) if gathered_parameter(member) is not None]
        for member in members:
            member.accumulate_unsharded_grad_if_needed()
        # Micro-batches without reduction accumulated their gradients in the dtype of the reduction.
        are_accumulated = any(member.unsharded_accumulated_grad is not None for member in members)
        for member in members:
            whole: Any = gathered_parameter(member)
            if member.unsharded_accumulated_grad is not None or whole.grad is not None:
                self._used.add(id(member.sharded_param))
            else:
                whole.grad = zero_gradient(whole)
                if member.sharded_param.grad is None:
                    self._filled.add(id(member.sharded_param))
            if are_accumulated:
                member.to_accumulated_grad_if_needed()

    def is_used(self, parameter: nn.Parameter) -> bool:
        """Return whether this rank used a sharded parameter since the last `finish`."""
        return id(parameter) in self._used

    def finish(self) -> None:
        """Remove gradients of parameters that no rank used. Communicates; call on every rank after backward."""
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


# Use of an FSDP2 unit's parameters outside its forward, when they are sharded.


_MIXED = "mixed torch.Tensor and DTensor"
"""torch's message for an operation on a tensor and a DTensor."""


@contextmanager
def naming_outside_use(model: nn.Module) -> Iterator[None]:
    """Return a context for forward that raises JobError with the name of a module that computes with shards."""
    try:
        yield
    except RuntimeError as error:
        if _MIXED not in str(error):
            raise
        raise _outside_use(model, error.__traceback__) from error


def _outside_use(model: nn.Module, traceback: TracebackType | None) -> JobError:
    modules = {id(module): name for name, module in model.named_modules()}
    name = ""
    while traceback is not None:  # from the outermost call to the failing one
        caller = traceback.tb_frame.f_locals.get("self")
        name = modules.get(id(caller), name)
        traceback = traceback.tb_next
    kind = type(model.get_submodule(name)).__name__.removeprefix("FSDP")  # fully_shard adds this prefix
    used = f"{name or 'the model'} ({kind})"
    unit = _unit_of(model, name)
    if unit:
        fact = f"FSDP2 gathers {unit} only in its forward, but {used} is called outside this forward"
    else:
        fact = f"FSDP2 gathers parameters only in the forward of the model or a block, but {used} reads shards"
    return JobError(
        fact,
        code="support.fsdp-use-outside-block",
        fix="call the model, which calls its blocks, or pass --plan ddp or --plan zero1, which do not shard parameters",
    )


def _unit_of(model: nn.Module, name: str) -> str:
    """Return the name of the innermost FSDP2 unit that contains a module; "" for the model itself."""
    while name and not isinstance(model.get_submodule(name), FSDPModule):
        name = name.rpartition(".")[0]
    return name


# The same order of FSDP2 units on all data-parallel ranks, even if the data determines which units run.
#
# FSDP2 gathers a unit when its forward is called. A rank that skips a unit (an expert without tokens, a dropped layer)
# would pair its next all-gather with the all-gather of a different unit on other ranks, which causes wrong weights if
# the sizes are equal, and an abort or a hang otherwise. The invariant: every rank makes the same sequence of unit
# calls. A rank that skips a unit makes a placeholder call, which runs FSDP2's hooks but no forward: it all-gathers, and
# in backward all-gathers and reduces, together with the other ranks. Autograd runs nodes in the reverse order of their
# creation, so backward preserves the order.
#
# In the first passes, ranks agree on the next unit before each call with one small collective on the host. If all ranks
# ran all units in the same sequence, each rank follows this sequence without communication afterwards. Otherwise ranks
# agree in every pass.


_AGREED_PASSES = 2
"""Number of passes before the order can be fixed, enough to detect a model that alternates between two orders."""


def keep_unit_order(root: nn.Module, units: Mapping[str, FSDPModule], group: dist.ProcessGroup) -> None:
    """Make all ranks of the host `group` call the `units` of `root` in the same order; forward may communicate."""
    order = _UnitOrder(root, units, group)
    root.register_forward_pre_hook(order.begin, prepend=True)
    root.register_forward_hook(order.end, prepend=True)  # before FSDP2's hook, which ends the pass
    for index, unit in enumerate(units.values()):
        unit.register_forward_pre_hook(order.before(index), prepend=True, with_kwargs=True)  # type: ignore[attr-defined]


class _UnitCall(NamedTuple):
    """A call of a unit in a forward pass."""

    unit: int
    """Index of the unit in the model; the number of units marks the end of a pass."""
    has_gradient: bool
    """Whether an input requires a gradient; FSDP2 then reduces when backward reaches the input, else after backward."""


class _Sequence:
    """The units that ranks called in passes of one mode (training or evaluation)."""

    def __init__(self, num_units: int) -> None:
        self._num_units = num_units
        self.passes = 0
        self.varies = False
        """Whether ranks or passes differed or skipped a unit, so that ranks agree before every call."""
        self.calls: list[_UnitCall] = []

    def update(self, calls: list[_UnitCall], *, differed: bool) -> None:
        """Record the calls of a pass."""
        is_whole = len({call.unit for call in calls}) == self._num_units
        is_same = self.passes == 0 or calls == self.calls
        self.varies = self.varies or differed or not (is_whole and is_same)
        self.calls = calls
        self.passes += 1

    @property
    def is_fixed(self) -> bool:
        """Whether each rank can follow the recorded sequence without communication."""
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
        self._num_placeholders = 0
        self._tokens: list[Tensor] = []
        """Outputs of placeholder calls, which are connected to the root's output so that backward reaches them."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begin(self, _module: nn.Module, _args: Any) -> None:
        """Start a forward pass of the root."""
        self._is_running = True
        self._calls, self._tokens, self._num_placeholders = [], [], 0

    def before(self, index: int) -> Any:
        """Return a forward pre-hook of a unit that makes the placeholder calls before the unit's turn."""

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
            if not self._is_running:
                return  # recomputation in backward, or a call outside the root's forward
            self._catch_up(_UnitCall(index, any(_differentiable(leaf) for leaf in tree_leaves((args, kwargs)))))

        return hook

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def end(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        """Make the remaining placeholder calls and finish the forward pass of the root."""
        if not self._is_running:
            return output
        self._catch_up(_UnitCall(len(self._units), has_gradient=False))
        self._is_running = False
        if not self._tokens:
            return output
        tokens, self._tokens = self._tokens, []
        if not any(_differentiable(leaf) for leaf in tree_leaves(output)):
            raise JobError(
                "the model must return a tensor that requires grad, since this rank skips blocks that other ranks run",
                code="support.fsdp-output-without-gradient",
                fix="return tensors in tuples, lists or dicts, or pass --plan ddp or --plan zero1",
            )
        return tree_map_only(Tensor, lambda leaf: _tie(leaf, tokens), output)

    def _catch_up(self, wanted: _UnitCall) -> None:
        """Make placeholder calls until the call `wanted` is next; communicates while the order is not fixed."""
        known = self._known[self._root.training]
        while True:
            turn = self._listed(known, wanted) if known.is_fixed else self._agreed(wanted)
            if turn.unit == len(self._units):
                break
            self._calls.append(turn)
            if turn.unit == wanted.unit:
                return
            self._call_placeholder(turn)
        if not known.is_fixed:
            differed = _smallest(-self._num_placeholders, self._group) < 0
            known.update(self._calls, differed=differed)

    def _agreed(self, wanted: _UnitCall) -> _UnitCall:
        """Return the next call of all ranks: the first unit in model order that any rank wants; communicates."""
        index, has_none = divmod(_smallest(2 * wanted.unit + (not wanted.has_gradient), self._group), 2)
        return _UnitCall(index, not has_none)

    def _listed(self, known: _Sequence, wanted: _UnitCall) -> _UnitCall:
        """Return the next call of the recorded sequence."""
        rest = known.calls[len(self._calls) :]
        if wanted.unit != len(self._units) and all(wanted.unit != call.unit for call in rest):
            raise JobError(
                f"FSDP2 must gather units in the same order on all ranks, but {self._names[wanted.unit]} runs in a"
                " different order than in the first passes",
                code="support.fsdp-block-order",
                fix="run repeated blocks in the same order in every pass, or pass --plan ddp or --plan zero1",
            )
        return rest[0] if rest else _UnitCall(len(self._units), has_gradient=False)

    def _call_placeholder(self, call: _UnitCall) -> None:
        """Gather a unit without running its forward; communicates over the unit's mesh."""
        self._num_placeholders += 1
        has_gradient = call.has_gradient and torch.is_grad_enabled()
        output = gather_without_forward(self._units[call.unit], has_gradient=has_gradient)
        if output.requires_grad:
            self._tokens.append(output)


class _Tie(torch.autograd.Function):
    """Autograd function that copies a tensor and makes backward also reach `tokens`, with zero gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, *tokens: Tensor) -> Tensor:
        ctx.save_for_backward(*tokens)
        return tensor.clone()  # a view created here could not be changed in place by the loss

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
