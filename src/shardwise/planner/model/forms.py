"""A model in every form in which plans train it: weights cast or gathered, context parallelism, a fused loss."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from shardwise.planner.model.shape import Amount, Footprint, ModelShape, Moment
from shardwise.units import ELEMENT_BYTES

if TYPE_CHECKING:
    from shardwise.planner.model.shape import AttentionWork, Head, Part, Recompute, Work
    from shardwise.plans.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model whose weights autocast casts, and the same with weights as sharding gathers them."""

    plain: ModelShape
    gathered: ModelShape

    def for_plan(self, plan: Plan) -> ModelShape:
        """Return the form that a plan trains; made once for all plans that share it."""
        layout = plan.layout
        shape = self.sliced(layout.cp, layout.tp, gathered=plan.zero >= 2)
        if not plan.fused_loss or shape.head is None:
            return shape
        key = ("fused", id(shape), plan.micro_batch, layout.tp)
        if key not in self._forms:
            self._forms[key] = fuse_loss(shape, plan.micro_batch, layout.tp)
        return self._forms[key]

    def sliced(self, cp: int, tp: int, *, gathered: bool) -> ModelShape:
        """Return the form on one of `cp` context-parallel ranks under `tp`; made once."""
        shape = self.gathered if gathered else self.plain
        if cp == 1:
            return shape
        key = ("sliced", id(shape), cp, tp)
        if key not in self._forms:
            self._forms[key] = split_context(shape, cp, tp)
        return self._forms[key]

    @cached_property
    def _forms(self) -> dict[tuple[str, int, int, int], ModelShape]:
        """All that were made: costs are kept by the identity of parts, which must live as long."""
        return {}


# Context parallelism: a slice of the tokens on each rank, all-to-alls around attention (Jacobs et al. 2023, Ulysses).


EXCHANGES = 2
"""All-to-alls of one attention, forward: queries, keys and values together, then the result."""
COPIES = 4
"""How often each byte is read or written around an exchange: put in order for sending, and again when it came."""
EXCHANGE_KERNELS = 8


def split_context(shape: ModelShape, cp: int, tp: int) -> ModelShape:
    """Return a model on one of `cp` slices of its tokens; attention runs on all tokens of 1/cp of the heads.

    `tp` splits heads first: where fewer key heads are left than slices, they are repeated.
    """
    width = ELEMENT_BYTES[shape.compute]
    parts = tuple(_sliced(part, cp, tp, width) for part in shape.parts)
    return replace(shape, parts=parts, head=shape.head and _sliced_head(shape.head, cp))


def _sliced(part: Part, cp: int, tp: int, width: int) -> Part:
    share = 1 / cp
    exchanged = sum(_exchanged(item, cp, tp, width) for item in part.work.attentions)
    results = sum(_result(item, cp, width) for item in part.work.attentions)
    repeated = exchanged - sum(_exchanged(item, 1, tp, width) for item in part.work.attentions) * share
    # The result of attention is kept before and after its exchange; repeated keys and values are kept too.
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
    """How often keys are repeated until slices divide their heads."""
    heads = max(1, item.kv_heads // tp)
    return math.lcm(heads, cp) // heads


def _result(item: AttentionWork, cp: int, width: int) -> float:
    """Return bytes per sample of an attention's result on one rank."""
    return item.count * item.heads * item.head_width * item.queries * width / cp


def _exchanged(item: AttentionWork, cp: int, tp: int, width: int) -> float:
    """Return bytes per sample that one rank puts into the exchanges of an attention."""
    keys = item.count * item.kv_heads * _repeats(item, cp, tp) * item.head_width * item.keys * width / cp
    return 2 * _result(item, cp, width) + 2 * keys


def _sliced_work(work: Work, cp: int, tp: int, exchanged: Amount) -> Work:
    copied = exchanged * COPIES
    kernels = EXCHANGE_KERNELS * sum(item.count for item in work.attentions)
    return replace(
        work,
        matmuls=tuple(replace(item, rows=max(1, item.rows // cp)) for item in work.matmuls),
        attentions=tuple(
            replace(item, heads=item.heads // cp, kv_heads=max(1, item.kv_heads * _repeats(item, cp, tp) // cp))
            for item in work.attentions
        ),
        moved=_per_token(work.moved, cp) + copied,
        moved_backward=_per_token(work.moved_backward, cp) + copied,
        kernels=work.kernels + kernels,
        kernels_backward=work.kernels_backward + kernels,
    )


def _per_token(moved: Amount, cp: int) -> Amount:
    """Split what grows with the tokens; casts of weights do not."""
    return replace(moved * (1 / cp), fixed=moved.fixed)


def _footprint(kept: Footprint, share: float, more: Amount, policy: Recompute) -> Footprint:
    """Split activations, tables of positions too, and add those of the exchanges: kept for backward, or recomputed."""
    return Footprint(
        saved=kept.saved * share + (more if policy == "none" else Amount()),
        forward=kept.forward * share + more,
        forward_on_gpu=kept.forward_on_gpu * share + more,
        backward=tuple(replace(moment, resident=moment.resident * share + more) for moment in kept.backward),
    )


def _sliced_head(head: Head, cp: int) -> Head:
    return replace(head, rows=max(1, head.rows // cp), before=_footprint(head.before, 1 / cp, Amount(), "none"))


# A fused loss, as planning sees it: logits of a chunk of tokens at a time, gradients made in the forward pass.


CHUNK_ELEMENTS = 2**28
"""Logits of one chunk, 1 GiB in fp32: 2,048 tokens of a 128k vocabulary. The weight's gradient is read and written
once per chunk, so chunks much smaller than the width cost more than their products; much larger ones gain nothing."""
TILE = 128
"""Rows of a chunk are a multiple of this, which is what matrix units work on."""
WIDE = 4
"""Bytes of the number in which a chunk's logits and the weight's gradient are kept, at least."""


def chunk_rows(rows: int, vocab_size: int) -> int:
    """Return how many of `rows` tokens to take at a time, so that chunks are nearly equal and within CHUNK_ELEMENTS."""
    largest = max(TILE, CHUNK_ELEMENTS // max(1, vocab_size) // TILE * TILE)
    chunks = max(1, -(-rows // largest))
    even = -(-rows // chunks)
    return max(1, min(rows, -(-even // TILE) * TILE))


def fuse_loss(shape: ModelShape, samples: int, tp: int) -> ModelShape:
    """Return a model with its head and loss fused, for micro-batches of so many samples on one of `tp` ranks."""
    head = shape.head
    if head is None:
        return shape
    *parts, last = shape.parts
    return replace(shape, parts=(*parts, _fused(last, head, shape, samples, tp)))


def _fused(part: Part, head: Head, shape: ModelShape, samples: int, tp: int) -> Part:
    narrow = ELEMENT_BYTES[shape.compute]
    wide = max(WIDE, narrow)
    rows, vocab_size = samples * head.rows, -(-head.vocab_size // tp) if head.split else head.vocab_size
    chunk = chunk_rows(rows, vocab_size)
    numel, hidden = vocab_size * head.width, rows * head.width * head.hidden_bytes
    gradient = wide * numel if head.trained else 0
    made = 0 if shape.gathered or narrow == wide else narrow * numel  # the weight, cast for all chunks
    passes, logits = -(-rows // chunk), chunk * vocab_size
    # A chunk's logits and their log-probabilities, or their gradient and one chunk's share of the weight's.
    work = max(2 * wide * logits, narrow * (logits + (numel if head.trained else 0)))
    # The head's input stays until its gradient, which is as large, replaces it.
    saved = head.before.saved + Amount(fixed=gradient)
    highest = saved + Amount(fixed=hidden + made + work)
    cast = gradient if shape.gathered else 0
    footprint = Footprint(
        saved=saved, forward=highest, forward_on_gpu=highest, backward=_backward(head, Amount(fixed=cast))
    )
    summed = Amount(fixed=passes * numel * (2 * narrow + 2 * wide) if head.trained else 0)
    return replace(
        part,
        weights=tuple(replace(weight, cast=weight.cast and weight.numel < numel) for weight in part.weights),
        footprints=dict.fromkeys(part.footprints, footprint),
        work=replace(part.work, moved=part.work.moved + summed, kernels=part.work.kernels * passes),
        # With a split vocabulary the group reduces only the gradient of the head's input, and a few numbers per row.
        tp_exchanged=Amount(whole=head.rows * head.width * head.hidden_bytes) if part.num_exchanges else Amount(),
    )


def _backward(head: Head, cast: Amount) -> tuple[Moment, ...]:
    """Return its moments: gradients are there, those of gathered weights `cast`; then what comes before the head."""
    # Elements of the whole weight: `memory._fresh` divides by tp.
    numel = head.vocab_size * head.width if head.trained else 0
    first = Moment(resident=head.before.saved + cast, gradients=numel)
    return first, *(replace(moment, gradients=moment.gradients + numel) for moment in head.before.backward)
