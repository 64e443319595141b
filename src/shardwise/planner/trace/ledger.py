"""A ledger of one pass on meta tensors: the live bytes after each operator, and the work of each operator.

The idea: a TorchDispatchMode sees every operator and weak references report when a storage is freed, so forward and
backward on meta tensors yield the timeline of live bytes without allocations. The invariant: each storage counts
once, views are free, and every storage has a tag for what tensor parallelism does with it (replicated, residual
stream, split), which follows from the tags of the operator's inputs.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from shardwise.planner.model.shape import AttentionWork, Matmul
from shardwise.planner.trace.cuda_rules import workspace_bytes
from shardwise.torch_private.dispatch import (
    TorchDispatchMode,
    is_in_backward,
    next_sequence_number,
    running_sequence_number,
    schema_of,
    storage_id,
    tree_leaves,
    tree_map_only,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import Tensor

Tag = Literal["whole", "stream", "split", "weight", "split weight", "gradient"]
"""Kind of a storage: activations by their placement under tensor parallelism, or weights and gradients."""

_RESIDENT = {"whole": 0, "stream": 1, "split": 2}
_WEIGHTS = {"weight", "split weight"}
_MATMULS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}
_ALLOCATION = "aten::empty"
"""An operator that runs no kernel."""
_ATTENTIONS = (
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
)


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """Live bytes after one operator or deallocation."""

    segment: int
    backward: bool
    resident: tuple[float, float, float]
    """Bytes of activations: replicated, of the residual stream, and split by tensor parallelism."""
    gradients: int
    """Elements of weight gradients so far."""
    on_gpu: bool = False
    """Whether it contains a workspace that only a GPU library allocates."""


@dataclass(slots=True)
class Tally:
    """Operators of one segment."""

    matmuls: list[Matmul] = field(default_factory=list)
    attentions: list[AttentionWork] = field(default_factory=list)
    moved: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    moved_backward: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    kernels: int = 0
    kernels_backward: int = 0


class Ledger(TorchDispatchMode):
    """Records every change of the live bytes by segment: a section of the forward pass and its backward."""

    def __init__(self, samples: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.samples = samples
        self.entries: list[LedgerEntry] = []
        self.tallies: list[Tally] = [Tally()]
        self._tags: dict[int, Tag] = {}
        self._sizes: dict[int, int] = {}
        self._refs: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._products: set[int] = set()
        """Storages that matrix products wrote in forward."""
        self._frozen: set[int] = set()
        """Storages of frozen weights and of their casts."""
        self._resident = [0.0, 0.0, 0.0]
        self._gradients = 0
        self._turned = False
        self._starts = [0]
        """Sequence number of the first autograd node of each segment."""

    def begin_segment(self) -> int:
        """Begin the next segment of the forward pass and return its index."""
        self.note()  # excludes tensors freed since the segment's last operator
        self._starts.append(next_sequence_number())
        self.tallies.append(Tally())
        self.note()
        return len(self._starts) - 1

    def turn_back(self) -> None:
        """Mark the end of forward."""
        self.note()
        self._turned = True

    def tag(self, tensor: Tensor, tag: Tag) -> None:
        """Set the tag of a tensor's storage."""
        storage = tensor.untyped_storage()
        self._count(storage_id(storage), -1)
        self._tags[storage_id(storage)] = tag
        self._watch(storage)
        self._count(storage_id(storage), +1)

    def exclude(self, tensor: Tensor) -> None:
        """Do not count a tensor's storage, which was allocated before this pass; views of it are free, too."""
        storage = tensor.untyped_storage()
        self._watch(storage)
        self._tags[storage_id(storage)] = "stream"
        self._sizes[storage_id(storage)] = 0

    def tag_weight(self, weight: Tensor, *, split: bool) -> None:
        """Tag a tensor as a weight, split by tensor parallelism or not."""
        self.tag(weight, "split weight" if split else "weight")
        if not weight.requires_grad:
            self._frozen.add(_key(weight))

    def gradient_made(self, weight: Tensor) -> None:
        """Tag the gradient of a weight and add its elements to the total."""
        if weight.grad is not None:
            self._gradients += weight.numel()
            self.tag(weight.grad, "gradient")
            self.note()

    def resident(self) -> tuple[float, float, float]:
        """Return the live bytes by kind of activation."""
        return (self._resident[0], self._resident[1], self._resident[2])

    def note(self) -> None:
        """Record the live bytes."""
        segment, backward = self._place()
        self.entries.append(LedgerEntry(segment, backward, self.resident(), self._gradients))

    def _note_workspace(self, num_bytes: float, tag: Tag) -> None:
        """Record the live bytes together with an operator's workspace."""
        if num_bytes and tag in _RESIDENT:
            segment, backward = self._place()
            resident = list(self.resident())
            resident[_RESIDENT[tag]] += num_bytes
            self.entries.append(
                LedgerEntry(segment, backward, (resident[0], resident[1], resident[2]), self._gradients, on_gpu=True)
            )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator, and record its results."""
        name = schema_of(func).name
        args, kwargs = _on_one_device(args, _with_real_places(name, args, kwargs or {}))
        result = func(*args, **kwargs)
        read, made = list(_tensors((args, tuple(kwargs.values())))), list(_tensors(result))
        tag = self._tag_of(name, read)
        new = [tensor for tensor in made if _key(tensor) not in self._sizes]
        for tensor in new:
            self._tags[_key(tensor)] = tag
            self._watch(tensor.untyped_storage())
            self._count(_key(tensor), +1)
            if tag in _WEIGHTS and self._is_frozen(read):
                self._frozen.add(_key(tensor))
        if new:
            self.note()
            self._note_workspace(workspace_bytes(name, args), tag)
        if new or name.endswith("_"):
            self._add_work(_OperatorCall(func, args, kwargs), read, made, tag)
        return result

    def _tag_of(self, name: str, read: Iterable[Tensor]) -> Tag:
        """Return the tag of an operator's results, given the tensors that it reads.

        A split matrix turns replicated activations into split ones and vice versa, in forward and backward.
        """
        tags = {self._tags.get(_key(tensor), "stream") for tensor in read}
        if tags and tags <= _WEIGHTS:
            return "split weight" if "split weight" in tags else "weight"
        activations = tags - _WEIGHTS - {"gradient"}
        if "split weight" in tags:
            if name == "aten::embedding":
                return "stream"
            return "stream" if "split" in activations else "split"
        if "split" in activations:
            return "split"
        return "whole" if "whole" in activations else "stream"

    def _add_work(self, call: _OperatorCall, read: list[Tensor], made: list[Tensor], tag: Tag) -> None:
        name = schema_of(call.func).name
        if name == _ALLOCATION:
            return
        segment, backward = self._place()
        tally = self.tallies[segment]
        if name in _MATMULS and not backward:
            tally.matmuls.append(self._matmul(read[-2:], made[0], tag))
            self._products.add(_key(made[0]))
            return
        if name == "aten::convolution" and not backward:
            weight, out = read[1], made[0]
            rows, inner = out.numel() // out.shape[1] // self.samples, weight.numel() // weight.shape[0]
            trained = not self._is_frozen([weight])
            tally.matmuls.append(Matmul(rows=rows, inner=inner, columns=weight.shape[0], trained=trained))
            return
        if name in _ATTENTIONS and not backward:
            copied = sum(each.numel() for each in call.args[:3] if _key(each) not in self._products)
            tally.attentions.append(_attention(call, self.samples, copied // self.samples))
            return
        if backward and (name in _MATMULS or "convolution" in name or "scaled_dot_product" in name):
            return
        amounts = tally.moved_backward if backward else tally.moved
        for tensor in (*read, *made):
            if not tensor.is_meta:
                continue
            own = self._tags.get(_key(tensor), "stream")
            amounts[_RESIDENT.get(own, 0)] += tensor.numel() * tensor.element_size()
        if backward:
            tally.kernels_backward += 1
        else:
            tally.kernels += 1

    def _matmul(self, operands: list[Tensor], out: Tensor, tag: Tag) -> Matmul:
        left = operands[0]
        count = left.shape[0] if left.ndim == 3 else 1
        rows = left.shape[-2]
        split_weight = any(self._tags.get(_key(item)) == "split weight" for item in operands)
        split: Literal["none", "inner", "columns"] = "none"
        if split_weight:
            split = "columns" if tag == "split" else "inner"
        elif tag == "split" and count > 1:
            split = "columns"
        each = max(1, count // self.samples) if count > 1 else 1
        rows = rows if count > 1 else max(1, rows // self.samples)
        trained = not self._is_frozen(operands)
        return Matmul(rows=rows, inner=left.shape[-1], columns=out.shape[-1], split=split, count=each, trained=trained)

    def _is_frozen(self, read: Iterable[Tensor]) -> bool:
        """Whether one of the tensors is a frozen weight."""
        return any(_key(tensor) in self._frozen for tensor in read)

    def _place(self) -> tuple[int, bool]:
        """Return the current segment, and whether its backward runs."""
        if not is_in_backward():
            return len(self._starts) - 1, self._turned
        number = running_sequence_number()
        if number is None:  # nodes that accumulate gradients belong to the current segment
            return self.entries[-1].segment, True
        return max(0, bisect_right(self._starts, number) - 1), True

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key = storage_id(storage)
        if key not in self._sizes:
            self._refs[key] = weakref.ref(storage, partial(self._died, key))
            self._sizes[key] = storage.nbytes()

    def _died(self, key: int, _: object) -> None:
        resident = _RESIDENT.get(self._tags.get(key, "")) is not None
        self._count(key, -1)
        del self._sizes[key], self._tags[key], self._refs[key]
        self._frozen.discard(key)
        self._products.discard(key)
        if resident and self._turned and is_in_backward():  # after backward, with all gradients, no segment runs
            self.note()

    def _count(self, key: int, sign: int) -> None:
        place = _RESIDENT.get(self._tags.get(key, ""))
        if place is not None and key in self._sizes:
            self._resident[place] += sign * self._sizes[key]


class _OperatorCall(NamedTuple):
    func: Any
    args: Any
    kwargs: dict[str, Any]


def _attention(call: _OperatorCall, samples: int, copied: int) -> AttentionWork:
    query, key = call.args[0], call.args[1]
    names = [argument.name for argument in schema_of(call.func).arguments]
    given = dict(zip(names, call.args, strict=False)) | call.kwargs
    return AttentionWork(
        heads=query.shape[1],
        kv_heads=key.shape[1],
        head_width=query.shape[-1],
        queries=query.shape[2] * query.shape[0] // samples,
        keys=key.shape[2],
        causal=bool(given.get("is_causal", False)),
        copied=copied,
    )


def _with_real_places(name: str, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Create the result of an integer arange on the CPU: models read positions to choose a kind of mask."""
    dtype, device = kwargs.get("dtype"), kwargs.get("device")
    if name != "aten::arange" or device is None or torch.device(device).type != "meta":
        return kwargs
    if dtype.is_floating_point if dtype is not None else any(type(each) is not int for each in args):
        return kwargs
    return {**kwargs, "device": torch.device("cpu")}


def _on_one_device(args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Move CPU tensors to meta where an operator mixes them with meta tensors.

    A batch stays on the CPU until an operator combines it with weights, so that models may read masks and token ids.
    """
    if args and isinstance(args[0], torch.Tensor) and kwargs.get("device") == torch.device("meta"):
        kwargs = {**kwargs, "device": args[0].device}  # a move to the weights' device leaves the batch on the CPU
    devices = {tensor.device.type for tensor in _tensors((args, tuple(kwargs.values())))}
    if devices <= {"meta"} or "meta" not in devices:
        return args, kwargs
    moved: tuple[Any, dict[str, Any]] = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
    return moved


def _key(tensor: Tensor) -> int:
    return storage_id(tensor.untyped_storage())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


# The weights outside the blocks that a tensor was computed from.


_RETURNED = "shardwise: a block returned this"


def mark_returned(result: Any) -> None:
    """Mark the autograd nodes of a block's results by metadata; a reference to a node would keep tensors alive."""
    for leaf in tree_leaves(result):
        node: Any = leaf.grad_fn if isinstance(leaf, torch.Tensor) else None
        if node is not None:
            node.metadata[_RETURNED] = True


def weights_in(inputs: Any, names: Mapping[int, str]) -> frozenset[str]:
    """Return the names of the weights that `inputs` were computed from, by a walk along the autograd graph.

    `names` maps ids of weights to names; the walk stops at the results of blocks.
    """
    found: set[int] = set()
    nodes: list[Any] = []
    for leaf in tree_leaves(inputs):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            found.add(id(leaf))
            nodes.append(leaf.grad_fn)
    seen: set[Any] = {None}
    while nodes:
        node = nodes.pop()
        if node in seen or _RETURNED in node.metadata:
            continue
        seen.add(node)
        found.add(id(getattr(node, "variable", None)))  # AccumulateGrad has one
        nodes.extend(following for following, _ in node.next_functions)
    return frozenset(map(names.__getitem__, found & names.keys()))
