"""Translates a plan into a DeepSpeed JSON configuration that sets every plan value for which DeepSpeed has a key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from shardwise.errors import PlanError
from shardwise.units import ELEMENT_BYTES, MIB

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from shardwise.job import Job
    from shardwise.plans.plan import Plan
    from shardwise.plans.sections import DType


DTYPES = ("fp32", "bf16", "fp16")
"""The dtypes that DeepSpeed supports for compute and for gradient reduction."""

_NO_KEY = ("gradient_sync", "compile", "capture", "sequence_parallel", "batch_norm")
_NO_COMMUNICATION_KEY = ("find_unused_parameters", "static_graph", "gradient_as_bucket_view", "broadcast_buffers")


def deepspeed_config(plan: Plan, *, clip_norm: float | None, nvme_path: str | None = None) -> dict[str, Any]:
    """Return the configuration of `plan` for `deepspeed.initialize`; does not import DeepSpeed.

    `clip_norm` is the value of the job; `nvme_path` is the folder for offload to nvme if the plan sets none.
    """
    require_expressible(plan)
    nvme_path = plan.offload.folder or nvme_path
    if "nvme" in (plan.offload.parameters, plan.offload.optimizer) and nvme_path is None:
        raise PlanError(
            "plan offloads to nvme, but offload.folder is not set",
            code="plan.nvme-folder-missing",
            fix="pass --set offload.folder=PATH",
        )
    precision = plan.precision
    config: dict[str, Any] = {
        # All three sizes are set, so DeepSpeed derives none; the plan guarantees that they agree. DeepSpeed counts
        # micro-batches itself: it reduces and steps at every accumulation-th one, so a script that calls backward and
        # step `accumulation` times per optimizer step needs no other option.
        "train_batch_size": plan.batch_size,
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.accumulation,
        # DeepSpeed clips to 1.0 if this key is missing.
        "gradient_clipping": clip_norm or 0.0,
        "communication_data_type": precision.reduce,
        "bf16": {"enabled": precision.compute == "bf16"},
        "fp16": {"enabled": precision.compute == "fp16"},
        "zero_optimization": _zero(plan, nvme_path),
        # The optimizer is the job's torch optimizer, with offload too; DeepSpeed would compile its own CPU optimizer.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if _accumulates_in_reduce_dtype(plan):
        config["data_types"] = {"grad_accum_dtype": precision.reduce}
    if plan.recompute != "none":
        # Options of DeepSpeed's own checkpoint function; the section alone enables nothing.
        config["activation_checkpointing"] = {"partition_activations": False, "cpu_checkpointing": False}
    return config


def deepspeed_stage(plan: Plan) -> int:
    """Return the ZeRO stage to configure: the plan's, but on one rank the lowest stage that supports its offload."""
    if plan.layout.world_size > 1 or plan.offload == type(plan.offload)():
        return plan.zero
    return 3 if plan.offload.parameters != "none" else 1


def require_expressible(plan: Plan) -> None:
    """Raise PlanError if a DeepSpeed configuration cannot express the plan; the message names the value."""
    layout, precision, offload = plan.layout, plan.precision, plan.offload
    if layout.world_size != layout.dp:
        raise PlanError(
            f"plan {layout} uses pp, cp or tp, which a DeepSpeed configuration cannot express",
            code="support.deepspeed-axis",
            fix="use plan ddp, zero1, zero2 or zero3",
        )
    if layout.replicate > 1 and layout.shard > 1:
        raise PlanError(
            f"plan {layout} shards within replicas, but DeepSpeed shards over all ranks or none",
            code="support.deepspeed-partial-sharding",
            fix=f"use layout shard{layout.world_size}",
        )
    has_fp32_state = precision.parameter == precision.optimizer == "fp32"
    if not has_fp32_state or precision.compute not in DTYPES or precision.reduce not in DTYPES:
        raise PlanError(
            f"DeepSpeed does not support precision {precision}",
            code="support.deepspeed-precision",
            fix="set parameter and optimizer to fp32; compute and reduce to fp32, bf16 or fp16",
        )
    if plan.communication.compression != "none":
        raise PlanError(
            f"plan compression = {plan.communication.compression!r} compresses DDP's buckets, which"
            " DeepSpeed does not use",
            code="support.compression-without-ddp",
            fix='set compression = "none", and set precision.reduce to bf16 to send fewer bytes',
        )
    if offload.parameters != "none" and plan.zero != 3 and layout.world_size > 1:
        raise PlanError(
            f"offload of parameters needs zero = 3, got {plan.zero}",
            code="support.offload-whole-parameters",
            fix="use plan zero3",
        )
    if offload.optimizer != "none" and plan.zero == 0 and layout.world_size > 1:
        raise PlanError(
            "offload of the optimizer needs zero = 1, 2 or 3, got 0",
            code="support.deepspeed-offload-unsharded",
            fix="use plan zero1, zero2 or zero3",
        )


def left_out(plan: Plan) -> tuple[str, ...]:
    """Return one sentence for each non-default value of a plan that DeepSpeed's JSON has no key for."""
    default = type(plan)()
    found = []
    for name in _NO_KEY:
        value = getattr(plan, name)
        if value != getattr(default, name):
            found.append(f"{name} = {value!r}")
    for name in _NO_COMMUNICATION_KEY:
        value = getattr(plan.communication, name)
        if value != getattr(default.communication, name):
            found.append(f"communication.{name} = {value!r}")
    if plan.recompute == "selective":
        found.append("recompute = 'selective'")
    if plan.recompute_blocks:
        found.append(f"recompute_blocks = {plan.recompute_blocks}")
    if plan.communication.prefetch != default.communication.prefetch and deepspeed_stage(plan) != 3:
        found.append(f"communication.prefetch = {plan.communication.prefetch}")
    return tuple(f"{each}: DeepSpeed's JSON has no key for it" for each in found)


def bucket_elements(bucket_mb: float, dtype: DType) -> int:
    """Return the bucket size as a number of gradient elements of `dtype`, DeepSpeed's unit; at least 1."""
    return max(1, round(bucket_mb * MIB / ELEMENT_BYTES[dtype]))


def bucket_megabytes(elements: int, dtype: DType) -> float:
    """Return the size in MiB of a bucket of `elements` gradients of `dtype`."""
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
        "allgather_bucket_size": elements + elements % 2,  # stages 1 and 2 require an even size
    }
    if stage == 3:
        # DeepSpeed prefetches a number of elements, the plan a number of blocks: one bucket is taken as one block.
        section["stage3_prefetch_bucket_size"] = elements * plan.communication.prefetch
    for name, part in _OFFLOAD.items():
        device = getattr(plan.offload, name)
        if device != "none":
            section[part] = {"device": device, "pin_memory": True}
            if device == "nvme":
                section[part]["nvme_path"] = nvme_path
    return section


_OFFLOAD = {"parameters": "offload_param", "optimizer": "offload_optimizer"}


def _accumulates_in_reduce_dtype(plan: Plan) -> bool:
    """Return whether gradients are accumulated in the dtype of their reduction instead of that of backward.

    The option is set for stages 2 and 3 only: stage 0 rejects it, and stage 1 in bf16 would use another optimizer.
    """
    return plan.accumulation > 1 and deepspeed_stage(plan) >= 2 and plan.precision.compute != plan.precision.reduce


def write_config(plan: Plan, path: Path, job: Job | None) -> list[str]:
    """Write a plan as DeepSpeed's JSON and return notes for the user; nvme offload uses a folder next to the file."""
    clip_norm = job.clip_norm if job is not None else None
    config = deepspeed_config(plan, clip_norm=clip_norm, nvme_path=str(path.resolve().parent / "nvme"))
    path.write_bytes(msgspec.json.format(msgspec.json.encode(config), indent=2) + b"\n")
    notes = [f"deepspeed {path}: stage {config['zero_optimization']['stage']}, {plan.layout.world_size} ranks"]
    if job is None:
        notes.append("note      gradient_clipping is 0.0 (off): set it to the job's clip_norm, if it has one")
    return notes + [f"left out: {sentence}" for sentence in left_out(plan)]


def best_expressible(plans: Sequence[Plan]) -> Plan:
    """Return the first plan that DeepSpeed's JSON can express; if there is none, raise the error of the last plan."""
    refusal = PlanError("no plan fits into device memory", code="plan.none-fits", fix="use a larger cluster")
    for plan in plans:
        try:
            require_expressible(plan)
        except PlanError as error:
            refusal = error
        else:
            return plan
    raise refusal
