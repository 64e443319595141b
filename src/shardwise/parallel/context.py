"""Context parallelism: sequences split over ranks by tokens, attention over whole ones by all-to-all over heads.

Each rank runs the model on its slice of the tokens. Only attention reads other tokens: around each call of
scaled_dot_product_attention one all-to-all gives every rank all tokens of some heads, and another gives the tokens back
(DeepSpeed-Ulysses, Jacobs et al. 2023). Parameters are whole or sharded over these ranks like over any others.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from shardwise.errors import JobError, PlanError
from shardwise.parallel.collectives import exchanged
from shardwise.parallel.recompute import find_blocks
from shardwise.torch_private.modules import ConvolutionBase
from shardwise.torch_private.runtime import disable_autograd_cache

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardwise.layout import Layout


HEADS, TOKENS = 1, 2
"""Dimensions of [rows, heads, tokens, head_width], as attention takes it."""

_ATTENTIONS = frozenset({functional.scaled_dot_product_attention, functional.multi_head_attention_forward})


def context_parallel(module: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    """Have `module` run on this rank's slice of [rows, tokens]; then forward and backward communicate over `group`.

    Its forward is given the `position_ids` of the slice; its repeated blocks attend over whole sequences.
    """
    switch = AttentionSwitch()
    for name, block in (find_blocks(module) or {"": module}).items():
        block.forward = _attending(block.forward, name or type(module).__name__, group, switch)
    plain, split = module.forward, _placed(module, group)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if switch.is_on:
            return split(*args, **kwargs)
        if kwargs.get("position_ids") is None:
            tokens = _tokens(args, kwargs)
            kwargs["position_ids"] = torch.arange(tokens.shape[1], device=tokens.device)[None]
        return plain(*args, **kwargs)

    module.forward = forward
    module.context_switch = switch  # type: ignore[assignment]
    return module


@dataclass
class AttentionSwitch:
    """Whether a model runs on slices; off, it runs on whole sequences, as it did before."""

    is_on: bool = True


def compile_afresh() -> None:
    """Have this process compile its graphs without torch's cache of what autograd made of them.

    A graph with the exchange in it comes back from there with garbage for sizes (torch 2.13). The cache of kernels,
    which saves most of the time, stays.
    """
    disable_autograd_cache()


class _NoOther(TorchFunctionMode):
    """Refuses attention outside of the blocks, where it would see this rank's tokens alone."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _ATTENTIONS:
            raise JobError(
                f"cp splits sequences, and {self._name} attends outside of repeated blocks or by {function.__name__}",
                code="support.cp-attention-outside-blocks",
                fix="attend in the blocks alone, by torch's scaled_dot_product_attention, or use cp 1",
            )
        return function(*args, **(kwargs or {}))


def _placed(module: nn.Module, group: dist.ProcessGroup) -> Callable[..., Any]:
    """Pass the module's own forward the positions of its tokens, unless the batch has them."""
    inner, index, size = module.forward, dist.get_rank(group), dist.get_world_size(group)
    most = getattr(getattr(module, "config", None), "context", None)
    no_other = _NoOther(type(module).__name__)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("position_ids") is None:
            tokens = _tokens(args, kwargs)
            length = tokens.shape[1]
            if most is not None and length * size > most:
                raise JobError(
                    f"sequences have {length * size} tokens, the decoder's context is {most}",
                    code="model.context-exceeded",
                    fix=f"use context={length * size} or shorter sequences",
                )
            kwargs["position_ids"] = torch.arange(index * length, (index + 1) * length, device=tokens.device)[None]
        with no_other:
            return inner(*args, **kwargs)

    return forward


def _tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the first tensor [rows, tokens, ...] that a model is called with."""
    return next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.ndim > 1)


def _attending(
    inner: Callable[..., Any], name: str, group: dist.ProcessGroup, switch: AttentionSwitch
) -> Callable[..., Any]:
    """Run a block with its attention over whole sequences; refuses one whose attention is not found."""
    attention = _Attention(group)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not switch.is_on:
            return inner(*args, **kwargs)
        attention.found = False
        with attention:
            output = inner(*args, **kwargs)
        if not attention.found:
            raise JobError(
                f"cp splits sequences at torch's scaled_dot_product_attention, and {name} did not call it",
                code="support.cp-without-sdpa",
                fix='attend by it (transformers: attn_implementation="sdpa"), or use cp 1',
            )
        return output

    return forward


class _Attention(TorchFunctionMode):
    """Finds calls of attention wherever a block makes them, in forward and when it is recomputed."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.found = False
        self._attend = partial(attend_whole, group)

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not functional.scaled_dot_product_attention:
            return function(*args, **(kwargs or {}))
        self.found = True
        return self._attend(*args, **(kwargs or {}))


def attend_whole(  # noqa: PLR0917 - torch's signature
    group: dist.ProcessGroup,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attend over whole sequences by slices [rows, heads, tokens, width]; communicates over `group`, also backward.

    Key and value heads that ranks do not divide are repeated until they do: grouped query heads find theirs again.
    """
    size = dist.get_world_size(group)
    if attn_mask is not None:
        raise JobError(
            "cp attends without a mask, and the model gives attention one",
            code="support.cp-attention-mask",
            fix="leave attention_mask out, or use cp 1",
        )
    heads = query.shape[HEADS]
    if heads % size:
        valid = [str(degree) for degree in range(1, heads + 1) if heads % degree == 0]
        raise PlanError(
            f"cp={size} does not divide {heads} attention heads",
            code="plan.cp-heads-not-divisible",
            fix=f"use cp {' or '.join(valid)}",
        )
    repeats = math.lcm(key.shape[HEADS], size) // key.shape[HEADS]
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, HEADS), value.repeat_interleave(repeats, HEADS)
    device = query.device.type
    if torch.is_autocast_enabled(device):  # attention itself would cast, after twice as many bytes had travelled
        query, key, value = (each.to(torch.get_autocast_dtype(device)) for each in (query, key, value))
    query, key, value = _Exchange.apply(group, HEADS, TOKENS, query, key, value)  # type: ignore[no-untyped-call]
    mixed = torch.ops.aten.scaled_dot_product_attention(  # not by the name that is refused outside of blocks
        query,
        key,
        value,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa and query.shape[HEADS] != key.shape[HEADS],
    )
    (back,) = _Exchange.apply(group, TOKENS, HEADS, mixed)  # type: ignore[no-untyped-call]
    return back  # type: ignore[no-any-return]


class _Exchange(torch.autograd.Function):
    """All-to-all that splits one dimension and joins another; backward is the way back."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, split: int, join: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.split, ctx.join = group, split, join
        return tuple(exchanged(tensors, split, join, group))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *exchanged(grads, ctx.join, ctx.split, ctx.group)


# Rules of context parallelism: which models can run on slices of their sequences; pure decisions.


_HEADS = ("num_attention_heads", "num_heads", "n_head", "n_heads")
_WITHOUT = "or use cp 1"


def check_context(module: nn.Module, layout: Layout, *, own_loss: bool) -> None:
    """Refuse a model that would not compute on slices what it computes on whole sequences; starts nothing.

    With `own_loss` the model returns its loss. What only shows in a forward pass is refused there.
    """
    if "position_ids" not in inspect.signature(module.forward).parameters:
        raise JobError(
            f"cp splits sequences, and {type(module).__name__}.forward takes no position_ids to learn where a slice is",
            code="support.cp-no-position-ids",
            fix=f"take position_ids [1, tokens] and hand them on, {_WITHOUT}",
        )
    for name, child in module.named_modules():
        if isinstance(child, nn.Embedding) and "position" in name and child.padding_idx is not None:
            raise JobError(
                f"cp splits sequences, and {name} counts positions from the padding it finds in a whole one",
                code="support.cp-positions-from-padding",
                fix="use cp 1",
            )
        if isinstance(child, ConvolutionBase | nn.RNNBase):
            raise JobError(
                f"cp splits sequences, and {name}, a {type(child).__name__}, reads neighbouring tokens",
                code="support.cp-mixes-tokens",
                fix="use cp 1",
            )
    for name, config in _configs(module):  # last: a model without attention has a config of it all the same
        _check_heads(name, config, layout)
        _check_config(name, config)
    if own_loss and getattr(module, "loss_type", None) != "ForCausalLM":
        raise JobError(
            f"cp splits sequences, and {type(module).__name__} computes a loss that is not known to add up over slices",
            code="support.cp-loss-inside-model",
            fix=f"return logits and give sw.losses.token_cross_entropy, {_WITHOUT}",
        )


def _configs(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield every config of a module and its submodules once, with the class that has it."""
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
            split = f"cp={layout.cp}" if layout.tp == 1 else f"cp={layout.cp} x tp={layout.tp}"
            valid = [degree for degree in range(1, heads + 1) if heads % (degree * layout.tp) == 0]
            raise PlanError(
                f"{split} does not divide the {heads} attention heads of {name}",
                code="plan.cp-heads-not-divisible",
                fix=f"use cp {' or '.join(map(str, valid))}" if valid else "use another tp",
            )


def _check_config(name: str, config: Any) -> None:
    """Refuse configs of transformers whose attention is not plain."""
    kernel = getattr(config, "_attn_implementation", None)
    if kernel not in {None, "sdpa"}:
        raise JobError(
            f"cp splits sequences at torch's scaled_dot_product_attention, and {name} attends by {kernel!r}",
            code="support.cp-without-sdpa",
            fix=f'set attn_implementation="sdpa", {_WITHOUT}',
        )
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "attention"}
    if kinds or window or getattr(config, "attention_chunk_size", None):
        kind = ", ".join(sorted(kinds)) or "sliding_window"
        shorter = f"set config.sliding_window = None if sequences are shorter, {_WITHOUT}"
        raise JobError(
            f"cp splits sequences, and {name} has layers that do not attend to all tokens ({kind})",
            code="support.cp-partial-attention",
            fix="use cp 1" if kinds else shorter,
        )
    if getattr(config, "output_router_logits", False):
        raise JobError(
            f"cp splits sequences, and {name} balances its experts over whole ones",
            code="support.cp-expert-balancing",
            fix=f"set config.output_router_logits = False, {_WITHOUT}",
        )
