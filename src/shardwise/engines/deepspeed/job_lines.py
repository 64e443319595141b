"""What a DeepSpeed JSON says of optimizer, schedule and clipping, as lines for the job."""

from __future__ import annotations

from typing import Any

_DEFAULT_CLIPPING = 1.0
"""What DeepSpeed clips to when it is not told."""

_ADAM = {"adam", "adamw", "torchadam", "fusedadam", "cpuadam"}
_SETTINGS = {"lr", "betas", "eps", "weight_decay", "momentum", "nesterov"}
_SCHEDULES = {"WarmupLR": "Constant", "WarmupDecayLR": "Linear", "WarmupCosineLR": "Cosine"}


def job_notes(data: dict[str, Any]) -> list[str]:
    """Return one sentence for each thing that is the job's, with the line to put into it."""
    notes = []
    if "optimizer" in data:
        notes.append(_optimizer(data["optimizer"]))
    if "scheduler" in data:
        notes.append(_schedule(data["scheduler"]))
    notes.append(_clipping(data))
    return [note for note in notes if note]


def _optimizer(section: Any) -> str:
    kind, settings = _of(section)
    words = ", ".join(f"{name}={_value(value)}" for name, value in settings.items() if name in _SETTINGS)
    if _autos(settings):
        return (
            f"optimizer {kind}: the job's, and {_autos(settings)} is left to Hugging Face: optimizer=sw.adamw(lr=...)"
        )
    if kind.lower() == "sgd":
        return f"optimizer {kind}: the job's: optimizer=sw.sgd({words})"
    if kind.lower() in _ADAM and settings.get("adam_w_mode", True):  # DeepSpeed's Adam decays weights as AdamW does
        decay = " (norms and biases do not decay in it)" if settings.get("weight_decay") else ""
        return f"optimizer {kind}: the job's: optimizer=sw.adamw({words}){decay}"
    return f"optimizer {kind}: the job's: optimizer=lambda named: YourOptimizer([p for _, p in named], {words})"


def _schedule(section: Any) -> str:
    kind, settings = _of(section)
    if kind not in _SCHEDULES:
        return f"scheduler {kind}: the job's: schedule=lambda step, total: FACTOR"
    warmup = settings.get("warmup_num_steps", 0)
    if not isinstance(warmup, int | float):
        return f"scheduler {kind}: the job's, and {_autos(settings)} is left to Hugging Face: schedule=sw.schedules."
    given = f"warmup={_value(warmup)}" if warmup else ""
    return f"scheduler {kind}: the job's: schedule=sw.schedules.{_SCHEDULES[kind]}({given})"


def _clipping(data: dict[str, Any]) -> str:
    norm = data.get("gradient_clipping")
    if norm is None:
        return f"gradient_clipping is not said, and DeepSpeed then clips: clip_norm={_DEFAULT_CLIPPING} in the job"
    if norm == "auto":
        return 'gradient_clipping is "auto", which Hugging Face fills in (max_grad_norm): clip_norm=1.0 in the job'
    return f"gradient_clipping {norm}: the job's: clip_norm={norm}" if norm else ""


def _of(section: Any) -> tuple[str, dict[str, Any]]:
    section = section if isinstance(section, dict) else {}
    settings = section.get("params")
    return str(section.get("type", "without a type")), settings if isinstance(settings, dict) else {}


def _autos(settings: dict[str, Any]) -> str:
    return ", ".join(name for name, value in settings.items() if value == "auto")


def _value(value: Any) -> str:
    return str(tuple(value)) if isinstance(value, list) else repr(value)
