"""The gate of a pipeline stage, which replaces the layers of other stages and exits after the stage's last layer.

Every stage runs the user's forward. The gate returns the received activations as the output of the layer before the
stage's first layer, and exits forward with an exception after the stage's last layer. Tensors of other stages are NaN,
so that their use is detected. Two cases that give wrong results but no NaN raise an error: a stage boundary inside an
autograd function, which splits the graph, and iteration over modules, which would only find modules of this stage.
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
from shardwise.parallel.skeleton import joined
from shardwise.torch_private.dispatch import own_parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from shardwise.parallel.stages import Stage
    from shardwise.plans.pipeline import StageSplit


def nan_placeholder(tensor: Tensor, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Return a NaN placeholder with the shape of `tensor`, a tensor of another stage; it uses a few bytes.

    The code before the layers runs on every stage to compute masks and positions. Results that depend on absent
    parameters are discarded, and they are NaN, so that their use is detected.
    """
    if not tensor.is_floating_point():
        return torch.zeros((), dtype=tensor.dtype, device=device or tensor.device).expand(tensor.shape)
    return torch.full((), torch.nan, dtype=dtype or tensor.dtype, device=device or tensor.device).expand(tensor.shape)


class StageExit(BaseException):
    """Exits forward with the output of a stage's last layer; a BaseException, which user code does not catch."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output


class Gate:
    """Skips the layers of other stages during one forward pass and exits after this stage's last layer."""

    def __init__(self, layers: str, own: range) -> None:
        self.own = own
        self.layers = layers
        self.is_open = False
        self.received: Any = None
        self.foreign: list[str] = []
        """Modules of other stages that were used in this forward; their outputs are NaN."""
        self._nothing: Any = None
        self._has_grad = False
        self._seen: set[int] = set()

    def open(self, received: tuple[Tensor, ...], structure: Structure) -> None:
        """Start a forward pass with `received`, the tensors that the previous stage sent."""
        self.is_open, self._seen, self.foreign = True, set(), []
        self.received = unpack(received, structure)
        self._has_grad = torch.is_grad_enabled()
        self._nothing = unpack(tuple(nan_placeholder(tensor) for tensor in received), structure)

    def close(self) -> None:
        """End a forward pass."""
        self.is_open, self.received, self._nothing = False, None, None

    def name_of(self, number: int) -> str:
        """Return the name of a layer; the list of layers may be the model itself."""
        return joined(self.layers, str(number))

    @property
    def has_skipped_all(self) -> bool:
        """Whether all layers of earlier stages were called in this forward pass."""
        return len(self._seen) == self.own.start

    def skip(self, number: int) -> Any:
        """Return the output of a skipped layer: the received activations right before this stage's layers, else NaN."""
        if number in self._seen or number >= self.own.stop:
            raise JobError(
                f"forward calls layer {self.name_of(number)} twice or out of order",
                code="support.pipeline-layer-order",
                fix="call every layer once, in the order of the list, or set pp=1",
            )
        self._seen.add(number)
        if number != self.own.start - 1:
            return self._nothing
        self._check_reentrant(number)
        return self.received

    def check_foreign(self, path: str) -> None:
        """Record the use of a module of another stage; raise JobError if this stage's layers have started."""
        self.foreign.append(path)
        if self.is_open and self.own.start and self.has_skipped_all:
            raise JobError(
                f"{path} is used after {self.layers} but registered before it, so it is on the wrong pipeline stage",
                code="support.pipeline-registration-order",
                fix="register it again, after the layers: parent.name = parent._modules.pop(name)",
            )

    def leave(self, _: nn.Module, __: Any, output: Any) -> None:
        """Exit the user's forward after this stage's last layer; recomputation in backward does not exit."""
        if self.is_open:
            self._check_reentrant(self.own[-1])
            raise StageExit(output)

    def _check_reentrant(self, number: int) -> None:
        """Raise JobError for a stage boundary inside an autograd function, which gradients would not cross."""
        if self._has_grad and not torch.is_grad_enabled() and _is_inside_function():
            raise JobError(
                f"layer {self.name_of(number)} runs inside an autograd function, as with reentrant activation"
                " checkpointing, so gradients would not cross the boundary of the pipeline stage",
                code="support.pipeline-reentrant-checkpoint",
                fix="use checkpoint(..., use_reentrant=False) or the plan's recompute instead, or set pp=1",
            )

    def reject_iteration(self, path: str) -> None:
        """Raise JobError if forward iterated over all submodules of a module, some of which are on other stages."""
        if self.is_open:
            raise JobError(
                f"forward iterates over all submodules of {path or 'the model'}, for example with parameters()"
                " or modules(), but a pipeline stage has only some of them",
                code="support.pipeline-iterates-modules",
                fix="move computations over all parameters out of forward, or set pp=1",
            )


def _is_inside_function() -> bool:
    """Return whether a caller is the forward of a torch.autograd.Function."""
    frame = inspect.currentframe()
    while frame is not None:
        if isinstance(frame.f_locals.get("ctx"), FunctionCtx):
            return True
        frame = frame.f_back
    return False


def guard_iteration(module: nn.Module, gate: Gate, elsewhere: Iterable[str]) -> None:
    """Make modules with tensors on other stages raise an error when forward iterates over all their submodules.

    `elsewhere` contains the names of these tensors. `next(model.parameters())` remains allowed. parameters(), buffers()
    and modules() all call named_modules(), which passes `memo` in recursive calls.
    """
    incomplete = {""}
    for name in elsewhere:
        parents = name.split(".")[:-1]
        for depth in range(1, len(parents) + 1):
            incomplete.add(".".join(parents[:depth]))
    for path, child in list(module.named_modules()):
        if path in incomplete:
            child.__dict__["named_modules"] = _guarded(child.named_modules, gate, path)


def _guarded(walk: Callable[..., Iterator[Any]], gate: Gate, path: str) -> Callable[..., Iterator[Any]]:
    def named_modules(memo: Any = None, *args: Any, **kwargs: Any) -> Iterator[Any]:
        yield from walk(memo, *args, **kwargs)
        if memo is None:
            gate.reject_iteration(path)

    return named_modules


# Activations between pipeline stages are sent as the tensors of a layer's output and the structure of the output.


@dataclass(frozen=True)
class _At:
    """A placeholder for a tensor in a structure: its index among the sent tensors."""

    position: int


Structure = Any
"""A layer's output with every tensor replaced by its index; plain data that can be sent."""


def pack(output: Any, layer: str) -> tuple[tuple[Tensor, ...], Structure]:
    """Return the tensors of a layer's output, contiguous and with gradients enabled, and the output's structure."""
    tensors: list[Tensor] = []
    structure = _take(output, tensors, layer)
    return tuple(_ready(tensor) for tensor in tensors), structure


def unpack(tensors: tuple[Tensor, ...], structure: Structure) -> Any:
    """Rebuild a layer's output from the tensors and the structure that `pack` returned."""
    if isinstance(structure, _At):
        return tensors[structure.position]
    if isinstance(structure, dict):
        return {key: unpack(tensors, item) for key, item in structure.items()}
    if isinstance(structure, list | tuple):
        return type(structure)(unpack(tensors, item) for item in structure)
    return structure


def receive(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Make unused tensors receive zero gradients, because the sending stage waits for a gradient of each."""
    if len(tensors) < 2 or not torch.is_grad_enabled():
        return tensors
    received: tuple[Tensor, ...] = _Received.apply(*tensors)  # type: ignore[no-untyped-call]
    return received


class _Received(torch.autograd.Function):
    """An identity function whose backward receives zeros for unused outputs."""

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
    kind = type(value).__name__
    if isinstance(value, Tensor):
        kind = f"{value.dtype} tensor"
    raise JobError(
        f"layer {layer} returns a {kind}, which cannot be sent to the next pipeline stage",
        code="support.pipeline-layer-output",
        fix="return floating-point tensors in plain tuples, lists or dicts",
    )


def _ready(tensor: Tensor) -> Tensor:
    if torch.is_grad_enabled() and not tensor.requires_grad:
        tensor = tensor.detach().requires_grad_()  # the layers before are frozen, but the schedule sends a gradient
    return tensor.contiguous()


# Tied parameters, of which the first and the last pipeline stage each store a copy.
#
# An embedding that shares its weight with the head is used at both ends of a pipeline. As in Megatron-LM, both stages
# store it, start from the same values, and sum the gradients of the two copies once per step, after the data-parallel
# reduction. Equal gradients and optimizer states keep the copies equal. Both copies have the parameter's first name, so
# a checkpoint contains it once and restores both. Schedules that place both stages on one rank share one parameter.


class Ties(NamedTuple):
    """The tied parameters of a full model, and the subset that two stages store."""

    first_names: Mapping[str, str]
    """Further name of a parameter -> its first name."""
    shared: frozenset[str]
    """First names of the parameters of which the first and the last stage each store a copy."""


def find_ties(module: nn.Module, owners: Mapping[str, int], split: StageSplit, layers: str) -> Ties:
    """Return the tied parameters of a full model; raise JobError for ties that a pipeline does not support.

    `owners` maps every parameter name to its stage.
    """
    ends, inside = {0, split.num_stages - 1}, joined(layers, "")
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
                f"{original} and {name} are the same parameter, but they belong to pipeline stages {owners[original]}"
                f" and {owners[name]}",
                code="support.pipeline-tied-weights",
                fix="tie only modules before the layers to modules after them, or set pp=1",
            )
        shared.add(original)
    return Ties(first_names, frozenset(shared))


def share_copies(stages: Sequence[Stage]) -> None:
    """Share one parameter between tied stages of one rank; call after all transforms of the stages."""
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
    """Yield this rank's copies of tied parameters that the gradient norm counts on the rank of the first stage."""
    if any(stage.is_first for stage in stages):
        return
    for stage in stages:
        yield from (parameter for name, parameter in stage.named_parameters() if name in stage.model_ties.shared)


class TieSync:
    """Sums the gradients of tied parameters over the ranks of the first and the last stage."""

    def __init__(
        self, stages: Sequence[Stage], split: StageSplit, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        """Create a sync for this rank's `stages`; `group` has the ranks along pp, for tensors on `device`."""
        self._group = group
        self._device = device
        rank, ends = dist.get_rank(group), {split.ranks[0], split.ranks[-1]}
        self._peer: int | None = None
        self._parameters: list[nn.Parameter] = []
        if rank not in ends or len(ends) == 1:
            return
        (self._peer,) = ends - {rank}
        named: dict[str, nn.Parameter] = {}
        for stage in stages:
            own = dict(stage.named_parameters())
            for name in stage.model_ties.shared & own.keys():
                if own[name].requires_grad:
                    named[name] = own[name]
        self._parameters = [named[name] for name in sorted(named)]

    @torch.no_grad()
    def finish(self) -> None:
        """Sum the gradients after the last backward of a step. Communicates between the two ranks; call on both."""
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            mine = local(parameter.grad)
            if not mine.numel():
                continue
            sent = mine.to(self._device).contiguous()
            received = torch.empty_like(sent)
            # The sum of two numbers does not depend on their order, so both ranks compute the same bits.
            exchange = [
                dist.P2POp(dist.isend, sent, group=self._group, group_peer=self._peer),
                dist.P2POp(dist.irecv, received, group=self._group, group_peer=self._peer),
            ]
            for work in dist.batch_isend_irecv(exchange):
                work.wait()
            mine.add_(received)
