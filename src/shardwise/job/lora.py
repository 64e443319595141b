"""LoRA adapters: their target modules, rank and scale, and the conversion from and to peft's config file."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from shardwise.errors import JobError, nearest

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from pathlib import Path


DOWN, UP = "lora_A", "lora_B"
"""Names of the two factors of an adapter, [rank, inputs] and [outputs, rank], as in peft's files."""


@dataclass(frozen=True, kw_only=True)
class Lora:
    """LoRA fine-tuning: y = W x + alpha / rank * B A dropout(x), with W frozen, A random and B zero initially."""

    targets: tuple[str, ...]
    """Names of linear modules or their suffixes, such as "q_proj"; `*` matches one component ("blocks.*.attn.qkv")."""
    rank: int = 16
    alpha: float = 32
    dropout: float = 0.0
    weights: str | None = None
    """Directory with initial adapters, written by peft or shardwise."""

    def __post_init__(self) -> None:
        given: Any = self.targets  # a single name and the command line's list are accepted
        targets = (given,) if isinstance(given, str) else given
        if not isinstance(targets, list | tuple) or not targets or not all(_is_name(target) for target in targets):
            raise JobError(
                f"Lora.targets must be names of linear modules, got {given!r}",
                code="job.lora-targets-invalid",
                fix='pass names or suffixes, such as ("q_proj", "v_proj")',
            )
        object.__setattr__(self, "targets", tuple(targets))
        if type(self.rank) is not int or self.rank < 1:
            raise JobError(
                f"Lora.rank must be a positive integer, got {self.rank!r}",
                code="job.lora-rank-invalid",
                fix="use an integer of at least 1",
            )
        if not _is_number(self.alpha) or self.alpha <= 0:
            fact = f"Lora.alpha must be a positive number, got {self.alpha!r}"
            raise JobError(fact, code="job.lora-alpha-invalid", fix="use a number above 0")
        if not _is_number(self.dropout) or not 0 <= self.dropout < 1:
            fact = f"Lora.dropout must be in [0, 1), got {self.dropout!r}"
            raise JobError(fact, code="job.lora-dropout-invalid", fix="use a number from 0 to below 1")

    @property
    def scale(self) -> float:
        """Scale of the adapter's output, alpha / rank."""
        return self.alpha / self.rank

    def choose(self, names: Iterable[str]) -> list[str]:
        """Return the module names that match a target; raises JobError for a target without a match."""
        names = list(names)
        chosen = set()
        for target in self.targets:
            matched = {name for name in names if is_target(target, name)}
            if not matched:
                raise JobError(
                    f"Lora target {target!r} matches no linear module",
                    code="job.lora-target-unmatched",
                    fix=_advice(target, names),
                )
            chosen |= matched
        return [name for name in names if name in chosen]

    def facts(self, transposed: Iterable[str]) -> dict[str, Any]:
        """Return the adapter metadata of a checkpoint; `transposed` names weights of shape [inputs, outputs]."""
        return {**asdict(self), "targets": list(self.targets), "transposed": sorted(transposed)}


def is_target(target: str, name: str) -> bool:
    """Whether the last components of a dotted name match a target."""
    wanted, parts = target.split("."), name.split(".")
    own = parts[len(parts) - len(wanted) :]
    return len(parts) >= len(wanted) and all(want in {"*", part} for want, part in zip(wanted, own, strict=True))


def adapted_modules(names: Iterable[str]) -> list[str]:
    """Return the modules that have adapters, given the names of all weights."""
    return [name.removesuffix(f".{DOWN}.weight") for name in names if name.endswith(f".{DOWN}.weight")]


def is_adapter(name: str) -> bool:
    """Whether a weight of this name is a factor of an adapter."""
    return name.endswith((f".{DOWN}.weight", f".{UP}.weight"))


def facts_of(facts: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the adapter metadata in the metadata of a checkpoint, or None without adapters."""
    lora = facts.get("lora")
    return lora if isinstance(lora, dict) else None


def _advice(target: str, names: Iterable[str]) -> str:
    """Return the fix for a target without a match: the nearest last component, or full name if the target has dots."""
    whole = {re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in names}
    known = whole if "." in target else {name.rpartition(".")[2] for name in whole}
    return nearest(target, known) if known else "use a model with linear modules"


def _is_name(target: object) -> bool:
    return isinstance(target, str) and bool(target) and not target.isspace()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


# peft's adapter_config.json: written for exported adapters, and read for initial ones.


CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Prefix of module names in peft's weights file."""

_UNSUPPORTED = {
    "use_rslora": "scales by the square root of the rank",
    "use_dora": "adds magnitude vectors",
    "rank_pattern": "sets another rank for some modules",
    "alpha_pattern": "sets another alpha for some modules",
    "modules_to_save": "trains whole modules in addition",
    "layer_replication": "repeats layers",
    "trainable_token_indices": "trains rows of embeddings in addition",
    "target_parameters": "adapts parameters outside linear modules",
    "lora_bias": "adds biases to the adapters",
    "alora_invocation_tokens": "applies adapters only after certain tokens",
    "use_qalora": "pools the inputs of the factors",
    "use_bdlora": "has block-diagonal factors",
    "arrow_config": "selects adapters by token",
    "kasa_config": "changes the frozen weights and scales between the factors",
    "monteclora_config": "samples factors at random",
}
"""Settings of peft (0.21) that are not supported, and their effect on the model."""

_KEEP_BASE = frozenset({"gaussian", "eva", "orthogonal", "mica"})
"""Initializations of peft (0.21) that do not change the frozen weights; others subtract the initial B A from them."""


def config_json(lora: Mapping[str, Any], modules: Collection[str], weights: Iterable[str]) -> bytes:
    """Return the config file for adapters of `modules`; `weights` are the names of the model's frozen weights.

    `lora` is the adapter metadata of a checkpoint (see Lora.facts), with the origin of the frozen weights as `base` and
    the module and name of the model's class as `class`. Targets are the last components of module names, or full names
    if modules without adapters have the same last components, since peft would adapt those modules, too.
    """
    ends = {name.rpartition(".")[2] for name in modules}
    others = {above for name in weights for above in _above(name)} - set(modules)
    is_short = not any(name.rpartition(".")[2] in ends for name in others)
    library, name = lora.get("class") or ("", "")
    config = {
        "peft_type": "LORA",
        "task_type": None,
        "auto_mapping": {"base_model_class": name, "parent_library": library} if name else None,
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
    """Return the modules that contain a weight, outermost first."""
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in range(1, len(parts))]


def read_config(folder: Path) -> dict[str, Any]:
    """Return rank, alpha, dropout, targets and weight transposition; raises JobError for unsupported settings."""
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
            f"{folder} has no valid LoRA adapters ({error})",
            code="job.adapter-config-invalid",
            fix=f"pass a directory with {CONFIG}",
        ) from None
    for key, effect in _UNSUPPORTED.items():
        if config.get(key):
            raise JobError(
                f"{folder / CONFIG} sets {key}, which {effect}",
                code="job.adapter-option-unsupported",
                fix=f"use adapters without {key}",
            )
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower() not in _KEEP_BASE:
        raise JobError(
            f"{folder / CONFIG} has init_lora_weights {init!r}, which changes the frozen weights",
            code="job.adapter-init-changes-base",
            fix="convert the adapters with peft's save_pretrained(path_initial_model_for_weight_conversion=...)",
        )
    if config.get("bias", "none") != "none":
        raise JobError(
            f"{folder / CONFIG} trains biases", code="job.adapter-trains-biases", fix='use adapters with bias "none"'
        )
    return lora
