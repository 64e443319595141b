"""Investigating a plan that failed: run it again with every rank's own tensors, take the step apart, name the cause."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shardwise.parallel.apply import unwrap
from shardwise.parallel.tensor_rules import find_rules, styles_by_name
from shardwise.parity.capture import grads_file, local_file, values_file
from shardwise.parity.cells import (
    by_module,
    repeat_gap,
    take_apart,
    tied_names,
    with_repeated_bias,
    with_restarted_positions,
)
from shardwise.parity.diagnose import diagnose
from shardwise.parity.double import true_double
from shardwise.parity.evidence import Evidence
from shardwise.parity.plans import one_process
from shardwise.parity.prepare import prepare_job
from shardwise.parity.ranks import on_ranks
from shardwise.training.build import build_step

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from shardwise.dist import World
    from shardwise.job import Job
    from shardwise.parity.bench import Bench, Record
    from shardwise.parity.compare import Comparison
    from shardwise.parity.plans import Exact
    from shardwise.parity.report import Finding
    from shardwise.parity.variants import Variant
    from shardwise.plans import Plan


@dataclass(frozen=True, kw_only=True)
class Case:
    """A plan that parted from one process."""

    plan: Plan
    precision: Exact
    twin: Variant
    """How one process grouped its rows to be comparable."""
    record: Record
    comparison: Comparison


def investigate(bench: Bench, case: Case) -> list[Finding]:
    """Return the named causes of a divergence; trains the plan and one process once more."""
    step = _step_of(case.comparison, bench.preparation.steps)
    again = bench.run(case.plan, close_up=step)
    expected = bench.one(case.precision, case.twin, close_up=step)

    def examine(world: World) -> list[Finding]:
        values = _load(values_file(expected.folder, step))
        parts = _take_apart(world, bench, case, again.folder, values)
        return diagnose(
            Evidence(
                plan=case.plan,
                comparison=case.comparison,
                tolerance=bench.limits(case.precision).of("gradient"),
                step=step,
                traced=case.record.traced,
                again=again.traced,
                expected=expected.traced[0],
                start=_all_values(case.record.folder, 0),
                expected_start=_all_values(expected.folder, 0),
                before=_load(values_file(again.folder, step))["parameters"],
                expected_before=values["parameters"],
                gradients=_load(grads_file(again.folder, step)),
                expected_gradients=_load(grads_file(expected.folder, step)),
                **parts,
            )
        )

    def examine_in_double(world: World) -> list[Finding]:
        with true_double() if case.precision == "fp64" else nullcontext():
            return examine(world)

    findings = on_ranks(examine_in_double, 1, timeout_s=bench.timeout_s)[0]
    again.discard()
    return findings


def _step_of(comparison: Comparison, steps: int) -> int:
    """The step to look at: where values parted, or the nearest one when that was before or after all steps."""
    first = comparison.first
    if first is None or first.step is None:
        return 0 if first is not None and first.kind == "initial value" else steps - 1
    return first.step


def _take_apart(world: World, bench: Bench, case: Case, folder: Path, values: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of the evidence that need the model, at the weights that one process had before the step."""
    job = prepare_job(bench.preparation)
    model = unwrap(build_step(job, one_process(bench.batch_size, dtype=case.precision), world).model)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            tensor.copy_({**values["parameters"], **values["buffers"]}[name])
    layout = case.plan.layout
    locals_ = [_load(local_file(folder, rank), weights_only=False) for rank in range(layout.world_size)]
    first_ranks = {layout.data_index(rank): rank for rank in reversed(range(layout.world_size))}
    readers = [locals_[first_ranks[reader]]["micro_batches"] for reader in range(layout.dp)]
    return {
        "locals": [each["gradients"] for each in locals_],
        "micro_batches": len(readers[0]),
        "cells": take_apart(job, model, readers),
        "repeat_gap": repeat_gap(job, model, readers[0][0]),
        "repeated_bias": _repeated_bias(job, model, readers, layout.tp),
        "restarted_positions": with_restarted_positions(job, model, readers, layout.cp) if layout.cp > 1 else {},
        "tied": tied_names(model),
        "uses": by_module(job, model, readers),
    }


def _repeated_bias(job: Job, model: nn.Module, readers: Any, degree: int) -> dict[int, Any]:
    """Return what the step's gradient would be if row-parallel modules added their bias on every rank."""
    if degree == 1:
        return {}
    styles = styles_by_name(model, find_rules(model, job.tensor_rules))
    rows = [name for name, style in styles.items() if style in {"row", "row_split"}]
    names = [name for name in rows if getattr(model.get_submodule(name), "bias", None) is not None]
    return {times: with_repeated_bias(job, model, readers, names, times) for times in {2, degree}} if names else {}


def _all_values(folder: Path, step: int) -> dict[str, Any]:
    values = _load(values_file(folder, step))
    return {**values["parameters"], **values["buffers"]}


def _load(path: Path, *, weights_only: bool = True) -> Any:
    """Read tensors; a rank's own file also holds batches, which may be of any class."""
    return torch.load(path, weights_only=weights_only, mmap=True)
