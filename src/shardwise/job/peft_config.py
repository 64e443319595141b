"""peft's adapter_config.json: what it must say for adapters of ours, and what of others' is understood."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from shardwise.errors import JobError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from pathlib import Path

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""What peft puts before the name of a module in the weights file."""

_UNKNOWN = {
    "use_rslora": "scales by the root of the rank",
    "use_dora": "has magnitudes beside the factors",
    "rank_pattern": "has other ranks for some modules",
    "alpha_pattern": "has other alphas for some modules",
    "modules_to_save": "has whole modules beside the factors",
    "layer_replication": "repeats layers",
    "trainable_token_indices": "has rows of embeddings beside the factors",
    "target_parameters": "adapts parameters that are not a linear module's",
    "lora_bias": "has biases beside the factors",
    "alora_invocation_tokens": "adapts only what follows some tokens",
    "use_qalora": "pools the inputs of the factors",
    "use_bdlora": "has factors of diagonal blocks",
    "arrow_config": "chooses among adapters by token",
    "kasa_config": "changes the frozen weights, and scales between the factors",
    "monteclora_config": "draws factors at random",
}
"""Settings of peft (0.21) that would change the numbers and are not built here."""

_BESIDE_THE_BASE = frozenset({"gaussian", "eva", "orthogonal", "mica"})
"""Inits of peft (0.21) that leave the frozen weights alone; others take the first product out of them."""


def config_json(lora: Mapping[str, Any], modules: Collection[str], weights: Iterable[str]) -> bytes:
    """Return the file for adapters beside `modules` of a model whose frozen weights have the names `weights`.

    `lora` are the facts of a checkpoint (see Lora.facts), with `base` for where the frozen weights came from. Targets
    are named by their ends if no other module ends so, else in full: peft would put adapters beside those, too.
    """
    ends = {name.rpartition(".")[2] for name in modules}
    others = {above for name in weights for above in _above(name)} - set(modules)
    is_short = not any(name.rpartition(".")[2] in ends for name in others)
    config = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": lora.get("base"),
        "r": lora["rank"],
        "lora_alpha": lora["alpha"],
        "lora_dropout": lora["dropout"],
        "target_modules": sorted(ends if is_short else modules),
        "fan_in_fan_out": bool(lora.get("transposed")),
        "bias": "none",
        "inference_mode": True,
    }
    return msgspec.json.format(msgspec.json.encode(config), indent=2)


def _above(name: str) -> list[str]:
    """Return the modules that a weight is in, innermost last."""
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in range(1, len(parts))]


def read_config(folder: Path) -> dict[str, Any]:
    """Return rank, alpha, dropout, targets and whether weights are [inputs, outputs]; what is not built is refused."""
    try:
        config = msgspec.json.decode((folder / CONFIG).read_bytes(), type=dict[str, Any])
        lora = {
            "rank": int(config["r"]),
            "alpha": float(config["lora_alpha"]),
            "dropout": float(config.get("lora_dropout", 0.0)),
            "targets": config.get("target_modules") or [],
            "transposed": bool(config.get("fan_in_fan_out")),
        }
    except (OSError, msgspec.MsgspecError, KeyError, TypeError, ValueError) as error:
        raise JobError(
            f"{folder} holds no adapters of LoRA ({error})",
            code="job.adapter-config-invalid",
            fix=f"name a folder with {CONFIG}",
        ) from None
    for key, words in _UNKNOWN.items():
        if config.get(key):
            raise JobError(
                f"{folder / CONFIG} sets {key}, which {words}",
                code="job.adapter-option-unsupported",
                fix="use adapters without it",
            )
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower() not in _BESIDE_THE_BASE:
        raise JobError(
            f"{folder / CONFIG} has init_lora_weights {init!r}, with which the frozen weights are not the base's",
            code="job.adapter-init-changes-base",
            fix="have peft convert them (save_pretrained with path_initial_model_for_weight_conversion)",
        )
    if config.get("bias", "none") != "none":
        raise JobError(
            f"{folder / CONFIG} trains biases", code="job.adapter-trains-biases", fix='use adapters with bias "none"'
        )
    return lora
