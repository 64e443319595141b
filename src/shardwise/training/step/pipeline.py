"""The pipeline step: micro-batches pass through stages on several ranks, forward and back, then the update."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.data.rows import cut_rows, tensors
from shardwise.errors import JobError, ShardwiseError, some_of
from shardwise.parallel.batch_norm import foreign_batch_norms
from shardwise.parallel.collectives import parameters_of
from shardwise.parallel.stage_gate import TieSync, tied_copies
from shardwise.parallel.stage_values import refuse_exchanged
from shardwise.training.step.first_step_checks import LossCheck
from shardwise.training.step.pipeline_schedule import Relay
from shardwise.training.step.plain import OptimizerStep, measured
from shardwise.training.step.step import NOTHING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from shardwise.data.feed import MicroBatch, StepBatch
    from shardwise.job import Job
    from shardwise.job.loss import Metric
    from shardwise.parallel.apply import MeshContext
    from shardwise.parallel.stage_values import Exchanged
    from shardwise.parallel.stages import Stage
    from shardwise.plans import Plan
    from shardwise.plans.pipeline import StageSplit
    from shardwise.training.step.pipeline_schedule import Ports, Schedule
    from shardwise.training.step.step import StepParts, StepReport

    Shape = tuple[tuple[tuple[int, ...], torch.dtype], ...]


class PipelineStep(OptimizerStep):
    """One optimizer step of a model whose layers are cut into stages; the plan's accumulation fills the pipeline."""

    def __init__(
        self, job: Job, stages: Sequence[Stage], parts: StepParts, *, cut: StageSplit, plan: Plan, place: MeshContext
    ) -> None:
        """`stages` are this rank's, under all their transforms."""
        super().__init__(job, nn.ModuleList(stages), parts)
        self._job = job
        self._stages = stages
        self._plan = plan
        self._device = place.device
        self._group: dist.ProcessGroup = place.axis("pp").get_group()  # type: ignore[union-attr]
        self._ties = TieSync(stages, cut, self._group, place.device)
        self._copies = {id(parameter) for parameter in tied_copies(stages)}
        self._relay = Relay(stages, cut, self._group, place.device)
        self._ports: dict[Shape, dict[int, Ports]] = {}
        self._shape: Shape | None = None
        self._schedule: Schedule | None = None
        self._weight = torch.ones((), device=place.device)
        self._sums: list[Tensor] = []
        self._unfilled = [name for stage in stages for name in foreign_batch_norms(stage)]
        self._note = parts.note
        self._remarks: list[str] | None = []
        """On the loss of the first step, which only the last stage computes."""
        self._loss_check = LossCheck(job.loss, self._remarks.append)
        for stage in stages:
            stage.connect()

    def __call__(self, batch: StepBatch) -> StepReport:
        """Train on one global batch; communicates over the pp group and through the gradient sync, on every rank."""
        self._begin()
        for check in self._batch_checks:
            check(batch)
        self.mark("forward", self.number)
        schedule = self._schedule_for(batch.micro_batches)
        # In fp64 whatever the loss is in: the sum over all real rows divided by the one denominator of the global
        # batch is the mean one process would compute.
        weight = torch.full((), self._sync.gain / (batch.denominator or 1), dtype=torch.float64, device=self._device)
        self._weight = self.update.scale(weight)
        self._sums = []
        # A block that backward runs again must see the real rows of its own micro-batch, not those of the last forward.
        run = partial(
            schedule,
            lambda index: partial(self._loss_sum, batch.micro_batches[index]),
            before_backward=lambda index: self._set_real_rows(batch.micro_batches[index]),
        )
        _with_own_errors(run)
        if self._after_first_backward is not None:
            self._after_first_backward(self._sums)
            self._after_first_backward = None
        if self._remarks is not None:
            self._share_first(self._remarks)
            self._remarks = None
        self._sync.finish()
        self._ties.finish()
        total = torch.stack(self._sums).sum() if self._sums else torch.zeros((), device=self._device)
        return self._end(batch, total)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the name, as in the user's module, and parameter of all layers on this rank's stages."""
        yield from parameters_of(self.model)

    @property
    def num_parameters(self) -> int:
        """Elements of the parameters that this rank has a part in, but for copies that the first stage counts."""
        return sum(each.numel() for _, each in self.named_parameters() if id(each) not in self._copies)

    def measure(self, micro_batch: MicroBatch, measures: Mapping[str, Metric]) -> dict[str, float]:
        """Return sum and count of each measure over the real rows, without training; communicates over the pp group.

        Ranks that do not hold the last stage return {}.
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
        """Return the schedule for batches of this shape; for a new one, communicates over the pp group."""
        shape = self._shape_of(micro_batches)
        if self._schedule is not None and shape == self._shape:
            return self._schedule
        if shape not in self._ports:
            if self._ports and self._plan.zero >= 2:
                # Finding the shape of what travels runs a forward, which data-parallel ranks of shards do together.
                raise JobError(
                    "batches of this step have another shape than those before, and the pipeline's stages are sharded",
                    code="support.pipeline-shape-changed",
                    fix="collate to one length, or use replicate instead of shard",
                )
            first = micro_batches[0]
            self._ports[shape] = self._relay.probe(partial(self._probe, first), tensors(first.batch))
        # Imported here: torch's schedules bring dynamo along, 1.5 s that jobs without pipeline need not wait.
        from shardwise.training.step.pipeline_schedule import Schedule

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
        shapes = {tuple((tuple(part.shape), part.dtype) for part in tensors(micro.batch)) for micro in micro_batches}
        if len(shapes) == 1:
            return shapes.pop()
        if self._unfilled and len({micro.filled for micro in micro_batches}) > 1:
            raise JobError(
                f"{some_of(self._unfilled)}: a batch norm class of its own counts filler rows, so a short step cannot"
                " be filled up, and a pipeline cannot pass micro-batches of different sizes on",
                code="support.batch-norm-filler-rows",
                fix="use torch's own batch norm, or a batch_size that divides the dataset",
            )
        raise shapes_differ()

    def _probe(self, micro_batch: MicroBatch, module: nn.Module) -> Tensor:
        with self._autocast():
            output, batch = self._forward(module, micro_batch)
            loss: Tensor = self._job.loss.sum_of(output, batch)
        return loss

    def _loss_sum(self, micro_batch: MicroBatch, module: nn.Module) -> Tensor:
        """Return the loss of one micro-batch, summed over its real rows; only the last stage gets that far."""
        with self._autocast():
            output, batch = self._forward(module, micro_batch)
            loss: Tensor = self._job.loss.sum_of(output, batch)
            if self._loss_check is not None:
                self._look_at_loss(output, batch, micro_batch)
        if not micro_batch.rows:
            loss = loss * 0  # a spare row took part so that every stage has its turn; it counts for nothing
        self._sums.append(loss.detach())
        return loss

    def _share_first(self, remarks: list[str]) -> None:
        """Share what stages found in the first step; communicates over the pp group.

        Every stage, that of rank 0 included, notes what the last one remarked, and refuses a value that one stage set
        on a module and another read.
        """
        exchanged: list[Exchanged] = []
        for stage in self._stages:
            if stage.values is not None:
                exchanged.append(stage.values.stop())
                stage.values = None
        everyone: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(everyone, (remarks, exchanged), group=self._group)
        refuse_exchanged([each for _, found in everyone for each in found])
        for remark in dict.fromkeys(each for found, _ in everyone for each in found):
            self._note(remark)

    def _forward(self, module: nn.Module, micro_batch: MicroBatch) -> tuple[Any, Any]:
        """Return the model's output and the batch, both without filler rows."""
        batch, rows, filled = micro_batch.batch, micro_batch.rows, micro_batch.filled
        self._set_real_rows(micro_batch)
        is_short = rows < filled and self._job.loss.by_row
        received = [stage.received for stage in self._stages]
        with self._keyed(module, micro_batch), self._output_rows.watching(batch, received) if is_short else NOTHING:
            output = self._job.forward(module, batch)
        if is_short:
            output = self._output_rows.cut(output, rows, filled)
            batch = cut_rows(batch, rows, filled, micro_batch.marks)
        return output, batch

    def _set_real_rows(self, micro_batch: MicroBatch) -> None:
        """Set which rows of a micro-batch batch norms take their statistics from."""
        rows, filled = micro_batch.rows, micro_batch.filled
        for norm in self._batch_norms:
            norm.rows = None if rows == filled else (rows, filled)


def _with_own_errors(run: Callable[[], None]) -> None:
    """Run a schedule; torch wraps what a stage raises into an error of its own, which hides ours."""
    try:
        run()
    except RuntimeError as error:
        if isinstance(error.__cause__, ShardwiseError):
            raise error.__cause__ from None
        raise


def shapes_differ() -> JobError:
    """Return the refusal of a step whose micro-batches differ in shape."""
    return JobError(
        "micro-batches of one step differ in shape, which a pipeline cannot pass on",
        code="support.pipeline-micro-batch-shapes",
        fix="collate to one length, and use a batch_size that divides the dataset",
    )
