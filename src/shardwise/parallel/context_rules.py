"""Rules of context parallelism: which models can run on slices of their sequences; pure decisions."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules.conv import _ConvNd

from shardwise.errors import JobError, PlanError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardwise.layout import Layout

_HEADS = ("num_attention_heads", "num_heads", "n_head", "n_heads")
_WITHOUT = "or use cp 1"


def check_context(module: nn.Module, layout: Layout, *, own_loss: bool) -> None:
    """Refuse a model that would not compute on slices what it computes on whole sequences; starts nothing.

    `own_loss` says that the model returns its loss. What only shows in a forward pass is refused there.
    """
    if "position_ids" not in inspect.signature(module.forward).parameters:
        raise JobError(
            f"cp cuts sequences, and {type(module).__name__}.forward takes no position_ids to learn where a slice is",
            code="support.cp-no-position-ids",
            fix=f"take position_ids [1, tokens] and hand them on, {_WITHOUT}",
        )
    for name, child in module.named_modules():
        if isinstance(child, nn.Embedding) and "position" in name and child.padding_idx is not None:
            raise JobError(
                f"cp cuts sequences, and {name} counts positions from the padding it finds in a whole one",
                code="support.cp-positions-from-padding",
                fix="use cp 1",
            )
        if isinstance(child, _ConvNd | nn.RNNBase):
            raise JobError(
                f"cp cuts sequences, and {name}, a {type(child).__name__}, looks at neighbouring tokens",
                code="support.cp-mixes-tokens",
                fix="use cp 1",
            )
    for name, config in _configs(module):  # last: a model without attention has a config of it all the same
        _check_heads(name, config, layout)
        _check_config(name, config)
    if own_loss and getattr(module, "loss_type", None) != "ForCausalLM":
        raise JobError(
            f"cp cuts sequences, and {type(module).__name__} computes a loss that is not known to add up over slices",
            code="support.cp-loss-inside-model",
            fix=f"return logits and give sw.losses.token_cross_entropy, {_WITHOUT}",
        )


def _configs(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield every config that a module or a part of it holds, once, with the class that holds it."""
    seen: set[int] = set()
    for child in module.modules():
        config = getattr(child, "config", None)
        if config is not None and id(config) not in seen:
            seen.add(id(config))
            yield type(child).__name__, config


def _check_heads(name: str, config: Any, layout: Layout) -> None:
    for attribute in _HEADS:
        heads = getattr(config, attribute, None)
        if isinstance(heads, int) and heads % (layout.cp * layout.tp):
            cut = f"cp={layout.cp}" if layout.tp == 1 else f"cp={layout.cp} x tp={layout.tp}"
            valid = [degree for degree in range(1, heads + 1) if heads % (degree * layout.tp) == 0]
            raise PlanError(
                f"{cut} does not divide the {heads} attention heads of {name}",
                code="plan.cp-heads-not-divisible",
                fix=f"use cp {' or '.join(map(str, valid))}" if valid else "use another tp",
            )


def _check_config(name: str, config: Any) -> None:
    """Refuse what transformers' configs say of attention that is not plain."""
    kernel = getattr(config, "_attn_implementation", None)
    if kernel not in {None, "sdpa"}:
        raise JobError(
            f"cp cuts sequences at torch's scaled_dot_product_attention, and {name} attends by {kernel!r}",
            code="support.cp-without-sdpa",
            fix=f'set attn_implementation="sdpa", {_WITHOUT}',
        )
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "attention"}
    if kinds or window or getattr(config, "attention_chunk_size", None):
        kind = ", ".join(sorted(kinds)) or "sliding_window"
        shorter = f"set config.sliding_window = None if sequences are shorter, {_WITHOUT}"
        raise JobError(
            f"cp cuts sequences, and {name} has layers that do not attend to all tokens ({kind})",
            code="support.cp-partial-attention",
            fix="use cp 1" if kinds else shorter,
        )
    if getattr(config, "output_router_logits", False):
        raise JobError(
            f"cp cuts sequences, and {name} balances its experts over whole ones",
            code="support.cp-expert-balancing",
            fix=f"set config.output_router_logits = False, {_WITHOUT}",
        )
