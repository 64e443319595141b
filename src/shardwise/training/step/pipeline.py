"""The pipeline step: run micro-batches forward and backward through stages on several ranks, then update."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.data.rows import drop_padding_rows, tensors
from shardwise.errors import JobError, ShardwiseError, some_of
from shardwise.parallel.batch_norm import foreign_batch_norms
from shardwise.parallel.collectives import parameters_of
from shardwise.parallel.stage_gate import TieSync, tied_copies
from shardwise.parallel.stage_values import check_accesses
from shardwise.training.step.first_step_checks import loss_check
from shardwise.training.step.pipeline_schedule import Relay, Schedule
from shardwise.training.step.plain import OptimizerStep, measured
from shardwise.training.step.step import NOTHING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from shardwise.data.feed import MicroBatch, StepBatch
    from shardwise.job import Job
    from shardwise.job.losses import Metric
    from shardwise.parallel.apply import MeshContext
    from shardwise.parallel.stage_values import AttributeAccesses
    from shardwise.parallel.stages import Stage
    from shardwise.plans import Plan
    from shardwise.plans.pipeline import StageSplit
    from shardwise.training.step.pipeline_schedule import Ports
    from shardwise.training.step.step import StepParts, StepReport

    Shape = tuple[tuple[tuple[int, ...], torch.dtype], ...]


class PipelineStep(OptimizerStep):
    """One optimizer step of a model whose layers are split into stages; accumulation provides the micro-batches."""

    def __init__(
        self,
        job: Job,
        stages: Sequence[Stage],
        parts: StepParts,
        *,
        split: StageSplit,
        plan: Plan,
        mesh_context: MeshContext,
    ) -> None:
        """Create the step of this rank's `stages`, to which the plan's transforms are already applied."""
        super().__init__(job, nn.ModuleList(stages), parts)
        self._job = job
        self._stages = stages
        self._plan = plan
        self._device = mesh_context.device
        self._group: dist.ProcessGroup = mesh_context.axis("pp").get_group()  # type: ignore[union-attr]
        self._ties = TieSync(stages, split, self._group, self._device)
        self._copies = {id(parameter) for parameter in tied_copies(stages)}
        self._relay = Relay(stages, split, self._group, self._device)
        self._ports: dict[Shape, dict[int, Ports]] = {}
        self._shape: Shape | None = None
        self._schedule: Schedule | None = None
        self._weight = torch.ones((), device=self._device)
        self._sums: list[Tensor] = []
        self._unpadded: list[str] = []
        """Batch norms of unknown classes, whose statistics would include padding rows."""
        for stage in stages:
            self._unpadded += foreign_batch_norms(stage)
        self._note = parts.note
        self._loss_notes: list[str] | None = []
        """Messages about the loss of the first step, which only the last stage computes."""
        self._loss_check = loss_check(job.loss, self._loss_notes.append)
        for stage in stages:
            stage.connect()

    def __call__(self, batch: StepBatch) -> StepReport:
        """Train on one global batch. Communicates over the pp group and in the gradient sync; call on every rank."""
        self._begin()
        for check in self._batch_checks:
            check(batch)
        self.mark("forward", self.number)
        schedule = self._schedule_for(batch.micro_batches)
        # In fp64 for every loss dtype: the sum over all rows divided by the denominator of the global batch is the mean
        # that one process would compute.
        weight = torch.full((), self._sync.gain / (batch.denominator or 1), dtype=torch.float64, device=self._device)
        self._weight = self.update.scale(weight)
        self._sums = []
        # A block recomputed in backward must use the rows of its own micro-batch, not those of the last forward.
        run = partial(
            schedule,
            lambda index: partial(self._loss_sum, batch.micro_batches[index]),
            before_backward=lambda index: self._set_real_rows(batch.micro_batches[index]),
        )
        _unwrap_errors(run)
        if self._after_first_backward is not None:
            self._after_first_backward(self._sums)
            self._after_first_backward = None
        if self._loss_notes is not None:
            self._share_first(self._loss_notes)
            self._loss_notes = None
        self._sync.finish()
        self._ties.finish()
        total = torch.stack(self._sums).sum() if self._sums else torch.zeros((), device=self._device)
        return self._end(batch, total)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of this rank's stages with their names in the user's module."""
        yield from parameters_of(self.model)

    @property
    def num_parameters(self) -> int:
        """Number of elements of this rank's parameters at full size, without copies of tied first-stage weights."""
        return sum(each.numel() for _, each in self.named_parameters() if id(each) not in self._copies)

    def measure(self, micro_batch: MicroBatch, measures: Mapping[str, Metric]) -> dict[str, float]:
        """Return the sum and count of each measure without padding rows. Communicates over the pp group.

        Ranks that do not own the last stage return {}.
        """
        found: dict[str, float] = {}

        def program(module: nn.Module) -> None:
            with self._autocast(), self._deferred():
                output, batch = self._forward(module, micro_batch)
                if micro_batch.rows:
                    found.update(measured(output, batch, micro_batch.rows, measures))

        self._relay.run(program)
        return found

    def _schedule_for(self, micro_batches: list[MicroBatch]) -> Schedule:
        """Return the schedule for batches of this shape. Communicates over the pp group for a new shape."""
        shape = self._shape_of(micro_batches)
        if self._schedule is not None and shape == self._shape:
            return self._schedule
        if shape not in self._ports:
            if self._ports and self._plan.zero >= 2:
                # The probe for stage shapes runs a forward pass, in which all ranks of a shard group must participate.
                raise JobError(
                    "the batch shape changed between steps, which a pipeline with sharded stages does not support",
                    code="support.pipeline-shape-changed",
                    fix="collate to a fixed length, or use replicate instead of shard",
                )
            first = micro_batches[0]
            self._ports[shape] = self._relay.probe(partial(self._probe, first), tensors(first.batch))
        self._shape = shape
        self._schedule = Schedule(
            self._plan.pipeline.schedule,
            self._stages,
            self._ports[shape],
            num_micro_batches=len(micro_batches),
            loss=lambda loss: loss * self._weight,
            mark=lambda phase: self.mark(phase, self.number),
            group=self._group,
            device=self._device,
        )
        return self._schedule

    def _shape_of(self, micro_batches: list[MicroBatch]) -> Shape:
        shapes: set[Shape] = set()
        for micro_batch in micro_batches:
            shapes.add(tuple((tuple(part.shape), part.dtype) for part in tensors(micro_batch.batch)))
        if len(shapes) == 1:
            return shapes.pop()
        if self._unpadded and len({micro_batch.filled for micro_batch in micro_batches}) > 1:
            raise JobError(
                f"the custom batch norm {some_of(self._unpadded)} would include padding rows in its statistics,"
                " but a pipeline requires micro-batches of equal size",
                code="support.batch-norm-filler-rows",
                fix="use a batch norm class of torch, or a dataset size that is a multiple of batch_size",
            )
        raise shapes_differ()

    def _probe(self, micro_batch: MicroBatch, module: nn.Module) -> Tensor:
        with self._autocast():
            output, batch = self._forward(module, micro_batch)
            loss: Tensor = self._job.loss.sum_of(output, batch)
        return loss

    def _loss_sum(self, micro_batch: MicroBatch, module: nn.Module) -> Tensor:
        """Return the loss of one micro-batch, summed without padding rows; only the last stage completes the call."""
        with self._autocast():
            output, batch = self._forward(module, micro_batch)
            loss: Tensor = self._job.loss.sum_of(output, batch)
            if self._loss_check is not None:
                self._check_loss(output, batch, micro_batch)
        if not micro_batch.rows:
            loss = loss * 0  # padding only: every stage runs it so that the schedule is the same on all ranks
        self._sums.append(loss.detach())
        return loss

    def _share_first(self, notes: list[str]) -> None:
        """Exchange the findings of the first step between stages. Communicates over the pp group; call on every rank.

        Every stage logs the notes of the last stage, and all stages raise if one of them reads a module attribute that
        another stage has set.
        """
        exchanged: list[AttributeAccesses] = []
        for stage in self._stages:
            if stage.values is not None:
                exchanged.append(stage.values.stop())
                stage.values = None
        gathered: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(gathered, (notes, exchanged), group=self._group)
        all_notes: dict[str, None] = {}
        all_exchanged: list[AttributeAccesses] = []
        for notes_of_rank, exchanged_of_rank in gathered:
            all_notes |= dict.fromkeys(notes_of_rank)
            all_exchanged += exchanged_of_rank
        check_accesses(all_exchanged)
        for note in all_notes:
            self._note(note)

    def _forward(self, module: nn.Module, micro_batch: MicroBatch) -> tuple[Any, Any]:
        """Return the model's output and the batch, both without padding rows."""
        batch, rows, filled = micro_batch.batch, micro_batch.rows, micro_batch.filled
        self._set_real_rows(micro_batch)
        is_short = rows < filled and self._job.loss.by_row
        received = [stage.received for stage in self._stages]
        with self._keyed(module, micro_batch), self._output_rows.tracking(batch, received) if is_short else NOTHING:
            output = self._job.forward(module, batch)
        if is_short:
            output = self._output_rows.drop_padding(output, rows, filled)
            batch = drop_padding_rows(batch, rows, filled, micro_batch.marks)
        return output, batch

    def _set_real_rows(self, micro_batch: MicroBatch) -> None:
        """Set the number of rows without padding that batch norms use for their statistics."""
        rows, filled = micro_batch.rows, micro_batch.filled
        for norm in self._batch_norms:
            norm.rows = None if rows == filled else (rows, filled)


def _unwrap_errors(run: Callable[[], None]) -> None:
    """Run a schedule and re-raise a ShardwiseError that torch has wrapped in a RuntimeError."""
    try:
        run()
    except RuntimeError as error:
        if isinstance(error.__cause__, ShardwiseError):
            raise error.__cause__ from None
        raise


def shapes_differ() -> JobError:
    """Return the error for a step whose micro-batches differ in shape."""
    return JobError(
        "the micro-batches of a step differ in shape, which pipeline parallelism does not support",
        code="support.pipeline-micro-batch-shapes",
        fix="collate to a fixed length, and use a dataset size that is a multiple of batch_size",
    )
