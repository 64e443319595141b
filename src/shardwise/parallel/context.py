"""Context parallelism, which shards sequences over ranks and uses an all-to-all over heads for attention.

Each rank runs the model on its slice of the tokens. Only attention reads other tokens. Before each call of
scaled_dot_product_attention an all-to-all exchanges this rank's tokens of all heads for all tokens of some heads, and
another all-to-all reverses the exchange (DeepSpeed-Ulysses, Jacobs et al. 2023). Parameters are replicated or sharded
over these ranks as over data-parallel ranks. In packed rows, the ids or positions of all slices are gathered before the
model runs, so that the model passes attention the mask of full sequences; the mask of a slice is refused.
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
from shardwise.models.documents import document_mask, number_documents
from shardwise.parallel.collectives import exchanged
from shardwise.parallel.recompute import find_blocks
from shardwise.torch_private.dispatch import ConvolutionBase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardwise.layout import Layout


HEADS, TOKENS = 1, 2
"""Dimensions of [rows, heads, tokens, head_width], the shape of attention inputs."""

_ATTENTIONS = frozenset({functional.scaled_dot_product_attention, functional.multi_head_attention_forward})


def context_parallel(module: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    """Make `module` run on this rank's slice of [rows, tokens]; forward and backward communicate over `group`.

    The module's forward receives the `position_ids` of the slice. Its repeated blocks attend over full sequences.
    """
    switch = AttentionSwitch()
    for name, block in (find_blocks(module) or {"": module}).items():
        block.forward = _attending(block.forward, name or type(module).__name__, group, switch)
    unsliced, sliced, named = module.forward, _with_positions(module, group), _named_arguments(module)

    def forward(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = named(args, kwargs)
        if switch.is_on:
            return sliced(*args, **kwargs)
        if kwargs.get("position_ids") is None:
            tokens = _tokens(args, kwargs)
            kwargs["position_ids"] = torch.arange(tokens.shape[1], device=tokens.device)[None]
        return unsliced(*args, **kwargs)

    module.forward = forward
    module.context_switch = switch  # type: ignore[assignment]
    return module


def _named_arguments(module: nn.Module) -> Callable[[Any, Any], tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return a function that passes positional arguments of the module's forward by name, if they have names."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]  # tp replaces module.forward
    names = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    if any(each.kind is each.VAR_POSITIONAL for each in parameters):
        names = []

    def named(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args[len(names) :], {**dict(zip(names, args, strict=False)), **kwargs}

    return named


@dataclass
class AttentionSwitch:
    """A switch: on, the model runs on slices and communicates; off, it runs on full sequences and does not."""

    is_on: bool = True


class _NoAttention(TorchFunctionMode):
    """A function mode that rejects attention outside the blocks, because it would only see this rank's tokens."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _ATTENTIONS:
            raise JobError(
                f"cp supports attention in repeated blocks only, but {self._name} calls {function.__name__}",
                code="support.cp-attention-outside-blocks",
                fix="call scaled_dot_product_attention in the repeated blocks only, or set cp=1",
            )
        return function(*args, **(kwargs or {}))


def _with_positions(module: nn.Module, group: dist.ProcessGroup) -> Callable[..., Any]:
    """Return a forward that passes the `position_ids` of this rank's slice unless the batch contains them."""
    inner, index, size = module.forward, dist.get_rank(group), dist.get_world_size(group)
    context = getattr(getattr(module, "config", None), "context", None)
    no_attention = _NoAttention(type(module).__name__)
    gather = _document_gathering(module, group)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("position_ids") is None:
            tokens = _tokens(args, kwargs)
            length = tokens.shape[1]
            if context is not None and length * size > context:
                raise JobError(
                    f"sequences have {length * size} tokens, but the decoder's context length is {context}",
                    code="model.context-exceeded",
                    fix=f"set context={length * size}, or use shorter sequences",
                )
            kwargs["position_ids"] = torch.arange(index * length, (index + 1) * length, device=tokens.device)[None]
        else:
            kwargs = gather(kwargs)
        with no_attention:
            return inner(*args, **kwargs)

    return forward


def _document_gathering(module: nn.Module, group: dist.ProcessGroup) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a function that adds the documents of full sequences to the arguments of a model on packed rows.

    A model with `document_ids` receives those of all slices. A decoder of transformers, which finds documents by
    positions that start again, receives its 4-dimensional attention mask, which it passes on to attention unchanged.
    Communicates over `group`.
    """
    parameters = inspect.signature(type(module).forward).parameters
    is_decoder = "attention_mask" in parameters and getattr(module, "loss_type", None) == "ForCausalLM"

    def gather(kwargs: dict[str, Any]) -> dict[str, Any]:
        if kwargs.get("document_ids") is not None:
            return kwargs | {"document_ids": _all_tokens(kwargs["document_ids"], group)}
        if not is_decoder or kwargs.get("attention_mask") is not None:
            return kwargs
        positions = _all_tokens(kwargs["position_ids"], group)
        places = torch.arange(positions.shape[1], device=positions.device)
        # Inside of a document, the difference of position and place in the row is constant.
        return kwargs | {"attention_mask": document_mask(number_documents(positions - places))}

    return gather


def _all_tokens(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return [rows, all tokens] from this rank's slice [rows, tokens]. Communicates over `group`."""
    slices = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
    dist.all_gather(slices, values.contiguous(), group=group)
    return torch.cat(slices, dim=1)


def _tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the first tensor of shape [rows, tokens, ...] among the arguments of a model."""
    return next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.ndim > 1)


def _attending(
    inner: Callable[..., Any], name: str, group: dist.ProcessGroup, switch: AttentionSwitch
) -> Callable[..., Any]:
    """Return a block's forward with attention over full sequences; it raises JobError if the block has no attention."""
    attention = _Attention(group)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not switch.is_on:
            return inner(*args, **kwargs)
        attention.found = False
        with attention:
            output = inner(*args, **kwargs)
        if not attention.found:
            raise JobError(
                f"cp requires torch's scaled_dot_product_attention, but {name} did not call it",
                code="support.cp-without-sdpa",
                fix='call scaled_dot_product_attention (transformers: attn_implementation="sdpa"), or set cp=1',
            )
        return output

    return forward


class _Attention(TorchFunctionMode):
    """A function mode that intercepts a block's attention calls, in the forward pass and during recomputation."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.found = False
        self._attend = partial(full_attention, group)

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not functional.scaled_dot_product_attention:
            return function(*args, **(kwargs or {}))
        self.found = True
        return self._attend(*args, **(kwargs or {}))


def full_attention(  # noqa: PLR0917 - torch's signature
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
    """Compute attention over full sequences from this rank's slices [rows, heads, tokens, width].

    Communicates over `group` in forward and backward. Key and value heads are repeated until the group size divides
    their number, which preserves the grouping of query heads. A mask must be that of the full sequences and equal for
    all heads, [rows, 1, all tokens, all tokens].
    """
    size = dist.get_world_size(group)
    num_tokens = size * query.shape[TOKENS]
    if attn_mask is not None and attn_mask.shape[HEADS:] != (1, num_tokens, num_tokens):
        raise JobError(
            "cp does not support masks of a slice of the sequence, but the model passes one to attention",
            code="support.cp-attention-mask",
            fix="remove attention_mask from the batch, or set cp=1",
        )
    heads = query.shape[HEADS]
    if heads % size:
        valid = [str(degree) for degree in range(1, heads + 1) if heads % degree == 0]
        raise PlanError(
            f"cp={size} does not divide the {heads} attention heads",
            code="plan.cp-heads-not-divisible",
            fix=f"set cp to {' or '.join(valid)}",
        )
    repeats = math.lcm(key.shape[HEADS], size) // key.shape[HEADS]
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, HEADS), value.repeat_interleave(repeats, HEADS)
    device = query.device.type
    if torch.is_autocast_enabled(device):  # attention itself would cast after the exchange, at twice the bytes
        query, key, value = (each.to(torch.get_autocast_dtype(device)) for each in (query, key, value))
    query, key, value = _Exchange.apply(group, HEADS, TOKENS, query, key, value)  # type: ignore[no-untyped-call]
    mixed = torch.ops.aten.scaled_dot_product_attention(  # bypasses the mode that rejects attention outside blocks
        query,
        key,
        value,
        attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa and query.shape[HEADS] != key.shape[HEADS],
    )
    (back,) = _Exchange.apply(group, TOKENS, HEADS, mixed)  # type: ignore[no-untyped-call]
    return back  # type: ignore[no-any-return]


class _Exchange(torch.autograd.Function):
    """All-to-all that splits one dimension and concatenates another; backward is the inverse exchange."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, split: int, join: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.split, ctx.join = group, split, join
        return tuple(exchanged(tensors, split, join, group))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *exchanged(grads, ctx.join, ctx.split, ctx.group)


# Checks whether a model can run on slices of its sequences.


_HEADS = ("num_attention_heads", "num_heads", "n_head", "n_heads")
_WITHOUT = "or set cp=1"


def check_context(module: nn.Module, layout: Layout, *, own_loss: bool) -> None:
    """Raise JobError or PlanError if the model's output on slices would differ from its output on full sequences.

    `own_loss` is True if the model returns its loss. The forward pass checks further properties.
    """
    if "position_ids" not in inspect.signature(module.forward).parameters:
        raise JobError(
            f"cp needs a forward with position_ids, but {type(module).__name__}.forward does not accept them",
            code="support.cp-no-position-ids",
            fix=f"accept position_ids [1, tokens] and pass them to the position embedding, {_WITHOUT}",
        )
    for name, child in module.named_modules():
        if isinstance(child, nn.Embedding) and "position" in name and child.padding_idx is not None:
            raise JobError(
                f"cp splits sequences, but {name} computes positions from the padding of a full sequence",
                code="support.cp-positions-from-padding",
                fix="set cp=1",
            )
        if isinstance(child, ConvolutionBase | nn.RNNBase):
            raise JobError(
                f"cp splits sequences, but {name}, a {type(child).__name__}, reads neighbouring tokens",
                code="support.cp-mixes-tokens",
                fix="set cp=1",
            )
    for name, config in _configs(module):  # last, because models without attention may have such a config
        _check_heads(name, config, layout)
        _check_config(name, config)
    if own_loss and getattr(module, "loss_type", None) != "ForCausalLM":
        raise JobError(
            f"cp requires a loss that is a sum over slices, but {type(module).__name__} computes its own loss",
            code="support.cp-loss-inside-model",
            fix=f"return logits and use sw.losses.token_cross_entropy, {_WITHOUT}",
        )


def config_heads(module: nn.Module) -> int:
    """Return the greatest common divisor of the attention heads that the configs of a model name; 0 without any."""
    named = [getattr(config, attribute, None) for _, config in _configs(module) for attribute in _HEADS]
    return math.gcd(*(heads for heads in named if isinstance(heads, int)))


def _configs(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield each distinct config of a module and its submodules, with the class name of its owner."""
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
            split = f"cp={layout.cp}"
            if layout.tp > 1:
                split += f" x tp={layout.tp}"
            valid = [str(degree) for degree in range(1, heads + 1) if heads % (degree * layout.tp) == 0]
            fix = "set a smaller tp"
            if valid:
                fix = f"set cp to {' or '.join(valid)}"
            raise PlanError(
                f"{split} does not divide the {heads} attention heads of {name}",
                code="plan.cp-heads-not-divisible",
                fix=fix,
            )


def _check_config(name: str, config: Any) -> None:
    """Raise JobError for a transformers config with an attention kernel or pattern that cp does not support."""
    kernel = getattr(config, "_attn_implementation", None)
    if kernel not in {None, "sdpa"}:
        raise JobError(
            f"cp needs attn_implementation='sdpa', but {name} uses {kernel!r}",
            code="support.cp-without-sdpa",
            fix=f'set attn_implementation="sdpa", {_WITHOUT}',
        )
    window = None
    if getattr(config, "use_sliding_window", True):
        window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "attention"}
    if kinds or window or getattr(config, "attention_chunk_size", None):
        kind = ", ".join(sorted(kinds)) or "sliding_window"
        fix = "set cp=1"
        if not kinds:
            fix = f"set config.sliding_window = None if sequences are shorter than the window, {_WITHOUT}"
        raise JobError(
            f"cp needs full attention, but {name} has layers that attend to some tokens only ({kind})",
            code="support.cp-partial-attention",
            fix=fix,
        )
    if getattr(config, "output_router_logits", False):
        raise JobError(
            f"cp splits sequences, but {name} computes its expert balancing loss over full sequences",
            code="support.cp-expert-balancing",
            fix=f"set config.output_router_logits = False, {_WITHOUT}",
        )
