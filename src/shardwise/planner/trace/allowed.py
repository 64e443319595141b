"""What a job's model allows beside what every model does: slices of its sequences, and a loss fused with its head."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shardwise.data.rows import tensors
from shardwise.data.tokens import TOKENS, TokenCut, check_token_loss
from shardwise.errors import ShardwiseError
from shardwise.layout import Layout
from shardwise.parallel.context import check_context
from shardwise.parallel.fused_loss import DeferredLogits, find_head
from shardwise.planner.model.shape import Head
from shardwise.planner.trace.amounts import footprint_of, states_of
from shardwise.planner.trace.ledger import Ledger
from shardwise.planner.trace.rehearsal import SAMPLES, ReachedBlock, is_cut, put_back, run_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor, nn

    from shardwise.planner.trace.rehearsal import TracedModel

CP_DEGREES = (2, 4, 8, 16, 32, 64)


def length_of(batch: Any) -> int | None:
    """Return the tokens of a sample, padding included; None where tensors are no sequences, or not of one length."""
    lengths = {int(each.shape[TOKENS]) for each in tensors(batch) if TOKENS < each.ndim < 4}  # 4: images
    return lengths.pop() if len(lengths) == 1 else None


def context_degrees(subject: TracedModel, heads: int) -> tuple[int, ...]:
    """Return the context-parallel degrees that the job's model of so many heads, its loss and its samples allow."""
    fits = [cp for cp in CP_DEGREES if heads and heads % cp == 0]
    return (1, *(cp for cp in fits if _is_sliceable(subject, cp)))


def _is_sliceable(subject: TracedModel, cp: int) -> bool:
    job = subject.job
    try:
        check_token_loss(job)
        check_context(subject.model, Layout(cp=cp), own_loss=not job.loss.by_row)
        TokenCut(index=0, size=cp, loss=job.loss, metrics=job.metrics)(subject.batch(max(SAMPLES)))
    except Exception:  # noqa: BLE001 - a count of the user's may raise anything at slices
        return False
    return True


def head_of(subject: TracedModel) -> Head | None:
    """Return the model's head as a fused loss sees it, None where the job's loss cannot be fused."""
    try:
        head = find_head(subject.model)
    except ShardwiseError:
        return None
    if not _is_fusable(subject, head):
        return None
    sizes: list[tuple[int, int]] = []

    def stop(hidden: Tensor) -> Tensor:
        sizes.append((hidden.numel() // head.in_features, hidden.element_size()))
        raise ReachedBlock(hidden)

    with _forward_of(head, stop):
        passes = [run_model(subject, samples) for samples in SAMPLES]
    name = next(name for name, part in subject.model.named_modules() if part is head)
    rows, width = sizes[0]
    return Head(
        words=head.out_features,
        width=head.in_features,
        rows=rows // SAMPLES[0],
        hidden_bytes=width,
        cut=is_cut(subject.model, f"{name}.weight", subject.styles),
        trained=head.weight.requires_grad,
        before=footprint_of(states_of(passes, len(passes[0].tallies) - 1)),
    )


@dataclass(frozen=True, eq=False)
class _Probe(DeferredLogits):
    """Deferred logits that note each cross entropy a fused loss would take them for; whatever else is refused."""

    taken: list[bool]

    def entropy_sum(self, target: Tensor, ignore: int) -> Tensor:  # noqa: ARG002 - as the real one
        """Note that it was asked for."""
        self.taken.append(True)
        return self.hidden.new_zeros((), dtype=torch.float32)


def _is_fusable(subject: TracedModel, head: nn.Linear) -> bool:
    """Whether the job's loss takes cross entropy of its logits and does nothing else with them."""
    batch, taken = subject.batch(SAMPLES[0]), list[bool]()
    deferred = _forward_of(head, lambda hidden: _Probe(hidden, head, taken))
    with deferred, torch.no_grad(), subject.rules(), Ledger(SAMPLES[0]):
        try:
            subject.job.loss.sum_of(subject.job.forward(subject.model, batch), batch)
        except Exception:  # noqa: BLE001 - a loss of the user's may raise anything at logits that are none
            return False
    return bool(taken)


@contextmanager
def _forward_of(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Give a module another forward for a while."""
    before = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        put_back(module, before)
