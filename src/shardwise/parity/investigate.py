"""Investigates a failed plan: trains again with the tensors of every rank, analyzes one step, and finds the cause."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardwise.data.rows import drop_padding_rows
from shardwise.job.generators import untouched_generators
from shardwise.parallel.collectives import unwrap
from shardwise.parallel.counter_dropout import CounterMasks
from shardwise.parallel.tensor_rules import find_rules, styles_by_name
from shardwise.parity.capture import grads_file, local_file, values_file
from shardwise.parity.compare import all_values, load_tensors, relative_gaps
from shardwise.parity.diagnose import diagnose
from shardwise.parity.evidence import Cell, Evidence, mean_gradient
from shardwise.parity.prepare import prepare_job
from shardwise.parity.reference import true_double
from shardwise.parity.runner import on_ranks
from shardwise.parity.spec import one_process
from shardwise.training.build import build_step
from shardwise.training.step.first_step_checks import OutputRows

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from shardwise.data.feed import MicroBatch
    from shardwise.dist import World
    from shardwise.job import Job
    from shardwise.parity.compare import Comparison
    from shardwise.parity.reference import Variant
    from shardwise.parity.runner import ParityRunner, Record
    from shardwise.parity.spec import Exact, Finding
    from shardwise.plans import Plan


@dataclass(frozen=True, kw_only=True)
class Case:
    """A plan that diverged from one process."""

    plan: Plan
    precision: Exact
    twin: Variant
    """Grouping of rows that makes training in one process comparable with the plan."""
    record: Record
    comparison: Comparison


def investigate(runner: ParityRunner, case: Case) -> list[Finding]:
    """Return the causes of a divergence; repeats the training under the plan and in one process."""
    step = _step_of(case.comparison, runner.preparation.steps)
    again = runner.run(case.plan, close_up=step)
    expected = runner.one(case.precision, case.twin, close_up=step)

    def examine(world: World) -> list[Finding]:
        values = load_tensors(values_file(expected.folder, step))
        parts = _model_data(world, runner, case, again.folder, values)
        return diagnose(
            Evidence(
                plan=case.plan,
                comparison=case.comparison,
                tolerance=runner.limits(case.precision).of("gradient"),
                step=step,
                traced=case.record.traced,
                again=again.traced,
                expected=expected.traced[0],
                start=all_values(case.record.folder, 0),
                expected_start=all_values(expected.folder, 0),
                before=load_tensors(values_file(again.folder, step))["parameters"],
                expected_before=values["parameters"],
                gradients=load_tensors(grads_file(again.folder, step)),
                expected_gradients=load_tensors(grads_file(expected.folder, step)),
                **parts,
            )
        )

    def examine_in_double(world: World) -> list[Finding]:
        with true_double() if case.precision == "fp64" else nullcontext():
            return examine(world)

    findings = on_ranks(examine_in_double, 1, timeout_s=runner.timeout_s)[0]
    again.discard()
    return findings


def _step_of(comparison: Comparison, steps: int) -> int:
    """Return the step to examine: the step of the divergence, or the step nearest to it."""
    first = comparison.first
    if first is None or first.step is None:
        return 0 if first is not None and first.kind == "initial value" else steps - 1
    return first.step


def _model_data(world: World, runner: ParityRunner, case: Case, folder: Path, values: dict[str, Any]) -> dict[str, Any]:
    """Return the evidence that requires the model, computed with the weights of one process before the step."""
    job = prepare_job(runner.preparation)
    model = unwrap(build_step(job, one_process(runner.batch_size, dtype=case.precision), world).model)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            tensor.copy_({**values["parameters"], **values["buffers"]}[name])
    layout = case.plan.layout
    locals_ = [load_tensors(local_file(folder, rank), weights_only=False) for rank in range(layout.world_size)]
    first_ranks = {layout.data_index(rank): rank for rank in reversed(range(layout.world_size))}
    by_dp_rank = [locals_[first_ranks[dp_rank]]["micro_batches"] for dp_rank in range(layout.dp)]
    return {
        "locals": [each["gradients"] for each in locals_],
        "micro_batches": len(by_dp_rank[0]),
        "cells": take_apart(job, model, by_dp_rank),
        "repeat_gap": repeat_gap(job, model, by_dp_rank[0][0]),
        "repeated_bias": _repeated_bias(job, model, by_dp_rank, layout.tp),
        "restarted_positions": with_restarted_positions(job, model, by_dp_rank, layout.cp) if layout.cp > 1 else {},
        "tied": tied_names(model),
        "uses": by_module(job, model, by_dp_rank),
    }


def _repeated_bias(job: Job, model: nn.Module, by_dp_rank: Any, degree: int) -> dict[int, Any]:
    """Return, for n = 2 and `degree`, the gradient of the step as if row-parallel modules added their bias n times."""
    if degree == 1:
        return {}
    styles = styles_by_name(model, find_rules(model, job.tensor_rules))
    rows = [name for name, style in styles.items() if style in {"row", "row_split"}]
    names = [name for name in rows if getattr(model.get_submodule(name), "bias", None) is not None]
    return {times: with_repeated_bias(job, model, by_dp_rank, names, times) for times in {2, degree}} if names else {}


# The gradient of a step by micro-batch and, for shared parameters, by module.


_RUNS = 3
"""Number of runs, sufficient to detect a model that changes with every forward pass or every second forward pass."""


def take_apart(job: Job, model: nn.Module, by_dp_rank: Sequence[Sequence[MicroBatch]]) -> list[list[Cell]]:
    """Return the gradient and count of each micro-batch of each data-parallel rank, with the weights of `model`."""
    return [[_cell(job, model, micro_batch) for micro_batch in micro_batches] for micro_batches in by_dp_rank]


def _all_cells(job: Job, model: nn.Module, by_dp_rank: Sequence[Sequence[MicroBatch]]) -> list[Cell]:
    return [cell for row in take_apart(job, model, by_dp_rank) for cell in row]


def _cell(job: Job, model: nn.Module, micro_batch: MicroBatch) -> Cell:
    batch, rows, filled, positions = micro_batch.batch, micro_batch.rows, micro_batch.filled, micro_batch.positions
    model.zero_grad(set_to_none=True)
    if not rows:
        return Cell(gradients={}, count=0)
    keys = None if positions is None else positions.keys()
    is_short, output_rows = rows < filled and job.loss.by_row, OutputRows()
    with (
        CounterMasks(model, "cpu").of(model, keys, filled) if job.masks == "keyed" else nullcontext(),
        output_rows.tracking(batch) if is_short else nullcontext(),
    ):
        output = job.forward(model, batch)
    if is_short:
        output = output_rows.drop_padding(output, rows, filled)
        batch = drop_padding_rows(batch, rows, filled, micro_batch.marks)
    job.loss.sum_of(output, batch).backward()
    gradients = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
    return Cell(gradients=gradients, count=job.loss.count_of(batch, rows))


def repeat_gap(job: Job, model: nn.Module, micro_batch: MicroBatch) -> float:
    """Return the largest relative difference between the gradients of a micro-batch in repeated runs of `model`."""
    found = []
    for _ in range(_RUNS):
        with untouched_generators():
            found.append(_cell(job, model, micro_batch).gradients)
    return max((gap for again in found[1:] for gap in relative_gaps(again, found[0]).values()), default=0.0)


def with_repeated_bias(
    job: Job, model: nn.Module, by_dp_rank: Sequence[Sequence[MicroBatch]], names: Sequence[str], times: int
) -> dict[str, Tensor]:
    """Return the gradient of the step, excluding these biases, as if each named module added its bias `times` times."""
    hooks = []
    for name in names:
        module = model.get_submodule(name)
        bias = dict(module.named_parameters(recurse=False))["bias"]
        more = (times - 1) * bias.detach()
        hooks.append(module.register_forward_hook(lambda _module, _args, output, more=more: output + more))
    cells = _all_cells(job, model, by_dp_rank)
    for hook in hooks:
        hook.remove()
    biases = {f"{name}.bias" for name in names}
    return {name: value for name, value in mean_gradient(cells).items() if name not in biases}


def with_restarted_positions(
    job: Job, model: nn.Module, by_dp_rank: Sequence[Sequence[MicroBatch]], degree: int
) -> dict[str, Tensor]:
    """Return the gradient of the step as if positions restarted in each of `degree` shards of a sequence."""

    def restart(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        tokens = next(each for each in [*args, *kwargs.values()] if isinstance(each, Tensor) and each.ndim > 1)
        length = tokens.shape[1]
        return args, {**kwargs, "position_ids": (torch.arange(length) % (length // degree))[None]}

    hook = model.register_forward_pre_hook(restart, with_kwargs=True)
    cells = _all_cells(job, model, by_dp_rank)
    hook.remove()
    return mean_gradient(cells)


def tied_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return the other names of each parameter that several modules share, by its first name."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {first: tuple(others) for first, *others in names.values() if others}


def by_module(job: Job, model: nn.Module, by_dp_rank: Sequence[Sequence[MicroBatch]]) -> dict[str, list[Tensor]]:
    """Return the gradient of each shared parameter in the step by module; unties the parameters of `model`."""
    tied = tied_names(model)
    for others in tied.values():
        for name in others:
            owner, _, attribute = name.rpartition(".")
            module = model.get_submodule(owner)
            setattr(module, attribute, nn.Parameter(getattr(module, attribute).detach().clone()))
    if not tied:
        return {}
    cells = _all_cells(job, model, by_dp_rank)
    count = sum(cell.count for cell in cells) or 1
    return {first: list(_shares([first, *others], cells, count)) for first, others in tied.items()}


def _shares(names: Sequence[str], cells: Sequence[Cell], count: float) -> Iterable[Tensor]:
    for name in names:
        parts = [cell.gradients[name] for cell in cells if name in cell.gradients]
        if parts:
            yield torch.stack(parts).sum(0) / count
