"""A plan as DeepSpeed's JSON: every value that DeepSpeed would otherwise choose by itself, written out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from shardwise.errors import PlanError
from shardwise.planner.cost.deepspeed import deepspeed_stage
from shardwise.units import ELEMENT_BYTES, MIB

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from shardwise.job import Job
    from shardwise.plans.plan import DType, Plan


DTYPES = ("fp32", "bf16", "fp16")
"""The dtypes that DeepSpeed knows for compute and for summing gradients."""

_SILENT = ("gradient_sync", "compile", "capture", "sequence_parallel", "batch_norm")
_SILENT_COMMUNICATION = ("find_unused_parameters", "static_graph", "gradient_as_bucket_view", "broadcast_buffers")


def deepspeed_config(plan: Plan, *, clip_norm: float | None, nvme_path: str | None = None) -> dict[str, Any]:
    """Return the JSON for `deepspeed.initialize` that trains as `plan` says; pure, and DeepSpeed is not needed.

    `clip_norm` is the job's; `nvme_path` is the folder for what is offloaded to nvme, where the plan names none.
    """
    require_expressible(plan)
    nvme_path = plan.offload.folder or nvme_path
    if "nvme" in (plan.offload.parameters, plan.offload.optimizer) and nvme_path is None:
        raise PlanError(
            "plan offloads to nvme and no folder is given for it",
            code="plan.nvme-folder-missing",
            fix="name a folder on the disk",
        )
    precision = plan.precision
    config: dict[str, Any] = {
        # All three, so that DeepSpeed derives none of them; they agree because the plan's algebra made them. The
        # boundary of accumulation is DeepSpeed's own counter: it reduces and steps at every accumulation-th
        # micro-batch, so a Step that makes exactly `accumulation` calls of backward and step needs no other switch.
        "train_batch_size": plan.batch_size,
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.accumulation,
        # DeepSpeed clips to 1.0 when this is not said.
        "gradient_clipping": clip_norm or 0.0,
        "communication_data_type": precision.reduce,
        "bf16": {"enabled": precision.compute == "bf16"},
        "fp16": {"enabled": precision.compute == "fp16"},
        "zero_optimization": _zero(plan, nvme_path),
        # The job brings a torch optimizer, also where it is offloaded; DeepSpeed's own would be compiled first.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if _accumulates_apart(plan):
        config["data_types"] = {"grad_accum_dtype": precision.reduce}
    if plan.recompute != "none":
        # How DeepSpeed's own checkpoint function would work; it turns nothing on by itself.
        config["activation_checkpointing"] = {"partition_activations": False, "cpu_checkpointing": False}
    return config


def require_expressible(plan: Plan) -> None:
    """Refuse a plan that DeepSpeed's JSON has no words for and would train otherwise, naming the value."""
    layout, precision, offload = plan.layout, plan.precision, plan.offload
    if layout.world_size != layout.dp:
        raise PlanError(
            f"plan {layout} cuts the model by pp, cp or tp",
            code="support.deepspeed-axis",
            fix="use ddp, zero1, zero2 or zero3",
        )
    if layout.replicate > 1 and layout.shard > 1:
        raise PlanError(
            f"plan {layout} shards within replicas, and DeepSpeed shards over all ranks or none",
            code="support.deepspeed-partial-sharding",
            fix=f"use shard{layout.world_size}",
        )
    if (precision.parameter, precision.optimizer) != ("fp32", "fp32") or not {
        precision.compute,
        precision.reduce,
    } <= set(DTYPES):
        raise PlanError(
            f"DeepSpeed does not support precision {precision}",
            code="support.deepspeed-precision",
            fix="set parameter and optimizer to fp32; compute and reduce to fp32, bf16 or fp16",
        )
    if plan.communication.compression != "none":
        raise PlanError(
            f"plan compression = {plan.communication.compression!r} compresses DDP's buckets, and DeepSpeed has none",
            code="support.compression-without-ddp",
            fix='set compression = "none" and precision.reduce instead',
        )
    if offload.parameters != "none" and plan.zero != 3 and layout.world_size > 1:
        raise PlanError(
            f"plan offloads parameters with zero = {plan.zero}",
            code="support.offload-whole-parameters",
            fix="use zero3",
        )
    if offload.optimizer != "none" and plan.zero == 0 and layout.world_size > 1:
        raise PlanError(
            "plan offloads the optimizer with zero = 0",
            code="support.deepspeed-offload-unsharded",
            fix="use zero1, zero2 or zero3",
        )


def left_out(plan: Plan) -> tuple[str, ...]:
    """Return what of a plan DeepSpeed's JSON has no word for, one sentence each; only values that are not defaults."""
    default = type(plan)()
    found = [
        f"{name} = {getattr(plan, name)!r}" for name in _SILENT if getattr(plan, name) != getattr(default, name)
    ] + [
        f"communication.{name} = {getattr(plan.communication, name)!r}"
        for name in _SILENT_COMMUNICATION
        if getattr(plan.communication, name) != getattr(default.communication, name)
    ]
    if plan.recompute == "selective":
        found.append("recompute = 'selective'")
    if plan.communication.prefetch != default.communication.prefetch and deepspeed_stage(plan) != 3:
        found.append(f"communication.prefetch = {plan.communication.prefetch}")
    return tuple(f"{each}: DeepSpeed's JSON has no word for it" for each in found)


def bucket_elements(bucket_mb: float, dtype: DType) -> int:
    """Return how many gradients of `dtype` a bucket holds, at least one: DeepSpeed counts elements."""
    return max(1, round(bucket_mb * MIB / ELEMENT_BYTES[dtype]))


def bucket_megabytes(elements: int, dtype: DType) -> float:
    """Return the size of a bucket of so many gradients of `dtype`, in the plan's unit."""
    return elements * ELEMENT_BYTES[dtype] / MIB


def _zero(plan: Plan, nvme_path: str | None) -> dict[str, Any]:
    stage = deepspeed_stage(plan)
    elements = bucket_elements(plan.communication.bucket_mb, plan.precision.reduce)
    section: dict[str, Any] = {
        "stage": stage,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "reduce_bucket_size": elements,
        "allgather_bucket_size": elements + elements % 2,  # stages 1 and 2 refuse an odd one
    }
    if stage == 3:
        # DeepSpeed looks ahead by elements, the plan by blocks: a bucket stands for a block.
        section["stage3_prefetch_bucket_size"] = elements * plan.communication.prefetch
    for name, part in _OFFLOAD.items():
        device = getattr(plan.offload, name)
        if device != "none":
            place = {"device": device, "pin_memory": True}
            section[part] = place | ({"nvme_path": nvme_path} if device == "nvme" else {})
    return section


_OFFLOAD = {"parameters": "offload_param", "optimizer": "offload_optimizer"}


def _accumulates_apart(plan: Plan) -> bool:
    """Whether micro-batches are added up in another dtype than gradients come in.

    Only stages 2 and 3 are told so: stage 0 refuses it, and stage 1 in bf16 would take another optimizer.
    """
    return plan.accumulation > 1 and deepspeed_stage(plan) >= 2 and plan.precision.compute != plan.precision.reduce


def write_config(plan: Plan, path: Path, job: Job | None) -> list[str]:
    """Write a plan as DeepSpeed's JSON, and return what to report of it; nvme gets a folder beside the file."""
    clip_norm = job.clip_norm if job is not None else None
    config = deepspeed_config(plan, clip_norm=clip_norm, nvme_path=str(path.resolve().parent / "nvme"))
    path.write_bytes(msgspec.json.format(msgspec.json.encode(config), indent=2) + b"\n")
    notes = [f"deepspeed {path}: stage {config['zero_optimization']['stage']}, {plan.layout.world_size} ranks"]
    if job is None:
        notes.append("note      gradient_clipping is 0.0, off: write the job's clip_norm there, if it has one")
    return notes + [f"left out: {sentence}" for sentence in left_out(plan)]


def best_expressible(plans: Sequence[Plan]) -> Plan:
    """Return the first plan that DeepSpeed's JSON can hold; where it can hold none, the last refusal is raised."""
    refusal = PlanError("no plan fits", code="plan.none-fits", fix="use a larger cluster")
    for plan in plans:
        try:
            require_expressible(plan)
        except PlanError as error:
            refusal = error
        else:
            return plan
    raise refusal
