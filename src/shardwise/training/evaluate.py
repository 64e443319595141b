"""Evaluation, and the export of weights and adapters from any strategy."""

from __future__ import annotations

import copy
import os
import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from shardwise.checkpoint.convert.hugging_face import write_adapters
from shardwise.checkpoint.disk import no_results, remove_atomically, run_collectively
from shardwise.data.feed import MicroBatch
from shardwise.data.loaders import CollatedReads, already_collated, dataset_length, dataset_of, raise_errors
from shardwise.data.rows import Collated, CountedCollate, fill_rows, move
from shardwise.data.streams import StreamShare
from shardwise.errors import JobError
from shardwise.job.generators import untouched_generators
from shardwise.job.lora import is_adapter
from shardwise.parallel.collectives import full_values, stages_of
from shardwise.runs.directory import write_error
from shardwise.training.loading import token_shard
from shardwise.training.step.module_step import adapter_facts, gather_objects, user_class, user_module, whole_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import IO

    from torch import Tensor

    from shardwise.dist import World
    from shardwise.job import Job
    from shardwise.plans import Plan
    from shardwise.runs import EventLog
    from shardwise.training.step.step import Step


def evaluate(step: Step, dataset: Dataset[Any] | None = None) -> dict[str, float]:
    """Return the loss and the metrics over a dataset, each sample counted once; call on every rank.

    `dataset` defaults to the test split of the job; returns {} if the job has none. Communicates over the world.
    """
    job, plan, world = step.source
    if dataset is None:
        dataset = dataset_of(job, "test")
    if dataset is None:
        return {}
    return evaluate_batches(step, evaluation_batches(job, plan, world, dataset))


def evaluate_batches(step: Step, micro_batches: Iterator[MicroBatch]) -> dict[str, float]:
    """Return the loss and the metrics over all ranks' batches. Communicates over the world; call on every rank."""
    job, plan, world = step.source
    measures = {"loss": job.loss, **job.metrics}
    sums: dict[str, float] = {}
    for name in measures:
        sums[name] = sums[f"{name}/count"] = 0.0
    reports = plan.layout.reports_loss(world.rank)
    counts = reports and plan.layout.coordinate(world.rank).cp == 0  # cp ranks add partial sums, but share one count
    with untouched_generators(), step.evaluating(world.axis_group(plan.layout, ("replicate", "shard"))):
        for micro_batch in micro_batches:
            found = step.measure(micro_batch, measures)
            for name, value in found.items():
                if counts or (reports and not name.endswith("/count")):
                    sums[name] += value
    totals = world.sum(sums)
    return {name: totals[name] / (totals[f"{name}/count"] or 1) for name in measures}


def evaluation_batches(job: Job, plan: Plan, world: World, dataset: Dataset[Any]) -> Iterator[MicroBatch]:
    """Yield this data-parallel rank's batches, padded to the plan's micro-batch if the model needs a fixed shape.

    If forward communicates between data-parallel ranks, ranks that run out of samples continue with padding-only
    batches until all ranks finish. Each batch then costs one small all-reduce.
    """
    group = None
    if plan.zero >= 2 and plan.layout.dp > 1:
        group = world.axis_group(plan.layout, ("replicate", "shard"), on_host=True)
    pads = plan.layout.pp > 1 and job.loss.by_row
    shard = token_shard(job, plan, world, job.metrics)
    dtype = torch.float64 if plan.precision.compute == "fp64" else None
    previous: Collated | None = None
    batches = _rank_batches(job, plan, world, dataset)
    while True:
        loaded = next(batches, None)
        rows = 0 if loaded is None else loaded.rows
        if not _any_rank_has(rows, group):
            return
        if loaded is None:
            loaded = previous or _first(job, dataset)
        previous, (batch, filled, marks) = loaded, loaded
        if pads and filled < plan.micro_batch:
            batch, filled = fill_rows(batch, filled, plan.micro_batch, marks), plan.micro_batch
        local, whole = batch, None
        if shard is not None:
            local, whole = shard(batch), batch
        yield MicroBatch(move(local, world.device, dtype), rows, filled, None, whole, marks)


def _any_rank_has(rows: int, group: dist.ProcessGroup | None) -> bool:
    """Return whether any rank has rows left. Communicates over `group`; call on every rank."""
    if group is None:
        return rows > 0
    left = torch.tensor(rows)
    dist.all_reduce(left, group=group)
    return bool(left)


def _first(job: Job, dataset: Any) -> Collated:
    sample = next(iter(dataset)) if isinstance(dataset, IterableDataset) else dataset[0]
    return CountedCollate(job.collate)([sample])


def _rank_batches(job: Job, plan: Plan, world: World, dataset: Dataset[Any]) -> Iterator[Collated]:
    dp_size, dp_rank = plan.layout.dp, plan.layout.data_index(world.rank)
    share: Dataset[Any]
    collate: Callable[[Any], Collated] = CountedCollate(job.collate)
    if isinstance(dataset, IterableDataset):
        share = StreamShare(dataset, dp_rank=dp_rank, dp_size=dp_size, micro_batch=plan.micro_batch)
    else:
        length = dataset_length(dataset)  # type: ignore[arg-type]
        own = Subset(dataset, range(length * dp_rank // dp_size, length * (dp_rank + 1) // dp_size))
        share, collate = CollatedReads(own, collate), already_collated
    batches: DataLoader[Any] = DataLoader(
        share,
        batch_size=plan.micro_batch,
        collate_fn=collate,
        num_workers=job.num_workers,
        generator=torch.Generator(),  # the global generator is for training: evaluation must not change dropout masks
    )
    return raise_errors(batches)


# Exporting from any strategy: the trained weights as one file, and adapters as a directory that peft loads.


def export(model: nn.Module, path: Path | str) -> None:
    """Write the model's full state dict to `path` on rank 0. Communicates over the world; call on every rank.

    LoRA adapters are merged into their base weights, so the state dict has the keys of the user's model.
    `torch.load(path, weights_only=True)` loads the file without shardwise. The file is replaced atomically; if it
    cannot be written, every rank raises the same CheckpointError.
    """
    if not isinstance(model, nn.Module):
        raise JobError(
            f"export requires a torch.nn.Module, got {type(model).__module__}.{type(model).__qualname__}",
            code="support.export-not-torch",
            fix='copy weights.pt of the run directory, or call save_weights("model.safetensors") of the mlx.nn.Module',
        )
    write_weights(whole_weights(model), path)


def write_weights(weights: dict[str, Tensor], path: Path | str) -> None:
    """Write the full weights of rank 0 to `path` as `export` does. Communicates over the world; call on every rank."""
    path = Path(path)
    group = dist.group.WORLD if dist.is_initialized() else None
    run_collectively(group, f"exporting {path}", lambda: _write(weights, path) if weights else None, no_results)


def export_adapters(model: nn.Module, folder: Path | str, *, base: str | None = None) -> None:
    """Write the LoRA adapters of `model` in peft's format on rank 0. Communicates over the world; call on every rank.

    `base` is the source of the frozen weights, recorded in the adapter configuration. The directory is replaced
    atomically.
    """
    folder = Path(folder)
    lora = adapter_facts(model)
    if lora is None:
        raise JobError(
            "the model has no LoRA adapters", code="model.no-adapters", fix="set Job.lora, or call sw.export"
        )
    adapters: list[tuple[str, Tensor]] = []
    names: list[str] = []
    for stage in stages_of(model):
        for name, parameter in stage.named_parameters():
            if is_adapter(name):
                adapters.append((name, parameter))
        names += [name for name in stage.state_dict(keep_vars=True) if not is_adapter(name)]
    trained = full_values(adapters)
    frozen: list[str] = []
    for names_of_rank in gather_objects(names):
        frozen += names_of_rank
    group = dist.group.WORLD if dist.is_initialized() else None

    def write() -> None:
        draft = folder.with_name(f".exporting-{folder.name}-{secrets.token_hex(4)}")
        try:
            write_adapters(draft, trained, frozen, {**lora, "base": base})
            if folder.is_dir():
                remove_atomically(folder)
            draft.rename(folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    run_collectively(group, f"exporting {folder}", write if trained else lambda: None, no_results)


def write_config(model: Any, folder: Path, events: EventLog) -> None:
    """Write config.json and generation_config.json of a transformers model; do nothing for any other model."""
    module = user_module(model) if isinstance(model, nn.Module) else None
    for name in ("config", "generation_config"):
        config: Any = getattr(module, name, None)
        if not hasattr(config, "save_pretrained"):
            continue
        try:
            config = copy.deepcopy(config)
            if name == "config" and not getattr(config, "architectures", None):
                config.architectures = [user_class(model).__name__]
            config.save_pretrained(folder)
        except Exception as error:  # noqa: BLE001 - transformers rejects some settings; the training has succeeded
            events.write("note", text=f"{name}.json was not written: {error}")


def _write(weights: dict[str, Tensor], path: Path) -> None:
    draft = path.with_name(f".exporting-{path.name}-{secrets.token_hex(4)}")
    try:
        with draft.open("xb") as file:
            _save(weights, file, path)
            file.flush()
            os.fsync(file.fileno())
        draft.rename(path)
    finally:
        draft.unlink(missing_ok=True)


def _save(weights: dict[str, Tensor], file: IO[bytes], path: Path) -> None:
    try:
        torch.save(weights, file)
    except RuntimeError as error:
        cause = write_error(path.parent)  # torch reports only that the file is too short, without the errno
        if cause is None:
            raise
        raise OSError(cause.errno, cause.strerror, str(path)) from error
