"""The reference of verify: the user's model in plain PyTorch, in one process.

The model is what `Job.model` returns under the job's seed, the optimizer what the job's factory makes of its named
parameters, and the loop is forward, loss sum over the count of the batch, backward, clipping, optimizer step. Nothing
that plans share stands around the model: no meta device, no transform, no wrapper, no padding. A fault in building or
wrapping models therefore cannot cancel out. Four things are the job's own terms and hold here as well: which samples
are in a batch, the learning rate schedule, counter-based dropout masks, and that a gradient that is not finite skips
the step. LoRA adapters and weights that are initialized by parameter name or read from a file are no values of
`Job.model`; the reference starts from them as the plan does.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from shardwise.data.collate import CountedCollate
from shardwise.data.rows import move
from shardwise.job.generators import host_states, seed_generators
from shardwise.job.schedules import check_schedule
from shardwise.parallel.adapters import add_adapters
from shardwise.parallel.keyed_masks import KeyedMasks, key_dropouts
from shardwise.parallel.optimizer import Optimized
from shardwise.parallel.probe import trainable_of
from shardwise.parallel.weights import fill_parameters
from shardwise.training.build import draw_up, make_feed
from shardwise.training.fit import check_fit
from shardwise.training.step.held import Held
from shardwise.training.step.loss_check import LossCheck, refuse_uncounted
from shardwise.training.step.step import StepReport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager

    from torch import Tensor
    from torch.utils.data import Dataset

    from shardwise.data.feed import MicroBatch, StepBatch
    from shardwise.dist import World
    from shardwise.job import Job, Metric
    from shardwise.parallel.blueprint import Blueprint
    from shardwise.parallel.weights import Weights
    from shardwise.plans import Plan


class PlainTraining:
    """A loop over batches as one would write it in plain PyTorch, on the CPU."""

    def __init__(self, job: Job, plan: Plan, world: World, *, before_update: Callable[[], None]) -> None:
        """`plan` is that of one process, in fp32 or fp64; `before_update` is called when a step has its gradients."""
        check_fit(job, plan, world)
        self.feed, self.length = make_feed(job, plan, world, None, 0, fill=False)
        check_schedule(job.schedule, self.length.num_steps)
        self.model = plain_model(job, draw_up(job, plan, world), double=plan.precision.parameter == "fp64")
        named = trainable_of(list(self.model.named_parameters()))
        seed_generators(job.seed + 1 + plan.layout.draw_index(world.rank))  # as a training is seeded
        self.optimized = Optimized(optimizer=job.optimizer(named), named=named)
        self._parameters = [parameter for _, parameter in named]
        self._rates = [group["lr"] for group in self.optimized.param_groups]
        self._masks = KeyedMasks(self.model, "cpu") if job.masks == "keyed" else None
        self._job = job
        self._before_update = before_update
        self._number = 0
        self.remarks: list[str] = []
        """On the loss of the job, from the check that every training makes."""
        self._loss_check: LossCheck | None = LossCheck(job.loss, self.remarks.append)

    def __call__(self, batch: StepBatch) -> StepReport:
        """Train on one global batch."""
        job, optimizer, number = self._job, self.optimized.optimizer, self._number
        factor = job.schedule(number, self.length.num_steps)
        for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor
        count = batch.denominator or 1
        sums = []
        for micro_batch in batch.micro_batches:
            with self._masked(micro_batch):
                output = job.forward(self.model, micro_batch.batch)
            loss = job.loss.sum_of(output, micro_batch.batch)
            if self._loss_check is not None and self._loss_check(output, micro_batch.batch, micro_batch):
                self._loss_check = None
            (loss / count).backward()
            sums.append(loss.detach())
        self._loss_check = None
        total = torch.stack(sums).sum()
        if not batch.denominator:
            refuse_uncounted(total)
        self._before_update()
        norm = None
        if job.clip_norm is not None:
            norm = nn.utils.clip_grad_norm_(self._parameters, job.clip_norm)
        skipped = not self._has_finite_gradients()
        if not skipped:
            optimizer.step()
        self.model.zero_grad()
        self._number += 1
        lr = self._rates[0] * factor
        return StepReport(number, batch.cursor, total, batch.samples, batch.denominator, lr, norm, float(skipped))

    @torch.no_grad()
    def evaluate(self, dataset: Dataset[Any]) -> dict[str, float]:
        """Return the mean loss and the job's metrics over a dataset, its samples in batches of the training's size."""
        job = self._job
        measures: dict[str, Metric] = {"loss": job.loss, **job.metrics}
        totals, counts = dict.fromkeys(measures, 0.0), dict.fromkeys(measures, 0.0)
        self.model.eval()
        dtype = torch.float64 if next(iter(self._parameters)).dtype == torch.float64 else None
        generator = torch.Generator()  # a loader of its own would draw from that of training
        collate = CountedCollate(job.collate)  # the samples of a batch are not always the rows of its first tensor
        for batch, rows, _ in DataLoader(dataset, job.batch_size, collate_fn=collate, generator=generator):
            moved = move(batch, torch.device("cpu"), dtype)
            output = job.forward(self.model, moved)
            for name, measure in measures.items():
                totals[name] += float(measure.sum(output, moved))
                counts[name] += measure.count_of(moved, rows)
        self.model.train()
        return {name: totals[name] / (counts[name] or 1.0) for name in measures}

    def held(self) -> Held:
        """Return the values of the parameters."""
        return Held({name: parameter.detach() for name, parameter in self.model.named_parameters()}, {})

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of a step before they are clipped."""
        named = self.model.named_parameters()
        return {name: parameter.grad for name, parameter in named if parameter.grad is not None}

    def buffers(self) -> dict[str, Tensor]:
        """Return all buffers by name."""
        return dict(self.model.named_buffers())

    def random_state(self) -> dict[str, Tensor]:
        """Return the states of the generators that a step draws from."""
        return {"cpu": torch.get_rng_state(), **host_states()}

    def _masked(self, micro_batch: MicroBatch) -> AbstractContextManager[None]:
        if self._masks is None:
            return nullcontext()
        keys = None if micro_batch.places is None else micro_batch.places.keys()
        return self._masks.of(self.model, keys, micro_batch.filled)

    def _has_finite_gradients(self) -> bool:
        gradients = (parameter.grad for parameter in self._parameters)
        return all(bool(torch.isfinite(gradient).all()) for gradient in gradients if gradient is not None)


def plain_model(job: Job, blueprint: Blueprint, *, double: bool) -> nn.Module:
    """Return the model as `Job.model` builds it under the job's seed, with the values that training starts from."""
    seed_generators(job.seed)
    model = job.model()
    if double:
        model = model.double()
    if job.lora is not None:
        add_adapters(model, job.lora)
    if job.masks == "keyed":
        key_dropouts(model, staged=False)
    weights = blueprint.weights
    if weights is None:
        return model
    specs = [spec for unit in blueprint.units for spec in unit.parameters]
    fill_parameters(model, specs, weights, torch.device("cpu"))  # adapters, which are on meta; of others nothing
    if not weights.from_model:
        _copy_values(model, [*specs, *blueprint.buffers], weights)
    return model


@torch.no_grad()
def _copy_values(model: nn.Module, specs: Iterable[tuple[str, Tensor]], weights: Weights) -> None:
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    for name, spec in specs:
        value = weights.value(name, spec, torch.device("cpu"), wanted=True)
        if value is not None:
            tensors[name].copy_(value)
