"""A transformers `config.json` as the decoder that `plan` describes in closed form, without transformers and torch.

The idea: decoders of the llama kind (RMSNorm, rotary positions, SwiGLU) and of the GPT-2 kind are what
`model/decoder_parts.py` describes; biases of projections are added to its weights. The invariant: the number of
parameters equals that of the transformers model (a test compares them). A field that changes the operators (a sliding
window, norms of queries, experts) is refused by name, because the prediction would be that of another model.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.errors import JobError, PlanError, nearest
from shardwise.planner.model.decoder_parts import published
from shardwise.plans.catalogue import DecoderConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardwise.planner.model.shape import ModelShape, Part
    from shardwise.plans.sections import DType

FILE = "config.json"
USUAL_LENGTH = 8192
"""Tokens per sample without --length, if the context is longer: pre-training rarely uses the whole of a long one."""
_QKV, _OUT, _MLP = "attn.qkv", "attn.out", ("mlp.gate", "mlp.up", "mlp.down")
_UNSPLIT = ("attn.out", "mlp.down")
"""Projections whose bias tensor parallelism replicates, since it is added after the reduction."""
_LLAMA_KINDS: dict[str, tuple[str, ...]] = {"llama": (), "mistral": (), "qwen2": (_QKV,), "phi3": ()}
"""model_type of the llama kind -> projections with a bias."""
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
"""Field of DecoderConfig -> field of config.json."""
_JOB = "write a job with this model (docs/guides/huggingface.md), which plan traces"


@dataclass(frozen=True, kw_only=True)
class ConfiguredDecoder:
    """A decoder from a config.json."""

    name: str
    config: DecoderConfig
    biases: tuple[str, ...] = ()
    """Projections with a bias, besides those of the GPT-2 kind."""
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
        shape = published(self.name, compute=compute, gathered=gathered, length=length, lora=lora, config=self.config)
        return dataclasses.replace(shape, parts=tuple(self._with_biases(part) for part in shape.parts))

    def _with_biases(self, part: Part) -> Part:
        added = []
        for weight in part.weights:
            owner = weight.name.removesuffix(".weight")
            if part.kind == "block" and owner in self.biases:
                split = owner not in _UNSPLIT
                added.append(dataclasses.replace(weight, name=f"{owner}.bias", numel=weight.rows, split=split))
        return dataclasses.replace(part, weights=(*part.weights, *added))


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
    try:
        if kind == "gpt2":
            return _gpt2(name, path, fields)
        if kind in _LLAMA_KINDS:
            return _llama(name, path, fields)
    except JobError as error:  # a value that DecoderConfig refuses
        raise PlanError(f"{path}: {error.fact}", code=error.code, fix="correct the file") from None
    raise PlanError(
        f"{path} has model_type {kind!r}, which cannot be described exactly",
        code="model.config-not-described",
        fix=f"use one of {', '.join(sorted((*_LLAMA_KINDS, 'gpt2')))}, or {_JOB}",
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
    except ValueError as error:
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
    config = DecoderConfig(
        family="gpt2",
        mlp_width=fields.get("n_inner"),
        tie_head=fields.get("tie_word_embeddings", True),
        norm_eps=fields.get("layer_norm_epsilon", 1e-5),
        **values,
    )
    return ConfiguredDecoder(name=name, config=config)


def _llama(name: str, path: Path, fields: Mapping[str, Any]) -> ConfiguredDecoder:
    values = _required(path, fields, _LLAMA_FIELDS)
    config = DecoderConfig(
        family="llama",
        num_kv_heads=fields.get("num_key_value_heads"),
        tie_head=fields.get("tie_word_embeddings", False),
        norm_eps=fields.get("rms_norm_eps", 1e-6),
        **values,
    )
    plain = {
        "hidden_act": (None, "silu"),
        "head_dim": (None, config.head_width),
        "partial_rotary_factor": (None, 1, 1.0),
    }
    _require_values(path, fields, plain)
    biases = list(_LLAMA_KINDS[fields["model_type"]])
    if fields.get("attention_bias"):
        biases += [_QKV, _OUT]
    if fields.get("mlp_bias"):
        biases += _MLP
    window = fields.get("sliding_window") if fields.get("use_sliding_window", True) else None
    return ConfiguredDecoder(name=name, config=config, biases=tuple(biases), window=window)


def _required(path: Path, fields: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of DecoderConfig that config.json must have."""
    missing = [written for written in names.values() if fields.get(written) is None]
    if missing:
        raise PlanError(
            f"{path} has no {', '.join(missing)}",
            code="model.config-field-missing",
            fix=f"add it; {nearest(missing[0], fields)}" if fields else "pass the config.json of transformers",
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
