"""The keys of DeepSpeed's JSON: plan fields, job fields, keys that do not affect results, unsupported keys."""

from __future__ import annotations

import json
import re
from typing import Any

from shardwise.errors import PlanError

BATCH, MICRO_BATCH, ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"

PLAN = {
    "": {
        BATCH, MICRO_BATCH, ACCUMULATION, "bf16", "bfloat16", "fp16", "communication_data_type", "zero_optimization",
        "activation_checkpointing", "data_types",
    },
    "bf16": {"enabled"},
    "fp16": {"enabled", "loss_scale"},
    "data_types": {"grad_accum_dtype"},
    "zero_optimization": {
        "stage", "overlap_comm", "contiguous_gradients", "reduce_bucket_size", "allgather_bucket_size",
        "stage3_prefetch_bucket_size", "offload_param", "offload_optimizer", "cpu_offload", "cpu_offload_param",
    },
    "offload_param": {"device", "nvme_path"},
    "offload_optimizer": {"device", "nvme_path"},
    "activation_checkpointing": set[str](),
}  # fmt: skip
"""Keys that become fields of a plan, by section; "" is the top level."""

JOB = {"optimizer", "scheduler", "gradient_clipping"}
"""Keys of the top level that belong to a Job."""

IGNORED = {
    "": {
        "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "log_level", "timers",
        "tensorboard", "wandb", "csv_monitor", "comet", "flops_profiler", "comms_logger", "autotuning", "checkpoint",
        "aio", "compile", "datastates_ckpt", "dataloader_drop_last", "disable_allgather", "disable_python_gc",
        "managed_gradient_accumulation", "prescale_gradients", "gradient_predivide_factor",
        "seq_parallel_communication_data_type", "use_data_before_expert_parallelism", "vocabulary_size",
        "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
    },
    "bf16": {"immediate_grad_update", "check_grad_overflow"},
    "fp16": {
        "auto_cast", "initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis",
        "min_loss_scale",
    },
    "data_types": {"buffer_dtype", "keep_in_fp32_modules", "param_dtype"},
    "zero_optimization": {
        "reduce_scatter", "allgather_partitions", "use_multi_rank_bucket_allreduce", "compute_grad_norm",
        "load_from_fp32_weights", "elastic_checkpoint", "cpu_offload_use_pin_memory", "sub_group_size",
        "stage3_param_persistence_threshold", "stage3_model_persistence_threshold", "stage3_max_live_parameters",
        "stage3_max_reuse_distance", "stage3_gather_16bit_weights_on_model_save",
        "stage3_gather_fp16_weights_on_model_save", "stage3_module_granularity_threshold",
        "stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential", "ignore_unused_parameters",
        "legacy_stage1", "round_robin_gradients", "parameter_alignment", "memory_efficient_linear",
        "pipeline_loading_checkpoint", "override_module_apply", "log_trace_cache_warnings", "enable_sanity_checks",
        "save_muon_momentum_buffer_in_memory", "leaf_module",
    },
    "offload_param": {"pin_memory", "buffer_count", "buffer_size", "max_in_cpu"},
    "offload_optimizer": {"pin_memory", "buffer_count", "pipeline_read", "pipeline_write", "fast_init"},
    "activation_checkpointing": {
        "partition_activations", "cpu_checkpointing", "contiguous_memory_optimization", "number_checkpoints",
        "synchronize_checkpoint_boundary", "profile",
    },
}  # fmt: skip
"""Keys by section that do not affect training results and have no field in a plan."""

REFUSED = {
    "": {
        "amp", "compression_training", "curriculum_learning", "data_efficiency", "eigenvalue", "elasticity",
        "expert_parallel", "graph_harvesting", "hybrid_engine", "nebula", "pipeline", "progressive_layer_drop",
        "quantize_training", "sequence_parallel_size", "sparse_attention", "sparse_gradients", "tensor_parallel",
        "torch_autocast", "weight_quantization",
    },
    "bf16": {"bf16_master_weights_and_grads", "bf16_optimizer_states"},
    "fp16": {"fp16_master_weights_and_grads"},
    "zero_optimization": {
        "mics_shard_size", "mics_hierarchical_params_gather", "zenflow", "zero_hpz_partition_size",
        "zero_quantized_gradients", "zero_quantized_nontrainable_weights", "zero_quantized_weights",
        "zeropp_loco_param",
    },
    "offload_optimizer": {"super_offload", "cpuadam_cores_perc"},
}  # fmt: skip
"""Keys by section that affect training results and that a plan cannot express; accepted only while disabled."""


def known(section: str) -> set[str]:
    """Return every key that a section may have."""
    keys = PLAN[section] | IGNORED[section] | REFUSED.get(section, set())
    if not section:
        keys |= {*JOB, "gradient_allreduce_op"}
    elif section == "offload_optimizer":
        keys |= {"ratio"}
    return keys


def is_off(value: object) -> bool:
    """Return whether a feature is present but disabled: false, null, a degree of one, or a section of these values."""
    if isinstance(value, dict):
        return value.get("enabled") is False or all(is_off(each) for each in value.values())
    return value is None or (isinstance(value, bool | int) and value in _OFF and value is not True)


_OFF = (0, 1, -1)


# Optimizer, schedule and clipping of a DeepSpeed JSON, as lines for the job file.


_DEFAULT_CLIPPING = 1.0
"""DeepSpeed's default for gradient_clipping."""

_ADAM = {"adam", "adamw", "torchadam", "fusedadam", "cpuadam"}
_SETTINGS = {"lr", "betas", "eps", "weight_decay", "momentum", "nesterov"}
_SCHEDULES = {"WarmupLR": "Constant", "WarmupDecayLR": "Linear", "WarmupCosineLR": "Cosine"}


def job_notes(data: dict[str, Any]) -> list[str]:
    """Return one sentence for each key that belongs to the job, with the line to add to the job file."""
    notes = []
    if "optimizer" in data:
        notes.append(_optimizer(data["optimizer"]))
    if "scheduler" in data:
        notes.append(_schedule(data["scheduler"]))
    notes.append(_clipping(data))
    return [note for note in notes if note]


def _optimizer(section: Any) -> str:
    kind, settings = _type_and_params(section)
    arguments = ", ".join(f"{name}={_value(value)}" for name, value in settings.items() if name in _SETTINGS)
    if _autos(settings):
        return f'optimizer {kind} with "auto" for {_autos(settings)} belongs to the job: set optimizer=sw.adamw(lr=...)'
    if kind.lower() == "sgd":
        return f"optimizer {kind} belongs to the job: set optimizer=sw.sgd({arguments})"
    if kind.lower() in _ADAM and settings.get("adam_w_mode", True):  # DeepSpeed's Adam decays weights as AdamW does
        decay = " (without weight decay for norms and biases)" if settings.get("weight_decay") else ""
        return f"optimizer {kind} belongs to the job: set optimizer=sw.adamw({arguments}){decay}"
    factory = f"lambda named: YourOptimizer([p for _, p in named], {arguments})"
    return f"optimizer {kind} belongs to the job: set optimizer={factory}"


def _schedule(section: Any) -> str:
    kind, settings = _type_and_params(section)
    if kind not in _SCHEDULES:
        return f"scheduler {kind} belongs to the job: set schedule=lambda step, total: FACTOR"
    warmup = settings.get("warmup_num_steps", 0)
    if not isinstance(warmup, int | float):
        return f'scheduler {kind} with "auto" for {_autos(settings)} belongs to the job: set schedule=sw.schedules.'
    given = f"warmup={_value(warmup)}" if warmup else ""
    return f"scheduler {kind} belongs to the job: set schedule=sw.schedules.{_SCHEDULES[kind]}({given})"


def _clipping(data: dict[str, Any]) -> str:
    norm = data.get("gradient_clipping")
    if norm is None:
        return f"gradient_clipping is not set, and DeepSpeed clips by default: set clip_norm={_DEFAULT_CLIPPING}"
    if norm == "auto":
        return 'gradient_clipping is "auto", which Hugging Face fills in (max_grad_norm): set clip_norm=1.0 in the job'
    return f"gradient_clipping {norm} belongs to the job: set clip_norm={norm}" if norm else ""


def _type_and_params(section: Any) -> tuple[str, dict[str, Any]]:
    if not isinstance(section, dict):
        section = {}
    settings = section.get("params")
    if not isinstance(settings, dict):
        settings = {}
    return str(section.get("type", "without a type")), settings


def _autos(settings: dict[str, Any]) -> str:
    return ", ".join(name for name, value in settings.items() if value == "auto")


def _value(value: Any) -> str:
    return str(tuple(value)) if isinstance(value, list) else repr(value)


def parse(text: str, origin: str) -> dict[str, Any]:
    """Return the object in a JSON text; raise PlanError for other values, comments and repeated keys."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise PlanError(
                    f"{origin} repeats the key {key!r}", code="plan.deepspeed-key-repeated", fix=f"keep one {key!r}"
                )
            found[key] = value
        return found

    def refuse(constant: str) -> Any:
        raise PlanError(
            f"{origin} has the value {constant}, which JSON does not allow",
            code="plan.deepspeed-not-finite",
            fix="write a finite number",
        )

    try:
        data = json.loads(text, object_pairs_hook=once, parse_constant=refuse)
    except json.JSONDecodeError as error:
        mistake, offset = _mistake(text, error)
        line, column = text.count("\n", 0, offset) + 1, offset - text.rfind("\n", 0, offset)
        raise PlanError(
            f"{origin} is not valid JSON: {mistake} at line {line} column {column}",
            code="plan.deepspeed-not-json",
            fix=f"correct line {line}",
        ) from None
    except RecursionError:
        raise PlanError(
            f"{origin} is nested too deeply", code="plan.deepspeed-nested-deeply", fix="pass a DeepSpeed JSON file"
        ) from None
    if not isinstance(data, dict):
        raise PlanError(
            f"{origin} must be a JSON object, got a {type(data).__name__}",
            code="plan.deepspeed-not-object",
            fix="write the configuration as { ... }",
        )
    return data


def _mistake(text: str, error: json.JSONDecodeError) -> tuple[str, int]:
    """Return a syntax error and its offset; comments and trailing commas, which DeepSpeed accepts, are named."""
    rest, before = text[error.pos :], re.search(r",\s*$", text[: error.pos])
    if re.match(r"//|/\*|#", rest):
        return "a comment", error.pos
    if re.match(r"[}\]]", rest) and before:
        return "a trailing comma", before.start()
    if re.match(r",\s*[}\]]", rest):  # the position that Python 3.13 reports
        return "a trailing comma", error.pos
    return error.msg[:1].lower() + error.msg[1:], error.pos
