"""A transformers `config.json` as the decoder that `plan` describes in closed form, without transformers and torch.

The idea: a file of the llama kind (RMSNorm, rotary positions, SwiGLU), of GPT-2 or of GPT-NeoX becomes a `DecoderForm`,
which `model/decoder_parts.py` describes. The invariant: the number of parameters equals that of the transformers model
(a test compares them). A field that changes the operators otherwise (a sliding window, another activation) and mixtures
of experts are refused by name, because the prediction would be that of another model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.errors import JobError, PlanError
from shardwise.planner.model.decoder_form import DOWN, GATE, GPT2_BIASES, OUT, QKV, UP, DecoderForm
from shardwise.planner.model.decoder_parts import published

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardwise.planner.model.shape import ModelShape
    from shardwise.plans.sections import DType

FILE = "config.json"
USUAL_LENGTH = 8192
"""Tokens per sample without --length, if the context is longer: pre-training rarely uses the whole of a long one."""
MOST_LAYERS = 1000
"""Layers above which a search takes minutes; the deepest published one has 1,000 (Wang et al. 2022, DeepNet)."""
_QWEN3_HEAD_DIM, _NEOX_ROTARY_SHARE = 128, 0.25
"""Values of transformers for files without these fields."""
_LLAMA_KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "phi3": {},
    "qwen2": {"biases": (QKV,)},
    "qwen3": {"head_dim": _QWEN3_HEAD_DIM, "qk_norm": "head"},
    "olmo2": {"qk_norm": "all", "norm_after": True},
}
"""model_type of the llama kind -> fields of DecoderForm that differ from Llama's."""
_DESCRIBED = tuple(sorted((*_LLAMA_KINDS, "gpt2", "gpt_neox")))
_EXPERT_KINDS = (
    "mixtral",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "deepseek_v4",
    "gpt_oss",
    "dbrx",
    "jamba",
    "llama4",
)
"""Mixtures of experts whose model_type does not contain `moe`."""
_EXPERT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_GELUS = (None, "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu")
_LLAMA_FIELDS = {
    "vocab_size": "vocab_size",
    "context": "max_position_embeddings",
    "width": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "mlp_width": "intermediate_size",
}
_GPT2_FIELDS = {
    "vocab_size": "vocab_size",
    "context": "n_positions",
    "width": "n_embd",
    "num_layers": "n_layer",
    "num_heads": "n_head",
}
"""Field of DecoderForm -> field of config.json."""
_JOB = "write a job with this model (docs/guides/huggingface.md), which plan traces"


@dataclass(frozen=True, kw_only=True)
class ConfiguredDecoder:
    """A decoder from a config.json."""

    name: str
    config: DecoderForm
    window: int | None = None
    """Tokens that attention is limited to; None means all."""

    def length(self, requested: int | None) -> int:
        """Return the tokens per sample: the requested ones, or the context up to USUAL_LENGTH."""
        length = requested or min(self.config.context, USUAL_LENGTH)
        if self.window is not None and length > self.window:
            raise PlanError(
                f"{self.name} limits attention to {self.window} tokens, but samples have {length}",
                code="model.sliding-window",
                fix=f"use --length {self.window} or less, or set sliding_window to null in {FILE}",
            )
        return length

    def shape(self, *, compute: DType, gathered: bool, length: int, lora: int) -> ModelShape:
        """Return the description of the decoder trained in `compute` on samples of `length` tokens."""
        return published(self.name, compute=compute, gathered=gathered, length=length, lora=lora, config=self.config)


def is_config(model: str) -> bool:
    """Whether a model is given as a config.json or as a folder, and not as a name or a job."""
    return model.endswith(".json") or Path(model).is_dir()


def read_decoder(model: str) -> ConfiguredDecoder:
    """Return the decoder of a config.json, or of the folder that contains it; raises PlanError for other models."""
    path = Path(model) / FILE if Path(model).is_dir() else Path(model)
    fields = _read(path)
    name = path.resolve().parent.name if path.name == FILE else path.stem
    kind = fields.get("model_type")
    if kind is None:
        raise PlanError(
            f"{path} has no model_type", code="model.config-field-missing", fix="pass the config.json of transformers"
        )
    if "quantization_config" in fields:
        raise PlanError(
            f"{path} describes a quantized model",
            code="model.config-not-described",
            fix="pass the config.json of the model before quantization",
        )
    _refuse_experts(path, fields)
    try:
        decoder = _decoder_of(name, path, fields)
    except JobError as error:  # a value that DecoderForm refuses
        raise PlanError(f"{path}: {error.fact}", code=error.code, fix="correct the file") from None
    if decoder.config.num_layers > MOST_LAYERS:
        raise PlanError(
            f"{path} describes {decoder.config.num_layers:,} layers, but plan searches models of at most"
            f" {MOST_LAYERS:,}",
            code="model.too-many-layers",
            fix="correct the file",
        )
    return decoder


def _decoder_of(name: str, path: Path, fields: Mapping[str, Any]) -> ConfiguredDecoder:
    kind = fields["model_type"]
    if kind == "gpt2":
        return _gpt2(name, path, fields)
    if kind == "gpt_neox":
        return _gpt_neox(name, path, fields)
    if kind in _LLAMA_KINDS:
        return _llama(name, path, fields)
    raise PlanError(
        f"{path} has model_type {kind!r}, which cannot be described exactly",
        code="model.config-not-described",
        fix=f"use one of {', '.join(_DESCRIBED)}, or {_JOB}",
    )


def _refuse_experts(path: Path, fields: Mapping[str, Any]) -> None:
    """Raise PlanError for a mixture of experts, recognized by its model_type or by the number of its experts."""
    kind = str(fields["model_type"])
    numbers = [fields[field] for field in _EXPERT_FIELDS if isinstance(fields.get(field), int)]
    if "moe" in kind or kind in _EXPERT_KINDS or max(numbers, default=0) > 1:
        raise PlanError(
            f"{path} has model_type {kind!r}, a mixture of experts, which has no closed form",
            code="model.config-experts",
            fix=_JOB,
        )


def _read(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text())
    except OSError as error:
        raise PlanError(
            f"{path} cannot be read ({error.strerror})",
            code="model.config-read-failed",
            fix=f"pass a {FILE}, or the folder of a model that contains one",
        ) from None
    except (ValueError, RecursionError) as error:  # the latter from thousands of brackets
        raise PlanError(
            f"{path} is not valid JSON ({error})", code="model.config-not-json", fix="download it again"
        ) from None
    if not isinstance(fields, dict):
        raise PlanError(
            f"{path} contains a {type(fields).__name__}, not an object",
            code="model.config-not-json",
            fix="pass the config.json of transformers",
        )
    return fields


def _gpt2(name: str, path: Path, fields: Mapping[str, Any]) -> ConfiguredDecoder:
    _require_values(path, fields, {"add_cross_attention": (None, False)})
    values = _required(path, fields, _GPT2_FIELDS)
    config = DecoderForm(
        family="gpt2",
        mlp_width=fields.get("n_inner"),
        tie_head=fields.get("tie_word_embeddings", True),
        norm_eps=fields.get("layer_norm_epsilon", 1e-5),
        rotary_share=0.0,
        biases=GPT2_BIASES,
        **values,
    )
    return ConfiguredDecoder(name=name, config=config)


def _gpt_neox(name: str, path: Path, fields: Mapping[str, Any]) -> ConfiguredDecoder:
    _require_values(path, fields, {"hidden_act": _GELUS, "hidden_dropout": (None, 0.0)})
    config = DecoderForm(
        family="gpt2",
        tie_head=fields.get("tie_word_embeddings", False),
        norm_eps=fields.get("layer_norm_eps", 1e-5),
        rotary_share=_rotary_share(path, fields, _NEOX_ROTARY_SHARE),
        parallel=fields.get("use_parallel_residual", True),
        biases=GPT2_BIASES if fields.get("attention_bias", True) else (UP, DOWN),
        **_required(path, fields, _LLAMA_FIELDS),
    )
    return ConfiguredDecoder(name=name, config=config)


def _llama(name: str, path: Path, fields: Mapping[str, Any]) -> ConfiguredDecoder:
    values = _required(path, fields, _LLAMA_FIELDS)
    kind = fields["model_type"]
    usual = _LLAMA_KINDS[kind]
    share = _rotary_share(path, fields, 1.0)
    _require_values(path, fields, {"hidden_act": (None, "silu")})
    if kind != "phi3":  # the only one of the kind that rotates a part of each head
        _require_values(path, {"partial_rotary_factor": share}, {"partial_rotary_factor": (1.0,)})
    biases = usual.get("biases", ())
    if fields.get("attention_bias"):
        biases += (QKV, OUT)
    if fields.get("mlp_bias"):
        biases += (GATE, UP, DOWN)
    own = {"head_dim": fields.get("head_dim") or usual.get("head_dim"), "biases": biases, "rotary_share": share}
    config = DecoderForm(
        family="llama",
        num_kv_heads=fields.get("num_key_value_heads"),
        tie_head=fields.get("tie_word_embeddings", False),
        norm_eps=fields.get("rms_norm_eps", 1e-6),
        **values,
        **usual | own,
    )
    window = fields.get("sliding_window") if fields.get("use_sliding_window", True) else None
    return ConfiguredDecoder(name=name, config=config, window=window)


def _rotary_share(path: Path, fields: Mapping[str, Any], usual: float) -> float:
    """Return the share of each head that is rotated: transformers 5 writes it in rope_parameters, 4 beside them."""
    nested = fields.get("rope_parameters") or fields.get("rope_scaling")
    rope = nested if isinstance(nested, dict) else {}
    written = (rope.get("partial_rotary_factor"), fields.get("partial_rotary_factor"), fields.get("rotary_pct"))
    share = next((value for value in written if value is not None), usual)
    if not isinstance(share, int | float) or not 0 < share <= 1:
        raise PlanError(
            f"{path} rotates a share of {share!r} of each head",
            code="model.config-not-described",
            fix="use a partial_rotary_factor above 0 and at most 1",
        )
    return float(share)


def _required(path: Path, fields: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of DecoderForm that config.json must have."""
    missing = [written for written in names.values() if fields.get(written) is None]
    if missing:
        raise PlanError(
            f"{path} has no {', '.join(missing)}",
            code="model.config-field-missing",
            fix="pass the complete config.json of transformers",
        )
    return {own: fields[written] for own, written in names.items()}


def _require_values(path: Path, fields: Mapping[str, Any], described: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise PlanError if a field has a value that changes the operators of the model."""
    for field, accepted in described.items():
        if fields.get(field) not in accepted:
            raise PlanError(
                f"{path} has {field} = {fields[field]!r}, but only {accepted[-1]!r} can be described exactly",
                code="model.config-not-described",
                fix=_JOB,
            )
