"""The captured step: the whole optimizer step as one CUDA graph, where every full step has the same shapes.

A small model's step is hundreds of kernels of some microseconds, and launching them from Python takes longer than they
do. A graph is launched once. What may change between steps lies in tensors that keep their place: the batch, the weight
of the loss, the learning rates.
"""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from shardwise.data.loaders import dataset_length, dataset_of
from shardwise.data.rows import map_tensors, stack_samples, tensors
from shardwise.errors import JobError
from shardwise.torch_private.dispatch import copy_all
from shardwise.training.step.plain import PlainStep
from shardwise.training.step.step import StepReport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn
    from torch.optim import Optimizer

    from shardwise.data.feed import MicroBatch, StepBatch
    from shardwise.job import Job
    from shardwise.plans import Plan
    from shardwise.training.step.step import StepParts

WARM_UP = 2
"""Full steps as they are, so that states exist and kernels are chosen and compiled; the one after is watched."""

LOOKS = 8
"""Batches whose shapes are compared before training."""

Form = tuple[tuple[tuple[int, ...], torch.dtype], ...]
"""Shape and dtype of each tensor of a step's micro-batches."""


def plain_step(job: Job, model: nn.Module, parts: StepParts, *, plan: Plan, note: Callable[[str], None]) -> PlainStep:
    """Return the step of a model that is no pipeline: captured if the plan asks for it and nothing stands against it.

    What does is said to `note`; that batches have one shape is insisted on either way.
    """
    if plan.capture == "none":
        return PlainStep(job, model, parts)
    reason = why_not_captured(job, plan, parts)
    if reason is None:
        return CapturedStep(job, model, parts, plan=plan, note=note)
    note(_not_captured(reason))
    return StaticStep(job, model, parts, plan=plan)


def why_not_captured(job: Job, plan: Plan, parts: StepParts) -> str | None:
    """Say why a step cannot become a CUDA graph; None when nothing is known against it."""
    optimizer = parts.optimized.optimizer
    against = {
        "it needs a CUDA device": parts.autocast.device_type != "cuda",
        f"gradients travel between the ranks of {plan.layout}": plan.layout.world_size > 1,
        "the offloaded optimizer works on the host": plan.offload.optimizer != "none",
        "keyed masks depend on the samples of each step": job.masks == "keyed",
        "gradients are looked at in every step": parts.before_update is not None,
        f"{type(optimizer).__name__} is not fused, and the host decides whether its step is skipped": not getattr(
            optimizer, "_step_supports_amp_scaling", False
        ),
    }
    return next((reason for reason, holds in against.items() if holds), None)


def _not_captured(reason: str) -> str:
    return f"capture = step: not captured, {reason}; steps run one kernel after another"


def check_shapes(job: Job, plan: Plan) -> None:
    """Refuse a job whose batches change their shape, as far as a few of them tell; reads these, on the host."""
    forms = sampled_forms(job, plan.micro_batch)
    for form in forms[1:]:
        _require_same(form, forms[0])


def sampled_forms(job: Job, rows: int) -> list[Form]:
    """Return the shapes and dtypes of a few micro-batches of `rows` samples, spread over the dataset; reads them.

    Empty for streams, and for a dataset that has no more than one micro-batch.
    """
    return [_form(batch) for batch in sampled_batches(job, rows, LOOKS)]


def sampled_batches(job: Job, rows: int, number: int) -> Iterator[Any]:
    """Yield `number` micro-batches of `rows` samples, spread over the dataset; none for streams and small datasets."""
    dataset = dataset_of(job, "train")
    collate = job.collate or stack_samples
    if dataset is None or isinstance(dataset, IterableDataset) or dataset_length(dataset) <= rows:
        return
    last = dataset_length(dataset) - rows
    for first in dict.fromkeys(last * each // max(number - 1, 1) for each in range(number)):
        yield collate([dataset[index] for index in range(first, first + rows)])


def _form(batch: Any) -> Form:
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors(batch))


def _require_same(form: Form, first: Form) -> None:
    if form == first:
        return
    was, now = next(((old, new) for old, new in zip(first, form, strict=False) if old != new), (first[0], form[0]))
    raise JobError(
        f"a batch of shape {list(now[0])} follows one of {list(was[0])}, and capture = step replays one shape",
        code="support.capture-shape-changed",
        fix="pad batches to one length in Job.collate, or --set capture=none",
    )


class StaticStep(PlainStep):
    """A plain step that refuses full batches of another shape, on any device: found out before a GPU is paid for."""

    def __init__(self, job: Job, model: nn.Module, parts: StepParts, *, plan: Plan) -> None:
        super().__init__(job, model, parts)
        self._rows = [plan.micro_batch] * plan.accumulation
        self._form: Form | None = None

    def __call__(self, batch: StepBatch) -> StepReport:
        """Train on one global batch, after a look at its shapes."""
        self._is_full(batch)
        return super().__call__(batch)

    def _is_full(self, batch: StepBatch) -> bool:
        """Whether the step has all its rows, and so the one shape; a full one of another shape is refused."""
        if [each.rows for each in batch.micro_batches] != self._rows:
            return False  # the short step at the end of an epoch, which stays uncaptured
        form = _form([each.batch for each in batch.micro_batches])
        self._form = self._form or form
        _require_same(form, self._form)
        return True


@dataclass(frozen=True, eq=False)
class _Recording:
    """A graph, and the places that change between its replays."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    weight: Tensor
    results: Tensor
    """Loss sum, norm of the gradient, skipped."""


class CapturedStep(StaticStep):
    """Runs full steps as one CUDA graph, after a few as they are; gives up, and says why, where that fails."""

    def __init__(
        self, job: Job, model: nn.Module, parts: StepParts, *, plan: Plan, note: Callable[[str], None]
    ) -> None:
        super().__init__(job, model, parts, plan=plan)
        self._note = note
        self._num_warm = 0
        self._recording: _Recording | None = None
        self._rates: list[Tensor] | None = None
        """Learning rates where the graph reads them."""
        self._known: tuple[float, ...] = ()
        """What they hold: writing each anew costs a kernel."""
        self._denominator = 0.0
        self._gave_up = False

    def __call__(self, batch: StepBatch) -> StepReport:
        """Train on one global batch; no communication, since a captured plan has one rank."""
        if not self._is_full(batch) or self._gave_up:
            return PlainStep.__call__(self, batch)
        if self._recording is None:
            if self._num_warm <= WARM_UP:
                self._num_warm += 1
                return self._warm(batch)
            self._recording = self._record(batch)
        if self._recording is None:
            return PlainStep.__call__(self, batch)
        return self._replay(self._recording, batch)

    def _warm(self, batch: StepBatch) -> StepReport:
        """Train as ever; the last time with an eye on whether the host waits for the device, which no graph can."""
        if self._num_warm <= WARM_UP:
            return PlainStep.__call__(self, batch)
        with waits_of_host() as waits:
            report = PlainStep.__call__(self, batch)
        if waits:
            self._give_up(f"the host waits for the device at {waits[0]}")
        return report

    def _give_up(self, reason: str) -> None:
        self._gave_up, self._rates = True, None
        self._note(_not_captured(reason))

    def _begin(self) -> None:
        """Set the learning rates of this step, where a graph has been captured in the tensors it reads."""
        super()._begin()
        if self._rates is None:
            return
        groups = self.optimizer.param_groups
        wanted = tuple(group["lr"] for group in groups)
        for group, place, rate, old in zip(groups, self._rates, wanted, self._known, strict=True):
            if rate != old:
                place.fill_(rate)
            group["lr"] = place
        self._known = wanted

    def _record(self, batch: StepBatch) -> _Recording | None:
        """Capture this step without running it; on failure go on uncaptured."""
        micro_batches = [_still(each) for each in batch.micro_batches]
        device = self._parameters[0].device
        self._known = tuple(group["lr"] for group in self.optimizer.param_groups)
        rates = [torch.full((), rate, device=device) for rate in self._known]
        weight = torch.full((), self._sync.gain / (batch.denominator or 1), device=device)
        graph = torch.cuda.CUDAGraph()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        try:
            # Other threads, such as the one that pins batches, may call CUDA meanwhile.
            with capturable(self.optimizer), torch.cuda.graph(graph, capture_error_mode="thread_local"):
                total = self._accumulate(micro_batches, weight)
                norm, skipped = self.update(self.optimizer)
                results = torch.stack([total, *(torch.as_tensor(each).to(total.dtype) for each in (norm, skipped))])
        except RuntimeError as error:
            self._give_up(str(error).splitlines()[0])
            return None
        finally:
            for parameter in self._parameters:
                parameter.grad = None
        inputs = [tensor for each in micro_batches for tensor in tensors(each.batch)]
        self._rates, self._denominator = rates, batch.denominator
        self._note("capture = step: the optimizer step runs as one CUDA graph")
        return _Recording(graph, inputs, weight, results)

    def _replay(self, recording: _Recording, batch: StepBatch) -> StepReport:
        """Put everything in its place and launch the graph."""
        self._begin()
        self.mark("forward", self.number)
        copy_all(recording.inputs, [t for each in batch.micro_batches for t in tensors(each.batch)])
        if batch.denominator != self._denominator:
            self._denominator = batch.denominator
            recording.weight.fill_(self._sync.gain / (batch.denominator or 1))
        recording.graph.replay()
        total, norm, skipped = recording.results.clone().unbind()  # the next replay writes over them
        number, self.number = self.number, self.number + 1
        self.mark("data", self.number)
        return StepReport(number, batch.cursor, total, batch.samples, batch.denominator, self._rate, norm, skipped)


def _still(micro_batch: MicroBatch) -> MicroBatch:
    """Return a copy whose tensors stay where they are."""
    return msgspec.structs.replace(micro_batch, batch=map_tensors(torch.clone, micro_batch.batch))


@contextmanager
def capturable(optimizer: Optimizer) -> Iterator[None]:
    """Let an optimizer be captured; only then, since it warns of every step that is not."""
    groups = [group for group in optimizer.param_groups if "capturable" in group]
    for group in groups:
        group["capturable"] = True
    try:
        yield
    finally:
        for group in groups:
            group["capturable"] = False


@contextmanager
def waits_of_host() -> Iterator[list[str]]:
    """Collect the places, as file:line, at which the host waits for a CUDA device."""
    found: list[str] = []
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)
            found += [place for each in caught if (place := _place_of_wait(each))]


def _place_of_wait(warning: Any) -> str:
    if "synchronizing CUDA operation" not in str(warning.message):
        return ""
    return f"{warning.filename}:{warning.lineno}"
