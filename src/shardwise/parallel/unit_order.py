"""One order of FSDP2 units on all data-parallel ranks, also where the data decides which units run.

FSDP2 gathers a unit when its forward is called. A rank that skips one (an expert without tokens, a dropped layer) would
pair its next all-gather with another unit's on the other ranks: wrong weights where sizes are equal, an abort or a wait
where they are not. The invariant kept here: every rank makes the same sequence of unit calls. A rank that skips a unit
makes a stand-in call, which runs FSDP2's own hooks and no forward: it gathers, and in backward gathers and reduces,
when the others do. Autograd runs nodes in the reverse order of their creation, so backward keeps the order of forward.

In the first passes ranks agree on the next unit before each call, one small collective on the host. If all of them ran
all units, in one sequence, that is the list which each rank follows from then on by itself; else they agree in every
pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwise.errors import JobError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn
    from torch.distributed.fsdp import FSDPModule

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
    """Its place among the units as the model lists them; their number stands for the end of a pass."""
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
        unit: Any = self._units[call.unit]
        has_gradient = call.has_gradient and torch.is_grad_enabled()
        state = unit._get_fsdp_state()  # noqa: SLF001 - its hooks without the forward between them
        token = torch.zeros((), device=state._device, requires_grad=torch.is_grad_enabled())  # noqa: SLF001
        (entered,), _ = state._pre_forward(unit, (token if has_gradient else token.detach(),), {})  # noqa: SLF001
        output = entered.clone() if has_gradient else entered + token
        output = state._post_forward(unit, (entered,), output)  # noqa: SLF001
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
