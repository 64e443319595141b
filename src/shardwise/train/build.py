"""Wiring: a Job, a Plan and a World become one Step."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from shardwise.data.feed import Feed, StepLoader
from shardwise.data.loaders import IndexLoader, StreamLoader, dataset_length
from shardwise.data.slices import Slices
from shardwise.errors import DataError, JobError, PlanError
from shardwise.parallel.apply import Place, apply_plan, gradient_sync, unwrap
from shardwise.parallel.batch_norm import foreign_batch_norms
from shardwise.parallel.probe import GradientProbe
from shardwise.parallel.support import require_supported
from shardwise.step.length import Length, training_length
from shardwise.step.plain import Autocast, PlainStep
from shardwise.step.update import choose_update

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from shardwise.job import Job
    from shardwise.plan import Plan
    from shardwise.world import World

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def build_step(job: Job, plan: Plan, world: World, *, note: Callable[[str], None] = lambda _: None) -> PlainStep:
    """Make the Step that trains `job` under `plan`; called on every rank. `note` gets remarks for the user."""
    check_fit(job, plan, world)
    torch.manual_seed(job.seed)
    model = parallelize(_make_model(job), plan, world)
    readers = plan.layout.dp
    reader = plan.layout.data_index(world.rank)
    torch.manual_seed(job.seed + 1 + reader)  # readers draw different dropout masks, whatever the model's init drew
    # On the host and by itself: its collectives run a step ahead of, and so beside, those of the model.
    feed_group = world.host_group if readers > 1 else None
    loader, length = _make_loader(job, plan, reader, feed_group, on_gpu=world.device.type == "cuda")
    plain = unwrap(model)
    feed = Feed(
        loader,
        job.loss,
        micro_batch=plan.micro_batch,
        device=world.device,
        fill=not foreign_batch_norms(plain),
        float_dtype=torch.float64 if plan.precision.compute == "fp64" else None,
        group=feed_group,
    )
    trainable = [(name, p) for name, p in plain.named_parameters() if p.requires_grad]
    if not trainable:
        raise JobError("the model has no trainable parameter", fix="leave some with requires_grad=True")
    return PlainStep(
        job,
        model=model,
        optimizer=job.optimizer(trainable),
        feed=feed,
        sync=gradient_sync(model, plan),
        update=choose_update([p for _, p in trainable], clip_norm=job.clip_norm, fp16=plan.precision.compute == "fp16"),
        autocast=Autocast(device_type=world.device.type, dtype=_DTYPES.get(plan.precision.compute)),
        readers=readers,
        length=length,
        after_first_backward=_first_check(plain, plan, feed_group, note),
    )


def _first_check(
    module: nn.Module, plan: Plan, group: dist.ProcessGroup | None, note: Callable[[str], None]
) -> Callable[[], None] | None:
    """Watch the first backward for parameters without gradient; a static graph must not be held back, nor needs it."""
    if plan.communication.static_graph and group is not None:
        return None
    probe = GradientProbe(module)
    return lambda: report_missing(probe.missing(group), plan, note)


def parallelize(model: nn.Module, plan: Plan, world: World) -> nn.Module:
    """Put a plain module under `plan` on this rank's device, for people with their own loop; on every rank.

    Autocast belongs around the loop's own forward and loss, so `plan.precision.compute` is left to it.
    """
    require_supported(plan)
    if plan.precision.parameter == "fp64":
        model = model.double()
    readers = dist.group.WORLD if plan.layout.dp > 1 else None
    return apply_plan(model.to(world.device), plan, Place(device=world.device, readers=readers))


def check_fit(job: Job, plan: Plan, world: World) -> None:
    """Refuse a plan that is for another world or another batch."""
    if plan.layout.world_size != world.size:
        raise PlanError(
            f"plan {plan.layout} is for {plan.layout.world_size} ranks, the world has {world.size}",
            fix=f"use plan.refit({world.size})",
        )
    if plan.batch_size != job.batch_size:
        raise PlanError(
            f"the plan trains {plan.micro_batch} x {plan.accumulation} x {plan.layout.dp} = {plan.batch_size} samples"
            f" a step, the job asks for {job.batch_size}",
            fix=f"use Plan.preset(name, {world.size}, batch_size={job.batch_size})",
        )


def report_missing(missing: dict[int, list[str]], plan: Plan, note: Callable[[str], None]) -> None:
    """Name parameters that got no gradient: under DDP that would leave others unsummed, so it is refused there."""
    if not missing:
        return
    words = "; ".join(f"rank {rank}: {', '.join(names)}" for rank, names in missing.items())
    if plan.layout.dp > 1 and not plan.communication.find_unused_parameters:
        raise JobError(
            f"parameters got no gradient in the first step ({words})",
            fix="freeze them, use them, or --set communication.find_unused_parameters=true",
        )
    note(f"parameters without gradient in the first step: {words}")


def _make_model(job: Job) -> nn.Module:
    model = job.model()
    if not isinstance(model, torch.nn.Module):
        raise JobError(f"Job.model made a {type(model).__name__}", fix="return a torch.nn.Module")
    if job.weights is not None:
        _load_weights(model, Path(job.weights))
    return model


def _load_weights(model: nn.Module, path: Path) -> None:
    if not path.is_file():
        raise JobError(f"Job.weights {path} is not a file", fix="name a state dict saved by torch.save")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        result = model.load_state_dict(state, strict=False)
    except (RuntimeError, ValueError, TypeError, OSError, pickle.UnpicklingError) as error:
        reason = (str(error).splitlines() or [""])[-1].strip()
        raise JobError(f"Job.weights {path} does not load ({reason})", fix="name a matching state dict") from error
    if result.missing_keys or result.unexpected_keys:
        raise JobError(
            f"Job.weights {path} lacks {result.missing_keys} and has extra {result.unexpected_keys}",
            fix="name the state dict of this model",
        )


def _make_loader(
    job: Job, plan: Plan, reader: int, group: dist.ProcessGroup | None, *, on_gpu: bool
) -> tuple[StepLoader, Length]:
    dataset: Any = job.data("train")
    if dataset is None:
        raise DataError("Job.data gave no dataset for split 'train'", fix="return one")
    if isinstance(dataset, IterableDataset):
        length = training_length(job, dataset, steps_per_epoch=None)
        stream = StreamLoader(
            dataset,
            reader=reader,
            readers=plan.layout.dp,
            micro_batch=plan.micro_batch,
            accumulation=plan.accumulation,
            num_steps=length.num_steps,
            seed=job.seed,
            group=group,
            collate=job.collate,
            num_workers=job.num_workers,
        )
        return stream, length
    slices = Slices(
        batch_size=job.batch_size,
        accumulation=plan.accumulation,
        reader=reader,
        readers=plan.layout.dp,
        length=dataset_length(dataset),
    )
    length = training_length(job, dataset, slices.steps_per_epoch)
    loader = IndexLoader(
        dataset,
        slices,
        seed=job.seed,
        first_step=0,
        num_steps=length.num_steps,
        collate=job.collate,
        num_workers=job.num_workers,
        pin_memory=on_gpu,
    )
    return loader, length
