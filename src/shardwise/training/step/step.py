"""The Step protocol, what a step reports, and the marks of its phases."""

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
    from shardwise.training.evaluate import Length
    from shardwise.training.step.module_step import Forms, Held
    from shardwise.training.step.update import Update


# Phase marks: every Step and the loop say what begins; listeners make records, times or a profiler's ranges of it.


Mark = Callable[[str, int], None]
"""Is told (phase, step): the phase, one of `run.recorder.PHASES`, begins now, and the one before ends."""

_RANGES = {
    "data": "data",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "publish": "publish",
    "evaluate": "evaluate",
    "save": "checkpoint",
}


def nobody(phase: str, step: int) -> None:
    """Listen to no mark; a call costs 0.04 us."""


def tell(*listeners: Mark | None) -> Mark:
    """Return a mark that all listeners hear, in order; None is no listener."""
    hearing = [listener for listener in listeners if listener is not None]
    if len(hearing) <= 1:
        return hearing[0] if hearing else nobody

    def mark(phase: str, step: int) -> None:
        for listener in hearing:
            listener(phase, step)

    return mark


class Ranges:
    """A listener that keeps one range of a profiler open, named after the phase at work; saving is "checkpoint"."""

    def __init__(self, begin: Callable[[str], Any], end: Callable[[Any], object]) -> None:
        """`begin(name)` opens a range and returns what `end` closes it by."""
        self._begin = begin
        self._end = end
        self._open: Any = None

    def __call__(self, phase: str, step: int) -> None:  # noqa: ARG002 - a profiler adds up ranges of one name
        """Close the range before, and open this phase's if it has one."""
        self.close()
        if phase in _RANGES:
            self._open = self._begin(_RANGES[phase])

    def close(self) -> None:
        """Close the range that is open."""
        if self._open is not None:
            self._end(self._open)
            self._open = None


def nvtx_ranges() -> Ranges | None:
    """Return NVTX ranges where nsys or another such profiler is attached to this process, else None."""
    if not profiler():
        return None
    nvtx = torch.cuda.nvtx
    try:
        nvtx.mark("shardwise")
    except RuntimeError:
        return None  # torch was built without CUDA, and so without NVTX
    # Not range_push: that one belongs to a thread, and autograd starts the kernels of backward from its own.
    return Ranges(nvtx.range_start, nvtx.range_end)


NOTHING = nullcontext()
"""One for all: making one costs 0.3 us a step."""


class LossSum(msgspec.Struct, frozen=True, gc=False):
    """The loss of a step while it is reduced over the world."""

    values: Tensor
    """Sum of the loss and what it is divided by, summed over `num_ranks`; fp64, on the device."""
    num_ranks: int
    work: dist.Work

    def read(self) -> float:
        """Wait for the reduction, which every rank began in its step, and return the mean."""
        self.work.wait()
        total, normalizer = self.values.tolist()
        # All ranks know one normalizer, or that of their own replica: its mean over the world is the global one.
        return float(total / (normalizer / self.num_ranks or 1))


@dataclass(frozen=True, kw_only=True)
class LossReduction:
    """Reduces the loss of every step over the world while the next one trains: reading it communicates nothing."""

    group: dist.ProcessGroup
    num_ranks: int

    def begin(self, total: Tensor, normalizer: float) -> LossSum:
        """Begin to reduce this rank's loss sum; communicates over the group, called on every rank in every step."""
        values = torch.stack((total.double(), torch.full_like(total, normalizer, dtype=torch.float64)))
        work = dist.all_reduce(values, group=self.group, async_op=True)
        return LossSum(values, self.num_ranks, work)


class StepReport(msgspec.Struct, frozen=True, gc=False):
    """What one optimizer step did. Tensors stay on the device until somebody reads them."""

    number: int
    """Counted from 0 over the whole training."""
    cursor: Cursor
    """Where the step's samples begin in the stream."""
    loss_sum: Tensor
    """Over this rank's real rows; 0 where a tensor-parallel peer already reports the same rows, and on pipeline stages
    before the last: summed over all ranks, every row counts once."""
    samples: int
    """Real samples over all data-parallel ranks."""
    denominator: float
    """The loss normalizer over all data-parallel ranks; of replicas that train apart, as if all counted alike."""
    lr: float
    """Learning rate of the first parameter group."""
    grad_norm: Tensor | None
    """Norm of the whole gradient before clipping; None when nothing needed it."""
    skipped: Tensor | float
    """1.0 when the gradient was not finite and the step was skipped, on all ranks alike; else 0.0."""

    reduced: LossSum | None = None
    """The loss on its way over the world; None in a world of one."""

    @property
    def loss(self) -> float:
        """Mean of the loss over the global batch, equal on every rank under every plan.

        Every step reduces it beside its gradients. Reading it waits for the device and communicates nothing, so one
        rank may read it alone.
        """
        return float(self.loss_share) if self.reduced is None else self.reduced.read()

    @property
    def loss_share(self) -> Tensor:
        """This rank's share of the loss: summed over all ranks, under every plan, the mean over the global batch.

        `loss` has that sum on every rank already.
        """
        return self.loss_sum / (self.denominator or 1)  # 0: nothing counts, and the sum is 0


@dataclass(frozen=True, kw_only=True)
class Autocast:
    """Lower precision around forward and loss only: around more, its cache would keep stale weights."""

    device_type: str
    dtype: torch.dtype | None

    def __call__(self) -> AbstractContextManager[Any]:
        """Enter around one forward pass and its loss."""
        if self.dtype is None:
            return NOTHING
        return torch.autocast(self.device_type, self.dtype)


class StepSource(NamedTuple):
    """What a step was built from."""

    job: Job
    plan: Plan
    world: World


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """What a step is given besides its model."""

    source: StepSource
    reduce_loss: LossReduction | None = None
    """None in a world of one, and where nobody reads the loss of a step."""

    feed: Feed
    length: Length
    first_step: int = 0
    """Steps done before this training began: those of the one it resumes."""
    reports_loss: bool = True
    """False on a rank whose tensor-parallel peer reports the loss of the same rows."""
    before_update: Callable[[], None] | None = None
    """Looks at the gradients of every step when they are summed, before they are clipped."""
    mark: Mark = nobody
    """Is told when a phase of a step begins."""
    note: Callable[[str], None] = lambda _: None
    """Gets remarks for the user."""


@dataclass(frozen=True, kw_only=True)
class StepParts(StepContext):
    """What a step of any kind is made from."""

    optimized: Optimized
    sync: GradSync
    update: Update
    autocast: Autocast
    origin: str = ""
    """Where the first weights came from, in words."""
    after_first_backward: Callable[[Sequence[Tensor]], None] | None = None
    """Looks at the first gradients before they are summed; gets this rank's loss sums of the micro-batches."""
    batch_checks: tuple[Callable[[StepBatch], None], ...] = ()
    """Look at the batches of the first steps, and refuse what would train wrongly on them; on every rank."""


class Step(Protocol):
    """One optimizer step under any strategy and any engine; the mode is chosen once, at build."""

    source: StepSource
    """The job, plan and world that it was built from."""
    feed: Feed
    model: Any
    """The user's own module as it is trained: torch's under its strategy, or another engine's."""
    optimizer: Any
    """The engine's own."""
    optimized: Optimized
    length: Length
    origin: str
    """Where the first weights came from, in words."""
    number: int
    """Steps done."""
    base_rates: list[float]
    """Learning rate of each parameter group before the schedule."""
    mark: Mark
    """Is told by the step when forward, backward and optimizer begin, and that what follows the step is the data of
    the next; a loop tells it what else it does between steps. May be set between steps."""

    def __call__(self, batch: StepBatch) -> StepReport:
        """Train on one global batch; called on every rank."""

    @property
    def num_parameters(self) -> int:
        """Elements of the parameters that this rank has a part in, a cut one as a whole."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the name, as in the user's module, and parameter of all layers on this rank's stages."""

    def buffers(self) -> dict[str, Tensor]:
        """Return the buffers whose values count on this rank, by name."""

    def common_buffers(self, *, broadcast: bool) -> dict[str, Tensor]:
        """Return the buffers that ranks hold alike; with `broadcast` some are equal only in forward."""

    def tied(self) -> dict[str, str]:
        """Return the other names of shared parameters, each with the one it is saved under."""

    def held(self) -> Held:
        """Return the values and optimizer states of this rank, to be read; may communicate, on every rank."""

    def room(self, saved: Forms) -> Held:
        """Return tensors to be filled, with the optimizer states in `saved`; `optimized.refresh` takes them over.

        What is not filled keeps the value it has.
        """

    def whole_weights(self) -> dict[str, Tensor]:
        """Communicate over the world to return the state dict of the user's own model on rank 0, {} elsewhere."""

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of a step while they are summed and not yet used; may communicate, on every rank."""

    def own_gradients(self) -> dict[str, Tensor]:
        """Return this rank's own part of them; no communication."""

    def put_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Replace this rank's own gradients before they are used."""

    def evaluating(self, dp_group: dist.ProcessGroup | None) -> AbstractContextManager[None]:
        """Put the model into evaluation, with rank 0's buffers on all; communicates over the data-parallel group."""

    def measure(self, micro_batch: MicroBatch, measures: Mapping[str, Metric]) -> dict[str, float]:
        """Return sum (name) and count (name/count) of each measure over real rows, {} where others know them."""

    def random_state(self) -> dict[str, Tensor]:
        """Return the states, as bytes, of the generators that a step draws from, by name."""

    def set_random_state(self, states: Mapping[str, Tensor]) -> None:
        """Go on drawing where `random_state` was called; of another engine's, what is known is taken."""

    def seed(self, number: int) -> None:
        """Begin fresh streams of random numbers."""

    def snapshot(self) -> Callable[[], None]:
        """Keep this moment's values, states and streams, but no number; returns what brings them back."""
