"""Parameters tied across pipeline stages: the first and the last stage keep a copy each.

An embedding whose weight is the head's too is used on both ends of a pipeline. As in Megatron-LM, both stages hold it,
start from the same values, and sum the gradients of the two copies once a step, after data-parallel ranks have summed
theirs; equal gradients and equal optimizer states keep the copies equal. Both go by the parameter's first name, so a
checkpoint holds one of them and fills both. On schedules that put both stages on one rank, one parameter serves both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from shardwise.errors import JobError
from shardwise.parallel.gradsync import local

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import nn

    from shardwise.parallel.stage_plan import StageCut
    from shardwise.parallel.stages import Stage


class Ties(NamedTuple):
    """Which parameters of a whole model have several names, and which of them two stages hold."""

    first_names: Mapping[str, str]
    """Every further name of a parameter, with its first."""
    shared: frozenset[str]
    """First names of those that the first and the last stage hold a copy of each."""


def find_ties(module: nn.Module, owners: Mapping[str, int], cut: StageCut, layers: str) -> Ties:
    """Return the ties of a whole model; those that its stages cannot have are refused by name.

    `owners` gives the stage of every name.
    """
    ends, inside = {0, cut.num_stages - 1}, f"{layers}." if layers else ""
    first: dict[int, str] = {}
    first_names, shared = {}, set()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        original = first.setdefault(id(parameter), name)
        if original == name:
            continue
        first_names[name] = original
        if owners[name] == owners[original]:
            continue
        in_layers = name.startswith(inside) or original.startswith(inside)
        if in_layers or {owners[name], owners[original]} != ends:
            raise JobError(
                f"{original} and {name} are one parameter, and the pipeline puts them on stages {owners[original]} and"
                f" {owners[name]}",
                code="support.pipeline-tied-weights",
                fix="tie only what comes before the layers to what comes after them, or use pp = 1",
            )
        shared.add(original)
    return Ties(first_names, frozenset(shared))


def share_copies(stages: Sequence[Stage]) -> None:
    """Have stages of one rank use one parameter where they are tied; called after all transforms of the stages."""
    first: dict[str, nn.Parameter] = {}
    for stage in stages:
        for name, parameter in list(stage.named_parameters()):
            kept = first.setdefault(name, parameter)
            if kept is parameter:
                continue
            for part in stage.modules():
                held = part._parameters  # noqa: SLF001 - setattr would run the user's own hooks
                held |= {key: kept for key, value in held.items() if value is parameter}


def tied_copies(stages: Sequence[Stage]) -> Iterator[nn.Parameter]:
    """Yield the parameters that another rank's first stage holds as well, and counts."""
    if any(stage.is_first for stage in stages):
        return
    for stage in stages:
        yield from (parameter for name, parameter in stage.named_parameters() if name in stage.model_ties.shared)


class TieSync:
    """Sums the gradients of tied parameters over the ranks of the first and the last stage."""

    def __init__(self, stages: Sequence[Stage], cut: StageCut, group: dist.ProcessGroup, device: torch.device) -> None:
        """`stages` are this rank's; `group` joins the ranks along pp and sends tensors of `device`."""
        self._group = group
        self._device = device
        rank, ends = dist.get_rank(group), {cut.ranks[0], cut.ranks[-1]}
        self._peer = next(iter(ends - {rank}), None) if rank in ends else None
        named = {
            name: parameter
            for stage in stages
            for name, parameter in stage.named_parameters()
            if name in stage.model_ties.shared and parameter.requires_grad
        }
        self._parameters = [named[name] for name in sorted(named)] if self._peer is not None else []

    @torch.no_grad()
    def finish(self) -> None:
        """Sum once a step, after the last backward; communicates between the two ranks, on both."""
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            mine = local(parameter.grad)
            if not mine.numel():
                continue
            sent = mine.to(self._device).contiguous()
            received = torch.empty_like(sent)
            # The sum of two numbers is the same in either order, so both ranks get the same bits.
            exchange = [
                dist.P2POp(dist.isend, sent, group=self._group, group_peer=self._peer),
                dist.P2POp(dist.irecv, received, group=self._group, group_peer=self._peer),
            ]
            for work in dist.batch_isend_irecv(exchange):
                work.wait()
            mine.add_(received)
