"""The Step protocol and what a step reports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from shardwise.data.cursor import Cursor
    from shardwise.data.feed import Feed, StepBatch


class StepReport(msgspec.Struct, frozen=True, gc=False):
    """What one optimizer step did. Tensors stay on the device until somebody reads them."""

    number: int
    """Counted from 0 over the whole training."""
    cursor: Cursor
    """Where the step's samples begin in the stream."""
    loss_sum: Tensor
    """Over this rank's real rows."""
    samples: int
    """Real samples over all readers."""
    denominator: int
    """What the loss counts, over all readers."""
    lr: float
    """Learning rate of the first parameter group."""
    grad_norm: Tensor | None
    """Norm of the whole gradient before clipping; None when nothing needed it."""
    skipped: Tensor | float
    """1.0 when the gradient was not finite and the optimizer stood still, on every rank alike; else 0.0."""

    @property
    def loss_share(self) -> Tensor:
        """This rank's part of the loss; the parts of all readers add up to the mean over the global batch."""
        return self.loss_sum / max(1, self.denominator)


class Step(Protocol):
    """One optimizer step under any strategy; the mode is chosen once, at build."""

    feed: Feed
    model: nn.Module
    optimizer: Optimizer

    def __call__(self, batch: StepBatch) -> StepReport:
        """Train on one global batch; called on every rank."""
