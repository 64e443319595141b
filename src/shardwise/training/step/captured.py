"""The captured step runs the whole optimizer step as one CUDA graph, for batches of constant shape.

The step of a small model consists of hundreds of kernels of a few microseconds, and launching them from Python takes
longer than running them. A graph is launched once. Values that change between steps are stored in tensors at fixed
addresses: the batch, the weight of the loss and the learning rates.
"""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from shardwise.data.corpus import Corpus
from shardwise.data.loaders import dataset_length, dataset_of
from shardwise.data.rows import map_tensors, stack_samples, tensors
from shardwise.errors import JobError
from shardwise.plans.rules import is_exact_in_graph
from shardwise.torch_private.dispatch import copy_all, free_matmul_workspaces
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
"""Number of uncaptured full steps, which create optimizer states and compile kernels; another checks for host syncs."""

NUM_SAMPLED = 8
"""Number of batches whose shapes are compared before training."""

Form = tuple[tuple[tuple[int, ...], torch.dtype], ...]
"""Shape and dtype of each tensor of a step's micro-batches."""


def plain_step(job: Job, model: nn.Module, parts: StepParts, *, plan: Plan, note: Callable[[str], None]) -> PlainStep:
    """Return the step of a plan without pipeline stages, captured as a CUDA graph if requested and possible.

    `note` receives the reason if the step cannot be captured.
    """
    if plan.capture == "none":
        return PlainStep(job, model, parts)
    reason = why_not_captured(job, plan, parts)
    if reason is None:
        return CapturedStep(job, model, parts, plan=plan, note=note)
    note(_not_captured(reason))
    return PlainStep(job, model, parts)


def why_not_captured(job: Job, plan: Plan, parts: StepParts) -> str | None:
    """Return the reason why a step cannot be captured as a CUDA graph, or None if no reason is known in advance."""
    optimizer = parts.optimized.optimizer
    reasons = {
        "it requires a CUDA device": parts.autocast.device_type != "cuda",
        f"gradients are reduced over the ranks of {plan.layout}": plan.layout.world_size > 1,
        "fused optimizers read a captured learning rate in fp32, but the parameters are in fp64": not is_exact_in_graph(
            plan
        ),
        "the offloaded optimizer runs on the host": plan.offload.optimizer != "none",
        "keyed dropout masks depend on the samples of each step": job.masks == "keyed",
        "before_update reads the gradients in every step": parts.before_update is not None,
        f"{type(optimizer).__name__} is not fused, so the host decides whether its step is skipped": not getattr(
            optimizer, "_step_supports_amp_scaling", False
        ),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def _not_captured(reason: str) -> str:
    return f"capture = step: the step is not captured because {reason}; kernels are launched one by one"


def check_shapes(job: Job, plan: Plan) -> None:
    """Raise JobError if a few sampled micro-batches of the job differ in shape; reads them on the host."""
    forms = sampled_forms(job, plan.micro_batch)
    for form in forms[1:]:
        if form != forms[0]:
            raise JobError(
                f"capture = step requires batches of constant shape, got {_changed(form, forms[0])}",
                code="support.capture-shape-changed",
                fix="pad batches to a fixed length in Job.collate, or pass --set capture=none",
            )


def sampled_forms(job: Job, rows: int) -> list[Form]:
    """Return the shapes and dtypes of a few micro-batches of `rows` samples, spread over the dataset.

    Empty for an IterableDataset and for a dataset with no more than one micro-batch.
    """
    return [_form(batch) for batch in sampled_batches(job, rows, NUM_SAMPLED)]


def sampled_batches(job: Job, rows: int, number: int) -> Iterator[Any]:
    """Yield `number` micro-batches of `rows` samples, spread over the dataset; none for streams and small datasets."""
    dataset = dataset_of(job, "train")
    collate = job.collate or stack_samples
    if isinstance(dataset, Corpus):  # all of its batches have the same shape
        yield collate(list(islice(dataset, rows)))
        return
    if dataset is None or isinstance(dataset, IterableDataset) or dataset_length(dataset) <= rows:
        return
    last = dataset_length(dataset) - rows
    # A small dataset has fewer distinct positions than `number`.
    for first in dict.fromkeys(last * each // max(number - 1, 1) for each in range(number)):
        yield collate([dataset[index] for index in range(first, first + rows)])


def sampled_meta_batch(job: Job, rows: int) -> Any:
    """Return a micro-batch of `rows` samples on the meta device; None for streams and small datasets."""
    batch = next(sampled_batches(job, rows, 1), None)
    return None if batch is None else map_tensors(lambda tensor: tensor.to("meta"), batch)


def _form(batch: Any) -> Form:
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors(batch))


def _changed(form: Form, first: Form) -> str:
    """Return the first pair of shapes in which two batches differ."""
    expected, found = first[0], form[0]
    for one, other in zip(first, form, strict=False):
        if one != other:
            expected, found = one, other
            break
    return f"{list(found[0])} after {list(expected[0])}"


@dataclass(frozen=True, eq=False)
class _Recording:
    """A CUDA graph and the tensors that are written before its replays or read after them."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    weight: Tensor
    results: Tensor
    """Loss sum, gradient norm and skip flag."""


class CapturedStep(PlainStep):
    """Runs full steps as one CUDA graph after a few warm-up steps; continues uncaptured if the capture fails.

    Short steps and batches whose shapes differ from those of the first full batch are not captured.
    """

    def __init__(
        self, job: Job, model: nn.Module, parts: StepParts, *, plan: Plan, note: Callable[[str], None]
    ) -> None:
        super().__init__(job, model, parts)
        self._note = note
        self._rows = [plan.micro_batch] * plan.accumulation
        self._form: Form | None = None
        self._has_changed = False
        self._num_warm = 0
        self._recording: _Recording | None = None
        self._rates: list[Tensor] | None = None
        """Tensors from which the graph reads the learning rates."""
        self._known: tuple[float, ...] = ()
        """Current values of these tensors, cached because each write costs a kernel launch."""
        self._denominator = 0.0
        self._gave_up = False

    @property
    def is_captured(self) -> bool:
        """Whether full steps run as a CUDA graph now."""
        return self._recording is not None

    def __call__(self, batch: StepBatch) -> StepReport:
        """Train on one global batch, without communication: a captured plan has one rank."""
        if self._gave_up or not self._is_recordable(batch):
            return PlainStep.__call__(self, batch)
        if self._recording is None:
            if self._num_warm <= WARM_UP:
                self._num_warm += 1
                return self._warm(batch)
            self._recording = self._record(batch)
        if self._recording is None:
            return PlainStep.__call__(self, batch)
        return self._replay(self._recording, batch)

    def _is_recordable(self, batch: StepBatch) -> bool:
        """Return whether a batch is full and has the shape of the first full one; reports the first other shape."""
        if [each.rows for each in batch.micro_batches] != self._rows:
            return False  # the short step at the end of an epoch
        form = _form([each.batch for each in batch.micro_batches])
        self._form = self._form or form
        if form != self._form and not self._has_changed:
            self._has_changed = True
            self._note(_not_captured(f"a batch has the shape {_changed(form, self._form)}"))
        return form == self._form

    def _warm(self, batch: StepBatch) -> StepReport:
        """Run a warm-up step; the last one checks for host syncs, which a graph cannot contain."""
        if self._num_warm <= WARM_UP:
            return PlainStep.__call__(self, batch)
        with host_syncs() as locations:
            report = PlainStep.__call__(self, batch)
        if locations:
            self._give_up(f"the host synchronizes with the device at {locations[0]}")
        return report

    def _give_up(self, reason: str) -> None:
        self._gave_up, self._rates = True, None
        self._note(_not_captured(reason))

    def _begin(self) -> None:
        """Set the learning rates of this step; after capture, in the tensors that the graph reads."""
        super()._begin()
        if self._rates is None:
            return
        groups = self.optimizer.param_groups
        wanted = tuple(group["lr"] for group in groups)
        for group, tensor, rate, old in zip(groups, self._rates, wanted, self._known, strict=True):
            if rate != old:
                tensor.fill_(rate)
            group["lr"] = tensor
        self._known = wanted

    def _record(self, batch: StepBatch) -> _Recording | None:
        """Capture this step without running it; return None if the capture fails."""
        micro_batches = [_cloned(each) for each in batch.micro_batches]
        device = self._parameters[0].device
        self._known = tuple(group["lr"] for group in self.optimizer.param_groups)
        rates = [torch.full((), rate, device=device) for rate in self._known]
        weight = torch.full((), self._sync.gain / (batch.denominator or 1), device=device)
        graph = torch.cuda.CUDAGraph()
        free_matmul_workspaces()  # the graph has a workspace of its own
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        try:
            # Other threads, such as the one that pins batches, may call CUDA during the capture.
            with capturable(self.optimizer), torch.cuda.graph(graph, capture_error_mode="thread_local"):
                total = self._accumulate(micro_batches, weight)
                norm, skipped = self.update(self.optimizer)
                values = (total, torch.as_tensor(norm), torch.as_tensor(skipped))
                results = torch.stack([value.to(total.dtype) for value in values])
        except RuntimeError as error:
            self._give_up(str(error).splitlines()[0])
            return None
        finally:
            for parameter in self._parameters:
                parameter.grad = None
        inputs = tensors([each.batch for each in micro_batches])
        self._rates, self._denominator = rates, batch.denominator
        self._note("capture = step: the optimizer step runs as one CUDA graph")
        return _Recording(graph, inputs, weight, results)

    def _replay(self, recording: _Recording, batch: StepBatch) -> StepReport:
        """Copy the batch, weight and learning rates to the graph's inputs and replay it."""
        self._begin()
        self.mark("forward", self.number)
        copy_all(recording.inputs, tensors([each.batch for each in batch.micro_batches]))
        if batch.denominator != self._denominator:
            self._denominator = batch.denominator
            recording.weight.fill_(self._sync.gain / (batch.denominator or 1))
        recording.graph.replay()
        total, norm, skipped = recording.results.clone().unbind()  # the next replay overwrites them
        number, self.number = self.number, self.number + 1
        self.mark("data", self.number)
        return StepReport(number, batch.cursor, total, batch.samples, batch.denominator, self._rate, norm, skipped)


def _cloned(micro_batch: MicroBatch) -> MicroBatch:
    """Return a micro-batch with cloned tensors, whose addresses the graph reads in every replay."""
    return msgspec.structs.replace(micro_batch, batch=map_tensors(torch.clone, micro_batch.batch))


@contextmanager
def capturable(optimizer: Optimizer) -> Iterator[None]:
    """Set `capturable` of an optimizer in this context only, because uncaptured steps would warn about it."""
    groups = [group for group in optimizer.param_groups if "capturable" in group]
    for group in groups:
        group["capturable"] = True
    try:
        yield
    finally:
        for group in groups:
            group["capturable"] = False


@contextmanager
def host_syncs() -> Iterator[list[str]]:
    """Collect the locations, as file:line, at which the host synchronizes with a CUDA device."""
    found: list[str] = []
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)
            syncs = [each for each in caught if "synchronizing CUDA operation" in str(each.message)]
            found += [f"{each.filename}:{each.lineno}" for each in syncs]
