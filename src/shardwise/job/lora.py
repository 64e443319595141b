"""LoRA: small trained matrices beside frozen ones; which modules get them, and how strongly they count."""

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
"""The two factors beside a linear module, [rank, inputs] and [outputs, rank]: peft's names, so that files fit."""


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Fine-tune by adapters: y = W x + alpha / rank * B A dropout(x), with W frozen, A drawn and B zero at first."""

    targets: tuple[str, ...]
    """Names of linear modules, or their ends: "q_proj", "blocks.*.attn.qkv"; `*` stands for one part of a name."""
    rank: int = 16
    alpha: float = 32
    dropout: float = 0.0
    weights: str | None = None
    """A folder of adapters to start from, as peft or shardwise wrote it."""

    def __post_init__(self) -> None:
        given: Any = self.targets  # one name, and the command line's list, are fine
        targets = (given,) if isinstance(given, str) else given
        if not isinstance(targets, list | tuple) or not targets or not all(_is_name(target) for target in targets):
            raise JobError(
                f"Lora.targets is {given!r}",
                code="job.lora-targets-invalid",
                fix='name linear modules, such as ("q_proj", "v_proj")',
            )
        object.__setattr__(self, "targets", tuple(targets))
        if type(self.rank) is not int or self.rank < 1:
            raise JobError(
                f"Lora.rank must be a positive integer, got {self.rank!r}",
                code="job.lora-rank-invalid",
                fix="use an integer of at least 1",
            )
        if not _is_number(self.alpha) or self.alpha <= 0:
            raise JobError(f"Lora.alpha is {self.alpha!r}", code="job.lora-alpha-invalid", fix="give a number above 0")
        if not _is_number(self.dropout) or not 0 <= self.dropout < 1:
            raise JobError(
                f"Lora.dropout is {self.dropout!r}",
                code="job.lora-dropout-invalid",
                fix="give a number from 0 to below 1",
            )

    @property
    def scale(self) -> float:
        """What the product of the factors is multiplied with."""
        return self.alpha / self.rank

    def choose(self, names: Iterable[str]) -> list[str]:
        """Return those module names that a target names; a target that names none is refused with near ones."""
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
        """Return what a checkpoint tells of its adapters; `transposed` names weights that are [inputs, outputs]."""
        return {**asdict(self), "targets": list(self.targets), "transposed": sorted(transposed)}


def is_target(target: str, name: str) -> bool:
    """Whether a dotted name ends as a target says, part by part."""
    wanted, parts = target.split("."), name.split(".")
    own = parts[len(parts) - len(wanted) :]
    return len(parts) >= len(wanted) and all(want in {"*", part} for want, part in zip(wanted, own, strict=True))


def adapted_modules(names: Iterable[str]) -> list[str]:
    """Return the modules that adapters stand beside, given the names of all weights."""
    return [name.removesuffix(f".{DOWN}.weight") for name in names if name.endswith(f".{DOWN}.weight")]


def is_adapter(name: str) -> bool:
    """Whether a weight of this name is a factor of an adapter."""
    return name.endswith((f".{DOWN}.weight", f".{UP}.weight"))


def facts_of(facts: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what the facts of a checkpoint say of adapters; None where there are none."""
    lora = facts.get("lora")
    return lora if isinstance(lora, dict) else None


def _advice(target: str, names: Iterable[str]) -> str:
    """Name what the target may have meant: ends of names for an end, whole ones with `*` for numbers otherwise."""
    whole = {re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in names}
    known = whole if "." in target else {name.rpartition(".")[2] for name in whole}
    return nearest(target, known) if known else "the model has no linear module"


def _is_name(target: object) -> bool:
    return isinstance(target, str) and bool(target) and not target.isspace()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


# peft's adapter_config.json: what it must say for adapters of ours, and what of others' is understood.


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
