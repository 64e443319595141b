"""The description of a model for planning: its parts in order, each with weights, operators and memory footprint."""

from __future__ import annotations

import math
from collections.abc import Mapping  # noqa: TC003 - needed at run time to decode a description from a file
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from shardwise.plans.sections import DType  # noqa: TC001 - needed at run time, too

Recompute = Literal["none", "selective", "full"]
TRACED = "traced"
"""Source of a description that was traced, not computed in closed form."""


@dataclass(frozen=True, kw_only=True)
class Amount:
    """Bytes as a linear function of the number of samples, in terms that tensor parallelism splits or replicates."""

    fixed: float = 0.0
    """Independent of the number of samples."""
    whole: float = 0.0
    """Per sample, replicated on every rank of a tensor-parallel group."""
    stream: float = 0.0
    """Per sample, the residual stream: replicated, or split along the sequence under sequence parallelism."""
    split: float = 0.0
    """Per sample, split over the tensor-parallel group."""

    def at(self, samples: int, *, tp: int = 1, sequence_parallel: bool = False) -> float:
        """Return the bytes on one rank."""
        stream = self.stream / tp if sequence_parallel else self.stream
        return self.fixed + samples * (self.whole + stream + self.split / tp)

    def __add__(self, other: Amount) -> Amount:
        return Amount(
            fixed=self.fixed + other.fixed,
            whole=self.whole + other.whole,
            stream=self.stream + other.stream,
            split=self.split + other.split,
        )

    def __mul__(self, factor: float) -> Amount:
        return Amount(
            fixed=self.fixed * factor, whole=self.whole * factor, stream=self.stream * factor, split=self.split * factor
        )


@dataclass(frozen=True, kw_only=True)
class Weight:
    """One parameter tensor."""

    name: str
    rows: int
    """Size of its first dimension, along which ranks shard it; 1 for a scalar."""
    numel: int
    split: bool = False
    """Whether tensor parallelism splits it."""
    cast: bool = True
    """Whether autocast casts it to the compute dtype for use; weights of norms, for example, are not cast."""
    trained: bool = True
    narrow: bool = False
    """Whether it is stored in the compute dtype in every plan, as frozen weights of a bf16 model are."""
    tied: bool = False
    """Whether another part shares it (a head tied to the embedding): one tensor where both parts are on one rank."""

    def adapters(self, rank: int) -> tuple[Weight, ...]:
        """Return the two LoRA factors of a weight matrix; empty for vectors and embedding tables."""
        columns = self.numel // max(1, self.rows)
        if columns <= 1 or not self.cast:
            return ()
        return (
            Weight(name=f"{self.name}.lora_a", rows=rank, numel=rank * columns),
            Weight(name=f"{self.name}.lora_b", rows=self.rows, numel=rank * self.rows, split=self.split),
        )


@dataclass(frozen=True, kw_only=True)
class Matmul:
    """A matrix product of a forward pass (a convolution counts as one): [rows, inner] x [inner, columns]."""

    rows: int
    """Per sample."""
    inner: int
    columns: int
    split: Literal["none", "inner", "columns"] = "none"
    """Which dimension tensor parallelism splits."""
    count: int = 1
    trained: bool = True
    """Whether its weight gets a gradient; backward skips one product for a frozen weight."""

    @property
    def flops(self) -> int:
        """Multiplications and additions per sample in forward; backward has twice as many, or as many if frozen."""
        return 2 * self.rows * self.inner * self.columns * self.count


@dataclass(frozen=True, kw_only=True)
class AttentionWork:
    """Scaled dot-product attention of one layer, in a fused kernel."""

    heads: int
    kv_heads: int
    head_width: int
    queries: int
    """Query tokens per sample."""
    keys: int
    """Key tokens per sample."""
    causal: bool = True
    copied: int = 0
    """Elements per sample of queries, keys and values that are not results of products or views of them, such as those
    with rotary embeddings."""
    count: int = 1

    @property
    def flops(self) -> float:
        """Multiplications and additions per sample in forward; backward has 2.5 times as many."""
        share = 0.5 if self.causal else 1.0
        return 4 * self.heads * self.head_width * self.queries * self.keys * share * self.count


@dataclass(frozen=True, kw_only=True)
class Work:
    """Operators of one forward and backward pass of a part."""

    matmuls: tuple[Matmul, ...] = ()
    attentions: tuple[AttentionWork, ...] = ()
    moved: Amount = field(default_factory=Amount)
    """Bytes that all other operators read and write in forward."""
    moved_backward: Amount = field(default_factory=Amount)
    kernels: int = 0
    """Operators launched in forward."""
    kernels_backward: int = 0

    @property
    def flops(self) -> float:
        """Multiplications and additions per sample of matrix products and attention in forward."""
        return sum(item.flops for item in self.matmuls) + sum(item.flops for item in self.attentions)


@dataclass(frozen=True, kw_only=True)
class Moment:
    """One moment of a part's backward pass."""

    resident: Amount
    """Allocations at this moment: the remaining saved activations, temporaries, gradients of activations."""
    gradients: float = 0.0
    """Elements (not bytes) of the part's weight gradients so far; a tensor-parallel rank has 1/tp of them."""
    on_gpu: bool = False
    """Whether it occurs on GPUs only, where a library allocates a workspace."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Memory that a part allocates under one recompute policy, without its weights."""

    saved: Amount
    """After its forward pass: the tensors saved for backward, and its output."""
    forward: Amount
    """At the peak of its forward pass."""
    forward_on_gpu: Amount
    """At the peak of its forward pass on a GPU, with the workspaces of libraries."""
    backward: tuple[Moment, ...]
    """The moments of its backward pass that can be the peak, each with all allocations of the part."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of a model: all modules before the repeated blocks, one kind of block, or all modules after them."""

    name: str
    kind: Literal["first", "block", "last"]
    count: int = 1
    """Number of equal consecutive instances."""
    weights: tuple[Weight, ...]
    work: Work
    footprints: Mapping[Recompute, Footprint]
    """Memory by recompute policy; equal under all policies for parts outside the blocks, which are never recomputed."""
    output: Amount
    """Its output, which a pipeline sends to the next stage."""
    tp_exchanged: Amount = field(default_factory=Amount)
    """Bytes of activations that a tensor-parallel group reduces in one forward pass; backward reduces as many."""
    num_exchanges: int = 0
    cp_exchanged: Amount = field(default_factory=Amount)
    """Bytes of queries, keys, values and results that a context-parallel rank exchanges in one forward pass."""
    num_cp_exchanges: int = 0
    keeps_activations: bool = False
    """Whether its activations are saved under every policy, as those of blocks that partial recompute leaves out."""

    @cached_property
    def numel(self) -> int:
        """Number of parameters of one instance."""
        return sum(weight.numel for weight in self.weights)

    @cached_property
    def kept(self) -> Part:
        """This part with all activations saved under every recompute policy, the same object each time."""
        return replace(self, keeps_activations=True)

    def footprint(self, recompute: Recompute) -> Footprint:
        """Return the footprint under a plan's recompute policy."""
        return self.footprints[self.policy(recompute)]

    def policy(self, recompute: Recompute) -> Recompute:
        """Return the recompute policy of this part under a plan's policy: parts outside the blocks have none."""
        return recompute if self.kind == "block" and not self.keeps_activations else "none"


@dataclass(frozen=True, kw_only=True)
class Head:
    """The language-model head, whose logits a fused loss computes in chunks, and the modules before it."""

    vocab_size: int
    width: int
    rows: int
    """Tokens per sample whose logits the loss reads."""
    hidden_bytes: int
    """Bytes per element of the head's input."""
    split: bool = False
    """Whether tensor parallelism splits it along the vocabulary."""
    is_separable: bool = True
    """Whether a graph of the whole model computes it with the loss and pads a vocabulary that is slow."""
    trained: bool = True
    before: Footprint
    """The footprint of the last part without head and loss."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Description of a model for one compute dtype and one length of samples."""

    name: str
    compute: DType
    gathered: bool = False
    """Whether weights are in the compute dtype, gathered by FSDP or stored so; else autocast casts fp32 weights."""
    parts: tuple[Part, ...]
    input: Amount = field(default_factory=Amount)
    """The batch on the device."""
    tokens_per_sample: int | None = None
    """None where samples are not sequences."""
    tp_degrees: tuple[int, ...] = (1,)
    """Tensor-parallel degrees that split it evenly."""
    cp_degrees: tuple[int, ...] = (1,)
    """Context-parallel degrees that split its sequences and heads evenly; (1,) if it does not support them."""
    head: Head | None = None
    """None where its loss cannot be fused."""
    stages: bool = True
    """Whether it can be split into pipeline stages at its blocks."""
    ties_samples: bool = False
    """Whether samples depend on each other through batch statistics (batch norm)."""
    source: str = "closed form"

    @cached_property
    def numel(self) -> int:
        """Number of parameters of the whole model; tied ones count once."""
        total = 0
        for part in self.parts:
            total += part.count * sum(weight.numel for weight in part.weights if not weight.tied)
        return total

    @cached_property
    def heads(self) -> int:
        """Attention heads that ranks can split: the greatest common divisor over layers; 0 without attention."""
        return math.gcd(*(item.heads for part in self.parts for item in part.work.attentions))

    @cached_property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return sum(part.count for part in self.parts if part.kind == "block")

    @cached_property
    def flops_per_sample(self) -> float:
        """Multiplications and additions of the forward pass of one sample; backward has about twice as many."""
        return sum(part.work.flops * part.count for part in self.parts)
