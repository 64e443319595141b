"""T5 and ByT5 of the published sizes, built by transformers (extra [hf]) with new weights and without a download."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwise.errors import JobError, MissingExtraError, nearest
from shardwise.plans.catalogue import BYT5_COMMON, BYT5_SIZES, T5_COMMON, T5_SIZES

if TYPE_CHECKING:
    from transformers import T5ForConditionalGeneration


def t5(name: str = "t5-small", **overrides: Any) -> T5ForConditionalGeneration:
    """Return a newly initialized T5 of a published size; `overrides` replace fields of its T5Config.

    With `input_ids` and `labels` (-100 is ignored) as inputs, the `loss` of its output is the mean over the labels.
    """
    return _build("t5", name, T5_SIZES, T5_COMMON, overrides)


def byt5(name: str = "byt5-small", **overrides: Any) -> T5ForConditionalGeneration:
    """Return a newly initialized ByT5 of a published size; `overrides` replace fields of its T5Config.

    A token is a byte + 3; 0 is padding, 1 the end of sequence and 2 unknown. `labels` and `loss` are as in `t5`.
    """
    return _build("byt5", name, BYT5_SIZES, BYT5_COMMON, overrides)


def _build(
    kind: str, name: str, sizes: dict[str, dict[str, Any]], common: dict[str, Any], overrides: dict[str, Any]
) -> T5ForConditionalGeneration:
    if name not in sizes:
        raise JobError(f"{kind} {name!r} is unknown", code="model.unknown-name", fix=nearest(str(name), sizes))
    settings = common | sizes[name]
    for key in overrides:
        if key not in settings:
            raise JobError(
                f"{kind} setting {key!r} is unknown", code="model.unknown-setting", fix=nearest(key, settings)
            )
    try:
        from transformers import T5Config, T5ForConditionalGeneration
    except ImportError as error:
        raise MissingExtraError.of(f"models.{kind}", "hf") from error
    return T5ForConditionalGeneration(T5Config(**settings | overrides))
