"""Tensor parallelism: matrices split over ranks by column and row, as in Megatron-LM, on plain activations.

Every parameter becomes a DTensor on the tp mesh, split or whole, so that optimizers, clipping and FSDP2 see one kind.
Modules compute on local tensors; activations between them are plain and communicated by the rules. Each gradient comes
out of backward with the placement of its parameter: split for split ones, already summed for whole ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn import functional

from shardwise.errors import JobError, PlanError
from shardwise.parallel.collectives import all_gathered, all_reduced, own_shard, sum_scattered
from shardwise.parallel.counter_dropout import ShardedRegion, sharded_region
from shardwise.parallel.lora import adapter_output, has_adapter
from shardwise.parallel.tensor_gradients import ShardedRandom, lend_parameters, uses_dropout
from shardwise.parallel.tensor_rules import (
    SPLIT_FACTORS,
    block_patterns,
    check_tensor,
    divide_heads,
    is_transposed,
    matches,
    split_dim,
    styles_by_name,
    within,
)
from shardwise.torch_private.dispatch import tree_leaves
from shardwise.torch_private.modules import own_parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

_Way = tuple["Placement", "Placement"]

TOKENS = 1
"""The dimension of [batch, tokens, width] that sequence parallelism splits."""


def tensor_parallel(module: nn.Module, mesh: DeviceMesh, rules: Mapping[str, str], *, sequence: bool) -> nn.Module:
    """Split `module` over the 1-D `mesh` by `rules`; communicates over it, called on every rank of it.

    Parameters on the meta device stay there; others take the values of the mesh's first rank. What enters and leaves
    the module stays plain and whole, and must be equal on all ranks of the mesh. With `sequence` the stream between
    the split modules of repeated blocks is split by tokens.
    """
    check_tensor(module, mesh.size(), rules, sequence=sequence)
    styles = styles_by_name(module, rules)
    flow = _Flow(
        mesh=mesh,
        random=_random(module, mesh),
        blocks=block_patterns(rules) if sequence else (),
    )
    _distribute(module, mesh, styles)
    for name, child in list(module.named_modules()):
        _install(child, name, styles, flow)
    lend_parameters(module, _local)
    for pattern in flow.blocks:
        _split_stream(module, pattern, flow)
    for name, style in styles.items():
        if style == "sequence" and sequence:
            _hand_out_whole(module.get_submodule(name), flow)
        elif style == "heads":
            divide_heads(module.get_submodule(name), mesh.size())
    if flow.random is not None:
        for scope in _scopes(module, styles):
            _leave_in_the_end(scope, flow.random)
    _explain_mixing(module)
    return module


def _random(module: nn.Module, mesh: DeviceMesh) -> ShardedRandom | ShardedRegion | None:
    """Return who is to know when a split region begins and ends; nobody where nothing is dropped."""
    return sharded_region(module) or (ShardedRandom(mesh) if uses_dropout(module) else None)


class _Entry:
    """Hands one whole activation to all column modules that read it: its gradient is summed once, not per module."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._last: tuple[Tensor, Tensor] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if not (torch.is_grad_enabled() and x.requires_grad):
            return x
        if self._last is not None and self._last[0] is x:
            return self._last[1]
        entered = _convert(x, self._mesh, Replicate(), Replicate(), grad=Partial())
        self._last = (x, entered)
        return entered

    def forget(self) -> None:
        """Let go of the activation; called where the split region ends."""
        self._last = None


@dataclass(frozen=True, kw_only=True, eq=False)
class _Flow:
    """What the modules of one parallel model share: the mesh, the random numbers, and how activations travel."""

    mesh: DeviceMesh
    random: ShardedRandom | ShardedRegion | None
    blocks: tuple[str, ...]
    """Patterns of the blocks whose stream is split by tokens; empty without sequence parallelism."""
    entry: _Entry = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "entry", _Entry(self.mesh))

    def begin_cut(self) -> None:
        """Go from equal to own random numbers, after a column module."""
        if self.random is not None:
            self.random.enter()

    def end_cut(self) -> None:
        """Go back to equal random numbers, before a row module."""
        self.entry.forget()
        if self.random is not None:
            self.random.leave()


def _convert(
    x: Tensor, mesh: DeviceMesh, source: Placement, target: Placement, *, grad: Placement, width: int | None = None
) -> Tensor:
    """Bring a plain activation from one placement to another; communicates over `mesh`, also backward.

    `grad` is the placement in which the gradient of the result comes back; `width` is the whole last dimension,
    needed where ranks have uneven shards of it.
    """
    back = Replicate() if isinstance(source, Partial) else source
    return _Move.apply(x, mesh, (source, target), (grad, back), width)  # type: ignore[no-any-return, no-untyped-call]


class _Move(torch.autograd.Function):
    """Placement to placement, forward and backward.

    DTensor's own redistribution would do, but costs 0.1 ms of Python a call, hands out views, which FSDP2 warns of when
    they leave a sharded module, and dies on gloo with CUDA tensors (torch 2.11).
    """

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd functions take no keywords
        ctx: Any, x: Tensor, mesh: DeviceMesh, there: _Way, back: _Way, width: int | None
    ) -> Tensor:
        ctx.mesh, ctx.back, ctx.width = mesh, back, width
        return _move(x, mesh, there, width)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _move(grad, ctx.mesh, ctx.back, ctx.width), None, None, None, None


def _move(x: Tensor, mesh: DeviceMesh, way: _Way, width: int | None) -> Tensor:
    source, target = way
    group = mesh.get_group()
    if source == target:
        return x.view_as(x)
    if isinstance(source, Partial):
        return sum_scattered(x, target.dim, group) if isinstance(target, Shard) else all_reduced(x, group)
    if isinstance(source, Shard):
        return all_gathered(x, source.dim, group, width)
    return own_shard(x, target.dim, group)  # type: ignore[attr-defined]


def _local(parameter: Tensor | None, *, summed: bool = False) -> Tensor | None:
    """Return this rank's shard of a parameter; `summed` when each rank's gradient is a share of a whole one."""
    if not isinstance(parameter, DTensor):
        return parameter
    piece = parameter.to_local(grad_placements=parameter.placements)
    if summed:  # free forward, one all_reduce backward
        return _convert(piece, parameter.device_mesh, Replicate(), Replicate(), grad=Partial())
    return piece


def _distribute(module: nn.Module, mesh: DeviceMesh, styles: Mapping[str, str]) -> None:
    """Make every parameter a DTensor, keeping shared ones shared; communicates over `mesh` unless on meta."""
    made: dict[int, nn.Parameter] = {}
    for name, child in module.named_modules():
        for kind, parameter in child.named_parameters(recurse=False):
            if id(parameter) not in made:
                split = split_dim(child, styles.get(name), kind)
                placement = Replicate() if split is None else Shard(split)
                placed = distribute_tensor(parameter.detach(), mesh, [placement])
                made[id(parameter)] = nn.Parameter(placed, requires_grad=parameter.requires_grad)
            own_parameters(child)[kind] = made[id(parameter)]  # register_parameter would refuse a shared one


def _install(child: nn.Module, name: str, styles: Mapping[str, str], flow: _Flow) -> None:
    """Give one module the forward that its style asks for."""
    if next(child.parameters(recurse=False), None) is None:
        return  # nothing to split; of a pipeline's stage also modules that live on another
    style = styles.get(name)
    in_block = within(flow.blocks, name)
    if style in {"column", "column_gathered"}:
        child.forward = _column(child, flow, gathered=style == "column_gathered", in_block=in_block)
    elif style in {"row", "row_split"}:
        child.forward = _row(child, flow, split=style == "row_split", in_block=in_block)
    elif style == "vocab":
        child.forward = _vocab(child, flow)
    else:
        above = [".".join(name.split(".")[:depth]) for depth in range(1, name.count(".") + 2)]
        summed = style not in SPLIT_FACTORS and (in_block or any(styles.get(outer) == "summed" for outer in above))
        child.forward = _whole(child, summed=summed)


def _column(module: Any, flow: _Flow, *, gathered: bool, in_block: bool) -> Callable[[Tensor], Tensor]:
    """Split outputs over ranks. Inside a split stream the norm before has gathered the input, and sums its gradient."""
    width = module.weight.shape[split_dim(module, "column", "weight")]

    def forward(input: Tensor) -> Tensor:  # noqa: A002 - the name is torch's
        x = input if in_block else flow.entry(input)
        if flow.random is not None and has_adapter(module):
            flow.random.leave()  # what the adapter drops is whole, also where a column before has begun the split
        output = _linear(module, x, _local(module.bias))
        if gathered:
            flow.entry.forget()
            return _convert(output, flow.mesh, Shard(output.ndim - 1), Replicate(), grad=Replicate(), width=width)
        if module.training:
            flow.begin_cut()
        return output

    return forward


def _row(module: Any, flow: _Flow, *, split: bool, in_block: bool) -> Callable[[Tensor], Tensor]:
    """Inputs split over ranks, outputs summed; the bias is added once, after the sum."""

    def forward(input: Tensor) -> Tensor:  # noqa: A002 - the name is torch's
        last = Shard(input.ndim - 1)
        x = _convert(input, flow.mesh, Replicate(), last, grad=last) if split else input
        if split and not in_block and module.training and has_adapter(module):
            flow.begin_cut()
        share = _linear(module, x, None)  # inside the split region: its adapter drops what is each rank's own
        if not in_block:
            flow.end_cut()
        target = Shard(TOKENS) if in_block else Replicate()
        output = _convert(share, flow.mesh, Partial(), target, grad=target)
        bias = _local(module.bias, summed=in_block)
        return output if bias is None else output + bias.to(output.dtype)  # under autocast it is the wider one

    return forward


def _linear(module: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    weight: Any = _local(module.weight)
    output = functional.linear(x, weight.T if is_transposed(module) else weight, bias)
    return output + adapter_output(module, x) if has_adapter(module) else output


def _vocab(module: Any, flow: _Flow) -> Callable[[Tensor], Tensor]:
    """Each rank looks up the tokens of its rows and passes zeros for the others."""
    size = module.weight.shape[0]
    start = min(size, flow.mesh.get_local_rank() * -(-size // flow.mesh.size()))  # as DTensor chunks: ceil first

    def forward(input: Tensor) -> Tensor:  # noqa: A002 - the name is torch's
        weight: Any = _local(module.weight)
        inside = (input >= start) & (input < start + len(weight))
        elsewhere = (input >= 0) & (input < size) & ~inside  # a token outside the vocabulary still raises below
        padding = module.padding_idx if module.padding_idx is None else module.padding_idx - start
        own_padding = padding if padding is not None and 0 <= padding < len(weight) else None
        rows = functional.embedding(torch.where(elsewhere, 0, input - start), weight, own_padding)
        share = rows.masked_fill(~inside[..., None], 0)
        return _convert(share, flow.mesh, Partial(), Replicate(), grad=Replicate())

    return forward


def _whole(module: nn.Module, *, summed: bool) -> Callable[..., Any]:
    """The module's own forward on plain parameters."""
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        own = dict(own_parameters(module))  # what the module reads as self.weight
        for kind, parameter in own.items():
            own_parameters(module)[kind] = _local(parameter, summed=summed)  # type: ignore[assignment]
        try:
            return inner(*args, **kwargs)
        finally:
            own_parameters(module).update(own)

    return forward


def _hand_out_whole(norm: nn.Module, flow: _Flow) -> None:
    """Have a norm that runs on this rank's tokens hand all tokens to the column modules after it."""
    inner = norm.forward

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        return _convert(inner(*args, **kwargs), flow.mesh, Shard(TOKENS), Replicate(), grad=Partial())

    norm.forward = forward


def _split_stream(module: nn.Module, pattern: str, flow: _Flow) -> None:
    """Split the stream by tokens before the first block of a stack and make it whole after the last."""
    stack = [child for name, child in module.named_modules() if matches(pattern, name)]
    blocks = [child for child in stack if next(child.parameters(), None) is not None]  # others are on other stages
    for index, block in enumerate(blocks):
        block.forward = _block(block, flow, first=index == 0, last=index == len(blocks) - 1)


def _block(block: nn.Module, flow: _Flow, *, first: bool, last: bool) -> Callable[..., Any]:
    inner = block.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not args:
            raise JobError(
                f"{type(block).__name__} is called by keywords alone; sequence parallelism splits the first argument",
                code="support.sequence-parallel-keywords",
                fix="pass the hidden states as its first argument, or set sequence_parallel = false",
            )
        x, *others = args
        if any(isinstance(other, Tensor) and other.requires_grad for other in tree_leaves((others, kwargs))):
            raise JobError(
                f"{type(block).__name__} gets a second tensor with a gradient, and sequence parallelism cannot sum it",
                code="support.sequence-parallel-second-gradient",
                fix="set sequence_parallel = false",
            )
        if first:
            _check_tokens(x, flow.mesh.size())
            x = _convert(x, flow.mesh, Replicate(), Shard(TOKENS), grad=Shard(TOKENS))
        if block.training:
            flow.begin_cut()
        output = inner(x, *others, **kwargs)
        flow.end_cut()
        if not last:
            return output
        head, *rest = output if isinstance(output, tuple) else (output,)
        head = _convert(head, flow.mesh, Shard(TOKENS), Replicate(), grad=Replicate())
        return (head, *rest) if isinstance(output, tuple) else head

    return forward


def _check_tokens(x: Tensor, degree: int) -> None:
    tokens = x.shape[TOKENS]
    if tokens % degree:
        raise PlanError(
            f"sequences of {tokens} tokens do not divide by tp={degree}, which sequence parallelism needs",
            code="plan.sequence-not-divisible",
            fix=f"use sequences of {tokens + -tokens % degree} tokens, or set sequence_parallel = false",
        )


def _scopes(module: nn.Module, styles: Mapping[str, str]) -> list[nn.Module]:
    """The modules at whose end every split region inside has ended: repeated blocks, else the whole module."""
    kinds: dict[str, set[str]] = {}
    for name, style in styles.items():
        kinds.setdefault(_numbered(name.rpartition(".")[0]), set()).add(style)
    scopes = {name if {"column", "row"} <= found else "" for name, found in kinds.items()}
    return [module.get_submodule(name) for name in scopes]


def _numbered(name: str) -> str:
    """Return the outermost numbered module around a name, such as blocks.3, or the root."""
    components = name.split(".")
    depth = next((depth for depth, component in enumerate(components, 1) if component.isdigit()), 0)
    return ".".join(components[:depth])


def _leave_in_the_end(module: nn.Module, random: ShardedRandom | ShardedRegion) -> None:
    """Leave the split region however the module ends: recompute stops a block early by an exception."""
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        try:
            return inner(*args, **kwargs)
        finally:
            random.leave()

    module.forward = forward


def _explain_mixing(module: nn.Module) -> None:
    """Say what to do when a module reads a parameter of another: it finds a DTensor there."""
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        try:
            return inner(*args, **kwargs)
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            raise JobError(
                "under tensor parallelism a module cannot use the parameter of another directly",
                code="support.tp-foreign-parameter",
                fix="call the module that owns it, such as self.embed(tokens) in place of self.embed.weight[tokens]",
            ) from error

    module.forward = forward
