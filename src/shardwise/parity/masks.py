"""Dropout masks across ranks: different where rows or activations are, equal where every rank holds the same."""

from __future__ import annotations

import dataclasses
import hashlib
from contextlib import contextmanager
from itertools import combinations
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch.nn import functional

from shardwise.errors import InputError
from shardwise.parallel.collectives import unwrap
from shardwise.parity.capture import Print, fingerprint
from shardwise.parity.prepare import Preparation, prepare_job
from shardwise.parity.progress import PauseLimit, Pulse, watched
from shardwise.parity.spec import Finding
from shardwise.training.build import build_step

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from torch import Tensor, nn

    from shardwise.dist import World
    from shardwise.layout import Layout
    from shardwise.plans import Plan

_FEWEST = 32
"""Smaller activations may draw the same mask by chance."""


class Mask(msgspec.Struct, frozen=True, kw_only=True):
    """One call of dropout: where, on what, and which entries it dropped."""

    place: str
    given: Print
    dropped: str
    """Digest of the mask; empty for activations too small to compare, and where nothing is dropped (a rate of 0)."""


def without_graphs(plan: Plan) -> Plan:
    """Return the plan that masks are noted under: a graph would draw in place of torch's function."""
    return dataclasses.replace(plan, compile="none")


def watch_masks(
    world: World, preparation: Preparation, plan: Plan, folder: Path, limit: PauseLimit
) -> tuple[list[Mask], InputError | None]:
    """Train one step with dropout on and return every mask, in order; communicates over the world, on every rank.

    A step that is refused is returned beside them: masks that differ make gradients differ, and name the cause. A rank
    that makes no progress for longer than `limit` writes where it is into `folder`, and ends.
    """
    pulse = Pulse()
    refused = None
    with watched(pulse, limit, world.rank, folder):
        job = prepare_job(msgspec.structs.replace(preparation, dropout=True, steps=1))
        step = build_step(job, plan, world)
        with _noted_masks(unwrap(step.model), pulse) as masks:
            for batch in step.feed:
                pulse.beat()
                try:
                    step(batch)
                except InputError as error:
                    refused = error
    return masks, refused


@contextmanager
def _noted_masks(model: nn.Module, pulse: Pulse) -> Iterator[list[Mask]]:
    """Note every call of dropout, which modules and functions all make through torch's one function."""
    masks: list[Mask] = []
    path = [""]
    hooks = []
    for name, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(lambda *_, name=name: path.append(name)))
        hooks.append(module.register_forward_hook(lambda *_: path.__delitem__(-1), always_call=True))
    right = functional.dropout

    def dropout(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # noqa: A002 - the name is torch's
        pulse.beat()
        state = torch.get_rng_state()
        kept = right(torch.ones_like(input), *args, **kwargs)  # of the input itself some entries may be 0 before
        masks.append(Mask(place=path[-1], given=fingerprint(input), dropped=_digest(kept)))
        torch.set_rng_state(state)
        return right(input, *args, **kwargs)

    functional.dropout = dropout
    try:
        yield masks
    finally:
        functional.dropout = right
        for hook in hooks:
            hook.remove()


def _digest(kept: Tensor) -> str:
    if kept.numel() < _FEWEST or bool(kept.all()):
        return ""
    return hashlib.blake2b((kept == 0).to(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()


def compare_masks(by_rank: Sequence[Sequence[Mask]], layout: Layout) -> Finding | None:
    """Compare the masks of ranks with each other; returns what is wrong with the first that is."""
    return _judge_tensor_peers(by_rank, layout) or _judge_data_peers(by_rank, layout)


def _judge_tensor_peers(by_rank: Sequence[Sequence[Mask]], layout: Layout) -> Finding | None:
    for group in layout.groups("tp"):
        for one, other in combinations(group, 2):
            for mine, theirs in zip(by_rank[one], by_rank[other], strict=True):
                if not mine.dropped and not theirs.dropped:
                    continue
                holds_same, drops_same = mine.given == theirs.given, mine.dropped == theirs.dropped
                if holds_same != drops_same:
                    return _finding(mine.place, (one, other), drops_same=drops_same)
    return None


def _judge_data_peers(by_rank: Sequence[Sequence[Mask]], layout: Layout) -> Finding | None:
    """Find ranks with other rows or other tokens that drop the same entries in every call: one may by chance."""
    for group in layout.groups("replicate", "shard", "cp"):
        for one, other in combinations(group, 2):
            pairs = [
                (mine, theirs.dropped)
                for mine, theirs in zip(by_rank[one], by_rank[other], strict=False)
                if mine.dropped or theirs.dropped
            ]
            if pairs and all(mine.dropped == dropped for mine, dropped in pairs):
                place = pairs[0][0].place
                return Finding(
                    cause="equal dropout seeds across data-parallel ranks",
                    evidence=f"{place} on ranks {one} and {other} dropped the same entries of different samples or"
                    f" tokens, and so did each of the {len(pairs)} calls of dropout in the step",
                    parameter=place,
                    step=0,
                    ranks=(one, other),
                )
    return None


def _finding(place: str, ranks: tuple[int, int], *, drops_same: bool) -> Finding:
    cause = "different dropout seeds outside the sharded region"
    dropped = "different entries of the same activation, so the ranks drift apart"
    if drops_same:
        cause = "equal dropout seeds across tensor-parallel ranks"
        dropped = "the same entries of different pieces of an activation"
    evidence = f"{place} on ranks {ranks[0]} and {ranks[1]} dropped {dropped}"
    return Finding(cause=cause, evidence=evidence, parameter=place, step=0, ranks=ranks)
