"""Functions for a custom training loop: parallelize a model, load data, autocast, accumulate and clip gradients.

They use the same core as `train`. Gradients are averaged over data-parallel ranks, as in DDP, so a mean loss over
equal numbers of rows trains like one process on the whole batch. Otherwise, and with gradient accumulation, the factor
`scale` of the loader makes the gradient the mean over the samples of the update.
"""

from __future__ import annotations

import warnings
import weakref
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from shardwise.data.corpus import Corpus
from shardwise.data.corpus_loader import ShardedCorpusLoader
from shardwise.data.rows import map_tensors
from shardwise.data.sharded_loader import DataRank, EvaluationLoader, ReadOptions, ShardedLoader, options_of
from shardwise.dist import world as running_world
from shardwise.errors import DataError, JobError, PlanError
from shardwise.parallel.apply import apply_plan
from shardwise.parallel.collectives import parameters_of, stages_of
from shardwise.parallel.first_passes import watch_inputs
from shardwise.parallel.gradsync import local, scale_gradients, without_reduction
from shardwise.parallel.meta_model import built_meta_model
from shardwise.parallel.parameter_rules import check_dtypes
from shardwise.parallel.sharded import DTYPES, LOWER, ReducedList
from shardwise.parallel.tensor_gradients import reject_unequal, unequal_gradients
from shardwise.parallel.tensor_rules import find_rules
from shardwise.parallel.weights import broadcast_values
from shardwise.plans.pipeline import split_batch
from shardwise.training.build import make_mesh_context
from shardwise.training.loading import check_checksums
from shardwise.training.preflight import check_own_loop, check_precision_of
from shardwise.training.step.compiled import compilable
from shardwise.training.step.plain import OptimizerStep
from shardwise.training.step.update import clip_factor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.utils.data import Dataset

    from shardwise.dist import World
    from shardwise.plans import Plan


_FIXES = ("call sw.parallelize(model, plan, ", "call shardwise.parallel.propose_rules.propose_rules(model, example)")
"""Fixes for a model without tensor rules: the call that takes rules, and how to find rules."""
_FP16 = (
    "small gradients become 0 in fp16 unless the loop scales its loss: use torch.amp.GradScaler, precision bf16, or"
    " build_step, which scales the loss"
)


def parallelize(
    model: nn.Module, plan: Plan, world: World | None = None, *, tensor_rules: Mapping[str, str] | str | None = None
) -> nn.Module:
    """Apply `plan` to a module and move it to this rank's device. Communicates over the world; call on every rank.

    All ranks receive the values of rank 0. Create the optimizer afterwards, because parameters may become shards.
    Gradients are averaged over data-parallel ranks. The forward pass computes in `plan.precision.compute` and returns
    fp32; use `autocast(plan)` for computations outside the model. `tensor_rules` maps module names to tensor-parallel
    styles, or is the path of a file with them; None uses the rules of the model. `world` defaults to the current world.
    """
    world = world or running_world()
    check_own_loop(model, plan)
    check_precision_of(world, plan)
    if plan.precision.parameter == "fp64":
        model = model.double()
    check_dtypes(model, plan, adapted=False)
    if world.size > 1:
        broadcast_values(model, world.device)
    if plan.precision.compute == "fp16":
        warnings.warn(_FP16, stacklevel=2)
    originals = [weakref.ref(parameter) for parameter in model.parameters()]
    plan = compilable(plan, world, warnings.warn)
    mesh_context = make_mesh_context(plan, world)
    _compute_in(model, world.device, LOWER.get(plan.precision.activations))
    meta_model = built_meta_model(model)
    if plan.layout.tp > 1:
        meta_model = replace(meta_model, tensor_rules=find_rules(model, tensor_rules, _FIXES))
    parallel = apply_plan(meta_model, plan, mesh_context)
    peers = world.axis_group(plan.layout, ("tp",), on_host=True)
    if peers is not None and world.backend != "fake":
        named = list(stages_of(parallel)[0].named_parameters())
        dtype = DTYPES[plan.precision.activations]
        watch_inputs(parallel, peers, lambda: reject_unequal(unequal_gradients(named, peers, dtype)))
    if isinstance(parallel, FSDPModule):
        ReducedList(parallel, mesh_context.host_dp_group, by_itself=True)
    for part in parallel.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(float(plan.layout.dp))
    _reject_replaced_parameters(originals, parallel)
    return parallel


def _reject_replaced_parameters(originals: Sequence[weakref.ref[nn.Parameter]], parallel: nn.Module) -> None:
    """Make optimizer steps raise JobError for parameters that sharding replaced, which would never be trained."""
    current = {id(parameter) for parameter in parallel.parameters()}

    def check(optimizer: Any, *_: Any) -> None:
        alive = [original() for original in originals]
        replaced = {id(parameter) for parameter in alive if parameter is not None} - current
        if not replaced:
            hook.remove()
        for group in optimizer.param_groups:
            if any(id(parameter) in replaced for parameter in group["params"]):
                raise JobError(
                    f"{type(optimizer).__name__} has parameters that sw.parallelize has replaced by shards",
                    code="train.optimizer-before-parallelize",
                    fix="create the optimizer after sw.parallelize, from the parameters of the model that it returns",
                )

    hook = register_optimizer_step_pre_hook(check)


def _compute_in(model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
    """Make a module compute under autocast to `dtype` and return fp32 outputs; None leaves the module unchanged.

    Replaces the class of the module, as FSDP2 does: a forward stored on the instance would be copied by deepcopy and
    would compute with the weights of the original module.
    """
    if dtype is None:
        return
    kind = type(model)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device.type, dtype):
            output = kind.__call__(self, *args, **kwargs)
        return map_tensors(_widened, output)

    model.__class__ = type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


def _widened(tensor: Tensor) -> Tensor:
    """Return a half-precision tensor in fp32, the precision in which autocast computes losses."""
    return tensor.float() if tensor.dtype in LOWER.values() else tensor


def dataloader(
    data: Dataset[Any] | DataLoader[Any],
    plan: Plan,
    world: World | None = None,
    *,
    batch_size: int | None = None,
    shuffle: bool = True,
    drop_last: bool | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    num_workers: int = 0,
    seed: int = 0,
    accumulation: int = 1,
    evaluate: bool = False,
) -> ShardedLoader | ShardedCorpusLoader | EvaluationLoader:
    """Return a loader of this data-parallel rank's batches of a dataset or DataLoader, on its device.

    `batch_size` is global: each data-parallel rank receives an equal share of every batch, and all ranks of a tp, cp
    or pp group receive the same share. It defaults to the batch size of the DataLoader, or to the plan's micro-batch on
    every rank. Each iteration reads one epoch, in an order that depends only on (seed, epoch); `state_dict` and
    `load_state_dict` resume within an epoch at any number of ranks. `drop_last` applies to a last batch that cannot be
    divided evenly: True drops it, False yields it (then back-propagate `loss * loader.scale`), None raises. An
    update uses `accumulation` batches: back-propagate `loss * loader.scale`, and call `optimizer.step()` only if
    `loader.is_update`. With `evaluate`, every sample is read once, in order, and every rank receives the same number of
    batches. The other options of a DataLoader apply unchanged. An IterableDataset defines its own order.
    """
    world = world or running_world()
    dp = plan.layout.dp
    if isinstance(data, DataLoader):
        if (batch_size, shuffle, collate, num_workers) != (None, True, None, 0):
            raise DataError(
                "sw.dataloader received a DataLoader and also options that the DataLoader already defines",
                code="data.loader-with-options",
                fix="pass the dataset with the options, or the DataLoader without them",
            )
        options, dataset = replace(options_of(data, seed), accumulation=accumulation), data.dataset
        if drop_last is not None:
            options = replace(options, drop_last=drop_last)
    else:
        dataset = data
        options = ReadOptions(
            batch_size=batch_size or plan.micro_batch * dp,
            shuffle=shuffle,
            drop_last=drop_last,
            collate=collate,
            num_workers=num_workers,
            seed=seed,
            accumulation=accumulation,
        )
    rank = _data_rank(plan, world)
    if evaluate:
        return EvaluationLoader(dataset, options, rank)
    split_batch(options.batch_size, dp=dp)
    if not isinstance(dataset, Corpus):
        return ShardedLoader(dataset, options, rank)
    if not shuffle:
        raise _corpus_order_error()
    check_checksums(dataset.sources.values(), world)
    return ShardedCorpusLoader(dataset, options, rank)


def _data_rank(plan: Plan, world: World) -> DataRank:
    """Return this rank's share of every batch. Creates a process group at the first call; call on every rank."""
    return DataRank(
        index=plan.layout.data_index(world.rank),
        size=plan.layout.dp,
        device=world.device,
        float_dtype=torch.float64 if plan.precision.compute == "fp64" else None,
        group=world.axis_group(plan.layout, ("replicate", "shard"), on_host=True),
    )


def _corpus_order_error() -> DataError:
    return DataError(
        "shuffle is False, but the order of a corpus follows from seed",
        code="data.corpus-order",
        fix="remove shuffle=; sw.dataloader reads the test split in order if evaluate=True",
    )


def autocast(plan: Plan) -> AbstractContextManager[Any]:
    """Return an autocast context for the compute precision of `plan`; it does nothing for fp32 and fp64."""
    dtype = LOWER.get(plan.precision.activations)
    contexts = ExitStack()
    if dtype is not None:
        contexts.enter_context(torch.autocast("cpu", dtype))
        if torch.cuda.is_available():
            contexts.enter_context(torch.autocast("cuda", dtype))
    return contexts


def no_sync(model: nn.Module, *, enabled: bool = True) -> AbstractContextManager[Any]:
    """Return a context in which backward passes accumulate gradients without reducing them over ranks.

    Use it for the forward and backward of every micro-batch of an optimizer step except the last one, whose backward
    reduces the accumulated gradients: `no_sync(model, enabled=not loader.is_update)`. It does not scale gradients.
    `model` is the result of `parallelize`; call on every rank.
    """
    if not enabled:
        return nullcontext()
    if isinstance(model, DistributedDataParallel):
        return model.no_sync()
    if isinstance(model, FSDPModule):
        return without_reduction([model])
    return nullcontext()


@torch.no_grad()
def clip_grad_norm_(parameters: nn.Module | Iterable[nn.Parameter] | OptimizerStep, max_norm: float) -> Tensor:
    """Clip the gradient norm of the whole model to `max_norm` and return the norm before clipping.

    Accepts a model, its parameters, or (in `before_update` of `build_step`) a step, whose norm includes all pipeline
    stages. Communicates over the ranks that shard parameters; call on every rank.
    """
    if isinstance(parameters, OptimizerStep):
        return _clip_step(parameters, max_norm)
    if isinstance(parameters, nn.Module):
        parameters = [parameter for _, parameter in parameters_of(parameters)]
    members = list(parameters)
    norm = _norm_of(members)
    scale_gradients(members, clip_factor(norm, max_norm))
    return norm


def _clip_step(step: OptimizerStep, max_norm: float) -> Tensor:
    norm_of = step.update.norm
    if norm_of is None:
        raise PlanError(
            f"{type(step).__name__} does not support clip_grad_norm_ because its engine clips gradients",
            code="support.clip-by-engine",
            fix="set Job.clip_norm",
        )
    norm: Tensor = norm_of() / step.update.state().get("loss_scale", 1.0)
    norm_of.scale(clip_factor(norm, max_norm))
    return norm


def _norm_of(parameters: list[nn.Parameter]) -> Tensor:
    """Return the norm of the whole gradient. Communicates over every mesh on which parameters are sharded."""
    device = local(parameters[0]).device
    pieces: dict[tuple[DeviceMesh | None, int], list[Tensor]] = {}
    for parameter in parameters:
        mesh = None
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
        gradient = parameter.grad
        copies = 1
        if isinstance(gradient, DTensor):
            placements = [Replicate() if each.is_partial() else each for each in gradient.placements]
            gradient = gradient.redistribute(placements=placements)
            for axis, placement in enumerate(placements):
                if placement.is_replicate():
                    copies *= gradient.device_mesh.size(axis)
        found = pieces.setdefault((mesh, copies), [])
        if gradient is not None:
            found.append(local(gradient))
    squares: dict[DeviceMesh | None, Tensor] = {}
    for (mesh, copies), tensors in pieces.items():
        # In fp64, because shards of one model may have different dtypes.
        square = torch.nn.utils.get_total_norm(tensors).to(device, torch.float64).square() / copies
        squares[mesh] = squares[mesh] + square if mesh in squares else square
    for mesh, square in squares.items():
        if mesh is not None:
            for axis in range(mesh.ndim):
                dist.all_reduce(square, group=mesh.get_group(axis))
    return torch.stack(list(squares.values())).sum().sqrt()
