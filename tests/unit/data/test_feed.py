from itertools import islice

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate, get_worker_info

import shardwise as sw
from refusals import refuses
from shardwise.data.cursor import Slices
from shardwise.data.feed import Feed
from shardwise.data.loaders import IndexLoader
from shardwise.data.rows import CountedCollate, drop_padding_rows, fill_rows, stack_samples
from shardwise.data.streams import StreamLoader
from shardwise.testing import run_ranks

CPU = torch.device("cpu")


class Numbers(Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.tensor([float(index)]), torch.tensor(index)


class Stream(IterableDataset):
    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return iter((torch.tensor([float(index)]), torch.tensor(index)) for index in range(self.length))


def index_feed(world, *, length=23, batch_size=12, accumulation=2, num_steps=6, workers=0, loss=None):
    slices = Slices(
        batch_size=batch_size, accumulation=accumulation, dp_rank=world.rank, dp_size=world.size, length=length
    )
    loader = IndexLoader(Numbers(length), slices, seed=5, first_step=0, num_steps=num_steps, num_workers=workers)
    group = world.group(range(world.size))
    return Feed(loader, loss or sw.losses.cross_entropy, micro_batch=slices.micro_batch, device=CPU, group=group)


def seen(feed):
    """Real sample ids of every step, and the shapes of its micro-batches."""
    steps = []
    for batch in feed:
        ids = [i for micro in batch.micro_batches for i in micro.batch[1][: micro.rows].tolist()]
        shapes = {len(micro.batch[1]) for micro in batch.micro_batches}
        steps.append((ids, shapes, batch.samples, batch.denominator, batch.cursor.epoch))
    return steps


@pytest.mark.parametrize("workers", [0, 2])
def test_two_data_parallel_ranks_see_every_sample_of_an_epoch_once(workers):
    results = run_ranks(lambda world: seen(index_feed(world, workers=workers)), 2)
    for epoch in range(3):
        ids = [i for steps in results for step in steps for i in step[0] if step[4] == epoch]
        assert sorted(ids) == list(range(23))


def test_samples_of_a_step_do_not_depend_on_the_number_of_data_parallel_ranks():
    def union(ranks, accumulation):
        results = run_ranks(lambda world: seen(index_feed(world, accumulation=accumulation)), ranks)
        return [sorted(i for steps in results for i in steps[number][0]) for number in range(6)]

    assert union(1, 1) == union(2, 3) == union(3, 2)


def placed(feed):
    """(epoch, index in it, sample) of every real row."""
    micro_batches = [micro for batch in feed for micro in batch.micro_batches]
    return [
        (micro.positions.epoch, index, sample)
        for micro in micro_batches
        for index, sample in zip(micro.positions.indices, micro.batch[1][: micro.rows].tolist(), strict=True)
    ]


def test_sample_indices_do_not_depend_on_the_number_of_data_parallel_ranks():
    def union(ranks, accumulation):
        results = run_ranks(lambda world: placed(index_feed(world, accumulation=accumulation)), ranks)
        return sorted(row for rows in results for row in rows)

    one = union(1, 1)
    assert [row[:2] for row in one] == [(epoch, index) for epoch in range(3) for index in range(23)]
    assert one == union(2, 3) == union(3, 2)


def test_short_step_is_filled_to_the_plans_shape_and_counts_only_real_rows():
    results = run_ranks(lambda world: seen(index_feed(world, length=13, num_steps=2)), 2)
    assert all(step[1] == {3} for steps in results for step in steps)
    assert [step[3] for step in results[0]] == [12, 1]


def test_counted_tokens_are_summed_over_data_parallel_ranks():
    loss = sw.Loss(sum=lambda output, batch: output, count=lambda batch: int(batch[1].sum()))
    results = run_ranks(lambda world: seen(index_feed(world, loss=loss, num_steps=2)), 2)
    assert results[0][0][3] + results[0][1][3] == sum(range(23))
    assert [step[3] for step in results[0]] == [step[3] for step in results[1]]


def test_loss_of_the_model_gets_exactly_the_real_rows():
    def shapes(world):
        loss = sw.losses.returned_by_model(count=lambda batch: len(batch[1]))
        return [step[1] for step in seen(index_feed(world, length=13, num_steps=2, loss=loss))]

    assert run_ranks(shapes, 1)[0] == [{6}, {1}]


class SplitStream(Stream):
    """Splits itself over DataLoader workers, as torch's documentation has it."""

    def __iter__(self):
        worker = get_worker_info()
        first, every = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for index in range(first, self.length, every):
            yield torch.tensor([float(index)]), torch.tensor(index)


def stream_feed(world, *, length, num_steps, accumulation=1, workers=0, micro_batch=2, kind=Stream, **options):
    group = world.group(range(world.size)) if world.size > 1 else None
    loader = StreamLoader(
        kind(length),
        dp_rank=world.rank,
        dp_size=world.size,
        micro_batch=micro_batch,
        accumulation=accumulation,
        num_steps=num_steps,
        seed=0,
        group=group,
        num_workers=workers,
        **options,
    )
    return Feed(loader, sw.losses.cross_entropy, micro_batch=micro_batch, device=CPU, group=group)


@pytest.mark.parametrize("workers", [0, 2])
def test_stream_is_dealt_out_without_duplicates(workers):
    results = run_ranks(lambda world: seen(stream_feed(world, length=11, num_steps=6, workers=workers)), 2)
    first_epoch = [i for steps in results for step in steps for i in step[0] if step[4] == 0]
    assert sorted(first_epoch) == list(range(11))


class SplitByRank(Stream):
    """Yields the part of one rank."""

    def __iter__(self):
        yield from islice(super().__iter__(), dist.get_rank(), None, dist.get_world_size())


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_that_is_split_by_rank_is_noted(workers):
    def body(world, kind):
        notes = []
        seen(stream_feed(world, length=16, num_steps=3, workers=workers, kind=kind, note=notes.append))
        return notes

    [[note], others] = run_ranks(body, 2, SplitByRank)
    assert "SplitByRank" in note
    assert others == []
    assert run_ranks(body, 2, Stream) == [[], []]


def test_a_stream_that_splits_itself_over_workers_is_split_once():
    def body(world):
        return seen(stream_feed(world, length=64, num_steps=16, workers=2, kind=SplitStream))

    ids = [i for steps in run_ranks(body, 2) for step in steps for i in step[0]]
    assert sorted(ids) == list(range(64))


def test_steps_of_a_stream_hold_the_same_samples_at_any_number_of_ranks_workers_and_micro_batches():
    def body(world, accumulation, workers):
        rows = 8 // accumulation // world.size
        steps = seen(
            stream_feed(world, length=21, num_steps=3, accumulation=accumulation, workers=workers, micro_batch=rows)
        )
        return [step[0] for step in steps]

    wanted = [list(range(8)), list(range(8, 16)), list(range(16, 21))]
    for nproc, accumulation, workers in [(1, 2, 0), (1, 2, 2), (1, 4, 3), (2, 1, 2), (2, 2, 2)]:
        by_rank = run_ranks(body, nproc, accumulation, workers)
        assert [sorted(sum(parts, [])) for parts in zip(*by_rank, strict=True)] == wanted  # noqa: RUF017 - lists of 8


def test_stream_starts_again_when_every_data_parallel_rank_has_finished():
    results = run_ranks(lambda world: seen(stream_feed(world, length=5, num_steps=4)), 2)
    assert [step[4] for step in results[0]] == [step[4] for step in results[1]] == [0, 0, 1, 1]
    assert [step[3] for step in results[0]] == [4, 1, 4, 1]


def test_empty_stream_is_refused():
    with refuses("data.no-samples"):
        run_ranks(lambda world: seen(stream_feed(world, length=0, num_steps=1)), 1)


def test_rows_are_padded_and_trimmed_in_nested_batches():
    batch = {"x": torch.arange(3), "more": (torch.arange(6).view(3, 2), "text"), "scalar": torch.tensor(1)}
    filled = fill_rows(batch, 3, 5)
    assert filled["x"].tolist() == [0, 1, 2, 0, 1]
    back = drop_padding_rows(filled, 3, 5)
    assert torch.equal(back["more"][0], batch["more"][0])
    assert back["more"][1] == "text"


def test_samples_are_stacked_as_torch_does():
    for samples in (
        [(torch.ones(2), torch.tensor(1)), (torch.zeros(2), torch.tensor(2))],
        [{"x": torch.ones(2)}, {"x": torch.zeros(2)}],
        [(torch.ones(2), 3), (torch.zeros(2), 4)],
    ):
        torch.testing.assert_close(stack_samples(samples), default_collate(samples))


class SampledDataset(TensorDataset):
    """A TensorDataset that is not recognized as one, so its samples are read and stacked one by one."""


@pytest.mark.parametrize("workers", [0, 1])
def test_rows_of_a_tensor_dataset_are_gathered_as_its_samples_are_stacked(workers):
    images = torch.randn(40, 3, 4, 4)
    tensors = [images, torch.arange(40), images[:, 0, 0] > 0, torch.randn(40, 2, dtype=torch.complex64)]
    slices = Slices(batch_size=8, accumulation=2, dp_rank=0, dp_size=1, length=40)

    def steps(dataset):
        loader = IndexLoader(dataset, slices, seed=3, first_step=0, num_steps=12, num_workers=workers)
        return [(batch, step.rows, step.marks) for step in loader.steps() for batch in step.batches]

    gathered, stacked = steps(TensorDataset(*tensors)), steps(SampledDataset(*tensors))
    assert len(gathered) == 24
    for (found, *facts), (expected, *expected_facts) in zip(gathered, stacked, strict=True):
        assert facts == expected_facts
        for tensor, other in zip(found, expected, strict=True):
            assert torch.equal(tensor, other)
            assert tensor.stride() == other.stride()


@pytest.mark.parametrize(
    "dataset",
    [
        SampledDataset(torch.zeros(4, 2)),
        TensorDataset(torch.zeros(4, 2, requires_grad=True)),
        TensorDataset(torch.zeros(2, 4).T),
        TensorDataset(torch.zeros(4, 2, device="meta")),
        TensorDataset(torch.nn.Parameter(torch.zeros(4, 2), requires_grad=False)),
    ],
    ids=["subclass", "gradient", "strided", "device", "tensor subclass"],
)
def test_other_datasets_are_read_sample_by_sample(dataset):
    assert CountedCollate().row_tensors(dataset) is None
    assert CountedCollate(default_collate).row_tensors(TensorDataset(torch.zeros(4, 2))) is None
