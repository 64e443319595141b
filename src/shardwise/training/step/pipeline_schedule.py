"""Runs the pipeline schedules of torch, and single forward passes through all stages."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, schedules

from shardwise.plans.pipeline import SCHEDULES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from shardwise.parallel.stage_gate import Structure
    from shardwise.parallel.stages import Stage
    from shardwise.plans.pipeline import StageSplit

    Program = Callable[[nn.Module], Any]


class Schedule:
    """A pipeline schedule of torch over this rank's stages, for micro-batches of one shape."""

    def __init__(
        self,
        name: str,
        stages: Sequence[Stage],
        ports: Mapping[int, Ports],
        *,
        num_micro_batches: int,
        loss: Callable[[Tensor], Tensor],
        mark: Callable[[str], None],
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        """Create the schedule `name` for this rank's `stages`.

        `loss` maps the output of the last stage to the back-propagated value, `group` contains the ranks along pp, and
        `mark` is called when forward and backward of each micro-batch start.
        """
        placed = [_PlacedStage(stage, ports[stage.index], group, device, mark) for stage in stages]
        options: dict[str, Any] = {
            "n_microbatches": num_micro_batches,
            "loss_fn": lambda output, _: loss(output),
            "scale_grads": False,
        }
        schedule = SCHEDULES[name]
        torch_class: Any = getattr(schedules, schedule.torch_class)
        self._schedule = torch_class(placed[0] if schedule.placement == "one" else placed, **options)
        self._placed = placed
        self._targets = torch.zeros(num_micro_batches)  # torch requires one per micro-batch; programs use the batch

    def __call__(
        self, program: Callable[[int], Callable[[nn.Module], Any]], before_backward: Callable[[int], None]
    ) -> None:
        """Run forward and backward of every micro-batch. Communicates over the pp group; call on every rank.

        `program(i)` returns the function that stages run for micro-batch i; `before_backward(i)` is called before its
        backward.
        """
        for stage in self._placed:
            stage.choose, stage.before_backward = program, before_backward
        self._schedule.step(target=self._targets, return_outputs=False)


class _PlacedStage(PipelineStage):
    """A torch PipelineStage that sets the program of a Stage for each micro-batch instead of splitting inputs."""

    choose: Callable[[int], Callable[[nn.Module], Any]]
    before_backward: Callable[[int], None]

    def __init__(
        self, stage: Stage, ports: Ports, group: dist.ProcessGroup, device: torch.device, mark: Callable[[str], None]
    ) -> None:
        super().__init__(
            stage, stage.index, stage.num_stages, device, input_args=ports[0], output_args=ports[1], group=group
        )
        self._stage = stage
        self._mark = mark

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass of one micro-batch."""
        self._mark("forward")
        self._stage.program = self.choose(fwd_chunk_id)
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run the backward pass of one micro-batch, or only the part for its input gradients."""
        self._mark("backward")
        self.before_backward(bwd_chunk_id)
        return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the weight gradients of one micro-batch."""
        self._mark("backward")
        return super().backward_weight_one_chunk(*args, **kwargs)

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Skip neighbours on this rank: torch 2.11 sends to itself in V-shaped schedules, which gloo rejects."""
        operations: list[dist.P2POp] = super()._get_init_p2p_neighbors_ops()
        return [operation for operation in operations if operation.group_peer != self.group_rank]


# The relay runs one forward pass through all pipeline stages; each stage sends its output to the next stage.


Ports = tuple[tuple["Tensor", ...], tuple["Tensor", ...]]
"""Meta tensors with the shapes of the inputs and of the outputs of a stage."""


class Relay:
    """Runs forward passes without gradients through all pipeline stages."""

    def __init__(
        self, stages: Sequence[Stage], split: StageSplit, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        """Create the relay of this rank's `stages`; `group` contains the ranks along pp."""
        self._stages = stages
        self._split = split
        self._group = group
        self._device = device

    @torch.no_grad()
    def run(self, program: Program) -> None:
        """Run `program` on every stage. Communicates over the pp group; call on every rank."""
        for _ in self._run_stages(program):
            pass

    @torch.no_grad()
    def probe(self, program: Program, inputs: Sequence[Tensor]) -> dict[int, Ports]:
        """Return the input and output shapes of this rank's stages, by stage index. Communicates over the pp group.

        Runs `program`, which reads `inputs` and returns a tensor, in eval mode; batch statistics do not change.
        """
        ports: dict[int, Ports] = {}
        with _eval_mode(self._stages):
            for stage, received, result in self._run_stages(program):
                sent = (result,) if stage.is_last else result
                stage.check_nan(inputs if stage.is_first else received, sent)
                ports[stage.index] = (_meta_like(received), _meta_like(sent))
        return ports

    def _run_stages(self, program: Program) -> Iterator[tuple[Stage, tuple[Tensor, ...], Any]]:
        """Run this rank's stages in order; yield each stage with its inputs and outputs."""
        local: tuple[Structure, tuple[Tensor, ...]] = (None, ())
        for stage in self._stages:
            if not stage.is_first:
                stage.incoming, received = self._receive(stage.index) or local
            else:
                received = ()
            stage.program = program
            sent = stage(*received)
            if not stage.is_last:
                local = stage.outgoing, sent
                self._send(stage.index, *local)
            if isinstance(stage, FSDPModule):
                stage.reshard()  # a root unit stays unsharded after forward, and there is no backward to reshard it
            yield stage, received, sent

    def _peer(self, stage: int, neighbour: int) -> int | None:
        """Return the global rank of a neighbouring stage, or None if it is on this rank."""
        if self._split.ranks[stage] == self._split.ranks[neighbour]:
            return None
        return dist.get_global_rank(self._group, self._split.ranks[neighbour])

    def _send(self, stage: int, structure: Structure, tensors: tuple[Tensor, ...]) -> None:
        peer = self._peer(stage, stage + 1)
        if peer is None:
            return
        forms = [(tensor.shape, tensor.dtype) for tensor in tensors]
        dist.send_object_list([structure, forms], dst=peer, group=self._group, device=self._device)
        for tensor in tensors:
            dist.send(tensor, dst=peer, group=self._group)

    def _receive(self, stage: int) -> tuple[Structure, tuple[Tensor, ...]] | None:
        peer = self._peer(stage, stage - 1)
        if peer is None:
            return None
        header: list[Any] = [None, None]
        dist.recv_object_list(header, src=peer, group=self._group, device=self._device)
        structure, forms = header
        tensors = tuple(torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in forms)
        for tensor in tensors:
            dist.recv(tensor, src=peer, group=self._group)
        return structure, tensors


@contextmanager
def _eval_mode(stages: Sequence[Stage]) -> Iterator[None]:
    modes = [(part, part.training) for stage in stages for part in stage.modules()]
    for stage in stages:
        stage.eval()
    try:
        yield
    finally:
        for part, was_training in modes:  # per module, because the user may have set some to eval mode
            part.training = was_training


def _meta_like(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(tensor, device="meta", requires_grad=True) for tensor in tensors)
