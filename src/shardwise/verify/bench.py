"""The bench on which trainings stand side by side: runs them, keeps those of one process, measures noise."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import msgspec

from shardwise.errors import InputError, TrainingError
from shardwise.launch import run_forked
from shardwise.verify.capture import Traced, trace
from shardwise.verify.compare import EXACT, KINDS, NOISE, Comparison, compare
from shardwise.verify.plans import Exact, one_process
from shardwise.verify.ranks import on_ranks
from shardwise.verify.variants import Variant

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from shardwise.job.engine import MadeFor
    from shardwise.layout import Layout
    from shardwise.plan import Plan
    from shardwise.verify.prepare import Preparation
    from shardwise.verify.report import Kind

T = TypeVar("T")

_LEAST_NOISE = 2.0**-23
"""One rounding error of fp32: a floor of zero only means that the trials happened to agree."""
_SPLITS = (2, 4, 5)


@dataclass(frozen=True, kw_only=True)
class Record:
    """One training that was watched: what its ranks saw, and the folder with whole tensors."""

    folder: Path
    traced: list[Traced]
    layout: Layout

    def discard(self) -> None:
        """Delete the tensors."""
        shutil.rmtree(self.folder)


@dataclass(kw_only=True)
class Bench:
    """Runs trainings of one job; remembers those of one process, which many plans are compared with."""

    preparation: Preparation
    batch_size: int
    folder: Path
    timeout_s: float
    backend: str = "gloo"
    """Of plans on several ranks; one process needs none."""
    made_for: MadeFor = "torch"
    """Whose module the job's model is."""
    _ones: dict[tuple[Exact, Variant, int], Record] = field(default_factory=dict)
    _limits: dict[Exact, dict[Kind, float]] = field(default_factory=dict)
    _number: int = 0

    def run(
        self, plan: Plan, *, variant: Variant | None = None, close_up: int | None = None, steps: int | None = None
    ) -> Record:
        """Train under `plan` on forked ranks; of step `close_up` every rank also writes its own tensors."""
        preparation = msgspec.structs.replace(self.preparation, steps=steps or self.preparation.steps)
        self._number += 1
        folder = self.folder / str(self._number)
        folder.mkdir()
        traced = on_ranks(
            lambda world: trace(world, preparation, plan, folder, variant=variant, close_up=close_up),
            plan.layout.world_size,
            timeout_s=self.timeout_s,
            backend=self.backend,
        )
        return Record(folder=folder, traced=traced, layout=plan.layout)

    def one(
        self,
        dtype: Exact,
        variant: Variant | None = None,
        *,
        close_up: int | None = None,
        steps: int | None = None,
    ) -> Record:
        """Train in one process, or remember it."""
        variant = variant or Variant()
        key = dtype, variant, steps or self.preparation.steps
        if key not in self._ones or close_up is not None:
            plan = one_process(self.batch_size, dtype=dtype, made_for=self.made_for)
            try:
                self._ones[key] = self.run(plan, variant=variant, close_up=close_up, steps=steps)
            except InputError:
                raise
            except Exception as error:
                raise TrainingError(
                    f"one process cannot train the job ({type(error).__name__}: {error})",
                    fix="mend that first: shardwise train --nproc 1",
                ) from error
        return self._ones[key]

    def exact(self, asked: Exact) -> tuple[Exact, tuple[str, ...]]:
        """Return the dtype to compare in, with a note where it is not the one asked for: MLX lacks some of fp64."""
        if asked == "fp32" or self.made_for == "torch":
            return asked, ()
        try:
            self.one(asked)
        except TrainingError as error:
            reason = str(error.__cause__).splitlines()[0]
            return "fp32", (f"compared in fp32: MLX does not train this model in fp64 ({reason})",)
        return asked, ()

    def compare(self, record: Record, expected: Record, limits: Mapping[Kind, float]) -> Comparison:
        """Compare a training with one of one process."""
        return self.apart(
            lambda: compare(
                record.traced,
                expected.traced[0],
                folder=record.folder,
                expected_folder=expected.folder,
                layout=record.layout,
                limits=limits,
            )
        )

    def apart(self, work: Callable[[], T]) -> T:
        """Do work with tensors in a fork, so that this process stays fit to be forked."""
        result: T = run_forked(lambda _: work(), 1, timeout_s=self.timeout_s)[0]
        return result

    def limits(self, dtype: Exact) -> dict[Kind, float]:
        """Return the largest gap that is still equal, by kind of value: in fp32 from the measured noise."""
        if dtype == "fp64":
            return dict.fromkeys(KINDS, EXACT)
        if dtype not in self._limits:
            self._limits[dtype] = self._noise_limits(dtype)
        return self._limits[dtype]

    def _noise_limits(self, dtype: Exact) -> dict[Kind, float]:
        """One process against itself, with sums in other orders and weights moved by one rounding error."""
        base = self.one(dtype)
        variants = [Variant(reverse=True), Variant(nudge=True)]
        if not base.traced[0].has_batch_norm:
            variants += [Variant(accumulation=parts) for parts in _SPLITS if self.batch_size % parts == 0]
        floors = dict.fromkeys(KINDS, _LEAST_NOISE)
        for variant in variants:
            found = self.compare(self.one(dtype, variant), base, dict.fromkeys(KINDS, EXACT)).largest
            floors = {kind: max(floor, found.get(kind, 0.0)) for kind, floor in floors.items()}
        return {kind: NOISE * floor for kind, floor in floors.items()}
