"""Context parallelism, as planning sees it: a slice of the tokens on each rank, and exchanges around attention."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from shardwise.planner.model.shape import ELEMENT_BYTES, Amount, Footprint

if TYPE_CHECKING:
    from shardwise.planner.model.shape import Attention, Head, ModelShape, Part, Recompute, Work

EXCHANGES = 2
"""All-to-alls of one attention, forward: queries, keys and values together, then the result."""
COPIES = 4
"""How often each byte is read or written around an exchange: put in order for sending, and again when it came."""
EXCHANGE_KERNELS = 8


def cut_context(shape: ModelShape, cp: int, tp: int) -> ModelShape:
    """Return a model on one of `cp` slices of its tokens, attention on all tokens of a share of the heads.

    `tp` cuts heads first: where fewer heads of keys are left than slices, they are repeated.
    """
    width = ELEMENT_BYTES[shape.compute]
    parts = tuple(_sliced(part, cp, tp, width) for part in shape.parts)
    return replace(shape, parts=parts, head=shape.head and _sliced_head(shape.head, cp))


def _sliced(part: Part, cp: int, tp: int, width: int) -> Part:
    share = 1 / cp
    exchanged = sum(_exchanged(item, cp, tp, width) for item in part.work.attentions)
    results = sum(_result(item, cp, width) for item in part.work.attentions)
    repeated = exchanged - sum(_exchanged(item, 1, tp, width) for item in part.work.attentions) * share
    # The result of attention is kept as it was made and as it came back; repeated keys and values are kept too.
    more = Amount(cut=results + repeated)
    return replace(
        part,
        work=_sliced_work(part.work, cp, tp, Amount(cut=exchanged)),
        footprints={policy: _footprint(kept, share, more, policy) for policy, kept in part.footprints.items()},
        output=part.output * share,
        tp_exchanged=part.tp_exchanged * share,
        cp_exchanged=Amount(cut=exchanged),
        num_cp_exchanges=EXCHANGES * sum(item.count for item in part.work.attentions),
    )


def _repeats(item: Attention, cp: int, tp: int) -> int:
    """How often keys are repeated until slices divide their heads."""
    heads = max(1, item.kv_heads // tp)
    return math.lcm(heads, cp) // heads


def _result(item: Attention, cp: int, width: int) -> float:
    """Return bytes per sample of an attention's result on one rank."""
    return item.count * item.heads * item.head_width * item.queries * width / cp


def _exchanged(item: Attention, cp: int, tp: int, width: int) -> float:
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
    """Cut what grows with the tokens; casts of weights do not."""
    return replace(moved * (1 / cp), fixed=moved.fixed)


def _footprint(kept: Footprint, share: float, more: Amount, policy: Recompute) -> Footprint:
    """Cut what is held, tables of positions too, and add what exchanges leave: kept for backward, or made again."""
    return Footprint(
        saved=kept.saved * share + (more if policy == "none" else Amount()),
        forward=kept.forward * share + more,
        forward_on_gpu=kept.forward_on_gpu * share + more,
        backward=tuple(replace(moment, held=moment.held * share + more) for moment in kept.backward),
    )


def _sliced_head(head: Head, cp: int) -> Head:
    return replace(head, rows=max(1, head.rows // cp), before=_footprint(head.before, 1 / cp, Amount(), "none"))
