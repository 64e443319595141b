"""Executes training runs of a job on forked ranks, caches training runs in one process, and measures rounding noise."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
import torch

from shardwise.dist import local_world, world
from shardwise.engines.backends import backend_row
from shardwise.engines.engine import engine_named
from shardwise.errors import InputError, TrainingError
from shardwise.launcher.local.function import run_by_mpirun, run_forked
from shardwise.parity.capture import Traced, trace
from shardwise.parity.compare import Comparison, Limits, compare, strict_limits
from shardwise.parity.masks import MaskReport, compare_masks, record_step, without_compile
from shardwise.parity.noise import is_comparable, may_be_noise, measure_noise
from shardwise.parity.progress import PauseLimit, StuckError, pause_limit, read_stuck
from shardwise.parity.reference import Variant
from shardwise.parity.spec import Exact, one_process
from shardwise.torch_private.distributed import DYNAMO

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from shardwise.dist import World
    from shardwise.job.job import Framework
    from shardwise.layout import Layout
    from shardwise.parity.prepare import Preparation
    from shardwise.plans import Float8, Plan, Precision

T = TypeVar("T")

_SPLITS = (2, 4, 5)
_PRELOAD = (
    DYNAMO,
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.pipelining",
)
"""Modules that are imported before the fork; otherwise each rank would import up to 800 modules in 1.5 s."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """A recorded training run: the recordings of its ranks, and the folder with its full tensors."""

    folder: Path
    traced: list[Traced]
    layout: Layout

    def discard(self) -> None:
        """Delete the folder with the tensors."""
        shutil.rmtree(self.folder)


@dataclass(kw_only=True)
class ParityRunner:
    """Executes training runs of a job; caches training runs in one process, with which many plans are compared."""

    preparation: Preparation
    batch_size: int
    folder: Path
    timeout_s: float
    backend: str = "gloo"
    """Backend of plans on several ranks."""
    framework: Framework = "torch"
    """Framework of the job's model."""
    _ones: dict[tuple[Exact, Variant, int], Record] = field(default_factory=dict)
    _lower: dict[tuple[Precision, Float8, bool, Variant], Record] = field(default_factory=dict)
    _noise: dict[Exact, Limits] = field(default_factory=dict)
    _masks: dict[tuple[Layout, int], MaskReport] = field(default_factory=dict)
    _longest_s: float = 0.0
    """Longest time between two progress marks of one process."""
    _number: int = 0

    def run(
        self,
        plan: Plan,
        *,
        variant: Variant | None = None,
        close_up: int | None = None,
        steps: int | None = None,
        plain: bool = False,
    ) -> Record:
        """Train under `plan` on forked ranks; if `plain` is set, train with plain PyTorch in one process instead.

        In step `close_up`, every rank also writes its local gradients and micro-batches.
        """
        preparation = msgspec.structs.replace(self.preparation, steps=steps or self.preparation.steps)
        folder = self._new_folder()
        limit = PauseLimit(usual_s=self.timeout_s) if plain else self.pause_limit(plan)
        traced = self.on_ranks(
            lambda world: trace(
                world, preparation, plan, folder, variant=variant, close_up=close_up, plain=plain, limit=limit
            ),
            plan,
            folder,
        )
        if plain:
            self._longest_s = max(self._longest_s, traced[0].longest_s)
        return Record(folder=folder, traced=traced, layout=plan.layout)

    def _new_folder(self) -> Path:
        self._number += 1
        folder = self.folder / str(self._number)
        folder.mkdir()
        return folder

    def pause_limit(self, plan: Plan) -> PauseLimit:
        """Return the longest pause that a rank of `plan` may take, from the longest pause of one process so far."""
        return pause_limit(plan, self._longest_s, self.timeout_s)

    def on_ranks(self, fn: Callable[[World], T], plan: Plan, folder: Path, *, label: str = "") -> list[T]:
        """Run `fn` on the ranks of `plan` and return its results by rank.

        Ranks without progress write their locations into `folder`; then a StuckError with `label` is raised.
        """
        try:
            return on_ranks(fn, plan.layout.world_size, timeout_s=self.timeout_s, backend=self.backend)
        except Exception as error:
            stuck = read_stuck(folder)
            if stuck:
                raise StuckError.of(stuck, label) from error
            raise

    def one(
        self, dtype: Exact, variant: Variant | None = None, *, close_up: int | None = None, steps: int | None = None
    ) -> Record:
        """Train in one process and cache the result; in plain PyTorch, unless the engine has no plain reference."""
        variant = variant or Variant()
        key = dtype, variant, steps or self.preparation.steps
        if key not in self._ones or close_up is not None:
            plan = one_process(self.batch_size, dtype=dtype, framework=self.framework)
            plain = engine_named(self.framework).has_plain_reference
            try:
                self._ones[key] = self.run(plan, variant=variant, close_up=close_up, steps=steps, plain=plain)
            except InputError:
                raise
            except Exception as error:
                raise TrainingError(
                    f"the job failed in one process ({type(error).__name__}: {error})",
                    code="verify.reference-failed",
                    fix="run shardwise train --nproc 1 to reproduce the error, and fix the job",
                ) from error
        return self._ones[key]

    def one_in(self, plan: Plan, variant: Variant) -> Record:
        """Train in one process in the precision of `plan`, to measure the effect of rounding; results are cached.

        A fused loss also rounds, because it casts the logits of each chunk of tokens.
        """
        key = plan.precision, plan.float8, plan.fused_loss, variant
        if key not in self._lower:
            alone = one_process(self.batch_size, dtype="fp32", framework=self.framework)
            rounding = dataclasses.replace(
                alone, precision=plan.precision, float8=plan.float8, fused_loss=plan.fused_loss
            )
            self._lower[key] = self.run(rounding, variant=variant)
        return self._lower[key]

    def exact(self, requested: Exact) -> tuple[Exact, tuple[str, ...]]:
        """Return the dtype of the comparison, and a note if the model does not compute in the requested dtype."""
        if requested == "fp32":
            return requested, ()
        try:
            dtype = self.one(requested).traced[0].loss_dtype
        except TrainingError as error:
            self.one("fp32")  # raises if fp32 fails as well: then fp64 is not the reason
            reason = str(error.__cause__).splitlines()[0]
            engine = engine_named(self.framework)
            trainer = "one process" if engine.has_plain_reference else engine.title
            return "fp32", (f"compared in fp32, because {trainer} does not train this model in fp64 ({reason})",)
        if dtype not in {"", "float64"}:
            return "fp32", (f"compared in fp32, because the model casts fp64 inputs and its loss is {dtype}",)
        return requested, ()

    def compare(self, record: Record, expected: Record, limits: Limits) -> Comparison:
        """Compare a recorded training run with training in one process."""
        return self.in_fork(lambda: compare(record, expected, limits))

    def compare_with_one(self, record: Record, expected: Record, dtype: Exact) -> tuple[Comparison, Limits]:
        """Return the comparison and its limits: strict ones, or measured ones if noise may explain an fp64 gap."""
        limits = self.limits(dtype)
        comparison = self.compare(record, expected, limits)
        if dtype == "fp64" and comparison.first is not None and may_be_noise(comparison.first):
            noise = self.noise(dtype)
            if is_comparable(noise):
                return self.compare(record, expected, noise), noise
        return comparison, limits

    def compare_masks(self, plan: Plan) -> MaskReport:
        """Train one step with dropout on and compare the masks of all ranks; cached by layout and ZeRO stage."""
        key = plan.layout, plan.zero
        if key not in self._masks:
            folder, eager = self._new_folder(), without_compile(plan)
            limit = self.pause_limit(eager)
            recorded = self.on_ranks(
                lambda world: record_step(world, self.preparation, eager, folder, limit), eager, folder
            )
            report = compare_masks([masks for masks, _ in recorded], plan.layout)
            errors = [error for _, error in recorded if error is not None]
            if errors and not report.findings:
                raise errors[0]
            self._masks[key] = report
        return self._masks[key]

    def in_fork(self, work: Callable[[], T]) -> T:
        """Run `work`, which may use tensor operations, in a fork, so that this process can still be forked."""
        result: T = run_forked(lambda _: work(), 1, timeout_s=self.timeout_s)[0]
        return result

    def limits(self, dtype: Exact) -> Limits:
        """Return the largest gaps that count as equal: 1e-9 in fp64, limits from the measured noise in fp32."""
        return strict_limits() if dtype == "fp64" else self.noise(dtype)

    def noise(self, dtype: Exact) -> Limits:
        """Return limits from the measured rounding noise of the job in a dtype; the first call trains several times."""
        if dtype not in self._noise:
            self._noise[dtype] = self._measure_noise(dtype)
        return self._noise[dtype]

    def _measure_noise(self, dtype: Exact) -> Limits:
        """Compare one process with itself, with sums in a different order and weights changed by one rounding error."""
        base = self.one(dtype)
        whole = [self.one(dtype, variant) for variant in (Variant(reverse=True), Variant(nudge=True))]
        split = []
        if not base.traced[0].has_batch_norm:
            variants = [Variant(accumulation=parts) for parts in _SPLITS if self.batch_size % parts == 0]
            split = [self.one(dtype, variant) for variant in variants]
        masks = self.folder / f"compared-{dtype}.pt"
        return self.in_fork(lambda: measure_noise(dtype, base, whole, split, masks))


def preload(names: Iterable[str] = _PRELOAD) -> None:
    """Import modules before a fork, so that not every rank must import them."""
    for name in names:
        with contextlib.suppress(Exception):  # a module that fails to import here may not be needed by the ranks
            importlib.import_module(name)


def on_ranks(fn: Callable[[World], T], nproc: int, *, timeout_s: float, backend: str = "gloo") -> list[T]:
    """Run `fn(world)` on `nproc` CPU ranks, forked with gloo or started by mpirun; return its results by rank.

    The exception of the first failing rank is raised with the last line of output as a note; other output is discarded.
    This process must not have run multi-threaded tensor operations, because their threads do not survive a fork.
    """
    if backend_row(backend).starts_by_mpirun and nproc > 1:
        return run_by_mpirun(lambda: _in_own_world(fn, backend, timeout_s), nproc, timeout_s=timeout_s)
    with tempfile.TemporaryDirectory(prefix="shardwise-") as name:
        folder = Path(name)

        def body(rank: int) -> T:
            _write_to(folder / f"{rank}.log")
            with local_world(folder / "store", rank, nproc, timeout_s=timeout_s) as here:
                return fn(here)

        try:
            return run_forked(body, nproc, timeout_s=timeout_s)
        except Exception as error:
            output = "".join(log.read_text() for log in sorted(folder.glob("*.log")))
            error.add_note(f"last output: {output.strip().splitlines()[-1] if output.strip() else 'none'}")
            raise


def _in_own_world(fn: Callable[[World], T], backend: str, timeout_s: float) -> T:
    """Run `fn` in a new world of the ranks that mpirun started. Communicates; call on every rank."""
    torch.set_num_threads(1)  # the same number of threads as in forked ranks
    with world(backend=backend, device="cpu", timeout_s=timeout_s) as here:
        return fn(here)


def _write_to(path: Path) -> None:
    """Redirect the output of this process to a file, including that of native code."""
    with path.open("w") as log:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
