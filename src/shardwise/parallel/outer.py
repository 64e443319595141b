"""Low communication: replicas train on their own for a round of steps, then an outer optimizer brings them together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _NormBase

from shardwise.parallel.gradsync import local, sum_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor, nn

    from shardwise.parallel.gradsync import GradSync
    from shardwise.parallel.place import Place
    from shardwise.plans import Communication, Plan


class OuterSync:
    """Local SGD and DiLoCo: gradients are summed within a replica only; at the end of a round replicas meet.

    There the outer optimizer, Nesterov's SGD, takes the mean over replicas of how far each went from the anchor, the
    weights they all began the round with, for its gradient; all go on from where it moves the anchor. Anchor and
    momentum are as large as the trained parameters each, and live where those are.
    """

    def __init__(
        self,
        inner: GradSync,
        named: Sequence[tuple[str, nn.Parameter]],
        statistics: Sequence[Tensor],
        group: dist.ProcessGroup,
        *,
        options: Communication,
        ends_round: Callable[[int], bool],
    ) -> None:
        """`inner` sums within a replica; `group` joins the ranks that hold the same piece of every replica.

        `statistics` are averaged when replicas meet; `ends_round` says whether they do after so many steps.
        """
        self._inner = inner
        self._group = group
        self._replicas = dist.get_world_size(group)
        # A feed counts what one replica reads and takes the others to count alike; a gradient is the replica's own.
        self.gain = inner.gain * self._replicas
        self._ends_round = ends_round
        self._statistics = statistics
        self._weights = [parameter.detach() for _, parameter in named]
        self._names = [name for name, _ in named]
        self._anchors = [torch.empty_like(weight) for weight in self._weights]
        self._optimizer = torch.optim.SGD(
            self._anchors, lr=options.outer_lr, momentum=options.outer_momentum, nesterov=options.outer_momentum > 0
        )
        if options.outer_momentum:  # made now rather than at the first sync, so that a checkpoint can fill it
            for anchor in self._anchors:
                self._optimizer.state[anchor]["momentum_buffer"] = torch.zeros_like(anchor)
        self._is_in_round = False

    def accumulate(self) -> AbstractContextManager[object]:
        """Keep back what is summed within a replica."""
        return self._inner.accumulate()

    def hold(self) -> AbstractContextManager[object]:
        """Keep back what is summed within a replica."""
        return self._inner.hold()

    def finish_held(self) -> None:
        """Sum within the replica what was kept back."""
        self._inner.finish_held()

    def has_gradient(self, parameter: nn.Parameter) -> bool:
        """Ask what sums within a replica."""
        return self._inner.has_gradient(parameter)

    @torch.no_grad()
    def finish(self) -> None:
        """Sum within the replica; the weights before the first update of a round are its anchor."""
        self._inner.finish()
        if not self._is_in_round:
            _copy(self._anchors, self._weights)
            self._is_in_round = True

    @torch.no_grad()
    def finish_step(self, number: int) -> None:
        """Communicate over the replicas if `number` updates end a round: move the anchor, and go on from there."""
        if not self._ends_round(number):
            return
        moves = [anchor - weight for anchor, weight in zip(self._anchors, self._weights, strict=True)]
        sum_tensors([local(move) for move in moves], self._group, self._replicas)
        for anchor, move in zip(self._anchors, moves, strict=True):
            anchor.grad = move
        self._optimizer.step()
        self._optimizer.zero_grad()
        _copy(self._weights, self._anchors)
        sum_tensors(self._statistics, self._group, self._replicas)
        self._is_in_round = False

    def state(self) -> dict[str, Tensor]:
        """The momentum, as outer_momentum/PARAMETER; between rounds, when it is saved, the weights are the anchor."""
        states: list[dict[str, Any]] = [self._optimizer.state.get(anchor, {}) for anchor in self._anchors]
        return {
            f"outer_momentum/{name}": state["momentum_buffer"]
            for name, state in zip(self._names, states, strict=True)
            if "momentum_buffer" in state
        }


def by_rounds(
    inner: GradSync,
    model: nn.Module,
    named: Sequence[tuple[str, nn.Parameter]],
    *,
    plan: Plan,
    place: Place,
    ends_round: Callable[[int], bool],
) -> GradSync:
    """Return the sync of a plan whose replicas meet after rounds of steps; `inner` where they meet in every step."""
    mesh = place.axis("replicate")
    if plan.communication.sync_every == 1 or mesh is None:
        return inner
    norms = [module for module in model.modules() if isinstance(module, _NormBase)]
    statistics = [buffer for norm in norms for buffer in norm.buffers() if buffer.is_floating_point()]
    return OuterSync(inner, named, statistics, mesh.get_group(), options=plan.communication, ends_round=ends_round)


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
