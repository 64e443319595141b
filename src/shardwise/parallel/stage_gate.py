"""The gate of a pipeline stage: between its layers and those of its neighbours, and what may not pass it.

Every stage runs the user's own forward. The gate replaces the output of the layer before the stage's first by what the
neighbour sent, and leaves forward, by an exception, after the stage's last layer. What a stage does not have is NaN, so
that its use shows; what would go wrong without a NaN is refused here: a boundary inside an autograd function, which
splits the graph, and a walk over modules, of which only this stage's would be found.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from shardwise.errors import JobError
from shardwise.parallel.gradsync import local
from shardwise.torch_private.modules import own_parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from shardwise.parallel.stages import Stage
    from shardwise.plans.pipeline import StageSplit


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
    """The boundary between the layers of a stage and its neighbours', during one forward."""

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

    def check_foreign(self, path: str) -> None:
        """Note that a module of another stage is used; refuse it where this stage's layers have begun."""
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
        """Refuse a forward that has walked over all submodules of a module, some of which are on other stages."""
        if self.is_open:
            raise JobError(
                f"the forward pass iterates over all submodules of {path or 'the model'}, by parameters() or modules(),"
                " and a pipeline stage has only some of them",
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
    """Have modules that lack something of `elsewhere` (names of tensors on other stages) refuse a complete walk.

    `next(model.parameters())`, which only reads, stays allowed. parameters(), buffers() and modules() all go through
    named_modules(), which passes `memo` where it calls itself.
    """
    incomplete = {""}
    for name in elsewhere:
        parents = name.split(".")[:-1]
        incomplete |= {".".join(parents[:depth]) for depth in range(1, len(parents) + 1)}
    for path, child in list(module.named_modules()):
        if path in incomplete:
            child.__dict__["named_modules"] = _guarded(child.named_modules, gate, path)


def _guarded(walk: Callable[..., Iterator[Any]], gate: Gate, path: str) -> Callable[..., Iterator[Any]]:
    def named_modules(memo: Any = None, *args: Any, **kwargs: Any) -> Iterator[Any]:
        yield from walk(memo, *args, **kwargs)
        if memo is None:
            gate.refuse_walk(path)

    return named_modules


# What travels between pipeline stages: all tensors of a layer's output, and how they were arranged.


@dataclass(frozen=True)
class _At:
    """Stands in a structure for the tensor at a position."""

    position: int


Structure = Any
"""A layer's output with every tensor replaced by its position; plain data, so that it can be sent."""


def pack(output: Any, layer: str) -> tuple[tuple[Tensor, ...], Structure]:
    """Take the tensors of a layer's output out of it, ready to be sent and to get a gradient back."""
    tensors: list[Tensor] = []
    structure = _take(output, tensors, layer)
    return tuple(_ready(tensor) for tensor in tensors), structure


def unpack(tensors: tuple[Tensor, ...], structure: Structure) -> Any:
    """Put tensors back where `pack` found them."""
    if isinstance(structure, _At):
        return tensors[structure.position]
    if isinstance(structure, dict):
        return {key: unpack(tensors, item) for key, item in structure.items()}
    if isinstance(structure, list | tuple):
        return type(structure)(unpack(tensors, item) for item in structure)
    return structure


def receive(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Have tensors that nobody uses get a gradient of zeros, since their sender waits for one."""
    if len(tensors) < 2 or not torch.is_grad_enabled():
        return tensors
    received: tuple[Tensor, ...] = _Received.apply(*tensors)  # type: ignore[no-untyped-call]
    return received


class _Received(torch.autograd.Function):
    """The identity, whose backward is called with zeros for unused outputs."""

    @staticmethod
    def forward(_: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients


def _take(value: Any, tensors: list[Tensor], layer: str) -> Structure:
    if isinstance(value, Tensor) and value.is_floating_point():
        tensors.append(value)
        return _At(len(tensors) - 1)
    if type(value) is dict:
        return {key: _take(item, tensors, layer) for key, item in value.items()}
    if type(value) in {list, tuple}:
        return type(value)(_take(item, tensors, layer) for item in value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    kind = f"{value.dtype} tensor" if isinstance(value, Tensor) else type(value).__name__
    raise JobError(
        f"layer {layer} returns a {kind}, which cannot go to the next pipeline stage",
        code="support.pipeline-layer-output",
        fix="return floating-point tensors, in plain tuples, lists or dicts",
    )


def _ready(tensor: Tensor) -> Tensor:
    if torch.is_grad_enabled() and not tensor.requires_grad:
        tensor = tensor.detach().requires_grad_()  # all in front of it is frozen; the schedule sends a gradient anyway
    return tensor.contiguous()


# Parameters tied across pipeline stages: the first and the last stage keep a copy each.
#
# An embedding whose weight is the head's too is used on both ends of a pipeline. As in Megatron-LM, both stages
# hold it, start from the same values, and sum the gradients of the two copies once a step, after data-parallel
# ranks have summed theirs; equal gradients and equal optimizer states keep the copies equal. Both go by the
# parameter's first name, so a checkpoint has one of them and fills both. On schedules that put both stages on one
# rank, one parameter serves both.


class Ties(NamedTuple):
    """Which parameters of a whole model have several names, and which of them two stages have."""

    first_names: Mapping[str, str]
    """Every further name of a parameter, with its first."""
    shared: frozenset[str]
    """First names of those of which the first and the last stage have a copy each."""


def find_ties(module: nn.Module, owners: Mapping[str, int], split: StageSplit, layers: str) -> Ties:
    """Return the ties of a whole model; those that its stages cannot have are refused by name.

    `owners` gives the stage of every name.
    """
    ends, inside = {0, split.num_stages - 1}, f"{layers}." if layers else ""
    first: dict[int, str] = {}
    first_names, shared = {}, set()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        original = first.setdefault(id(parameter), name)
        if original == name:
            continue
        first_names[name] = original
        if owners[name] == owners[original]:
            continue
        in_layers = name.startswith(inside) or original.startswith(inside)
        if in_layers or {owners[name], owners[original]} != ends:
            raise JobError(
                f"{original} and {name} are one parameter, and the pipeline puts them on stages {owners[original]} and"
                f" {owners[name]}",
                code="support.pipeline-tied-weights",
                fix="tie only what comes before the layers to what comes after them, or use pp = 1",
            )
        shared.add(original)
    return Ties(first_names, frozenset(shared))


def share_copies(stages: Sequence[Stage]) -> None:
    """Have stages of one rank use one parameter where they are tied; called after all transforms of the stages."""
    first: dict[str, nn.Parameter] = {}
    for stage in stages:
        for name, parameter in list(stage.named_parameters()):
            kept = first.setdefault(name, parameter)
            if kept is parameter:
                continue
            for child in stage.modules():
                own = own_parameters(child)
                own |= {key: kept for key, value in own.items() if value is parameter}


def tied_copies(stages: Sequence[Stage]) -> Iterator[nn.Parameter]:
    """Yield the parameters that another rank's first stage has as well, and counts."""
    if any(stage.is_first for stage in stages):
        return
    for stage in stages:
        yield from (parameter for name, parameter in stage.named_parameters() if name in stage.model_ties.shared)


class TieSync:
    """Sums the gradients of tied parameters over the ranks of the first and the last stage."""

    def __init__(
        self, stages: Sequence[Stage], split: StageSplit, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        """`stages` are this rank's; `group` joins the ranks along pp and sends tensors of `device`."""
        self._group = group
        self._device = device
        rank, ends = dist.get_rank(group), {split.ranks[0], split.ranks[-1]}
        self._peer = next(iter(ends - {rank}), None) if rank in ends else None
        named: dict[str, nn.Parameter] = {}
        for stage in stages:
            trained = {name: parameter for name, parameter in stage.named_parameters() if parameter.requires_grad}
            named |= {name: trained[name] for name in stage.model_ties.shared & trained.keys()}
        self._parameters = [named[name] for name in sorted(named)] if self._peer is not None else []

    @torch.no_grad()
    def finish(self) -> None:
        """Sum once a step, after the last backward; communicates between the two ranks, on both."""
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            mine = local(parameter.grad)
            if not mine.numel():
                continue
            sent = mine.to(self._device).contiguous()
            received = torch.empty_like(sent)
            # The sum of two numbers is the same in either order, so both ranks get the same bits.
            exchange = [
                dist.P2POp(dist.isend, sent, group=self._group, group_peer=self._peer),
                dist.P2POp(dist.irecv, received, group=self._group, group_peer=self._peer),
            ]
            for work in dist.batch_isend_irecv(exchange):
                work.wait()
            mine.add_(received)
