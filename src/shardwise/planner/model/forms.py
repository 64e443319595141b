"""The forms in which plans train a model: weights cast or gathered, context parallelism, a compiled or fused loss."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from shardwise.planner.model.shape import Amount, Footprint, ModelShape, Moment
from shardwise.plans.rules import compiles_model, padded_vocabulary
from shardwise.units import ELEMENT_BYTES

if TYPE_CHECKING:
    from shardwise.planner.model.shape import AttentionWork, Head, Part, Recompute, Work
    from shardwise.plans.plan import Plan
    from shardwise.plans.sections import Precision


def stores_half(precision: Precision) -> bool:
    """Return whether a plan stores weights in 16 bits, so that autocast casts none."""
    return ELEMENT_BYTES[precision.parameter] < ELEMENT_BYTES["fp32"]


@dataclass(frozen=True, kw_only=True)
class Model:
    """Descriptions of one model: with weights that autocast casts, and with weights in the compute dtype."""

    plain: ModelShape
    gathered: ModelShape
    """The form of weights that FSDP gathers in the compute dtype, or that the plan stores in 16 bits."""

    def for_plan(self, plan: Plan) -> ModelShape:
        """Return the form in which a plan trains the model; plans with the same form get the same object."""
        layout = plan.layout
        shape = self.sliced(layout.cp, layout.tp, gathered=plan.zero >= 2 or stores_half(plan.precision))
        if shape.head is None:
            return shape
        if plan.fused_loss:
            key = ("fused", id(shape), plan.micro_batch, layout.tp)
            if key not in self._forms:
                self._forms[key] = fuse_loss(shape, plan.micro_batch, layout.tp)
            return self._forms[key]
        if plan.compile != "none" and layout.pp == 1:
            compiled = compile_whole if compiles_model(plan) and shape.head.is_separable else compile_loss
            key = (compiled.__name__, id(shape), 1, 1)
            if key not in self._forms:
                self._forms[key] = compiled(shape, shape.head)
            return self._forms[key]
        return shape

    def sliced(self, cp: int, tp: int, *, gathered: bool) -> ModelShape:
        """Return the form on one of `cp` context-parallel ranks under `tp`, the same object each time."""
        shape = self.gathered if gathered else self.plain
        if cp == 1:
            return shape
        key = ("sliced", id(shape), cp, tp)
        if key not in self._forms:
            self._forms[key] = split_context(shape, cp, tp)
        return self._forms[key]

    @cached_property
    def _forms(self) -> dict[tuple[str, int, int, int], ModelShape]:
        """Cache of forms. Costs are cached by the identity of parts, so the parts must stay alive."""
        return {}


# Context parallelism: each rank has a slice of the tokens, with all-to-alls around attention (Jacobs et al. 2023,
# DeepSpeed Ulysses).


EXCHANGES = 2
"""All-to-alls of one attention layer in forward: queries, keys and values together, then the result."""
COPIES = 4
"""Reads and writes of each byte around an all-to-all: one copy reorders it before sending, one after receiving."""
EXCHANGE_KERNELS = 8


def split_context(shape: ModelShape, cp: int, tp: int) -> ModelShape:
    """Return a model on one of `cp` slices of its tokens; attention runs on all tokens of 1/cp of the heads.

    `tp` splits heads first; key and value heads are repeated if their number per rank is not divisible by `cp`.
    """
    width = ELEMENT_BYTES[shape.compute]
    parts = tuple(_sliced(part, cp, tp, width) for part in shape.parts)
    return replace(shape, parts=parts, head=shape.head and _sliced_head(shape.head, cp))


def _sliced(part: Part, cp: int, tp: int, width: int) -> Part:
    share = 1 / cp
    exchanged = sum(_exchanged(item, cp, tp, width) for item in part.work.attentions)
    results = sum(_result(item, cp, width) for item in part.work.attentions)
    repeated = exchanged - sum(_exchanged(item, 1, tp, width) for item in part.work.attentions) * share
    # The result of attention is saved before and after its all-to-all; repeated keys and values are saved, too.
    more = Amount(split=results + repeated)
    return replace(
        part,
        work=_sliced_work(part.work, cp, tp, Amount(split=exchanged)),
        footprints={policy: _footprint(kept, share, more, policy) for policy, kept in part.footprints.items()},
        output=part.output * share,
        tp_exchanged=part.tp_exchanged * share,
        cp_exchanged=Amount(split=exchanged),
        num_cp_exchanges=EXCHANGES * sum(item.count for item in part.work.attentions),
    )


def _repeats(item: AttentionWork, cp: int, tp: int) -> int:
    """Return how often key heads are repeated so that `cp` divides their number."""
    heads = max(1, item.kv_heads // tp)
    return math.lcm(heads, cp) // heads


def _result(item: AttentionWork, cp: int, width: int) -> float:
    """Return the bytes per sample of an attention layer's result on one rank."""
    return item.count * item.heads * item.head_width * item.queries * width / cp


def _exchanged(item: AttentionWork, cp: int, tp: int, width: int) -> float:
    """Return the bytes per sample that one rank sends in the all-to-alls of an attention layer."""
    keys = item.count * item.kv_heads * _repeats(item, cp, tp) * item.head_width * item.keys * width / cp
    return 2 * _result(item, cp, width) + 2 * keys


def _sliced_work(work: Work, cp: int, tp: int, exchanged: Amount) -> Work:
    copied = exchanged * COPIES
    kernels = EXCHANGE_KERNELS * sum(item.count for item in work.attentions)
    return replace(
        work,
        matmuls=tuple(replace(item, rows=max(1, item.rows // cp)) for item in work.matmuls),
        attentions=tuple(
            replace(
                item,
                heads=item.heads // cp,
                kv_heads=max(1, item.kv_heads * _repeats(item, cp, tp) // cp),
                copied=item.copied // cp,
            )
            for item in work.attentions
        ),
        moved=_per_token(work.moved, cp) + copied,
        moved_backward=_per_token(work.moved_backward, cp) + copied,
        kernels=work.kernels + kernels,
        kernels_backward=work.kernels_backward + kernels,
    )


def _per_token(moved: Amount, cp: int) -> Amount:
    """Return 1/cp of the bytes that grow with the number of tokens; casts of weights stay whole."""
    return replace(moved * (1 / cp), fixed=moved.fixed)


def _footprint(kept: Footprint, share: float, more: Amount, policy: Recompute) -> Footprint:
    """Return a share of the activations, with `more` for the all-to-alls, which is saved only without recompute."""
    saved = kept.saved * share
    return Footprint(
        saved=saved + more if policy == "none" else saved,
        forward=kept.forward * share + more,
        forward_on_gpu=kept.forward_on_gpu * share + more,
        backward=tuple(replace(moment, resident=moment.resident * share + more) for moment in kept.backward),
    )


def _sliced_head(head: Head, cp: int) -> Head:
    return replace(head, rows=max(1, head.rows // cp), before=_footprint(head.before, 1 / cp, Amount(), "none"))


# A compiled loss: kernels read the logits in forward, and write their gradient in backward.


def compile_loss(shape: ModelShape, head: Head) -> ModelShape:
    """Return a model with a compiled loss, whose logits never exist in fp32, and are no part of its graph."""
    logits = Amount(whole=head.rows * head.vocab_size * ELEMENT_BYTES[shape.compute])
    hidden = Amount(whole=head.rows * head.width * head.hidden_bytes)
    numel = head.vocab_size * head.width if head.trained else 0
    kept = head.before.saved
    ends = (Moment(resident=kept + logits * 2), Moment(resident=kept + logits + hidden, gradients=numel))
    return _with_loss(shape, head, kept + logits, ends)


def compile_whole(shape: ModelShape, head: Head) -> ModelShape:
    """Return a model that is compiled together with its loss, where the gradient of the logits overwrites them.

    The graph pads the vocabulary, and saves the inputs of the head and of its norm in the compute dtype. The weight's
    gradient is computed first: its second operand is freed before the gradient of the head's input is computed.
    """
    vocab_size, compute = padded_vocabulary(head.vocab_size), ELEMENT_BYTES[shape.compute]
    logits = Amount(whole=head.rows * vocab_size * compute)
    weight_gradient = Amount(fixed=vocab_size * head.width * compute if head.trained else 0)
    kept = head.before.saved * min(1.0, compute / head.hidden_bytes)
    *parts, last = shape.parts
    last = replace(last, work=_padded_head(last.work, head.vocab_size, vocab_size))
    ends = (Moment(resident=kept + logits + weight_gradient),)
    return _with_loss(replace(shape, parts=(*parts, last)), head, kept + logits, ends)


def _with_loss(shape: ModelShape, head: Head, saved: Amount, ends: tuple[Moment, ...]) -> ModelShape:
    """Return a model whose last part saves `saved`, and whose backward pass begins with the moments `ends`."""
    numel = head.vocab_size * head.width if head.trained else 0
    before = tuple(replace(moment, gradients=moment.gradients + numel) for moment in head.before.backward)
    footprint = Footprint(saved=saved, forward=saved, forward_on_gpu=saved, backward=(*ends, *before))
    *parts, last = shape.parts
    return replace(shape, parts=(*parts, replace(last, footprints=dict.fromkeys(last.footprints, footprint))))


def _padded_head(work: Work, vocab_size: int, padded: int) -> Work:
    """Return the work of the last part with the product of a padded head."""
    matmuls = [replace(each, columns=padded) if each.columns == vocab_size else each for each in work.matmuls]
    return replace(work, matmuls=tuple(matmuls))


# A fused loss: it computes the logits of one chunk of tokens at a time, and their gradients already in forward.


CHUNK_ELEMENTS = 2**28
"""Logits of one chunk, 1 GiB in fp32: 2,048 tokens of a 128k vocabulary. The weight's gradient is read and written
once per chunk, which dominates for chunks much smaller than the width; much larger ones gain nothing."""
TILE = 128
"""Rows of a chunk are a multiple of this, the tile size of tensor cores."""
WIDE = 4
"""Minimum bytes per element of a chunk's logits and of the weight's gradient."""


def chunk_rows(rows: int, vocab_size: int) -> int:
    """Return the tokens of one chunk, such that chunks are nearly equal and within CHUNK_ELEMENTS."""
    largest = max(TILE, CHUNK_ELEMENTS // max(1, vocab_size) // TILE * TILE)
    chunks = max(1, -(-rows // largest))
    even = -(-rows // chunks)
    return max(1, min(rows, -(-even // TILE) * TILE))


def fuse_loss(shape: ModelShape, samples: int, tp: int) -> ModelShape:
    """Return a model with head and loss fused, for micro-batches of `samples` on one of `tp` ranks."""
    head = shape.head
    if head is None:
        return shape
    *parts, last = shape.parts
    return replace(shape, parts=(*parts, _fused(last, head, shape, samples, tp)))


def _fused(part: Part, head: Head, shape: ModelShape, samples: int, tp: int) -> Part:
    narrow = ELEMENT_BYTES[shape.compute]
    wide = max(WIDE, narrow)
    rows = samples * head.rows
    vocab_size = -(-head.vocab_size // tp) if head.split else head.vocab_size
    chunk = chunk_rows(rows, vocab_size)
    numel, hidden = vocab_size * head.width, rows * head.width * head.hidden_bytes
    trained = numel if head.trained else 0
    gradient = wide * trained
    cast_weight = 0 if shape.gathered or narrow == wide else narrow * numel  # cast once for all chunks
    passes, logits = -(-rows // chunk), chunk * vocab_size
    # The logits of a chunk and their log-probabilities, or their gradient and the chunk's weight gradient.
    work = max(2 * wide * logits, narrow * (logits + trained))
    # The head's input stays until its gradient, which is as large, replaces it.
    saved = head.before.saved + Amount(fixed=gradient)
    highest = saved + Amount(fixed=hidden + cast_weight + work)
    cast = gradient if shape.gathered else 0
    footprint = Footprint(
        saved=saved, forward=highest, forward_on_gpu=highest, backward=_backward(head, Amount(fixed=cast))
    )
    summed = Amount(fixed=passes * trained * (2 * narrow + 2 * wide))
    return replace(
        part,
        weights=tuple(replace(weight, cast=weight.cast and weight.numel < numel) for weight in part.weights),
        footprints=dict.fromkeys(part.footprints, footprint),
        work=replace(part.work, moved=part.work.moved + summed, kernels=part.work.kernels * passes),
        # With a split vocabulary, the group reduces the gradient of the head's input and a few elements per row.
        tp_exchanged=Amount(whole=head.rows * head.width * head.hidden_bytes) if part.num_exchanges else Amount(),
    )


def _backward(head: Head, cast: Amount) -> tuple[Moment, ...]:
    """Return the moments of backward: the head's weight gradient with FSDP's `cast`, then earlier modules' moments."""
    # The elements of the whole weight, since `memory._fresh` divides by tp.
    numel = head.vocab_size * head.width if head.trained else 0
    first = Moment(resident=head.before.saved + cast, gradients=numel)
    return first, *(replace(moment, gradients=moment.gradients + numel) for moment in head.before.backward)
