"""The Step protocol, the report of a step, and the marks of its phases."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
import torch
import torch.distributed as dist

from shardwise.environment import profiler

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from shardwise.data.cursor import Cursor
    from shardwise.data.feed import Feed, MicroBatch, StepBatch
    from shardwise.dist import World
    from shardwise.job import Job, Metric
    from shardwise.parallel.gradsync import GradSync
    from shardwise.parallel.optimizer import Optimized
    from shardwise.plans import Plan
    from shardwise.training.loading import Length
    from shardwise.training.step.module_step import Forms, LocalState
    from shardwise.training.step.update import Update


# Phase marks: every Step and the loop report the start of each phase to a recorder, a timer or a profiler.


Mark = Callable[[str, int], None]
"""Called with (phase, step) when a phase of `runs.recorder.PHASES` starts, which ends the previous one."""

_RANGES = {
    "data": "data",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "publish": "publish",
    "evaluate": "evaluate",
    "save": "checkpoint",
}


def ignore_mark(phase: str, step: int) -> None:
    """Ignore a phase mark; a call takes 0.04 us."""


def combine_marks(*listeners: Mark | None) -> Mark:
    """Return a mark that calls all listeners in order, except those that are None."""
    present = [listener for listener in listeners if listener is not None]
    if len(present) <= 1:
        return next(iter(present), ignore_mark)

    def mark(phase: str, step: int) -> None:
        for listener in present:
            listener(phase, step)

    return mark


class Ranges:
    """A listener that opens one profiler range per phase, named after it; the phase "save" is named "checkpoint"."""

    def __init__(self, begin: Callable[[str], Any], end: Callable[[Any], object]) -> None:
        """Use `begin(name)` to open a range and `end(handle)` to close it, with the handle that `begin` returned."""
        self._begin = begin
        self._end = end
        self._open: Any = None

    def __call__(self, phase: str, step: int) -> None:  # noqa: ARG002 - a profiler adds up ranges of one name
        """Close the open range, and open a new one if profilers show this phase."""
        self.close()
        if phase in _RANGES:
            self._open = self._begin(_RANGES[phase])

    def close(self) -> None:
        """Close the open range, if any."""
        if self._open is not None:
            self._end(self._open)
            self._open = None


def nvtx_ranges() -> Ranges | None:
    """Return NVTX ranges if a profiler such as nsys is attached to this process, else None."""
    if not profiler():
        return None
    nvtx = torch.cuda.nvtx
    try:
        nvtx.mark("shardwise")
    except RuntimeError:
        return None  # torch was built without CUDA and NVTX
    # Not range_push: its ranges are per thread, and autograd launches the kernels of backward from its own thread.
    return Ranges(nvtx.range_start, nvtx.range_end)


NOTHING = nullcontext()
"""A shared instance: creating one costs 0.3 us per step."""


class LossSum(msgspec.Struct, frozen=True, gc=False):
    """The loss of a step during its asynchronous reduction over the world."""

    values: Tensor
    """The loss sum and its normalizer, both summed over `num_ranks`; fp64, on the device."""
    num_ranks: int
    work: dist.Work

    def read(self) -> float:
        """Wait for the reduction that every rank started in its step, and return the mean loss."""
        self.work.wait()
        total, normalizer = self.values.tolist()
        # The mean over the world is the global normalizer, also if the normalizer differs between replicas.
        return float(total / (normalizer / self.num_ranks or 1))


@dataclass(frozen=True, kw_only=True)
class LossReduction:
    """Reduces the loss of every step over the world during the next step, so that reading it does not communicate."""

    group: dist.ProcessGroup
    num_ranks: int

    def begin(self, total: Tensor, normalizer: float) -> LossSum:
        """Start to reduce this rank's loss sum. Communicates over the group; call on every rank in every step."""
        values = torch.stack((total.double(), torch.full_like(total, normalizer, dtype=torch.float64)))
        work = dist.all_reduce(values, group=self.group, async_op=True)
        return LossSum(values, self.num_ranks, work)


class StepReport(msgspec.Struct, frozen=True, gc=False):
    """The report of one optimizer step. Tensors stay on the device until they are read."""

    number: int
    """Step number, counted from 0 over the whole training."""
    cursor: Cursor
    """Position of the step's first sample in the sample stream."""
    loss_sum: Tensor
    """Loss summed over this rank's rows without padding. It is 0 if a tensor-parallel peer reports the same rows, and
    on pipeline stages before the last, so the sum over all ranks counts every row once."""
    samples: int
    """Samples over all data-parallel ranks, without padding."""
    denominator: float
    """Loss normalizer over all data-parallel ranks; with `sync_every`, that of this replica times the replica count."""
    lr: float
    """Learning rate of the first parameter group."""
    grad_norm: Tensor | None
    """Norm of the whole gradient before clipping; None if it was not computed."""
    skipped: Tensor | float
    """1.0 if the step was skipped on all ranks because the gradient was not finite; else 0.0."""

    reduced: LossSum | None = None
    """The asynchronous reduction of the loss; None in a world of one rank, or if losses are not reported per step."""

    @property
    def loss(self) -> float:
        """Mean loss over the global batch, equal on every rank under every plan.

        Every step starts its reduction over ranks after the update. Reading the loss synchronizes with the device but
        does not communicate, so a single rank may read it.
        """
        return float(self.loss_share) if self.reduced is None else self.reduced.read()

    @property
    def loss_share(self) -> Tensor:
        """This rank's share of the loss; the shares of all ranks add up to the mean loss, which `loss` returns."""
        return self.loss_sum / (self.denominator or 1)  # a denominator of 0 implies a sum of 0


@dataclass(frozen=True, kw_only=True)
class Autocast:
    """Autocast around forward and loss only: a longer context would cache outdated casts of the weights."""

    device_type: str
    dtype: torch.dtype | None

    def __call__(self) -> AbstractContextManager[Any]:
        """Return the context for one forward pass and its loss."""
        if self.dtype is None:
            return NOTHING
        return torch.autocast(self.device_type, self.dtype)


class StepSource(NamedTuple):
    """The job, plan and world that a step was built from."""

    job: Job
    plan: Plan
    world: World


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """The data, length and hooks of a step, without its model."""

    source: StepSource
    reduce_loss: LossReduction | None = None
    """None if the world has one rank or if losses are not reported per step."""

    feed: Feed
    length: Length
    first_step: int = 0
    """Steps that were completed before this run, if it resumes from a checkpoint."""
    reports_loss: bool = True
    """False if a tensor-parallel peer reports the loss of the same rows."""
    before_update: Callable[[], None] | None = None
    """Called in every step after gradients are reduced and before they are clipped."""
    mark: Mark = ignore_mark
    """Called when a phase of a step starts."""
    note: Callable[[str], None] = lambda _: None
    """Receives messages for the user."""


@dataclass(frozen=True, kw_only=True)
class StepParts(StepContext):
    """The components of a step: its context, optimizer, gradient sync, update and first-step checks."""

    optimized: Optimized
    sync: GradSync
    update: Update
    autocast: Autocast
    origin: str = ""
    """Description of the source of the initial weights."""
    after_first_backward: Callable[[Sequence[Tensor]], None] | None = None
    """Checks the first gradients before they are reduced; receives this rank's loss sums of the micro-batches."""
    head: str = ""
    """Name of the output head that is compiled together with the loss; "" if none is."""
    batch_checks: tuple[Callable[[StepBatch], None], ...] = ()
    """Checks of the first batches, which raise if a batch would train incorrectly; called on every rank."""


class Step(Protocol):
    """One optimizer step under any strategy and engine; `build_step` chooses the implementation."""

    source: StepSource
    """The job, plan and world that the step was built from."""
    feed: Feed
    model: Any
    """The user's module with the strategy applied: a torch module, or that of another engine."""
    optimizer: Any
    """The optimizer of the engine."""
    optimized: Optimized
    length: Length
    origin: str
    """Description of the source of the initial weights."""
    number: int
    """Number of completed steps."""
    base_rates: list[float]
    """Learning rate of each parameter group before the schedule is applied."""
    mark: Mark
    """Called when forward, backward and optimizer start, and with "data" when the step ends; the training loop calls it
    for the other phases. May be replaced between steps."""

    def __call__(self, batch: StepBatch) -> StepReport:
        """Train on one global batch; call on every rank."""

    @property
    def num_parameters(self) -> int:
        """Number of elements of the parameters of which this rank owns a shard, counted at full size."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of this rank's pipeline stages with their names in the user's module."""

    def buffers(self) -> dict[str, Tensor]:
        """Return the buffers that this rank owns, by name."""

    def common_buffers(self, *, broadcast: bool) -> dict[str, Tensor]:
        """Return the buffers that are equal on all ranks; if `broadcast`, without those that DDP broadcasts."""

    def tied(self) -> dict[str, str]:
        """Return a map from each alias of a tied parameter to the name under which it is saved."""

    def local_state(self) -> LocalState:
        """Return this rank's parameters, buffers and optimizer states. May communicate; call on every rank."""

    def load_targets(self, saved: Forms) -> LocalState:
        """Return the tensors to load a checkpoint into, with the optimizer states of `saved` allocated.

        `optimized.refresh` applies the loaded values. Tensors that are not loaded retain their values.
        """

    def whole_weights(self) -> dict[str, Tensor]:
        """Return the full state dict of the user's model on rank 0, else {}. Communicates over the world."""

    def gradients(self) -> dict[str, Tensor]:
        """Return the reduced gradients of a step before the update uses them. May communicate; call on every rank."""

    def local_gradients(self) -> dict[str, Tensor]:
        """Return this rank's shard of the reduced gradients, without communication."""

    def set_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Replace this rank's gradients before the update uses them."""

    def evaluating(self, dp_group: dist.ProcessGroup | None) -> AbstractContextManager[None]:
        """Switch the model to eval mode with the buffers of rank 0. Communicates over the data-parallel group."""

    def measure(self, micro_batch: MicroBatch, measures: Mapping[str, Metric]) -> dict[str, float]:
        """Return the sum (NAME) and count (NAME/count) of each measure; {} on ranks without the last pipeline stage."""

    def random_state(self) -> dict[str, Tensor]:
        """Return the states, as bytes, of the random generators that a step uses, by name."""

    def set_random_state(self, states: Mapping[str, Tensor]) -> None:
        """Restore the random generators to the states of `random_state`; names of other engines are ignored."""

    def seed(self, number: int) -> None:
        """Seed the random generators of the step."""

    def snapshot(self) -> Callable[[], None]:
        """Copy the parameters, optimizer states and random generators; return a function that restores them."""
