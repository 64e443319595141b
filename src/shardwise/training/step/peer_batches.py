"""Batches of model-parallel peers: the ranks of one data-parallel rank (tp, cp, pp) must train on the same samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardwise.data.rows import tensors
from shardwise.parallel.peer_inputs import CHECKED_PASSES, gathered, refuse_peers
from shardwise.recorder.fingerprint import fingerprints

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch.distributed as dist

    from shardwise.data.feed import MicroBatch, StepBatch

_FIX = "iterate over step.feed, or read samples by plan.layout.data_index(world.rank), with no random numbers of a rank"


class PeerBatches:
    """Compares the batches of the first steps over the ranks that share them."""

    def __init__(self, group: dist.ProcessGroup, cut: Callable[[Any], Any] | None) -> None:
        """`group` joins the peers on the host; `cut` takes this rank's tokens from a whole batch, None without cp."""
        self._group = group
        self._cut = cut
        self._num_steps = 0

    def __call__(self, batch: StepBatch) -> None:
        """Raise on every peer if batches differ; in the first steps communicates over their group, on each of them."""
        if self._num_steps >= CHECKED_PASSES:
            return
        self._num_steps += 1
        forms = [_form(micro_batch) for micro_batch in batch.micro_batches]
        is_slice = all(self._is_slice(micro_batch) for micro_batch in batch.micro_batches)
        (first, (value, _)), *rest = everyone = gathered(
            ((batch.denominator, batch.samples, forms), is_slice), self._group
        )
        others = [rank for rank, (theirs, _) in rest if theirs != value]
        refuse_peers(others, f"another batch than rank {first}", code="data.peer-batches-differ", fix=_FIX)
        whole = [rank for rank, (_, theirs) in everyone if not theirs]
        refuse_peers(
            whole,
            "something else than slices of the tokens, which cp splits",
            code="data.peer-tokens-unsliced",
            fix=_FIX,
        )

    def _is_slice(self, micro_batch: MicroBatch) -> bool:
        """Whether a micro-batch has this rank's tokens of the whole one; floats may be in another precision."""
        if self._cut is None:
            return True
        if micro_batch.whole is None:
            return False
        wanted, given = tensors(self._cut(micro_batch.whole)), tensors(micro_batch.batch)
        if [tensor.shape for tensor in wanted] != [tensor.shape for tensor in given]:
            return False
        pairs = zip(wanted, given, strict=True)
        return all(torch.equal(one, other.cpu()) for one, other in pairs if not one.is_floating_point())


def _form(micro_batch: MicroBatch) -> Any:
    """Return what is equal on ranks with the same batch."""
    whole = tensors(micro_batch.uncut)
    forms = [(tuple(tensor.shape), str(tensor.dtype)) for tensor in whole]
    return micro_batch.rows, micro_batch.filled, forms, fingerprints(whole)
