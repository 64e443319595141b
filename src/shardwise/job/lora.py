"""LoRA: small trained matrices beside frozen ones; which modules get them, and how strongly they count."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from shardwise.errors import JobError, nearest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

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
                f"Lora.rank is {self.rank!r}", code="job.lora-rank-invalid", fix="give a whole number of at least 1"
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
        chosen = {name for name in names for target in self.targets if is_target(target, name)}
        for target in self.targets:
            if not any(is_target(target, name) for name in names):
                raise JobError(
                    f"Lora target {target!r} matches no linear module",
                    code="job.lora-target-unmatched",
                    fix=_advice(target, names),
                )
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
