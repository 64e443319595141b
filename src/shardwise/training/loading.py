"""The data loader and the feed of a data-parallel rank, and the length of a training in optimizer steps."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset, IterableDataset, default_collate

from shardwise.data.corpus import Corpus, CorpusPosition
from shardwise.data.corpus_loader import CorpusLoader
from shardwise.data.cursor import Slices
from shardwise.data.feed import Feed, StreamPosition
from shardwise.data.loaders import IndexLoader, dataset_length, dataset_of
from shardwise.data.rows import TokenShard
from shardwise.data.sources.source import FileSource
from shardwise.data.streams import StreamLoader
from shardwise.data.token_datasets import TokenRows
from shardwise.errors import DataError, JobError, some_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import torch.distributed as dist
    from torch import nn

    from shardwise.data.feed import DataPosition, StepLoader
    from shardwise.data.sources.source import TokenSource
    from shardwise.dist import World
    from shardwise.job import Job, Metric
    from shardwise.plans import Plan

VERIFIED_BYTES = 2**29
"""Bytes of corpora that are compared with their checksums at the start: a second at 500 MB/s, 0.1 s from memory."""


@dataclass(frozen=True, kw_only=True)
class RankLoader:
    """The data-parallel rank for which a loader reads samples, and the step at which the loader starts."""

    dp_rank: int
    """Index of the data-parallel rank."""
    group: dist.ProcessGroup | None
    """Host process group of the data-parallel ranks; None if there is only one."""
    first_step: int
    on_gpu: bool
    position: DataPosition | None = None
    """Position of a corpus or a stream at `first_step`, from a checkpoint."""
    note: Callable[[str], None] = warnings.warn
    """Receives messages for the user."""


def token_shard(job: Job, plan: Plan, world: World, metrics: Mapping[str, Metric] | None = None) -> TokenShard | None:
    """Return the function that slices this rank's tokens from a batch; None without context parallelism."""
    if plan.layout.cp == 1:
        return None
    index = plan.layout.coordinate(world.rank).cp
    return TokenShard(index=index, size=plan.layout.cp, loss=job.loss, metrics=metrics or {})


def make_loader(job: Job, plan: Plan, where: RankLoader) -> tuple[StepLoader, Length]:
    """Return the loader of the job's training data and the length of the whole training."""
    dataset = dataset_of(job, "train")
    if dataset is None:
        raise DataError(
            "Job.data('train') returned None, expected a dataset",
            code="data.no-train-split",
            fix="return a dataset for split 'train' from Job.data",
        )
    if isinstance(dataset, Corpus):
        return _corpus_loader(dataset, job, plan, where)
    if isinstance(dataset, IterableDataset):
        length = training_length(job, dataset, None, sync_every=plan.communication.sync_every)
        if isinstance(where.position, CorpusPosition):
            raise _other_data("a corpus", "an IterableDataset")
        stream = StreamLoader(
            dataset,
            dp_rank=where.dp_rank,
            dp_size=plan.layout.dp,
            micro_batch=plan.micro_batch,
            accumulation=plan.accumulation,
            first_step=where.first_step,
            num_steps=length.num_steps,
            seed=job.seed,
            group=where.group,
            collate=job.collate,
            num_workers=job.num_workers,
            position=where.position,
            note=where.note,
        )
        return stream, length
    slices = Slices(
        batch_size=job.batch_size,
        accumulation=plan.accumulation,
        dp_rank=where.dp_rank,
        dp_size=plan.layout.dp,
        length=dataset_length(dataset),
    )
    length = training_length(job, dataset, slices.steps_per_epoch, sync_every=plan.communication.sync_every)
    loader = IndexLoader(
        dataset,
        slices,
        seed=job.seed,
        first_step=where.first_step,
        num_steps=length.num_steps,
        collate=job.collate,
        num_workers=job.num_workers,
        pin_memory=where.on_gpu,
    )
    return loader, length


def _corpus_loader(corpus: Corpus, job: Job, plan: Plan, where: RankLoader) -> tuple[StepLoader, Length]:
    if job.collate is not None:
        raise JobError(
            "Job.collate is set, but a corpus returns whole batches",
            code="data.corpus-collate",
            fix="remove collate=, or change batches in Job.forward",
        )
    if isinstance(where.position, StreamPosition):
        raise _other_data("an IterableDataset", "a corpus")
    length = training_length(job, corpus, None, sync_every=plan.communication.sync_every)
    slices = Slices(
        batch_size=job.batch_size,
        accumulation=plan.accumulation,
        dp_rank=where.dp_rank,
        dp_size=plan.layout.dp,
        length=length.num_steps * job.batch_size,
    )
    loader = CorpusLoader(
        corpus,
        slices,
        seed=job.seed,
        first_step=where.first_step,
        num_steps=length.num_steps,
        position=where.position,
        num_workers=job.num_workers,
        pin_memory=where.on_gpu,
    )
    return loader, length


def _other_data(before: str, now: str) -> DataError:
    return DataError(
        f"the data was {before} in the checkpoint and is {now} now",
        code="data.corpus-changed",
        fix="resume with the data of the run, or start a new run from these weights",
    )


def make_feed(
    job: Job,
    plan: Plan,
    world: World,
    group: dist.ProcessGroup | None,
    first_step: int,
    *,
    fill: bool,
    position: DataPosition | None = None,
    note: Callable[[str], None] = warnings.warn,
) -> tuple[Feed, Length]:
    """Return the feed of this rank's batches and the training length; `group` contains the data-parallel ranks."""
    dp_rank = plan.layout.data_index(world.rank)
    on_gpu = world.device.type == "cuda"
    rank_loader = RankLoader(
        dp_rank=dp_rank, group=group, first_step=first_step, on_gpu=on_gpu, position=position, note=note
    )
    loader, length = make_loader(job, plan, rank_loader)
    feed = Feed(
        loader,
        job.loss,
        micro_batch=plan.micro_batch,
        device=world.device,
        fill=fill,
        float_dtype=torch.float64 if plan.precision.compute == "fp64" else None,
        group=world.axis_group(plan.layout, plan.dp_axes, on_host=True),
        replicas=plan.layout.replicate if plan.communication.sync_every > 1 else 1,
        token_shard=token_shard(job, plan, world),
        position=position,
    )
    return feed, length


def check_tokens(
    job: Job, feed: Feed, vocab_size: int | None, world: World, note: Callable[[str], None] = lambda _: None
) -> None:
    """Raise DataError if a split is a damaged corpus, or its token ids may be outside of a model's vocabulary.

    Ids of sources that do not know their vocabulary are checked when they are read. `vocab_size` is that of the model,
    and None if it is unknown. Communicates over the world; call on every rank.
    """
    if vocab_size is None and not feed.sources:
        return
    test = dataset_of(job, "test")
    rows = [test] if isinstance(test, TokenRows) else []
    check_checksums([*feed.sources.values(), *(each.source for each in rows)], world, note)
    if vocab_size is None:
        return
    feed.limit_ids(vocab_size)
    for each in rows:
        each.limit_ids(vocab_size)


def check_checksums(sources: Iterable[TokenSource], world: World, note: Callable[[str], None] = lambda _: None) -> None:
    """Raise DataError if a small corpus on disk differs from its checksums; `note` receives the names of larger ones.

    One rank of each node reads them. Communicates over the world; call on every rank.
    """
    stored = [source.checksums for source in sources if isinstance(source, FileSource) and source.checksums]
    stored.sort(key=lambda each: each.num_bytes)
    if not stored or world.backend == "fake":
        return
    totals = accumulate(each.num_bytes for each in stored)
    num_verified = sum(total <= VERIFIED_BYTES for total in totals)
    failure: DataError | None = None
    if world.local_rank == 0:
        try:
            for each in stored[:num_verified]:
                each.check()
        except DataError as error:
            failure = error
    failures: list[DataError | None] = world.gather(failure) if world.size > 1 else [failure]
    for found in failures:
        if found is not None:
            raise found
    large = [each.path for each in stored[num_verified:]]
    if large:
        command = f"`shardwise data inspect {large[0]} --verify`"
        note(f"checksums are not compared at the start, because of the size of {some_of(large)}: {command} does it")


def vocabulary_of(model: nn.Module) -> int | None:
    """Return the vocabulary size of a model's config, else the size of its largest embedding; None without both."""
    size = config_vocabulary(model)
    if size is not None:
        return size
    # An embedding of positions may be larger than that of tokens; then ids that are too large are not detected here.
    return max((each.num_embeddings for each in model.modules() if isinstance(each, torch.nn.Embedding)), default=None)


def config_vocabulary(model: Any) -> int | None:
    """Return the vocabulary size in the config of a model, as those of transformers have it; None without one."""
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    return size if isinstance(size, int) else None


# The length of a training: epochs, steps or tokens, converted to optimizer steps before the first step.


@dataclass(frozen=True, kw_only=True)
class Length:
    """The number of optimizer steps of a training and of one epoch."""

    num_steps: int
    steps_per_epoch: int | None
    """None for an IterableDataset."""
    source: str
    sync_every: int = 1
    """Steps between synchronizations of the replicas."""

    def syncs_after(self, number: int) -> bool:
        """Return whether replicas synchronize after `number` steps: every `sync_every` steps and at epoch ends.

        Steps are counted within the epoch, so only the last round of an epoch is shorter.
        """
        step_in_epoch = number % (self.steps_per_epoch or self.num_steps)
        return step_in_epoch % self.sync_every == 0 or number == self.num_steps

    def is_due(self, number: int, every: int) -> bool:
        """Return whether an action with the interval `every` is due after `number` steps; False if either is 0.

        An interval that ends between two synchronizations of the replicas is due at the next synchronization.
        """
        if not every or not number or not self.syncs_after(number):
            return False
        last = next(before for before in range(number - 1, -1, -1) if self.syncs_after(before))
        return number // every > last // every

    def ends_epoch(self, number: int) -> bool:
        """Return whether step `number`, counted from 0, is the last step of its epoch."""
        return self.steps_per_epoch is not None and (number + 1) % self.steps_per_epoch == 0


def training_length(job: Job, dataset: Dataset[Any], steps_per_epoch: int | None, *, sync_every: int = 1) -> Length:
    """Compute the training length; `steps_per_epoch` is None for an IterableDataset, which requires Job.steps."""
    num_steps, source = _count_steps(job, dataset, steps_per_epoch)
    return Length(num_steps=num_steps, steps_per_epoch=steps_per_epoch, source=source, sync_every=sync_every)


def _count_steps(job: Job, dataset: Dataset[Any], steps_per_epoch: int | None) -> tuple[int, str]:
    if job.steps is not None:
        return job.steps, "steps of the job"
    if isinstance(dataset, Corpus) and job.tokens is not None:
        per_step = job.batch_size * dataset.length
        num_steps = -(-job.tokens // per_step)
        return num_steps, f"{job.tokens} tokens / {per_step} tokens per step"
    if isinstance(dataset, Corpus):
        raise JobError(
            "a corpus has sources with epochs of their own, so epochs= cannot be used",
            code="data.corpus-without-steps",
            fix="set steps= or tokens= in the job",
        )
    if steps_per_epoch is None:
        raise JobError(
            "an IterableDataset has no known number of samples, so epochs= and tokens= cannot be used",
            code="data.stream-without-steps",
            fix="set steps= in the job",
        )
    if job.epochs is not None:
        return job.epochs * steps_per_epoch, f"{job.epochs} epochs x {steps_per_epoch} steps"
    per_sample = job.loss.count_of((job.collate or default_collate)([dataset[0]]), 1)
    if not per_sample:
        raise JobError(
            "the first sample contains no counted tokens, so tokens= cannot be converted to steps",
            code="data.sample-without-tokens",
            fix="set steps= in the job",
        )
    source = f"{job.tokens} tokens / ({per_sample} in the first sample x batch_size {job.batch_size})"
    return math.ceil((job.tokens or 0) / (per_sample * job.batch_size)), source
