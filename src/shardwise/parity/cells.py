"""The gradient of one step, taken apart: by micro-batch and, for shared parameters, by module."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardwise.data.rows import cut_rows
from shardwise.job.generators import untouched_generators
from shardwise.parallel.keyed_masks import KeyedMasks
from shardwise.parity.compare import relative_gaps
from shardwise.parity.evidence import Cell, mean_gradient
from shardwise.training.step.output_rows import OutputRows

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shardwise.data.feed import MicroBatch
    from shardwise.job import Job


_RUNS = 3
"""Enough to see what changes with every forward pass, or with every second one."""


def take_apart(job: Job, model: nn.Module, readers: Sequence[Sequence[MicroBatch]]) -> list[list[Cell]]:
    """Return what every micro-batch of every reader contributes, at the weights of `model`."""
    return [[_cell(job, model, micro_batch) for micro_batch in micro_batches] for micro_batches in readers]


def _cell(job: Job, model: nn.Module, micro_batch: MicroBatch) -> Cell:
    batch, rows, filled, places = micro_batch.batch, micro_batch.rows, micro_batch.filled, micro_batch.places
    model.zero_grad(set_to_none=True)
    if not rows:
        return Cell(gradients={}, count=0)
    keys = None if places is None else places.keys()
    is_short, output_rows = rows < filled and job.loss.by_row, OutputRows()
    with (
        KeyedMasks(model, "cpu").of(model, keys, filled) if job.masks == "keyed" else nullcontext(),
        output_rows.watching(batch) if is_short else nullcontext(),
    ):
        output = job.forward(model, batch)
    if is_short:
        output = output_rows.cut(output, rows, filled)
        batch = cut_rows(batch, rows, filled, micro_batch.marks)
    job.loss.sum_of(output, batch).backward()
    gradients = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
    return Cell(gradients=gradients, count=job.loss.count_of(batch, rows))


def repeat_gap(job: Job, model: nn.Module, micro_batch: MicroBatch) -> float:
    """Return how far the gradients of one micro-batch are apart when `model` runs it again, and once more."""
    found = []
    for _ in range(_RUNS):
        with untouched_generators():
            found.append(_cell(job, model, micro_batch).gradients)
    return max((gap for again in found[1:] for gap in relative_gaps(again, found[0]).values()), default=0.0)


def with_repeated_bias(
    job: Job, model: nn.Module, readers: Sequence[Sequence[MicroBatch]], names: Sequence[str], times: int
) -> dict[str, Tensor]:
    """Return the step's gradient as if each named module added its bias several times; of those biases nothing."""
    hooks = []
    for name in names:
        module = model.get_submodule(name)
        bias = dict(module.named_parameters(recurse=False))["bias"]
        more = (times - 1) * bias.detach()
        hooks.append(module.register_forward_hook(lambda _module, _args, output, more=more: output + more))
    cells = [cell for row in take_apart(job, model, readers) for cell in row]
    for hook in hooks:
        hook.remove()
    biases = {f"{name}.bias" for name in names}
    return {name: value for name, value in mean_gradient(cells).items() if name not in biases}


def with_restarted_positions(
    job: Job, model: nn.Module, readers: Sequence[Sequence[MicroBatch]], degree: int
) -> dict[str, Tensor]:
    """Return the step's gradient as if positions began anew in each of `degree` slices of a sequence."""

    def restart(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        tokens = next(each for each in [*args, *kwargs.values()] if isinstance(each, Tensor) and each.ndim > 1)
        length = tokens.shape[1]
        return args, {**kwargs, "position_ids": (torch.arange(length) % (length // degree))[None]}

    hook = model.register_forward_pre_hook(restart, with_kwargs=True)
    cells = [cell for row in take_apart(job, model, readers) for cell in row]
    hook.remove()
    return mean_gradient(cells)


def tied_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return, of every parameter that several modules share, its name and its other names."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {first: tuple(others) for first, *others in names.values() if others}


def by_module(job: Job, model: nn.Module, readers: Sequence[Sequence[MicroBatch]]) -> dict[str, list[Tensor]]:
    """Return the step's gradient of every shared parameter, by the module that used it; unties `model`."""
    tied = tied_names(model)
    for others in tied.values():
        for name in others:
            owner, _, attribute = name.rpartition(".")
            module = model.get_submodule(owner)
            setattr(module, attribute, nn.Parameter(getattr(module, attribute).detach().clone()))
    if not tied:
        return {}
    cells = [cell for row in take_apart(job, model, readers) for cell in row]
    count = sum(cell.count for cell in cells) or 1
    return {first: list(_shares([first, *others], cells, count)) for first, others in tied.items()}


def _shares(names: Sequence[str], cells: Sequence[Cell], count: float) -> Iterable[Tensor]:
    for name in names:
        parts = [cell.gradients[name] for cell in cells if name in cell.gradients]
        if parts:
            yield torch.stack(parts).sum(0) / count
