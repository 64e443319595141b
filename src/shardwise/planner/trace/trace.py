"""Traces a job's model for planning: passes on meta tensors, each kind of block once.

The idea: run the whole model with two batch sizes, each kind of block also by itself under every recompute policy, and
turn the ledgers of these passes into the same description that published models have in closed form (`model/`).
Descriptions are cached by a fingerprint of the model's code, shapes and samples.
"""

from __future__ import annotations

import hashlib
import inspect
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import repeat
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from shardwise.data.loaders import dataset_of
from shardwise.data.rows import TOKENS, TokenShard, check_token_loss, tensors
from shardwise.errors import JobError, PlanError, ShardwiseError
from shardwise.hardware.probe import package_version
from shardwise.job.losses import TOKEN_LOSSES
from shardwise.layout import Layout
from shardwise.parallel.context import check_context, config_heads
from shardwise.parallel.fused_loss import DeferredLogits, find_head, separable_head
from shardwise.planner.model.forms import Model
from shardwise.planner.model.shape import TRACED, Amount, Head, ModelShape, Part, Weight
from shardwise.planner.trace.amounts import footprint_of, states_of, work_of
from shardwise.planner.trace.ledger import Ledger
from shardwise.planner.trace.rehearsal import (
    SAMPLES,
    BlockCall,
    ReachedBlock,
    TracedModel,
    TracedPass,
    is_split,
    put_back,
    run_block,
    run_model,
)
from shardwise.torch_private.dispatch import BatchNormBase, tree_leaves
from shardwise.training.step.captured import sampled_batches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from shardwise.job import Job
    from shardwise.planner.model.shape import Recompute
    from shardwise.plans.sections import DType


POLICIES: tuple[Recompute, ...] = ("none", "selective", "full")


def describe(job: Job, compute: DType) -> Model:
    """Return the description of a job's model trained in `compute`, traced on the meta device."""
    plain = trace(job, compute=compute, gathered=False)
    gathered = plain
    if compute in {"bf16", "fp16"}:
        gathered = trace(job, compute=compute, gathered=True)
    return Model(plain=plain, gathered=gathered)


def trace(job: Job, *, compute: DType, gathered: bool) -> ModelShape:
    """Return one description of a job's model; `gathered` if FSDP2 gathers its weights in the compute dtype."""
    subject = TracedModel.of(job, compute, gathered=gathered)
    try:
        return _assemble(subject)
    except (PlanError, JobError):
        raise
    except Exception as error:
        raise JobError(
            f"the model cannot be traced on the meta device: {type(error).__name__}: {error}",
            code="model.trace-failed",
            fix="avoid reading tensor values in forward, or plan a published model of the same shape",
        ) from error


def _assemble(subject: TracedModel) -> ModelShape:
    """Return the description of a model: parts outside blocks from the whole pass, blocks from separate passes."""
    passes = [run_model(subject, samples) for samples in SAMPLES]
    calls = {call.segment: call for call in passes[0].calls}
    later = {call.segment: call for call in passes[1].calls}
    parts: list[Part] = []
    kinds: dict[tuple[Any, ...], Part] = {}
    last_block = max(calls, default=-1)
    for segment in range(len(passes[0].tallies)):
        if segment in calls:
            call = calls[segment]
            if call.kind not in kinds:
                kinds[call.kind] = _block_part(subject, (call, later[segment]), passes[0].lowered)
            parts.append(kinds[call.kind])
            continue
        weights = _outer_weights(subject, passes[0], segment)
        states = states_of(passes, segment)
        if len(states) > 2 or weights:  # an empty segment has two states, its beginning and its end
            footprint = footprint_of(states)
            name = "last" if segment > last_block else "first"
            if 0 < segment <= last_block:
                name = f"between{segment}"
            parts.append(
                Part(
                    name=name,
                    kind="last" if segment > last_block else "first",
                    weights=weights,
                    work=work_of(passes, segment),
                    footprints=dict.fromkeys(POLICIES, footprint),
                    output=Amount(),
                )
            )
    shape = ModelShape(
        name=type(subject.model).__name__,
        compute=subject.compute,
        gathered=subject.gathered,
        parts=_counted(parts),
        input=Amount(whole=passes[0].input_bytes / SAMPLES[0]),
        tokens_per_sample=_tokens(subject),
        tp_degrees=subject.tp_degrees,
        stages=bool(calls) and not _is_misplaced(subject, passes[0]),
        ties_samples=any(isinstance(module, BatchNormBase) for module in subject.model.modules()),
        source=TRACED,
    )
    # Grouped heads in fp32, and all in fp64, have no fused kernel: attention is traced as matrix products.
    degrees = context_degrees(subject, shape.heads or config_heads(subject.model))
    return replace(shape, cp_degrees=degrees, head=head_of(subject))


def _is_misplaced(subject: TracedModel, single: TracedPass) -> bool:
    """Whether a module is registered on one side of the blocks and used on the other, which pipelines do not support.

    Models with several lists of blocks are not checked, since the user chooses the list that stages split.
    """
    if len({name.rpartition(".")[0] for name in subject.blocks}) != 1:
        return False
    calls = sorted(single.calls, key=lambda call: call.segment)
    first, last = calls[0], calls[-1]
    # A stage computes the arguments of its layers from its own weights.
    uses = list(single.uses)
    uses += zip(first.reads, repeat(first.segment - 1))
    if last is not first:
        uses += zip(last.reads, repeat(last.segment + 1))
    sides: dict[str, set[bool]] = {}
    first_names: dict[int, str] = {}
    is_behind = False
    for name, parameter in subject.model.named_parameters(remove_duplicate=False):
        if any(name.startswith(f"{block}.") for block in subject.blocks):
            is_behind = True
        else:
            sides.setdefault(first_names.setdefault(id(parameter), name), set()).add(is_behind)
    for name, user in uses:
        if user > last.segment and True not in sides.get(name, {True}):
            return True
        if user < first.segment and False not in sides.get(name, {False}):
            return True
    return False


def _block_part(subject: TracedModel, calls: tuple[BlockCall, BlockCall], lowered: set[str]) -> Part:
    footprints = {}
    for policy in POLICIES:
        passes = [run_block(subject, call, samples, policy) for call, samples in zip(calls, SAMPLES, strict=True)]
        footprints[policy] = footprint_of(states_of(passes, 0))
        if policy == "none":
            work, output = work_of(passes, 0), passes[0].input_bytes / SAMPLES[0]
    name = calls[0].name
    weights = tuple(_weight(subject, f"{name}.{key}", lowered) for key, _ in subject.blocks[name].named_parameters())
    sums = sum(1 for module, style in subject.styles.items() if style == "row" and module.startswith(f"{name}."))
    return Part(
        name=name,
        kind="block",
        weights=weights,
        work=work,
        footprints=footprints,
        output=Amount(stream=output),
        tp_exchanged=Amount(whole=output * sums),
        num_exchanges=sums,
    )


def _outer_weights(subject: TracedModel, single: TracedPass, segment: int) -> tuple[Weight, ...]:
    """Return the weights of a segment outside the blocks; one that an earlier segment uses, too, is tied."""
    first: dict[str, int] = {}
    weights = []
    for name, user in single.uses:
        first.setdefault(name, user)
        if user == segment:
            weights.append(_weight(subject, name, single.lowered, tied=first[name] != user))
    return tuple(weights)


def _weight(subject: TracedModel, name: str, lowered: set[str], *, tied: bool = False) -> Weight:
    value = subject.model.get_parameter(name)
    # Only the first block of each kind runs, so its casts represent those of the others.
    return Weight(
        name=name,
        rows=value.shape[0] if value.ndim else 1,
        numel=value.numel(),
        split=is_split(subject.model, name, subject.styles),
        cast=name in lowered,
        trained=value.requires_grad,
        narrow=name in subject.narrow,
        tied=tied,
    )


def _counted(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Merge equal consecutive blocks into one part with their count."""
    joined: list[Part] = []
    for part in parts:
        if joined and part.kind == "block" and replace(joined[-1], count=1) == part:
            joined[-1] = replace(joined[-1], count=joined[-1].count + 1)
        else:
            joined.append(part)
    return tuple(joined)


def _tokens(subject: TracedModel) -> int | None:
    """Return the tokens of a sample: its length, or its Loss.count if its tensors differ in length."""
    if isinstance(subject.job.loss.count, str):
        return None
    return length_of(subject.batch(SAMPLES[0])) or max(1, int(subject.job.loss.count_of(subject.batch(1), 1)))


# Descriptions of models, cached by content: equal models, samples and versions of torch are traced once.


VERSION = 11
"""Version of cached descriptions: increase it when tracing changes, since the fingerprint does not cover its code."""
_BASES = {object, nn.Module}


def described(job: Job, compute: DType, folder: Path) -> Model:
    """Return the description of a job's model from the cache in `folder`, or trace the model and write it there."""
    path = folder / f"{fingerprint(job, compute)}.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=Model)
    except (OSError, msgspec.DecodeError):
        pass  # never traced, or written by another version
    model = describe(job, compute)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.encode(model))
    except OSError:
        pass  # in a read-only home, the model is traced again next time
    return model


def fingerprint(job: Job, compute: DType) -> str:
    """Return a digest of all inputs of a description: modules, their code, samples, loss, and versions."""
    subject = TracedModel.of(job, compute, gathered=False)
    versions = (VERSION, package_version("shardwise"), torch.__version__)
    digest = hashlib.sha256(f"{versions} {compute} {job.tensor_rules}".encode())
    for line in _lines(subject.model):
        digest.update(line.encode())
    for leaf in tree_leaves(subject.batch(1)):
        digest.update(f"{tuple(leaf.shape)} {leaf.dtype}".encode() if isinstance(leaf, Tensor) else repr(leaf).encode())
    for function in (job.loss.sum, job.forward):
        digest.update(_source(function).encode())
    is_stream = isinstance(dataset_of(job, "train"), IterableDataset)
    digest.update(f"{job.masks} {job.lora is None} {is_stream}".encode())  # whether the head is separable
    # Context parallelism also depends on the samples: sequences with a padding mask cannot be split.
    digest.update(repr(context_degrees(subject, max(CP_DEGREES))).encode())
    return digest.hexdigest()[:32]


def _lines(model: nn.Module) -> Iterator[str]:
    seen: set[type] = set()
    for name, module in model.named_modules():
        yield f"{name} {module.extra_repr()} {getattr(module, 'config', '')}"
        if type(module) not in seen:
            seen.add(type(module))
            yield from (_source(kind) for kind in type(module).__mro__ if kind not in _BASES)
    for name, value in model.named_parameters():
        yield f"{name} {tuple(value.shape)} {value.dtype} {value.requires_grad}"


def _source(thing: Any) -> str:
    try:
        return inspect.getsource(thing)
    except (OSError, TypeError):
        return repr(type(thing))


# Techniques that not every model supports: context parallelism, and a loss fused with the head.


CP_DEGREES = (2, 4, 8, 16, 32, 64)


def length_of(batch: Any) -> int | None:
    """Return the tokens of a sample with padding; None if its tensors are not sequences of one length."""
    lengths = {int(each.shape[TOKENS]) for each in tensors(batch) if TOKENS < each.ndim < 4}  # 4: images
    return lengths.pop() if len(lengths) == 1 else None


def context_degrees(subject: TracedModel, heads: int) -> tuple[int, ...]:
    """Return the context-parallel degrees that the job's model with `heads` heads, its loss and its samples support."""
    fits = [cp for cp in CP_DEGREES if heads and heads % cp == 0]
    return (1, *(cp for cp in fits if _is_sliceable(subject, cp)))


def _is_sliceable(subject: TracedModel, cp: int) -> bool:
    job = subject.job
    try:
        check_token_loss(job)
        check_context(subject.model, Layout(cp=cp), own_loss=not job.loss.by_row)
        TokenShard(index=0, size=cp, loss=job.loss, metrics=job.metrics)(subject.batch(max(SAMPLES)))
    except Exception:  # noqa: BLE001 - a user's Loss.count may raise anything on a slice
        return False
    return True


def head_of(subject: TracedModel) -> Head | None:
    """Return the description of the model's head for a fused loss, None if the job's loss cannot be fused."""
    try:
        head = find_head(subject.model)
    except ShardwiseError:
        return None
    if not _is_fusable(subject, head):
        return None
    sizes: list[tuple[int, int]] = []

    def stop(hidden: Tensor) -> Tensor:
        sizes.append((hidden.numel() // head.in_features, hidden.element_size()))
        raise ReachedBlock(hidden)

    with _forward_of(head, stop):
        passes = [run_model(subject, samples) for samples in SAMPLES]
    name = next(name for name, part in subject.model.named_modules() if part is head)
    rows, width = sizes[0]
    return Head(
        vocab_size=head.out_features,
        width=head.in_features,
        rows=rows // SAMPLES[0],
        hidden_bytes=width,
        split=is_split(subject.model, f"{name}.weight", subject.styles),
        is_separable=_is_separable(subject.job),
        trained=head.weight.requires_grad,
        before=footprint_of(states_of(passes, len(passes[0].tallies) - 1)),
    )


def _is_separable(job: Job) -> bool:
    """Whether training finds a head whose logits it can pad; on which device and in which dtype rarely matters."""
    if job.loss not in TOKEN_LOSSES:
        return False
    return bool(separable_head(job, lambda: next(sampled_batches(job, 1, 1), None), "cpu", torch.bfloat16))


@dataclass(frozen=True, eq=False)
class _Probe(DeferredLogits):
    """Deferred logits that record each cross entropy of them; every other operation on them raises."""

    taken: list[bool]

    def entropy_sum(self, target: Tensor, ignore: int) -> Tensor:  # noqa: ARG002 - as the real one
        """Record the call and return zero."""
        self.taken.append(True)
        return self.hidden.new_zeros((), dtype=torch.float32)


def _is_fusable(subject: TracedModel, head: nn.Linear) -> bool:
    """Whether the job's loss uses the logits only to compute their cross entropy."""
    batch, taken = subject.batch(SAMPLES[0]), list[bool]()
    deferred = _forward_of(head, lambda hidden: _Probe(hidden, head, taken))
    with deferred, torch.no_grad(), subject.rules(), Ledger(SAMPLES[0]):
        try:
            subject.job.loss.sum_of(subject.job.forward(subject.model, batch), batch)
        except Exception:  # noqa: BLE001 - a user's loss may raise anything on deferred logits
            return False
    return bool(taken)


@contextmanager
def _forward_of(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace the forward of a module within the context."""
    before = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        put_back(module, before)
