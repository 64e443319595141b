"""The reference of `verify`: the user's model trained in plain PyTorch, in one process.

The model is the result of `Job.model` under the job's seed, the optimizer is built by the job's factory, and the loop
is forward, loss sum over count, backward, clipping and optimizer step. It shares with plans no code that could hide an
error: no meta device, no transforms, no wrappers, no padding. Four properties of the job apply here as well: the
samples of each batch, the learning rate schedule, counter-based dropout masks, and skipping a step with a non-finite
gradient. `Job.model` does not create LoRA adapters, nor weights that are initialized by parameter name or loaded from a
file; for these, the reference starts from the same values as the plan.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from shardwise.data.feed import MicroBatch, StepBatch
from shardwise.data.rows import CountedCollate, map_rows, move, settle_marks
from shardwise.job.generators import host_states, seed_generators
from shardwise.job.schedules import check_schedule
from shardwise.parallel.counter_dropout import CounterMasks, replace_dropouts
from shardwise.parallel.lora import add_adapters
from shardwise.parallel.muon import for_model
from shardwise.parallel.optimizer import Optimized
from shardwise.parallel.parameter_rules import trainable_of
from shardwise.parallel.weights import fill_parameters
from shardwise.training.build import prepare_meta_model
from shardwise.training.loading import make_feed
from shardwise.training.preflight import check_fit
from shardwise.training.step.first_step_checks import check_counted, loss_check
from shardwise.training.step.module_step import LocalState
from shardwise.training.step.step import StepReport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager

    from torch import Tensor
    from torch.utils.data import Dataset

    from shardwise.dist import World
    from shardwise.job import Job, Metric
    from shardwise.parallel.meta_model import MetaModel
    from shardwise.parallel.weights import Weights
    from shardwise.plans import Plan


class PlainTraining:
    """A training loop in plain PyTorch on the CPU."""

    def __init__(self, job: Job, plan: Plan, world: World, *, before_update: Callable[[], None]) -> None:
        """Build the loop for a one-rank `plan` in fp32 or fp64; `before_update` is called before each clipping."""
        check_fit(job, plan, world)
        self.feed, self.length = make_feed(job, plan, world, None, 0, fill=False)
        check_schedule(job.schedule, self.length.num_steps)
        self.model = plain_model(job, prepare_meta_model(job, plan, world), double=plan.precision.parameter == "fp64")
        named = trainable_of(list(self.model.named_parameters()))
        seed_generators(job.seed + 1 + plan.layout.draw_index(world.rank))  # the same seed as in training
        optimizer = for_model(job.optimizer, self.model)(named)
        self.optimized = Optimized(optimizer=optimizer, named=named)
        self._parameters = [parameter for _, parameter in named]
        self._rates = [group["lr"] for group in self.optimized.param_groups]
        self._masks = CounterMasks(self.model, "cpu") if job.masks == "keyed" else None
        self._job = job
        self._before_update = before_update
        self._number = 0
        self.remarks: list[str] = []
        """Remarks about the loss of the job, from the check of the first steps."""
        self._loss_check = loss_check(job.loss, self.remarks.append)

    def __call__(self, batch: StepBatch) -> StepReport:
        """Train on one global batch and return the report of the step."""
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
            check_counted(total)
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
        """Return the mean loss and the metrics of the job over a dataset, in batches of the global batch size."""
        job = self._job
        measures: dict[str, Metric] = {"loss": job.loss, **job.metrics}
        totals, counts = dict.fromkeys(measures, 0.0), dict.fromkeys(measures, 0.0)
        self.model.eval()
        dtype = torch.float64 if next(iter(self._parameters)).dtype == torch.float64 else None
        generator = torch.Generator()  # otherwise the loader would advance the random generator of the training
        collate = CountedCollate(job.collate)  # the first tensor of a batch need not have a row per sample
        for batch, rows, _ in DataLoader(dataset, job.batch_size, collate_fn=collate, generator=generator):
            moved = move(batch, torch.device("cpu"), dtype)
            output = job.forward(self.model, moved)
            for name, measure in measures.items():
                totals[name] += float(measure.sum(output, moved))
                counts[name] += measure.count_of(moved, rows)
        self.model.train()
        return {name: totals[name] / (counts[name] or 1.0) for name in measures}

    def local_state(self) -> LocalState:
        """Return the values of the parameters."""
        return LocalState({name: parameter.detach() for name, parameter in self.model.named_parameters()}, {})

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of a step before clipping."""
        named = self.model.named_parameters()
        return {name: parameter.grad for name, parameter in named if parameter.grad is not None}

    def buffers(self) -> dict[str, Tensor]:
        """Return all buffers by name."""
        return dict(self.model.named_buffers())

    def random_state(self) -> dict[str, Tensor]:
        """Return the states of the random generators of a step."""
        return {"cpu": torch.get_rng_state(), **host_states()}

    def _masked(self, micro_batch: MicroBatch) -> AbstractContextManager[None]:
        if self._masks is None:
            return nullcontext()
        keys = None if micro_batch.positions is None else micro_batch.positions.keys()
        return self._masks.of(self.model, keys, micro_batch.filled)

    def _has_finite_gradients(self) -> bool:
        gradients = (parameter.grad for parameter in self._parameters)
        return all(bool(torch.isfinite(gradient).all()) for gradient in gradients if gradient is not None)


def plain_model(job: Job, meta_model: MetaModel, *, double: bool) -> nn.Module:
    """Return the model as `Job.model` builds it under the job's seed, with the initial values of the training."""
    seed_generators(job.seed)
    model = job.model()
    if double:
        model = model.double()
    if job.lora is not None:
        add_adapters(model, job.lora)
    if job.masks == "keyed":
        replace_dropouts(model, staged=False)
    weights = meta_model.weights
    if weights is None:
        return model
    specs = [spec for unit in meta_model.units for spec in unit.parameters]
    fill_parameters(model, specs, weights, torch.device("cpu"))  # fills adapters only, which are on the meta device
    if not weights.from_model:
        _copy_values(model, [*specs, *meta_model.buffers], weights)
    return model


@torch.no_grad()
def _copy_values(model: nn.Module, specs: Iterable[tuple[str, Tensor]], weights: Weights) -> None:
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    for name, spec in specs:
        value = weights.value(name, spec, torch.device("cpu"), wanted=True)
        if value is not None:
            tensors[name].copy_(value)


# Variants of the same computation in one process: rows regrouped or reordered, weights changed by one rounding error.


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """A variation of the training in one process; the defaults change nothing."""

    dp_size: int = 1
    accumulation: int = 1
    """Number of micro-batches, with separate batch statistics, into which rows are grouped as on `dp_size` ranks."""
    reverse: bool = False
    """Reverse the rows of each micro-batch, so that sums are computed in a different order."""
    nudge: bool = False
    """Change every weight by up to one rounding error."""

    @torch.no_grad()
    def perturb(self, step: Any) -> None:
        """Change the weights of a step if `nudge` is set."""
        if not self.nudge:
            return
        generator = torch.Generator().manual_seed(1)
        for value in step.local_state().values.values():
            noise = torch.rand(value.shape, generator=generator, dtype=value.dtype) - 0.5
            value.mul_(1 + 2 * torch.finfo(value.dtype).eps * noise)
        step.optimized.refresh()


def vary(batches: Iterable[StepBatch], variant: Variant) -> Iterator[StepBatch]:
    """Yield each step with its rows regrouped and reordered by `variant`; the given steps have one micro-batch each."""
    for step in batches:
        (whole,) = step.micro_batches
        groups = regroup(whole.rows, variant.dp_size, variant.accumulation)
        orders = [order[::-1] if variant.reverse else order for order in groups if order]
        yield StepBatch([_take(whole, order) for order in orders], step.denominator, step.samples, step.cursor)


def regroup(rows: int, dp_size: int, accumulation: int) -> list[list[int]]:
    """Return the row indices of each micro-batch over all data-parallel ranks, in the order of `Slices`."""
    cells = dp_size * accumulation
    spans = [range(cell * rows // cells, (cell + 1) * rows // cells) for cell in range(cells)]
    return [
        [row for dp_rank in range(dp_size) for row in spans[dp_rank * accumulation + number]]
        for number in range(accumulation)
    ]


def _take(whole: MicroBatch, order: list[int]) -> MicroBatch:
    index = torch.tensor(order)

    marks = settle_marks(whole.marks, whole.batch, whole.filled)
    positions = whole.positions
    if positions is not None:
        positions = msgspec.structs.replace(positions, indices=[positions.indices[row] for row in order])
    batch = map_rows(lambda tensor: tensor[index], whole.batch, marks)
    return MicroBatch(batch, len(order), len(order), positions, None, whole.marks)


# fp64 without casts: a model that casts to fp32 would hide differences below 1e-7, or add differences of that size.


_CASTING: tuple[tuple[Any, str], ...] = (
    (torch.Tensor, "to"),
    (torch.Tensor, "type"),
    (torch.Tensor, "softmax"),
    (torch, "softmax"),
    (functional, "softmax"),
    (functional, "log_softmax"),
)
"""Methods with which models cast. The smallest fp64 number, used as an attention mask, is -inf in an fp32 softmax."""


@contextmanager
def true_double() -> Iterator[None]:
    """Disable casts of fp64 tensors to fp32 (`.float()`, `.to(torch.float32)`) in this process.

    The methods of the class are patched, because a torch function mode would not apply to the recomputation in
    backward.
    """
    plain = [(owner, name, getattr(owner, name)) for owner, name in ((torch.Tensor, "float"), *_CASTING)]
    for owner, name, function in plain:
        setattr(owner, name, _kept_float(function) if name == "float" else _kept(function))
    try:
        yield
    finally:
        for owner, name, function in plain:
            setattr(owner, name, function)


def _kept_float(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def kept(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self if self.dtype == torch.float64 else function(self, *args, **kwargs)

    return kept


def _kept(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that casts to fp64 when a cast to fp32 is requested."""

    @wraps(function)
    def kept(*args: Any, **kwargs: Any) -> Any:
        given = args[0] if args else kwargs.get("input")
        if getattr(given, "dtype", None) == torch.float64:
            args = tuple(torch.float64 if each is torch.float32 else each for each in args)
            kwargs = {key: torch.float64 if each is torch.float32 else each for key, each in kwargs.items()}
        return function(*args, **kwargs)

    return kept
