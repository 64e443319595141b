"""Records a training run for comparison: digests of rows, fingerprints of shards, and full tensors."""

from __future__ import annotations

import hashlib
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch.distributed.tensor import DTensor
from torch.utils.data import IterableDataset

from shardwise.data.loaders import dataset_of
from shardwise.data.packed_batches import packed_batch
from shardwise.data.rows import settle_marks, tensors
from shardwise.engines.engine import engine_named
from shardwise.parallel.collectives import full_values
from shardwise.parallel.counter_dropout import FirstPass
from shardwise.parallel.counter_random import name_modules, random_of
from shardwise.parallel.gradsync import local
from shardwise.parity.prepare import Preparation, prepare_job
from shardwise.parity.progress import PauseLimit, Pulse, watched
from shardwise.parity.reference import PlainTraining, Variant, true_double, vary
from shardwise.training.build import build_step
from shardwise.training.evaluate import evaluate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from torch import Tensor

    from shardwise.data.feed import StepBatch
    from shardwise.data.rows import RowMarks
    from shardwise.dist import World
    from shardwise.job import Job
    from shardwise.plans import Plan
    from shardwise.training.step.step import Step, StepReport


# Fingerprints and digests of tensors, small enough to be compared across ranks.


Print = tuple[float, float]
"""Fingerprint of a tensor: its projection on a fixed pattern, and its norm. Fingerprints almost never collide."""

_PATTERN = 97


def fingerprint(value: Tensor) -> Print:
    """Return the fingerprint of a tensor; two fingerprints differ by about the norm of the tensors' difference."""
    flat = value.detach().to("cpu", torch.float64).flatten()
    pattern = (torch.arange(len(flat)) * 31 % _PATTERN - _PATTERN // 2).double() / (_PATTERN / 4)
    return float(flat @ pattern), float(flat.norm())


def pieces(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return the local shard of each tensor, by a key that is equal on all ranks with the same shard."""
    parts = {}
    for name, tensor in named:
        if isinstance(tensor, DTensor):
            parts[name + _shard_coordinate(tensor)] = tensor.to_local().detach()
        else:
            parts[name] = tensor.detach()
    return parts


def _shard_coordinate(tensor: DTensor) -> str:
    """Return this rank's coordinate on each axis that shards the tensor, such as " [tp 1]"."""
    mesh = tensor.device_mesh
    coordinate: Sequence[int] = mesh.get_coordinate() or ()
    names = mesh.mesh_dim_names or [str(number) for number in range(mesh.ndim)]
    parts = [
        f"{name} {index}"
        for name, index, placement in zip(names, coordinate, tensor.placements, strict=True)
        if not placement.is_replicate()
    ]
    return f" [{', '.join(parts)}]" if parts else ""


def row_digests(batch: StepBatch) -> list[str]:
    """Return a digest of every row of a step, in order and without padding rows."""
    return [
        digest
        for each in batch.micro_batches
        for digest in digest_rows(each.unsharded, each.rows, settle_marks(each.marks, each.unsharded, each.filled))
    ]


def digest_rows(batch: Any, rows: int, marks: RowMarks) -> list[str]:
    """Return a digest of each of the first `rows` rows of a batch; `marks` selects the tensors that contain rows."""
    parts = [tensor for tensor, marked in zip(tensors(batch), marks, strict=True) if marked]
    return [digest_tensors(part[row] for part in parts) for row in range(rows)]


def digest_tensors(values: Iterable[Any]) -> str:
    """Return a digest of the bytes of tensors."""
    digest = hashlib.blake2b(digest_size=8)
    for value in values:
        digest.update(value.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


Prints = dict[str, Print]


class Traced(msgspec.Struct, kw_only=True):
    """The recording of a training run on one rank; `grads_file`, `values_file` and `local_file` contain its tensors."""

    rank: int
    losses: list[float] = msgspec.field(default_factory=list)
    """This rank's share of the mean loss, by step."""
    norms: list[float | None] = msgspec.field(default_factory=list)
    rows: list[list[str]] = msgspec.field(default_factory=list)
    """Digests of the rows that this rank read, without padding, by step."""
    gradients: list[Prints] = msgspec.field(default_factory=list)
    """Fingerprints of this rank's gradient shards after the reduction and before clipping, by step."""
    parameters: list[Prints] = msgspec.field(default_factory=list)
    """Fingerprints of this rank's parameter shards before the first step and after each step."""
    buffers: Prints = msgspec.field(default_factory=dict)
    """Fingerprints of this rank's buffers after the last step."""
    evaluation: dict[str, float] = msgspec.field(default_factory=dict)
    """Loss and metrics over the test split after the last step; empty without an evaluation."""
    num_parameters: int = 0
    """Number of parameter elements on this rank."""
    optimized: int = 0
    """Number of parameter elements in the optimizer of this rank."""
    has_batch_norm: bool = False
    is_packed: bool = False
    """Whether the rows consist of packed documents."""
    loss_dtype: str = ""
    silenced: bool = False
    """Whether the model has dropout, which was set to 0."""
    draws_random: bool = False
    """Whether a step advanced the random generator although dropout is off."""
    drawn_by: str = ""
    """The first module that sampled random numbers in the first step; recorded only in the plain PyTorch reference."""
    remarks: list[str] = msgspec.field(default_factory=list)
    """Remarks about the job's loss; recorded only in the plain PyTorch reference."""
    longest_s: float = 0.0
    """Longest time between two progress marks of the training run, in seconds."""
    imported: list[str] = msgspec.field(default_factory=list)
    """Modules that the training imported."""


def values_file(folder: Path, step: int) -> Path:
    """Return the file of the full parameters and buffers after `step` completed steps."""
    return folder / f"values-{step}.pt"


def grads_file(folder: Path, step: int) -> Path:
    """Return the file of the full gradients of `step`."""
    return folder / f"grads-{step}.pt"


def local_file(folder: Path, rank: int) -> Path:
    """Return the file of a rank's gradient shards and micro-batches in the step that `trace` examines in detail."""
    return folder / f"local-{rank}.pt"


def trace(
    world: World,
    preparation: Preparation,
    plan: Plan,
    folder: Path,
    *,
    variant: Variant | None = None,
    close_up: int | None = None,
    plain: bool = False,
    limit: PauseLimit,
) -> Traced:
    """Train under `plan` and record the training. Communicates over the world; call on every rank.

    Rank 0 writes full tensors to `folder`, and for step `close_up` every rank writes its own tensors. With `plain`, the
    job is trained in plain PyTorch in one process, in the precision of `plan`. A rank without progress for longer than
    `limit` exits.
    """
    before = set(sys.modules)
    build = PlainTraining if plain else build_step
    pulse = Pulse()
    double = true_double() if plan.precision.compute == "fp64" else nullcontext()
    with double, watched(pulse, limit, world.rank, folder):
        seen = _train(world, preparation, plan, folder, variant, close_up, build, pulse)
    return msgspec.structs.replace(seen, longest_s=pulse.longest_s, imported=sorted(set(sys.modules) - before))


def _train(  # noqa: PLR0917 - positions of one private caller
    world: World,
    preparation: Preparation,
    plan: Plan,
    folder: Path,
    variant: Variant | None,
    close_up: int | None,
    build: Callable[..., Step | PlainTraining],
    pulse: Pulse,
) -> Traced:
    job = prepare_job(preparation)
    watch: _TrainingWatch
    step = build(job, plan, world, before_update=lambda: watch.gradients())  # noqa: PLW0108 - there is no watch yet
    watch = _TrainingWatch(world, step, folder, close_up, pulse)
    watch.seen.has_batch_norm = engine_named(plan.engine).has_batch_norm(step.model)
    if variant is not None:
        variant.perturb(step)
    watch.values()
    for batch in step.feed if variant is None else vary(step.feed, variant):
        watch.before(batch)
        watch.after(step(batch))
    pulse.begin("evaluation")
    watch.seen.evaluation = _evaluate(job, plan, step)
    silenced = job.model.silenced  # type: ignore[attr-defined]  # a PreparedModel
    return msgspec.structs.replace(watch.seen, silenced=silenced, remarks=getattr(step, "remarks", []))


def _evaluate(job: Job, plan: Plan, step: Step | PlainTraining) -> dict[str, float]:
    """Return the loss and the metrics over the test split. Communicates over the world; call on every rank."""
    dataset = dataset_of(job, "test")
    if dataset is None or isinstance(dataset, IterableDataset) or not engine_named(plan.engine).has_plain_reference:
        return {}
    if isinstance(step, PlainTraining):
        return step.evaluate(dataset)
    return evaluate(step, dataset)


class _TrainingWatch:
    """Records the rows, gradients, parameters and results of each step of a training run."""

    def __init__(
        self, world: World, step: Step | PlainTraining, folder: Path, close_up: int | None, pulse: Pulse
    ) -> None:
        self.seen = Traced(
            rank=world.rank,
            num_parameters=_elements(step.local_state().values.values()),
            optimized=_elements(each for group in step.optimized.param_groups for each in group["params"]),
        )
        self._world = world
        self._step = step
        self._folder = folder
        self._close_up = close_up
        self._pulse = pulse
        self._batch: StepBatch | None = None
        self._streams = step.random_state()
        self._first_pass = _watch_draws(step)

    @property
    def _number(self) -> int:
        return len(self.seen.losses)

    def before(self, batch: StepBatch) -> None:
        """Record the rows of a batch."""
        self._pulse.begin(batch.samples)  # a partial step may have different shapes than a full step
        self._batch = batch
        packed = packed_batch(batch.micro_batches[0].batch)
        self.seen.is_packed |= packed is not None and packed.has_documents
        self.seen.rows.append(row_digests(batch))
        self._streams = self._step.random_state()

    def gradients(self) -> None:
        """Record the gradients. Communicates over the world; call on every rank."""
        self._pulse.beat()
        named = list(self._step.gradients().items())
        self.seen.gradients.append(_prints(named))
        self._write(grads_file(self._folder, self._number), full_values(named))
        if self._number == self._close_up and self._batch is not None:
            micro_batches = [msgspec.structs.replace(each, batch=each.unsharded) for each in self._batch.micro_batches]
            own = {name: value.clone() for name, value in pieces(named).items()}
            torch.save({"gradients": own, "micro_batches": micro_batches}, local_file(self._folder, self._world.rank))

    def after(self, report: StepReport) -> None:
        """Record the results of a step. Communicates over the world; call on every rank."""
        if self._first_pass is not None:
            self._first_pass.end()
            self.seen.drawn_by = next((name or "the model" for name in self._first_pass.sampled), "")
            self._first_pass = None
        drawn = self._step.random_state()
        self.seen.draws_random |= any(not torch.equal(drawn[name], state) for name, state in self._streams.items())
        self.seen.losses.append(float(report.loss_share))
        self.seen.loss_dtype = str(report.loss_sum.dtype).removeprefix("torch.")
        self.seen.norms.append(None if report.grad_norm is None else float(report.grad_norm))
        self.values()
        self._pulse.end()

    def values(self) -> None:
        """Record parameters; write full tensors before the first and the examined step and at the end. Communicates."""
        self._pulse.beat()
        parameters = list(self._step.local_state().values.items())
        self.seen.parameters.append(_prints(parameters))
        number = self._number
        if number in {0, self._step.length.num_steps, self._close_up}:
            buffers = list(self._step.buffers().items())
            self.seen.buffers = _prints(buffers)
            whole = {"parameters": full_values(parameters), "buffers": full_values(buffers)}
            self._write(values_file(self._folder, number), whole)

    def _write(self, path: Path, values: Any) -> None:
        if self._world.is_main:
            torch.save(values, path)


def _watch_draws(step: Step | PlainTraining) -> FirstPass | None:
    """Return a recorder of reference modules that sample random numbers; None for plans and counter-based dropout."""
    if not isinstance(step, PlainTraining) or random_of(step.model) is not None:
        return None
    name_modules(step.model, staged=False)
    draws = random_of(step.model)
    return None if draws is None else FirstPass(step.model, draws)


def _prints(named: Iterable[tuple[str, Tensor]]) -> Prints:
    return {key: fingerprint(value) for key, value in pieces(named).items()}


def _elements(tensors: Iterable[Tensor]) -> int:
    return sum(local(tensor).numel() for tensor in tensors)
