"""Tensor parallelism, which shards weight matrices over ranks by column and row as in Megatron-LM.

Every parameter becomes a sharded or replicated DTensor on the tp mesh, so that optimizers, clipping and FSDP2 see one
type. Modules compute on local tensors. Activations between them are plain tensors, communicated as the rules require.
After backward, each gradient has the placement of its parameter; gradients of replicated parameters are summed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn import functional

from shardwise.errors import JobError, PlanError
from shardwise.parallel.collectives import convert
from shardwise.parallel.counter_dropout import ShardedRegion, sharded_region
from shardwise.parallel.float8 import linear_output
from shardwise.parallel.lora import adapter_output, has_adapter
from shardwise.parallel.tensor_gradients import ShardedRandom, expose_parameters, uses_dropout
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
from shardwise.torch_private.dispatch import own_parameters, tree_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.distributed.device_mesh import DeviceMesh

TOKENS = 1
"""The dimension of [batch, tokens, width] that sequence parallelism shards."""


def tensor_parallel(module: nn.Module, mesh: DeviceMesh, rules: Mapping[str, str], *, sequence: bool) -> nn.Module:
    """Shard `module` over the 1-D `mesh` by `rules`. Communicates over `mesh`; call on every rank of the mesh.

    Meta parameters stay on the meta device; other parameters get the values of the mesh's first rank. Inputs and
    outputs of the module stay plain and unsharded, and must be equal on all ranks of the mesh. With `sequence`, the
    residual stream of repeated blocks is sharded by tokens.
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
    expose_parameters(module, _local)
    for pattern in flow.blocks:
        _split_stream(module, pattern, flow)
    for name, style in styles.items():
        if style == "sequence" and sequence:
            _gather_tokens(module.get_submodule(name), flow)
        elif style == "heads":
            divide_heads(module.get_submodule(name), mesh.size())
    if flow.random is not None:
        for scope in _scopes(module, styles):
            _leave_at_end(scope, flow.random)
    _explain_mixing(module)
    return module


def _random(module: nn.Module, mesh: DeviceMesh) -> ShardedRandom | ShardedRegion | None:
    """Return the object that switches random numbers at the bounds of sharded regions; None without dropout."""
    region = sharded_region(module)
    if region is None and uses_dropout(module):
        return ShardedRandom(mesh)
    return region


class _Entry:
    """Passes one activation to all column modules that read it, so that its gradient is all-reduced only once."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._last: tuple[Tensor, Tensor] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if not (torch.is_grad_enabled() and x.requires_grad):
            return x
        if self._last is not None and self._last[0] is x:
            return self._last[1]
        entered = convert(x, self._mesh, Replicate(), Replicate(), grad=Partial())
        self._last = (x, entered)
        return entered

    def forget(self) -> None:
        """Release the activation at the end of the sharded region."""
        self._last = None


@dataclass(frozen=True, kw_only=True, eq=False)
class _Flow:
    """The mesh, random numbers and activation entry that the modules of one parallel model share."""

    mesh: DeviceMesh
    random: ShardedRandom | ShardedRegion | None
    blocks: tuple[str, ...]
    """Name patterns of the blocks whose residual stream is sharded by tokens; empty without sequence parallelism."""
    entry: _Entry = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "entry", _Entry(self.mesh))

    def enter_sharded(self) -> None:
        """Switch to random numbers that differ between ranks, after a column module."""
        if self.random is not None:
            self.random.enter()

    def leave_sharded(self) -> None:
        """Switch back to equal random numbers, before a row module."""
        self.entry.forget()
        if self.random is not None:
            self.random.leave()


def _local(parameter: Tensor | None, *, summed: bool = False) -> Tensor | None:
    """Return this rank's shard of a parameter; with `summed`, its gradient is summed over ranks."""
    if not isinstance(parameter, DTensor):
        return parameter
    piece = parameter.to_local(grad_placements=parameter.placements)
    if summed:  # no communication in forward, one all_reduce in backward
        return convert(piece, parameter.device_mesh, Replicate(), Replicate(), grad=Partial())
    return piece


def _distribute(module: nn.Module, mesh: DeviceMesh, styles: Mapping[str, str]) -> None:
    """Convert every parameter to a DTensor; tied parameters stay tied. Communicates except for meta parameters."""
    converted: dict[int, nn.Parameter] = {}
    for name, child in module.named_modules():
        for kind, parameter in child.named_parameters(recurse=False):
            if id(parameter) not in converted:
                dim = split_dim(child, styles.get(name), kind)
                placement = Replicate() if dim is None else Shard(dim)
                placed = distribute_tensor(parameter.detach(), mesh, [placement])
                converted[id(parameter)] = nn.Parameter(placed, requires_grad=parameter.requires_grad)
            own_parameters(child)[kind] = converted[id(parameter)]  # register_parameter rejects tied parameters


def _install(child: nn.Module, name: str, styles: Mapping[str, str], flow: _Flow) -> None:
    """Replace the forward of one module according to its style."""
    if next(child.parameters(recurse=False), None) is None:
        return  # nothing to shard, or a module of another pipeline stage
    style = styles.get(name)
    in_block = within(flow.blocks, name)
    if style in {"column", "column_gathered"}:
        child.forward = _column(child, flow, gathered=style == "column_gathered", in_block=in_block)
    elif style in {"row", "row_split"}:
        child.forward = _row(child, flow, split=style == "row_split", in_block=in_block)
    elif style == "vocab":
        child.forward = _vocab(child, flow)
    else:
        outer_styles = {style}
        for depth in range(1, name.count(".") + 1):
            outer_styles.add(styles.get(".".join(name.split(".")[:depth])))
        summed = style not in SPLIT_FACTORS and (in_block or "summed" in outer_styles)
        child.forward = _replicated(child, summed=summed)


def _column(module: Any, flow: _Flow, *, gathered: bool, in_block: bool) -> Callable[[Tensor], Tensor]:
    """Return a column-parallel forward, with outputs sharded over ranks.

    In a block that is sharded by tokens, the preceding norm gathers the input and sums its gradient.
    """
    width = module.weight.shape[split_dim(module, "column", "weight")]

    def forward(input: Tensor) -> Tensor:  # noqa: A002 - the name is torch's
        x = input if in_block else flow.entry(input)
        if flow.random is not None and has_adapter(module):
            flow.random.leave()  # the adapter's dropout input is replicated, even after a previous column module
        output = _linear(module, x, _local(module.bias))
        if gathered:
            flow.entry.forget()
            return convert(output, flow.mesh, Shard(output.ndim - 1), Replicate(), grad=Replicate(), width=width)
        if module.training:
            flow.enter_sharded()
        return output

    return forward


def _row(module: Any, flow: _Flow, *, split: bool, in_block: bool) -> Callable[[Tensor], Tensor]:
    """Return a row-parallel forward, which sums outputs of sharded inputs over ranks and adds the bias to the sum."""

    def forward(input: Tensor) -> Tensor:  # noqa: A002 - the name is torch's
        x = input
        if split:
            last = Shard(input.ndim - 1)
            x = convert(input, flow.mesh, Replicate(), last, grad=last)
        if split and not in_block and module.training and has_adapter(module):
            flow.enter_sharded()
        share = _linear(module, x, None)  # in the sharded region: the adapter's dropout input is sharded
        if not in_block:
            flow.leave_sharded()
        target = Shard(TOKENS) if in_block else Replicate()
        output = convert(share, flow.mesh, Partial(), target, grad=target)
        bias = _local(module.bias, summed=in_block)
        if bias is None:
            return output
        return output + bias.to(output.dtype)  # under autocast, the bias has the wider dtype

    return forward


def _linear(module: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    weight: Any = _local(module.weight)
    if is_transposed(module):
        weight = weight.T
    output = linear_output(module, x, weight, bias)
    if has_adapter(module):
        output = output + adapter_output(module, x)
    return output


def _vocab(module: Any, flow: _Flow) -> Callable[[Tensor], Tensor]:
    """Return an embedding forward that looks up the tokens in this rank's vocabulary shard and sums over ranks."""
    size = module.weight.shape[0]
    start = min(size, flow.mesh.get_local_rank() * -(-size // flow.mesh.size()))  # as DTensor: ceil(size / ranks) each

    def forward(input: Tensor) -> Tensor:  # noqa: A002 - the name is torch's
        weight: Any = _local(module.weight)
        inside = (input >= start) & (input < start + len(weight))
        elsewhere = (input >= 0) & (input < size) & ~inside  # tokens outside the vocabulary still raise
        own_padding = None
        if module.padding_idx is not None and start <= module.padding_idx < start + len(weight):
            own_padding = module.padding_idx - start
        rows = functional.embedding(torch.where(elsewhere, 0, input - start), weight, own_padding)
        share = rows.masked_fill(~inside[..., None], 0)
        return convert(share, flow.mesh, Partial(), Replicate(), grad=Replicate())

    return forward


def _replicated(module: nn.Module, *, summed: bool) -> Callable[..., Any]:
    """Return the module's forward with plain tensors as parameters; `summed` sums their gradients over ranks."""
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        own = dict(own_parameters(module))  # read by the module as self.weight
        for kind, parameter in own.items():
            own_parameters(module)[kind] = _local(parameter, summed=summed)  # type: ignore[assignment]
        try:
            return inner(*args, **kwargs)
        finally:
            own_parameters(module).update(own)

    return forward


def _gather_tokens(norm: nn.Module, flow: _Flow) -> None:
    """Make a norm that runs on this rank's tokens return all tokens, for the column modules after it."""
    inner = norm.forward

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        return convert(inner(*args, **kwargs), flow.mesh, Shard(TOKENS), Replicate(), grad=Partial())

    norm.forward = forward


def _split_stream(module: nn.Module, pattern: str, flow: _Flow) -> None:
    """Shard the residual stream by tokens before the first block of a stack and gather it after the last block."""
    stack = [child for name, child in module.named_modules() if matches(pattern, name)]
    blocks = [child for child in stack if next(child.parameters(), None) is not None]  # others are on other stages
    for index, block in enumerate(blocks):
        block.forward = _block(block, flow, first=index == 0, last=index == len(blocks) - 1)


def _block(block: nn.Module, flow: _Flow, *, first: bool, last: bool) -> Callable[..., Any]:
    inner = block.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not args:
            raise JobError(
                f"sequence parallelism requires a positional argument, but {type(block).__name__} got keywords only",
                code="support.sequence-parallel-keywords",
                fix="pass the hidden states as the first positional argument, or set sequence_parallel = false",
            )
        x, *others = args
        if any(isinstance(other, Tensor) and other.requires_grad for other in tree_leaves((others, kwargs))):
            raise JobError(
                f"sequence parallelism supports one input with a gradient, but {type(block).__name__} got several",
                code="support.sequence-parallel-second-gradient",
                fix="set sequence_parallel = false",
            )
        if first:
            _check_tokens(x, flow.mesh.size())
            x = convert(x, flow.mesh, Replicate(), Shard(TOKENS), grad=Shard(TOKENS))
        if block.training:
            flow.enter_sharded()
        output = inner(x, *others, **kwargs)
        flow.leave_sharded()
        if not last:
            return output
        if not isinstance(output, tuple):
            return convert(output, flow.mesh, Shard(TOKENS), Replicate(), grad=Replicate())
        hidden = convert(output[0], flow.mesh, Shard(TOKENS), Replicate(), grad=Replicate())
        return (hidden, *output[1:])

    return forward


def _check_tokens(x: Tensor, degree: int) -> None:
    tokens = x.shape[TOKENS]
    if tokens % degree:
        raise PlanError(
            f"sequence parallelism requires sequences divisible by tp={degree}, got {tokens} tokens",
            code="plan.sequence-not-divisible",
            fix=f"use sequences of {tokens + -tokens % degree} tokens, or set sequence_parallel = false",
        )


def _scopes(module: nn.Module, styles: Mapping[str, str]) -> list[nn.Module]:
    """Return the modules that contain all their sharded regions: repeated blocks, or the full module."""
    kinds: dict[str, set[str]] = {}
    for name, style in styles.items():
        kinds.setdefault(_numbered(name.rpartition(".")[0]), set()).add(style)
    scopes = set()
    for name, found in kinds.items():
        is_complete = {"column", "row"} <= found
        scopes.add(name if is_complete else "")
    return [module.get_submodule(name) for name in scopes]


def _numbered(name: str) -> str:
    """Return the outermost numbered module around a name, such as blocks.3, or "" for the root."""
    components = name.split(".")
    depth = next((depth for depth, component in enumerate(components, 1) if component.isdigit()), 0)
    return ".".join(components[:depth])


def _leave_at_end(module: nn.Module, random: ShardedRandom | ShardedRegion) -> None:
    """Leave the sharded region when forward returns or raises, as recompute does to stop early."""
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        try:
            return inner(*args, **kwargs)
        finally:
            random.leave()

    module.forward = forward


def _explain_mixing(module: nn.Module) -> None:
    """Raise JobError instead of torch's error if a module reads a DTensor parameter of another module."""
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        try:
            return inner(*args, **kwargs)
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            raise JobError(
                "with tensor parallelism, a module cannot read a parameter of another module",
                code="support.tp-foreign-parameter",
                fix="call the other module, such as self.embed(tokens) instead of self.embed.weight[tokens]",
            ) from error

    module.forward = forward
