"""Torch's pipeline schedules, given stages that pick their micro-batches themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.pipelining import PipelineStage, schedules

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch.distributed as dist
    from torch import Tensor, nn

    from shardwise.parallel.stages import Stage
    from shardwise.training.step.relay import Ports

_SINGLE: dict[str, Any] = {"gpipe": schedules.ScheduleGPipe, "1f1b": schedules.Schedule1F1B}
_SEVERAL: dict[str, Any] = {
    "looped_bfs": schedules.ScheduleLoopedBFS,
    "interleaved_1f1b": schedules.ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": schedules.ScheduleInterleavedZeroBubble,
    "zbv": schedules.ScheduleZBVZeroBubble,
    "dualpipev": schedules.ScheduleDualPipeV,
}


class Schedule:
    """One of torch's schedules over this rank's stages, for micro-batches of one shape."""

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
        """`loss` turns the last stage's output into what is back-propagated; `group` joins the ranks along pp.

        `mark` is told when forward and backward of each micro-batch begin.
        """
        placed = [_PlacedStage(stage, ports[stage.index], group, device, mark) for stage in stages]
        options: dict[str, Any] = {
            "n_microbatches": num_micro_batches,
            "loss_fn": lambda output, _: loss(output),
            "scale_grads": False,
        }
        single = name in _SINGLE
        self._schedule = _SINGLE[name](placed[0], **options) if single else _SEVERAL[name](placed, **options)
        self._placed = placed
        self._targets = torch.zeros(num_micro_batches)  # torch wants one per micro-batch; the program has the real one

    def __call__(
        self, program: Callable[[int], Callable[[nn.Module], Any]], before_backward: Callable[[int], None]
    ) -> None:
        """Run forward and backward of every micro-batch; communicates over the pp group.

        `program(i)` is what stages run for micro-batch i, `before_backward(i)` is called before its backward.
        """
        for stage in self._placed:
            stage.choose, stage.before_backward = program, before_backward
        self._schedule.step(target=self._targets, return_outputs=False)


class _PlacedStage(PipelineStage):
    """Tells our stage which micro-batch comes next: torch would have us cut batches into tensors."""

    choose: Callable[[int], Callable[[nn.Module], Any]]
    before_backward: Callable[[int], None]

    def __init__(
        self,
        stage: Stage,
        ports: Ports,
        group: dist.ProcessGroup,
        device: torch.device,
        mark: Callable[[str], None],
    ) -> None:
        super().__init__(
            stage, stage.index, stage.num_stages, device, input_args=ports[0], output_args=ports[1], group=group
        )
        self._stage = stage
        self._mark = mark

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run one micro-batch."""
        self._mark("forward")
        self._stage.program = self.choose(fwd_chunk_id)
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run one micro-batch back: all of it, or its inputs' gradients alone."""
        self._mark("backward")
        self.before_backward(bwd_chunk_id)
        return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Make the weights' gradients of one micro-batch."""
        self._mark("backward")
        return super().backward_weight_one_chunk(*args, **kwargs)

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Leave out neighbours on this rank: torch 2.11 has V-shaped schedules greet themselves, which gloo refuses."""
        greetings: list[dist.P2POp] = super()._get_init_p2p_neighbors_ops()
        return [greeting for greeting in greetings if greeting.group_peer != self.group_rank]
