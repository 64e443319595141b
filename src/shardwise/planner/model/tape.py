"""A tape of operators on sizes: the tensors that autograd saves, and the allocations of forward and backward.

The idea: run a model's forward and backward in pure Python on sizes instead of tensors. The invariant: a Storage counts
as allocated from its creation until Python frees it, so references in Python stand for those of torch, and a function
that describes a module must keep the references that the module's own frame keeps.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeVar

from shardwise.planner.model.shape import Amount, AttentionWork, Footprint, Matmul, Moment, Part, Work
from shardwise.units import ELEMENT_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from shardwise.planner.model.shape import Recompute, Weight
    from shardwise.plans.sections import DType

Item = TypeVar("Item", Matmul, AttentionWork)

NOTHING = Amount()
WIDE = 4
"""Bytes per element in fp32, the dtype of weights and their gradients."""

Gradients = dict[tuple[int, int], "Storage"]
"""The accumulated gradient of each output of a node, by the node's id and the slot."""


class Storage:
    """Bytes on the device, which their tape counts until the last reference to this object is gone."""

    __slots__ = ("_tape", "is_expensive", "is_viewed", "size")

    def __init__(self, tape: Tape, size: Amount, *, is_viewed: bool = False, is_expensive: bool = False) -> None:
        self._tape, self.size, self.is_viewed, self.is_expensive = tape, size, is_viewed, is_expensive
        tape.live += size
        tape.note()

    def __del__(self) -> None:
        self._tape.live += self.size * -1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Value:
    """A tensor: its number of elements, their width, its storage, and the operator that produced it."""

    elements: Amount
    """Elements, not bytes."""
    width: int
    """Bytes per element."""
    storage: Storage | None
    """None for tensors outside the part."""
    node: Node | None = None
    """None if it requires no gradient."""
    slot: int = 0
    """Which output of the operator it is."""

    @property
    def size(self) -> Amount:
        """Bytes of the tensor; a view has fewer than its storage."""
        return self.elements * self.width


@dataclass(slots=True, kw_only=True, eq=False)
class Node:
    """One operator in the autograd graph: the tensors it saves for backward, and those that its backward allocates."""

    inputs: tuple[Value, ...] = ()
    """Inputs that require a gradient, without their storage."""
    passes_on: frozenset[int] = frozenset()
    """Indices of the inputs whose gradient is the incoming one, or a view of it."""
    saves: bool = False
    saved: tuple[Storage, ...] | None = ()
    """None: dropped by activation checkpointing, to be recomputed."""
    temporaries: Amount = NOTHING
    numel: int = 0
    """Elements of the weights whose gradient it computes."""
    casts_weights: bool = False
    """Whether the weight gradient arrives in the compute dtype and is cast."""
    moves: bool = False
    """Whether memory bandwidth bounds its time, unlike that of views and matrix products."""
    flattens: bool = False
    """Whether its input's gradient is a view of a product of flattened rows, which autograd never adds to in place."""

    @property
    def has_backward(self) -> bool:
        """Whether backward runs it: false for tensors outside the part and for operators without gradients."""
        return bool(self.inputs or self.numel)


class _StopRecomputeError(Exception):
    """Raised when the recomputed forward has saved all tensors for backward, as in torch's checkpoint."""


@dataclass(slots=True, eq=False)
class Tape:
    """One run of a part's forward and backward pass on sizes."""

    compute: DType
    gathered: bool
    """Whether weights are in the compute dtype, gathered by FSDP or stored so; else autocast casts them."""
    frozen: bool = False
    """Whether the model's own weights get no gradients."""
    rank: int = 0
    """Rank of the LoRA adapters of each matrix; 0 for none."""
    live: Amount = NOTHING
    """Allocated bytes."""
    gradients: float = 0.0
    """Elements of weight gradients so far, in units of fp32 elements: an element in bf16 counts as half."""
    moments: list[Moment] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    matmuls: list[Matmul] = field(default_factory=list)
    attentions: list[AttentionWork] = field(default_factory=list)
    moved: list[Amount] = field(default_factory=lambda: [NOTHING, NOTHING])
    """Bytes moved by operators that memory bandwidth bounds, in forward and backward."""
    kernels: list[int] = field(default_factory=lambda: [0, 0])
    recompute: Recompute = "none"
    kept: list[Storage] = field(default_factory=list)
    """Results of expensive operators that selective recompute keeps, in order."""
    saves_left: int | None = None
    """During recompute: how many operators have yet to save their tensors."""

    @property
    def width(self) -> int:
        """Bytes per element in the compute dtype."""
        return ELEMENT_BYTES[self.compute]

    @property
    def weight_width(self) -> int:
        """Bytes per element of a weight before autocast."""
        return self.width if self.gathered else max(self.width, WIDE)

    @property
    def casts_weights(self) -> bool:
        """Whether the weights of matrix products are cast for use, and their gradients back."""
        return self.width < self.weight_width

    @property
    def repeats(self) -> bool:
        """Whether the forward pass is being recomputed."""
        return self.saves_left is not None

    @property
    def work(self) -> Work:
        """The operators counted so far."""
        return Work(
            matmuls=_counted(self.matmuls),
            attentions=_counted(self.attentions),
            moved=self.moved[0],
            moved_backward=self.moved[1],
            kernels=self.kernels[0],
            kernels_backward=self.kernels[1],
        )

    def note(self) -> None:
        """Record the allocations of this moment."""
        self.moments.append(Moment(resident=self.live, gradients=self.gradients))

    def outside(self, elements: Amount, width: int, *, requires_grad: bool = True) -> Value:
        """Return a tensor outside the part, such as its input."""
        node = self._add(Node()) if requires_grad else None
        return Value(elements=elements, width=width, storage=None, node=node)

    def store(self, size: Amount, *, expensive: bool = False) -> Storage:
        """Allocate bytes; during selective recompute, return the kept result of an expensive operator instead."""
        keeps = expensive and self.recompute == "selective"
        if keeps and self.repeats:
            return self.kept.pop(0)
        storage = Storage(self, size, is_expensive=expensive)
        if keeps:
            self.kept.append(storage)
        return storage

    def apply(
        self,
        inputs: Sequence[Value],
        elements: Amount,
        width: int,
        *,
        saved: Sequence[Storage | None] = (),
        saves_result: bool = False,
        place: Storage | None = None,
        free: bool = False,
        expensive: bool = False,
        **backward: object,
    ) -> Value:
        """Run one operator forward and return its result; `backward` are fields of its Node.

        The result gets a new storage, or that of `place`. An operator may be `free` (a view) or `expensive` (selective
        recompute keeps its result). Where neither inputs nor weights require a gradient, the operator saves nothing.
        """
        node = Node(
            inputs=tuple(replace(value, storage=None) for value in inputs if value.node is not None),
            moves=not (free or expensive),
            **backward,  # type: ignore[arg-type]
        )
        requires_grad = node.has_backward
        if requires_grad:
            self._add(node)
            node.saves = bool(saved) or saves_result
            node.saved = tuple(item for item in saved if item is not None)
        self._stop_if(node.saves and not saves_result)
        storage = place or self.store(elements * width, expensive=expensive)
        if saves_result and node.saved is not None and requires_grad:
            node.saved += (storage,)
        self._stop_if(requires_grad and saves_result)
        if node.saves and self.recompute != "none" and not self.repeats:
            node.saved = None
        result = Value(elements=elements, width=width, storage=storage, node=node if requires_grad else None)
        if not self.repeats and not free:
            self._count(0, 1, (result.size, *(value.size for value in inputs)) if node.moves else ())
            self._count_casts(0, node)
        return result

    def backward(self, output: Value, repeat: Callable[[], object]) -> None:
        """Run backward from the gradient of `output`; `repeat` recomputes forward under activation checkpointing."""
        nodes, self.nodes = self.nodes, []
        gradients: Gradients = {(id(output.node), output.slot): Storage(self, output.size)}
        for node in reversed(nodes):
            if not node.has_backward:
                continue  # the part's input, whose gradient stays
            incoming = [gradients.pop(key) for key in list(gradients) if key[0] == id(node)]
            if not incoming:
                continue
            if node.saved is None:
                self._make_again(nodes, repeat)
            made = self._run(node, incoming)
            for value in node.inputs:
                self._accumulate(gradients, (id(value.node), value.slot), made.pop(0))

    def _add(self, node: Node) -> Node:
        self.nodes.append(node)
        return node

    def _stop_if(self, saved: bool) -> None:  # noqa: FBT001 - reads as a sentence
        if saved and self.saves_left is not None:
            self.saves_left -= 1
            if self.saves_left == 0:
                raise _StopRecomputeError

    def _make_again(self, nodes: list[Node], repeat: Callable[[], object]) -> None:
        self.saves_left = sum(node.saves for node in nodes)
        with suppress(_StopRecomputeError):
            repeat()
        self.saves_left = None
        self.kept.clear()
        for node, again in zip(_with_backward(nodes), _with_backward(self.nodes), strict=False):
            node.saved = again.saved
        self.nodes = []

    def _run(self, node: Node, incoming: list[Storage]) -> list[Storage]:
        """Run one operator backward: its inputs, saved tensors and results coexist, then only the results stay."""
        temporaries = Storage(self, node.temporaries)
        share = self.width / WIDE if node.casts_weights else 1.0
        self.gradients += node.numel * share
        first = incoming[0]
        made = []
        for index, value in enumerate(node.inputs):
            made.append(first if index in node.passes_on else Storage(self, value.size, is_viewed=node.flattens))
        self.note()
        read_and_made = [item.size for item in (*incoming, *(node.saved or ()), *made)]
        kernels = sum(item is not first for item in made) + bool(node.numel)
        self._count(1, kernels, read_and_made if node.moves else ())
        self._count_casts(1, node)
        node.saved = ()
        incoming.clear()
        del temporaries, first
        if node.casts_weights:
            self.gradients += node.numel
            self.note()
            self.gradients -= node.numel * share
        return made

    def _accumulate(self, gradients: Gradients, key: tuple[int, int], gradient: Storage) -> None:
        """Add a gradient to the accumulated one: in place, unless that is a view or has another reference."""
        before = gradients.get(key)
        if before is not None:
            self._count(1, 1, (before.size, before.size, gradient.size))
            shared = sum(other is before for other in gradients.values()) > 1
            gradient = Storage(self, before.size) if shared or before.is_viewed else before
        gradients[key] = gradient

    def _count(self, phase: int, kernels: int, moved: Iterable[Amount]) -> None:
        self.kernels[phase] += kernels
        self.moved[phase] = sum(moved, self.moved[phase])

    def _count_casts(self, phase: int, node: Node) -> None:
        """Count the casts of an operator's weights to the compute dtype, or of their gradients to fp32."""
        if node.casts_weights:
            self.count_cast(phase, node.numel)

    def count_cast(self, phase: int, numel: int) -> None:
        """Count a cast of `numel` elements of weights (phase 0) or of their gradients (phase 1)."""
        self._count(phase, 1, [Amount(fixed=numel * (WIDE + self.width))])


def _with_backward(nodes: list[Node]) -> list[Node]:
    return [node for node in nodes if node.has_backward]


@dataclass(frozen=True, kw_only=True)
class Describer:
    """Describes parts of a model for one compute dtype."""

    compute: DType
    gathered: bool
    lora: int = 0
    """Rank of LoRA adapters on every matrix of the blocks, all other weights frozen; 0 trains all weights."""

    def __call__(
        self,
        kind: Literal["first", "block", "last"],
        name: str,
        forward: Callable[[Tape, Value], Value],
        given: Callable[[Tape], Value],
        weights: Sequence[Weight],
        *,
        count: int = 1,
        exchanged: Sequence[Amount] = (),
    ) -> Part:
        """Return a part: `given` creates its input on a tape, and `forward` returns the output for it.

        `exchanged` are the activations that tensor parallelism reduces in forward. Only blocks are recomputed.
        """
        policies: tuple[Recompute, ...] = ("selective", "full", "none")
        footprints: dict[Recompute, Footprint] = {}
        for policy in policies if kind == "block" else policies[-1:]:
            tape = self._tape(self.lora if kind == "block" else 0, policy)
            footprints[policy], output = _run(tape, forward, given)
        resident = list(weights)
        if self.lora:
            resident = [replace(weight, trained=False) for weight in weights]
        if self.lora and kind == "block":
            resident += [adapter for weight in weights for adapter in weight.adapters(self.lora)]
        return Part(
            name=name,
            kind=kind,
            count=count,
            weights=tuple(resident),
            work=tape.work,
            footprints={policy: footprints.get(policy, footprints["none"]) for policy in policies},
            output=output,
            tp_exchanged=sum(exchanged, NOTHING),
            num_exchanges=len(exchanged),
        )

    def footprint(self, forward: Callable[[Tape, Value], Value], given: Callable[[Tape], Value]) -> Footprint:
        """Return the footprint of operators outside the blocks."""
        return _run(self._tape(0, "none"), forward, given)[0]

    def _tape(self, rank: int, policy: Recompute) -> Tape:
        return Tape(self.compute, self.gathered, frozen=self.lora > 0, rank=rank, recompute=policy)


def _run(
    tape: Tape, forward: Callable[[Tape, Value], Value], given: Callable[[Tape], Value]
) -> tuple[Footprint, Amount]:
    """Run a part forward and backward; return its footprint and the bytes of its output."""
    x = given(tape)
    output = forward(tape, x)
    saved, highest = tape.live, max(tape.moments, key=lambda moment: moment.resident.at(1)).resident
    tape.moments = []
    output = replace(output, storage=None)  # the part that used it has run backward before
    tape.backward(output, partial(forward, tape, x))
    backward = _undominated(tape.moments)
    return Footprint(saved=saved, forward=highest, forward_on_gpu=highest, backward=backward), output.size


def _counted(items: list[Item]) -> tuple[Item, ...]:
    """Merge equal items into one with their total count."""
    return tuple(replace(item, count=number * item.count) for item, number in Counter(items).items())


def _undominated(moments: list[Moment]) -> tuple[Moment, ...]:
    """Return the moments that no other moment exceeds in every term."""
    left: list[Moment] = []
    for moment in moments:
        if not any(_exceeds(other, moment) for other in left):
            left = [other for other in left if not _exceeds(moment, other)]
            left.append(moment)
    return tuple(left)


def _exceeds(one: Moment, other: Moment) -> bool:
    return (
        one.gradients >= other.gradients
        and one.resident.fixed >= other.resident.fixed
        and one.resident.whole >= other.resident.whole
        and one.resident.stream >= other.resident.stream
        and one.resident.split >= other.resident.split
    )
