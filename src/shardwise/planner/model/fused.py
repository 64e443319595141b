"""A fused loss, as planning sees it: logits of a chunk of tokens at a time, gradients made in the forward pass."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardwise.planner.model.shape import ELEMENT_BYTES, Amount, Footprint, Moment

if TYPE_CHECKING:
    from shardwise.planner.model.shape import Head, ModelShape, Part

CHUNK_ELEMENTS = 2**28
"""Logits of one chunk, 1 GiB in fp32: 2,048 tokens of a 128k vocabulary. The weight's gradient is read and written
once per chunk, so chunks much smaller than the width cost more than their products; much larger ones gain nothing."""
TILE = 128
"""Rows of a chunk are a multiple of this, which is what matrix units work on."""
WIDE = 4
"""Bytes of the number in which a chunk's logits and the weight's gradient are kept, at least."""


def chunk_rows(rows: int, words: int) -> int:
    """Return how many of `rows` tokens to take at a time, so that chunks are nearly equal and within CHUNK_ELEMENTS."""
    largest = max(TILE, CHUNK_ELEMENTS // max(1, words) // TILE * TILE)
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
    rows, words = samples * head.rows, -(-head.words // tp) if head.cut else head.words
    chunk = chunk_rows(rows, words)
    numel, hidden = words * head.width, rows * head.width * head.hidden_bytes
    gradient = wide * numel if head.trained else 0
    made = 0 if shape.gathered or narrow == wide else narrow * numel  # the weight, cast for all chunks
    passes, logits = -(-rows // chunk), chunk * words
    # A chunk's logits and their log-probabilities, or their gradient and one chunk's share of the weight's.
    work = max(2 * wide * logits, narrow * (logits + (numel if head.trained else 0)))
    # What the head was given stays until its own gradient, as large, stands for it.
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
        # Of cut words only the gradient of what the head was given is summed over the group, and numbers per row.
        tp_exchanged=Amount(whole=head.rows * head.width * head.hidden_bytes) if part.num_exchanges else Amount(),
    )


def _backward(head: Head, cast: Amount) -> tuple[Moment, ...]:
    """Return its moments: gradients are there, those of gathered weights `cast`; then what comes before the head."""
    # Numbers of gradients are of the whole weight: what tensor parallelism leaves of them is worked out elsewhere.
    numel = head.words * head.width if head.trained else 0
    first = Moment(held=head.before.saved + cast, gradients=numel)
    return first, *(replace(moment, gradients=moment.gradients + numel) for moment in head.before.backward)
