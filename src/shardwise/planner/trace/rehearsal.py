"""Forward and backward of a job's model on meta tensors, of the whole model or of one block."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, default_collate

from shardwise.data.loaders import dataset_of
from shardwise.data.streams import preserved
from shardwise.errors import JobError, PlanError
from shardwise.parallel.apply import disable_kv_cache
from shardwise.parallel.lora import add_adapters
from shardwise.parallel.parameter_rules import trainable_of
from shardwise.parallel.recompute import find_blocks, recompute_block
from shardwise.parallel.sharded import DTYPES
from shardwise.parallel.skeleton import skeleton
from shardwise.parallel.tensor_rules import check_tensor, find_rules, split_dim, styles_by_name
from shardwise.planner.trace.cuda_rules import CudaRules
from shardwise.planner.trace.ledger import Ledger, LedgerEntry, Tally, mark_returned, weights_in
from shardwise.planner.trace.stand_ins import outline_of, receive, skip_block, trained_in
from shardwise.torch_private.dispatch import tree_flatten, tree_leaves, tree_map

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shardwise.job import Job
    from shardwise.planner.model.shape import Recompute
    from shardwise.plans.sections import DType

SAMPLES = (2, 4)
"""Samples of the two passes that separate fixed bytes from bytes per sample; batch norm needs more than one."""
TP_DEGREES = (2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, kw_only=True)
class TracedModel:
    """A job's model on the meta device, with its blocks, tensor-parallel styles and samples."""

    job: Job
    model: nn.Module
    compute: DType
    gathered: bool
    blocks: Mapping[str, nn.Module]
    styles: Mapping[str, str]
    tp_degrees: tuple[int, ...]
    narrow: frozenset[str]
    """Parameters that the job's own model stores in the compute dtype."""
    samples: Sequence[Any]

    @classmethod
    def of(cls, job: Job, compute: DType, *, gathered: bool) -> TracedModel:
        """Build the model of a job on the meta device."""
        model = skeleton(job.model).module.to("meta").train()
        if job.lora is not None:
            add_adapters(model, job.lora)
        trainable_of(model.named_parameters())
        disable_kv_cache(model)  # a cache would carry tensors of one pass into the next
        dtype = DTYPES[compute]
        narrow = frozenset(name for name, value in model.named_parameters() if value.dtype == dtype != torch.float32)
        if gathered or compute == "fp64":
            model.to(dtype) if compute == "fp64" else _lower_parameters(model, dtype)
        samples = _samples(dataset_of(job, "train"))
        if not samples:
            raise JobError(
                "tracing the model requires a training sample, but the job has no training data",
                code="data.no-train-split",
                fix='return a dataset for "train" from Job.data',
            )
        styles, degrees = _tensor_styles(model, job)
        return cls(
            job=job,
            model=model,
            compute=compute,
            gathered=gathered,
            blocks=find_blocks(model),
            styles=styles,
            tp_degrees=degrees,
            narrow=narrow if compute in {"bf16", "fp16"} else frozenset(),
            samples=samples,
        )

    def rules(self) -> CudaRules:
        """Return CUDA's rules for a pass in the compute dtype."""
        return CudaRules(DTYPES[self.compute] if self.compute in {"bf16", "fp16"} else None)

    def batch(self, samples: int) -> Any:
        """Return a batch of real samples on the CPU."""
        return (self.job.collate or default_collate)(list(self.samples[:samples]))

    def tag_weights(self, ledger: Ledger) -> None:
        """Tag parameters and buffers as weights in a ledger; tensor parallelism may split parameters."""
        for name, parameter in self.model.named_parameters():
            ledger.tag_weight(parameter, split=is_split(self.model, name, self.styles))
            parameter.grad = None
        for buffer in self.model.buffers():
            ledger.tag(buffer, "weight")


def _samples(dataset: Any) -> list[Any]:
    """Return the samples of the largest traced batch; a small dataset repeats its samples, an empty one has none."""
    number = max(SAMPLES)
    if isinstance(dataset, IterableDataset):
        with preserved(dataset) as stream:  # a training in this process begins at the first sample
            found = list(itertools.islice(stream, number))
    else:
        found = [] if dataset is None else [dataset[index] for index in range(min(number, len(dataset)))]
    return [found[index % len(found)] for index in range(number)] if found else []


def _lower_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def _tensor_styles(model: nn.Module, job: Job) -> tuple[Mapping[str, str], tuple[int, ...]]:
    """Return the tensor-parallel style of each module by name, and the degrees that are possible."""
    try:
        rules = find_rules(model, job.tensor_rules)
    except (PlanError, JobError):
        return {}, (1,)
    degrees = [1]
    for degree in TP_DEGREES:
        try:
            check_tensor(model, degree, rules)
        except (PlanError, JobError):
            continue
        degrees.append(degree)
    return styles_by_name(model, rules), tuple(degrees)


def is_split(model: nn.Module, parameter: str, styles: Mapping[str, str]) -> bool:
    """Whether tensor parallelism splits a parameter."""
    owner, _, kind = parameter.rpartition(".")
    return split_dim(model.get_submodule(owner), styles.get(owner), kind) is not None


@dataclass(frozen=True, kw_only=True)
class BlockCall:
    """One call of a block in a traced pass."""

    name: str
    segment: int
    kind: tuple[Any, ...]
    """Key that is equal for blocks of one class with equal shapes of weights and arguments."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: frozenset[str]
    """Weights outside the blocks from which its arguments were computed without another block in between."""


@dataclass(frozen=True, kw_only=True)
class TracedPass:
    """The record of one traced pass."""

    entries: list[LedgerEntry]
    tallies: list[Tally]
    calls: list[BlockCall]
    uses: list[tuple[str, int]]
    """Uses of weights outside the blocks, as (name, segment), in order."""
    lowered: set[str]
    input_bytes: float


class ReachedBlock(Exception):  # noqa: N818 - not an error: it ends a forward pass early
    """Raised by the forward of a head to end a traced pass there; carries the head's input."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


def run_model(subject: TracedModel, samples: int) -> TracedPass:
    """Run forward, loss and backward of the whole model, each kind of block once.

    A head that raises ReachedBlock ends forward, and backward starts from its input.
    """
    ledger, rules = Ledger(samples), subject.rules()
    model, job = subject.model, subject.job
    batch = subject.batch(samples)
    to_compute = partial(tree_map, lambda leaf: _to_dtype(leaf, DTYPES[subject.compute]))
    if subject.compute == "fp64":
        batch = to_compute(batch)
    input_bytes = sum(leaf.nbytes for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
    calls: list[BlockCall] = []
    uses: list[tuple[str, int]] = []
    handles = _note_gradients(model, ledger)
    handles += _note_uses(subject, uses, ledger)
    for name, style in subject.styles.items():
        if style == "column_gathered":
            hook = model.get_submodule(name).register_forward_hook(lambda _, __, output: ledger.tag(output, "whole"))
            handles.append(hook)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    with _blocks_once(subject, calls, ledger), rules, ledger:
        subject.tag_weights(ledger)
        ledger.note()
        if subject.gathered:
            batch = to_compute(batch)  # FSDP2 casts the inputs of the model
        try:
            end = job.loss.sum_of(job.forward(model, batch), batch)
        except ReachedBlock as reached:
            end = reached.hidden
        rules.forget_casts()
        ledger.turn_back()
        if end.ndim == 0:
            end.backward()
        else:
            received = receive(end)
            del end
            if received is not None:
                received.backward()
    for handle in handles:
        handle.remove()
    return TracedPass(
        entries=ledger.entries,
        tallies=ledger.tallies,
        calls=calls,
        uses=uses,
        lowered={names[key] for key in rules.lowered if key in names},
        input_bytes=input_bytes,
    )


def _to_dtype(leaf: Any, dtype: torch.dtype) -> Any:
    return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def _note_gradients(module: nn.Module, ledger: Ledger) -> list[Any]:
    """Register hooks that record each trained weight's gradient in the ledger, and return them."""
    trained = (parameter for parameter in module.parameters() if parameter.requires_grad)
    return [parameter.register_post_accumulate_grad_hook(ledger.gradient_made) for parameter in trained]


def _note_uses(subject: TracedModel, uses: list[tuple[str, int]], ledger: Ledger) -> list[Any]:
    """Register hooks that record the weights used outside the blocks, tied ones by their first name; return them."""
    inside = {id(part) for block in subject.blocks.values() for part in block.modules()}
    names = {id(parameter): name for name, parameter in subject.model.named_parameters()}

    def note(module: nn.Module, _: Any) -> None:
        for parameter in module.parameters(recurse=False):
            use = (names[id(parameter)], len(ledger.tallies) - 1)
            if use not in uses:
                uses.append(use)

    return [
        part.register_forward_pre_hook(note)
        for part in subject.model.modules()
        if id(part) not in inside and next(part.parameters(recurse=False), None) is not None
    ]


class _blocks_once:  # noqa: N801 - reads as a function
    """Context in which each block has its own segment; the first of each kind runs, others return empty results."""

    def __init__(self, subject: TracedModel, calls: list[BlockCall], ledger: Ledger) -> None:
        self._subject = subject
        self._calls = calls
        self._ledger = ledger
        self._made: dict[tuple[Any, ...], Any] = {}
        inside = {id(weight) for block in subject.blocks.values() for weight in block.parameters()}
        named = subject.model.named_parameters()
        self._outside = {id(weight): name for name, weight in named if id(weight) not in inside}
        self._forwards = [(block, block.__dict__.get("forward")) for block in subject.blocks.values()]

    def __enter__(self) -> None:
        for name, block in self._subject.blocks.items():
            block.forward = self._watched(name, block, block.forward)

    def __exit__(self, *_: object) -> None:
        for block, forward in self._forwards:
            put_back(block, forward)

    def _watched(self, name: str, block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            segment = self._ledger.begin_segment()
            if self._subject.gathered:
                dtype = DTYPES[self._subject.compute]  # FSDP2 casts the inputs of a unit
                args, kwargs = tree_map(lambda leaf: _to_dtype(leaf, dtype), (args, kwargs))
            kind = _kind(block, args, kwargs)
            reads = weights_in((args, kwargs), self._outside)
            self._calls.append(BlockCall(name=name, segment=segment, kind=kind, args=args, kwargs=kwargs, reads=reads))
            if kind in self._made:
                result = skip_block(self._made[kind], (args, kwargs))
            else:
                result = forward(*args, **kwargs)
                self._made[kind] = tree_map(outline_of, result)
            mark_returned(result)
            self._ledger.begin_segment()
            return result

        return run


def put_back(block: nn.Module, forward: Callable[..., Any] | None) -> None:
    """Restore a module's forward: an instance attribute, or None for that of its class."""
    if forward is None:
        del block.forward
    else:
        block.forward = forward


def _kind(block: nn.Module, args: Any, kwargs: Any) -> tuple[Any, ...]:
    weights = tuple((name, outline_of(value)) for name, value in block.named_parameters())
    leaves, form = tree_flatten((args, kwargs))
    inputs = tuple(outline_of(leaf) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves)
    return type(block), weights, inputs, str(form)


def run_block(subject: TracedModel, call: BlockCall, samples: int, policy: Recompute) -> TracedPass:
    """Run forward and backward of one block on new inputs of the shapes that it was called with."""
    block = subject.blocks[call.name]
    ledger, rules = Ledger(samples), subject.rules()
    args, kwargs = tree_map(_fresh, (call.args, call.kwargs))
    forward = block.__dict__.get("forward")
    if policy != "none":
        block.forward = rules.around(block.forward)
        recompute_block(block, selective=policy == "selective")
    handles = _note_gradients(block, ledger)
    try:
        with rules, ledger:
            subject.tag_weights(ledger)
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor):
                    ledger.exclude(leaf)  # the part that made it saves it
            ledger.note()
            result = block(*args, **kwargs)
            rules.forget_casts()
            ledger.turn_back()
            output_bytes = sum(output.nbytes for output in trained_in(result))
            received = receive(result)
            del result  # the next part has freed it before its gradient arrives
            if received is not None:
                received.backward()
    finally:
        for handle in handles:
            handle.remove()
        if policy != "none":
            put_back(block, forward)
    return TracedPass(
        entries=ledger.entries, tallies=ledger.tallies, calls=[], uses=[], lowered=set(), input_bytes=output_bytes
    )


def _fresh(leaf: Any) -> Any:
    return torch.empty_like(leaf).requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
