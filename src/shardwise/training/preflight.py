"""Preflight checks that a plan can train the job's model, which run before any process starts.

The planner proposes a plan only if it passes these checks, and `train` applies the same checks to the plan it receives.
"""

from __future__ import annotations

import tempfile
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from shardwise.data.rows import check_token_loss
from shardwise.dist import local_world
from shardwise.engines.engine import engine_named, require_supported
from shardwise.errors import JobError, PlanError, RankFailedError, some_of
from shardwise.job.job import call_model
from shardwise.job.optimizers import SGD, AdamW, Muon
from shardwise.launcher.local.function import run_forked
from shardwise.parallel.context import check_context
from shardwise.parallel.first_passes import written_parameters
from shardwise.parallel.fused_loss import find_head
from shardwise.parallel.lora import add_adapters
from shardwise.parallel.meta_model import structure
from shardwise.parallel.parameter_rules import (
    check_dtypes,
    check_optimizer,
    check_parameters,
    check_sharded_updates,
    copy_attributes,
    trial_shape,
)
from shardwise.parallel.sharded import check_sharded
from shardwise.parallel.stages import check_stages, count_layers, find_layers
from shardwise.parallel.support import check_device
from shardwise.parallel.tensor_rules import check_tensor, find_rules, split_dim, styles_by_name
from shardwise.plans.pipeline import check_pipeline, split_layers
from shardwise.plans.rules import accumulates_in_fp32
from shardwise.training.float8 import Float8Rules
from shardwise.training.step.captured import check_shapes, sampled_forms, sampled_meta_batch
from shardwise.training.step.pipeline import shapes_differ

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.distributed.device_mesh import DeviceMesh

    from shardwise.dist import World
    from shardwise.job import Job
    from shardwise.job.optimizers import OptimizerFactory
    from shardwise.parallel.skeleton import Skeleton
    from shardwise.plans import Plan

    Dims = dict[str, int | None]
    """Parameter name -> the sharded dimension, or None for a parameter that is a replicated DTensor."""


class ModelRules:
    """Rejects plans that cannot train a job; builds the model on the meta device for the first plan that needs it."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._tried: dict[bool, JobError | None] = {}
        """Error of the optimizer trial on shards, keyed by whether tensor parallelism shards the parameters."""
        self._num_forms: dict[int, int] = {}
        """Number of distinct micro-batch shapes, by the number of samples of a micro-batch."""

    def __call__(self, plan: Plan) -> None:
        """Raise PlanError or JobError if the plan cannot partition this model (heads, layers, ties) or train this job.

        Reads a few samples of the job's data, but only for plans that capture the step or use pipeline parallelism.
        """
        require_supported(plan)
        check_job(self._job, plan)
        if plan.capture == "step":
            check_shapes(self._job, plan)
        if plan.layout.pp > 1 and plan.accumulation > 1:
            self._check_micro_batches(plan)
        if _needs_model(self._job, plan):
            self._check_model(plan)
        if plan.precision.compute == "float8":
            self._float8_rules(plan)

    def _check_micro_batches(self, plan: Plan) -> None:
        """Reject a pipeline if a few sampled micro-batches differ in shape."""
        rows = plan.micro_batch
        if rows not in self._num_forms:
            self._num_forms[rows] = len(set(sampled_forms(self._job, rows)))
        if self._num_forms[rows] > 1:
            raise shapes_differ()

    def _check_model(self, plan: Plan) -> None:
        job, layout = self._job, plan.layout
        if plan.precision.parameter == "fp32":  # other dtypes convert the whole model
            check_dtypes(self._module, plan, adapted=job.lora is not None)
        check_parameters(self._module, plan, self._skeleton.references)
        if plan.fused_loss:
            find_head(self._module)
        if layout.cp > 1:
            check_context(self._module, layout, own_loss=not job.loss.by_row)
        if layout.tp > 1:
            rules = find_rules(self._module, job.tensor_rules)
            num_ranks = layout.tp * layout.dp
            check_tensor(self._module, layout.tp, rules, sequence=plan.sequence_parallel, num_ranks=num_ranks)
            self._try_optimizer(by_tensor=True, trial=lambda: try_on_shards(job.optimizer, self._module, rules))
        if plan.zero and engine_named(plan.engine).uses_fsdp:
            self._try_optimizer(by_tensor=False, trial=lambda: try_on_shards(job.optimizer, self._module))
        if layout.pp > 1:
            layers = find_layers(self._module, job.layers)
            num_layers = count_layers(self._module, layers)
            check_pipeline(plan, num_layers)
            check_stages(self._module, split_layers(plan, num_layers), layers)
            if self._written:
                raise JobError(
                    f"forward writes to {some_of(self._written)}, but a pipeline stage owns only its own layers",
                    code="support.pipeline-parameter-write",
                    fix="use a plan with pp = 1",
                )

    def _try_optimizer(self, *, by_tensor: bool, trial: Callable[[], None]) -> None:
        """Raise the error of the optimizer trial, if any; the trial runs once for all plans."""
        if by_tensor not in self._tried:
            try:
                trial()
                self._tried[by_tensor] = None
            except JobError as raised:
                self._tried[by_tensor] = raised
        error = self._tried[by_tensor]
        if error is not None:
            raise error

    @cached_property
    def _written(self) -> list[str]:
        """Parameters that a forward pass writes to, found by running one micro-batch on the meta device."""
        meta_batch = sampled_meta_batch(self._job, 1)
        if meta_batch is None:
            return []
        return written_parameters(self._module, lambda module: call_model(module, meta_batch))

    @cached_property
    def _skeleton(self) -> Skeleton:
        found = structure(self._job.model, self._job.seed)
        if self._job.lora is not None:
            add_adapters(found.module, self._job.lora)
        return found

    @property
    def _module(self) -> nn.Module:
        return self._skeleton.module

    @cached_property
    def _float8_rules(self) -> Float8Rules:
        return Float8Rules(self._job, self._module)


def check_job(job: Job, plan: Plan) -> None:
    """Raise PlanError if the plan's engine or options do not support the job; reads neither the model nor the data."""
    if plan.layout.cp > 1:
        check_token_loss(job)
    engine = engine_named(plan.engine)
    if job.lora is not None and not engine.trains_adapters:
        raise PlanError(
            f"engine {plan.engine} does not support LoRA adapters",
            code="support.lora-engine",
            fix="pass --set engine=torch, or remove Job.lora",
        )
    if isinstance(job.optimizer, Muon):
        _check_muon(plan)
    if isinstance(job.optimizer, Muon | SGD) and plan.precision.needs_mixed_optimizer:
        raise PlanError(
            f"precision ({plan.precision}) requires AdamW, but the job's optimizer is {type(job.optimizer).__name__}",
            code="optimizer.precision-unsupported",
            fix="use sw.adamw, or set precision.parameter and precision.optimizer to fp32",
        )
    if job.masks == "keyed" and (not engine.has_keyed_dropout or plan.compile != "none"):
        unsupported, fix = f"compile = {plan.compile}", "compile=none"
        if not engine.has_keyed_dropout:
            unsupported, fix = f"engine {plan.engine}", "engine=torch"
        raise PlanError(
            f"counter-based dropout (masks=keyed) is not supported by {unsupported}",
            code="support.keyed-masks-engine",
            fix=f"pass --set {fix}, or --set masks=drawn",
        )


def _check_muon(plan: Plan) -> None:
    """Raise PlanError if the plan's engine or its offload cannot gather the matrices that Muon orthogonalizes."""
    if not engine_named(plan.engine).uses_fsdp:
        raise PlanError(
            f"engine {plan.engine} does not support sw.muon, which updates whole matrices",
            code="support.muon-engine",
            fix="pass --set engine=torch, or use sw.adamw",
        )
    if plan.offload.optimizer != "none" or plan.offload.parameters != "none":
        raise PlanError(
            "sw.muon orthogonalizes matrices on the device, but the plan offloads optimizer states to the host",
            code="support.muon-offload",
            fix="pass --set offload.parameters=none --set offload.optimizer=none, or use sw.adamw",
        )


def _needs_model(job: Job, plan: Plan) -> bool:
    layout = plan.layout
    if engine_named(plan.engine).uses_fsdp and (plan.zero or plan.offload.optimizer != "none"):
        return True  # sharding and offloading replace parameters
    return layout.tp > 1 or layout.pp > 1 or layout.cp > 1 or plan.fused_loss or job.lora is not None


# Whether a plan fits a job and a world, or a custom training loop.


def check_fit(job: Job, plan: Plan, world: World) -> None:
    """Raise PlanError if the plan is not supported, or does not match the world size or the job's batch size.

    Communicates over a world of GPUs; call on every rank.
    """
    require_supported(plan)
    check_precision_of(world, plan)
    if plan.layout.pp > 1 and world.backend == "gloo" and world.device.type == "cuda":
        raise PlanError(
            f"plan {plan.layout} has pipeline stages on GPUs, but gloo cannot send GPU tensors",
            code="support.pipeline-gloo-gpu",
            fix="pass --backend nccl",
        )
    if plan.layout.world_size != world.size:
        raise PlanError(
            f"plan {plan.layout} requires {plan.layout.world_size} ranks, but the world has {world.size}",
            code="plan.world-size-mismatch",
            fix=f"call plan.refit({world.size})",
        )
    if plan.batch_size != job.batch_size:
        raise PlanError(
            f"the plan trains {plan.micro_batch} x {plan.accumulation} x {plan.layout.dp} = {plan.batch_size} samples"
            f" per step, but the job's batch_size is {job.batch_size}",
            code="plan.batch-size-mismatch",
            fix=f"use Plan.preset(name, {world.size}, batch_size={job.batch_size})",
        )
    check_job(job, plan)


def check_precision_of(world: World, plan: Plan) -> None:
    """Raise PlanError on every rank if the GPU of any rank does not compute in the plan's precisions.

    Communicates over a world of GPUs; call on every rank.
    """
    if world.device.type != "cuda":
        return
    refusal: PlanError | None = None
    try:
        check_device(plan, torch.cuda.get_device_name(world.device), torch.cuda.get_device_capability(world.device))
    except PlanError as error:
        refusal = error
    refusals = [refusal] if world.size == 1 or world.backend == "fake" else world.gather(refusal)
    for found in filter(None, refusals):
        raise found


def check_own_loop(model: nn.Module, plan: Plan) -> None:
    """Raise PlanError if a custom training loop cannot run the plan."""
    require_supported(plan)
    if plan.layout.pp > 1:
        raise PlanError(
            f"plan {plan.layout} uses pipeline parallelism, which custom training loops do not support",
            code="support.own-loop-pipeline",
            fix="use build_step",
        )
    if plan.layout.cp > 1:
        raise PlanError(
            f"plan {plan.layout} uses context parallelism, which custom training loops do not support",
            code="support.own-loop-cp",
            fix="use build_step",
        )
    if plan.zero == 1 or plan.offload.optimizer != "none":
        raise PlanError(
            "the plan shards or offloads optimizer states, but a custom training loop creates its own optimizer",
            code="support.own-loop-zero1",
            fix="use build_step, or the plan zero2",
        )
    if accumulates_in_fp32(plan) and plan.layout.dp > 1:
        raise PlanError(
            f"gradients of bf16 parameters are accumulated in fp32 over {plan.accumulation} micro-batches and summed"
            " without DDP, which custom training loops do not support",
            code="support.own-loop-bf16-accumulation",
            fix="use build_step, set accumulation = 1, or use the plan zero2",
        )
    if plan.layout.dp > 1 and plan.zero < 2 and plan.layout.tp > 1:
        raise PlanError(
            f"plan {plan.layout} replicates tensor-parallel weights, which custom training loops do not support",
            code="support.own-loop-split-replicas",
            fix=f"use build_step, or the plan shard{plan.layout.dp}.tp{plan.layout.tp}",
        )
    if plan.communication.sync_every > 1:
        raise PlanError(
            "the plan sets communication.sync_every, which custom training loops do not support",
            code="support.own-loop-sync-every",
            fix="use build_step",
        )
    if plan.capture == "step":
        raise PlanError(
            "the plan sets capture = step, which custom training loops do not support",
            code="support.own-loop-capture",
            fix="use build_step",
        )
    if plan.precision.needs_mixed_optimizer:
        raise PlanError(
            f"precision ({plan.precision}) requires the optimizer of build_step, but a custom training loop creates its"
            " own",
            code="support.own-loop-precision",
            fix='use build_step, or set precision.parameter = "fp32" and precision.optimizer = "fp32"',
        )
    check_parameters(model, plan)
    check_sharded(model, plan, by_step=False)


# The trial of an optimizer on shards before a run: two forked CPU ranks step small tensors that replace the parameters.
#
# `make_optimizer` tries every optimizer on the shards of the run itself (parallel/parameter_rules.py). The planner and
# preflight have no ranks yet, so the same trial runs here on two forked ranks, in about 0.2 s per job: each parameter
# is replaced by a tensor of at most 16 elements per dimension, with the same name and attributes, sharded as in the
# plan. Two ranks are sufficient: an update is either elementwise, or DTensor gathers the shards.

_RANKS = 2
_TIMEOUT_S = 60.0


def try_on_shards(factory: OptimizerFactory, module: nn.Module, tensor_rules: Mapping[str, str] | None = None) -> None:
    """Raise JobError if an optimizer updates shards differently from full parameters; `module` may be a meta model.

    Parameters are sharded along dimension 0 as in ZeRO, or with `tensor_rules` as in tensor parallelism.
    """
    if isinstance(factory, AdamW | SGD | Muon) or dist.is_initialized():
        # AdamW and SGD are elementwise, and Muon gathers its shards; in an initialized world, build_step runs the trial
        # on the real shards.
        return
    dims = _shard_dims(module, tensor_rules)
    try:
        errors = _run_on_two_ranks(lambda: _trial_error(factory, module, dims))
    except RankFailedError:
        return  # the trial could not run; build_step repeats it
    for error in errors:
        if error is not None:
            raise error


def _shard_dims(module: nn.Module, tensor_rules: Mapping[str, str] | None) -> Dims:
    styles = {} if tensor_rules is None else styles_by_name(module, tensor_rules)
    dims: Dims = {}
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        if tensor_rules is None:
            dims[name] = 0 if parameter.ndim else None
        else:
            owner, _, kind = name.rpartition(".")
            dims[name] = split_dim(module.get_submodule(owner), styles.get(owner), kind)
    return dims


def _trial_error(factory: OptimizerFactory, module: nn.Module, dims: Dims) -> JobError | None:
    """Return the error of the trial; None if it passes or if the factory does not accept small tensors."""
    mesh = init_device_mesh("cpu", (_RANKS,))
    named = [(name, _small_shard(module.get_parameter(name), mesh, dim)) for name, dim in dims.items()]
    try:
        optimizer = factory(named)
    except Exception:  # noqa: BLE001 - a factory may require its model's shapes; then build_step runs the trial
        return None
    try:
        check_optimizer(optimizer)
        check_sharded_updates(optimizer)
    except JobError as error:
        return error
    return None


def _small_shard(like: nn.Parameter, mesh: DeviceMesh, dim: int | None) -> nn.Parameter:
    """Return a small parameter with the attributes of `like`, sharded along `dim` or replicated if None."""
    placement = Replicate() if dim is None else Shard(dim)
    small = torch.zeros(trial_shape(like), dtype=torch.float64)
    parameter = nn.Parameter(distribute_tensor(small, mesh, [placement], src_data_rank=None))
    copy_attributes(vars(like), parameter)
    return parameter


def _run_on_two_ranks(call: Callable[[], Any]) -> list[Any]:
    """Run `call` on two forked ranks of a CPU process group and return the result of each rank."""
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        store = Path(folder) / "store"

        def body(rank: int) -> Any:
            with local_world(store, rank, _RANKS, timeout_s=_TIMEOUT_S):
                return call()

        return run_forked(body, _RANKS, timeout_s=_TIMEOUT_S)
