"""The gate of a pipeline stage: where its layers meet those of its neighbours, and what may not cross there.

Every stage runs the user's own forward. The gate replaces the output of the layer before the stage's first by what the
neighbour sent, and leaves forward, by an exception, after the stage's last layer. What a stage does not hold is NaN, so
that its use shows; what would go wrong without a NaN is refused here: a boundary inside an autograd function, which
cuts the graph, and a walk over parts, of which only this stage's would be found.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from shardwise.errors import JobError
from shardwise.parallel.parcel import Structure, unpack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


def stand_in(tensor: Tensor, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Return NaN in the shape of `tensor`, in a few bytes: for what lives on another stage.

    The part before the layers runs on every stage, so that masks and positions are there; what it makes of
    parameters it has not is thrown away, and is NaN, so that nothing can use it unnoticed.
    """
    if not tensor.is_floating_point():
        return torch.zeros((), dtype=tensor.dtype, device=device or tensor.device).expand(tensor.shape)
    return torch.full((), torch.nan, dtype=dtype or tensor.dtype, device=device or tensor.device).expand(tensor.shape)


class Left(BaseException):
    """Carries the output of a stage's last layer out of the user's forward; no Exception, which users catch."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output


class Gate:
    """Where the layers of a stage meet those of its neighbours, during one forward."""

    def __init__(self, layers: str, own: range) -> None:
        self.own = own
        self.layers = layers
        self.is_open = False
        self.received: Any = None
        self.strangers: list[str] = []
        """Parts of other stages that were used in this forward; what they made is NaN."""
        self._nothing: Any = None
        self._has_grad = False
        self._seen: set[int] = set()

    def open(self, received: tuple[Tensor, ...], structure: Structure) -> None:
        """Begin a forward with the output of the layer before this stage's first."""
        self.is_open, self._seen, self.strangers = True, set(), []
        self.received = unpack(received, structure)
        self._has_grad = torch.is_grad_enabled()
        self._nothing = unpack(tuple(stand_in(tensor) for tensor in received), structure)

    def close(self) -> None:
        """End a forward."""
        self.is_open, self.received, self._nothing = False, None, None

    def name_of(self, number: int) -> str:
        """Return the name of a layer; the list of layers may be the model itself."""
        return f"{self.layers}.{number}" if self.layers else str(number)

    @property
    def has_skipped_all(self) -> bool:
        """Whether every layer before this stage's own was called, as the first to run must be."""
        return len(self._seen) == self.own.start

    def skip(self, number: int) -> Any:
        """Stand for a layer of another stage: return what the last of them did, for those before it NaN."""
        if number in self._seen or number >= self.own.stop:
            raise JobError(
                f"layer {self.name_of(number)} runs twice or out of order in one forward",
                code="support.pipeline-layer-order",
                fix="pipelines need every layer once, in the order of the list; use pp = 1",
            )
        self._seen.add(number)
        if number != self.own.start - 1:
            return self._nothing
        self._refuse_reentrant(number)
        return self.received

    def meet_stranger(self, path: str) -> None:
        """Note that a part of another stage is used; refuse it where this stage's layers have begun."""
        self.strangers.append(path)
        if self.is_open and self.own.start and self.has_skipped_all:
            raise JobError(
                f"{path} is registered before {self.layers} and used after it, so it is on the wrong pipeline stage",
                code="support.pipeline-registration-order",
                fix="register it again, behind the layers: parent.name = parent._modules.pop(name)",
            )

    def leave(self, _: nn.Module, __: Any, output: Any) -> None:
        """Leave the user's forward after this stage's last layer; a layer run again in backward stays."""
        if self.is_open:
            self._refuse_reentrant(self.own[-1])
            raise Left(output)

    def _refuse_reentrant(self, number: int) -> None:
        """Refuse a boundary inside an autograd function: activations would pass it, and gradients would not."""
        if self._has_grad and not torch.is_grad_enabled() and _is_inside_function():
            raise JobError(
                f"layer {self.name_of(number)} runs inside an autograd function, as reentrant activation checkpointing"
                " runs it, and no gradient would cross the pipeline stage's boundary there",
                code="support.pipeline-reentrant-checkpoint",
                fix="use checkpoint(..., use_reentrant=False), leave recompute to the plan, or use pp = 1",
            )

    def refuse_walk(self, path: str) -> None:
        """Refuse a forward that has walked over all parts of a module, some of which are on other stages."""
        if self.is_open:
            raise JobError(
                f"the forward pass iterates over all parts of {path or 'the model'}, by parameters() or modules(), and"
                " a pipeline stage holds only some of them",
                code="support.pipeline-iterates-modules",
                fix="compute what needs all parameters outside of the model, or use pp = 1",
            )


def _is_inside_function() -> bool:
    """Whether one of the callers is the forward of a torch.autograd.Function."""
    frame = inspect.currentframe()
    while frame is not None:
        if isinstance(frame.f_locals.get("ctx"), FunctionCtx):
            return True
        frame = frame.f_back
    return False


def guard_walks(module: nn.Module, gate: Gate, elsewhere: Iterable[str]) -> None:
    """Have parts that lack something of `elsewhere` (names of tensors on other stages) refuse a complete walk.

    `next(model.parameters())`, which only looks, stays allowed. parameters(), buffers() and modules() all go through
    named_modules(), which passes `memo` where it calls itself.
    """
    incomplete = {""}
    for name in elsewhere:
        parents = name.split(".")[:-1]
        incomplete |= {".".join(parents[:depth]) for depth in range(1, len(parents) + 1)}
    for path, part in list(module.named_modules()):
        if path in incomplete:
            part.__dict__["named_modules"] = _guarded(part.named_modules, gate, path)


def _guarded(walk: Callable[..., Iterator[Any]], gate: Gate, path: str) -> Callable[..., Iterator[Any]]:
    def named_modules(memo: Any = None, *args: Any, **kwargs: Any) -> Iterator[Any]:
        yield from walk(memo, *args, **kwargs)
        if memo is None:
            gate.refuse_walk(path)

    return named_modules
