"""Loaders of a loop of one's own: every sample once over data-parallel ranks, in one order, resumed anywhere."""

from itertools import chain

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler

import shardwise as sw
from refusals import refuses
from shardwise.data.sharded_loader import DataRank, EvaluationLoader, ReadOptions, ShardedLoader, even_batches
from shardwise.testing import run_ranks

CPU = torch.device("cpu")


class Numbers(Dataset):
    def __init__(self, length=23):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.tensor(index)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(11))


def loaders(dp_size, dataset=None, **options):
    """Return the loaders of all data-parallel ranks."""
    given = ReadOptions(**{"batch_size": 8, "drop_last": False, **options})
    ranks = [DataRank(index=index, size=dp_size, device=CPU) for index in range(dp_size)]
    return [ShardedLoader(dataset or Numbers(), given, rank) for rank in ranks]


def global_batches(of_ranks, num=None):
    """Return the samples of each global batch: real rows of all ranks, in the order of the ranks."""
    batches = []
    for parts in zip(*of_ranks, strict=True):
        scales = [loader.scale for loader in of_ranks]
        batches.append([row for part, scale in zip(parts, scales, strict=True) if scale for row in part.tolist()])
        assert sum(scales) == pytest.approx(len(of_ranks))
        if len(batches) == num:
            break
    return batches


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("dp_size", [2, 4, 8])
def test_batches_are_those_of_one_process_divided(dp_size, shuffle):
    (alone,), many = loaders(1, shuffle=shuffle), loaders(dp_size, shuffle=shuffle)
    epochs = []
    for epoch in range(2):
        assert (alone.epoch, many[0].epoch) == (epoch, epoch)
        expected = [batch.tolist() for batch in alone]
        assert global_batches(many) == expected
        assert sorted(chain(*expected)) == list(range(23))
        assert [len(batch) for batch in expected] == [8, 8, 7]
        epochs.append(expected)
    assert (epochs[0] == epochs[1]) is not shuffle
    assert [len(loader) for loader in many] == [3] * dp_size


def test_a_rank_without_rows_takes_part_with_a_scale_of_zero():
    many = loaders(4, Numbers(9))
    seen = [[(len(batch), loader.scale) for batch in loader][-1] for loader in many]
    assert sorted(seen) == [(1, 0.0), (1, 0.0), (1, 0.0), (1, 4.0)]


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 1), (1, 2)])
def test_an_epoch_resumes_at_another_number_of_ranks_with_every_sample_once(before, after):
    (alone,) = loaders(1)
    expected = [batch.tolist() for _ in range(2) for batch in alone]
    first = loaders(before)
    seen = global_batches(first) + global_batches(first, num=2)
    states = [loader.state_dict() for loader in first]
    assert states == states[:1] * before
    resumed = loaders(after)
    for loader in resumed:
        loader.load_state_dict(states[0])
    assert resumed[0].epoch == 1
    assert seen + global_batches(resumed) == expected
    assert resumed[0].epoch == 2


def test_a_state_after_the_last_batch_begins_the_next_epoch():
    (loader,) = loaders(1)
    batches = iter(loader)
    states = [loader.state_dict() for _ in batches]
    assert [(state["epoch"], state["index"]) for state in states] == [(0, 8), (0, 16), (1, 0)]
    with refuses("data.loader-state-mismatch", "batch_size", 8, 4):
        loaders(1, batch_size=4)[0].load_state_dict(states[0])


def test_a_loop_that_is_left_early_is_followed_by_the_next_epoch():
    (loader,) = loaders(1, shuffle=False)
    next(iter(loader))
    assert next(iter(loader)).tolist() == list(range(8))
    assert loader.epoch == 1


@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_accumulated_batches_are_weighted_by_the_samples_of_their_update(dp_size):
    """23 samples in batches of 4, three to an update: updates of 12 and 11 samples."""
    many = loaders(dp_size, batch_size=4, accumulation=3, drop_last=None)
    scales, updates = [], []
    for _ in zip(*many, strict=True):
        scales.append(sum(loader.scale for loader in many) / dp_size)
        updates.append({loader.is_update for loader in many})
    assert scales == pytest.approx([4 / 12] * 3 + [4 / 11, 4 / 11, 3 / 11])
    assert updates == [{False}, {False}, {True}] * 2
    (dropping,) = loaders(1, batch_size=4, accumulation=3, drop_last=True)
    assert [(dropping.scale, dropping.is_update) for _ in dropping][3:] == [(0.5, False), (0.5, True)]


def test_a_stream_ends_with_an_update():
    (stream,) = loaders(1, Stream(), batch_size=2, accumulation=4)
    seen = [(len(batch), stream.scale, stream.is_update) for batch in stream]
    assert seen == [(2, 0.25, False)] * 3 + [(2, 0.25, True), (2, 2 / 3, False), (1, 1 / 3, True)]


def test_a_state_is_the_position_after_the_last_update():
    (loader,) = loaders(1, batch_size=4, accumulation=3)
    states = [loader.state_dict() for _ in loader]
    assert [(state["epoch"], state["index"]) for state in states] == [(0, 0), (0, 0), *[(0, 12)] * 3, (1, 0)]
    (resumed,) = loaders(1, batch_size=4, accumulation=3)
    resumed.load_state_dict(states[4])
    assert [(len(batch), resumed.is_update) for batch in resumed] == [(4, False), (4, False), (3, True)]
    with refuses("data.loader-state-mismatch", "accumulation", 3, 1):
        loaders(1, batch_size=4)[0].load_state_dict(states[0])
    (old,) = loaders(1)
    state = old.state_dict()
    del state["accumulation"]  # states of earlier versions
    old.load_state_dict(state)


@pytest.mark.parametrize(
    ("length", "dp_size", "batch_size"), [(23, 4, 8), (9, 4, 4), (4, 4, 8), (17, 2, 2), (20, 3, 7)]
)
def test_evaluation_has_every_sample_once_in_as_many_batches_on_every_rank(length, dp_size, batch_size):
    shares = [
        even_batches(length, batch_size, DataRank(index=index, size=dp_size, device=CPU)) for index in range(dp_size)
    ]
    assert list(chain(*chain(*shares))) == list(range(length))
    assert len({len(share) for share in shares}) == 1
    sizes = [len(batch) for share in shares for batch in share]
    assert min(sizes) > 0
    assert max(sizes) <= -(-batch_size // dp_size) + 1


def test_evaluation_of_fewer_samples_than_ranks_and_of_streams_is_refused():
    rank = DataRank(index=0, size=4, device=CPU)
    with refuses("data.too-few-samples", 3, 4):
        even_batches(3, 8, rank)
    with refuses("data.stream-evaluation", "Stream"):
        EvaluationLoader(Stream(), ReadOptions(batch_size=8), rank)


def test_drop_last_leaves_out_the_short_batch_and_silence_is_refused():
    many = loaders(2, drop_last=True)
    assert [len(batch) for batch in global_batches(many)] == [8, 8]
    assert many[0].state_dict()["epoch"] == 1
    with refuses("data.last-batch-uneven", 7, 2, "drop_last=True"):
        loaders(2, drop_last=None)
    with refuses("data.last-batch-uneven", 2):
        loaders(2, Stream(), drop_last=None)
    loaders(2, Numbers(22), drop_last=None)


def divided(world, name):
    """Return the batches of a DataLoader, of a stream before and after a resume, and which rank's data they are."""
    plan = sw.Plan.preset(name, world.size)
    loader = DataLoader(Numbers(16), batch_size=4, collate_fn=lambda rows: {"rows": torch.stack(rows)})
    batches = [batch["rows"].tolist() for batch in sw.dataloader(loader, plan, world)]
    stream = sw.dataloader(Stream(), plan, batch_size=4, drop_last=True)
    streamed = [batch.tolist() for batch in stream]
    again = sw.dataloader(Stream(), plan, world, batch_size=4, drop_last=True)
    next(iter(again))
    resumed = sw.dataloader(Stream(), plan, world, batch_size=4, drop_last=True)
    resumed.load_state_dict(again.state_dict())
    assert [batch.tolist() for batch in resumed] == streamed[1:]
    return batches, streamed


def test_dataloaders_and_streams_are_divided_and_tensor_parallel_ranks_get_the_same():
    first, second = run_ranks(divided, 2, "ddp")
    assert first[0] == [[0, 1], [4, 5], [8, 9], [12, 13]]
    assert second[0] == [[2, 3], [6, 7], [10, 11], [14, 15]]
    assert (first[1], second[1]) == ([[0, 2], [4, 6]], [[1, 3], [5, 7]])
    one, other = run_ranks(divided, 2, "tp")
    assert one == other
    assert one[0][0] == [0, 1, 2, 3]


def test_loaders_that_cannot_be_divided_are_refused():
    def body(world):
        plan = sw.Plan.preset("ddp", 1)
        with refuses("data.loader-not-divisible", "WeightedRandomSampler"):
            sw.dataloader(DataLoader(Numbers(), sampler=WeightedRandomSampler([1.0] * 23, 23)), plan, world)
        with refuses("data.loader-not-divisible", "batch size"):
            sw.dataloader(DataLoader(Numbers(), batch_size=None), plan, world)
        with refuses("data.loader-with-options"):
            sw.dataloader(DataLoader(Numbers()), plan, world, batch_size=4)
        with refuses("data.accumulation-not-positive", 0):
            sw.dataloader(Numbers(), plan, world, accumulation=0)
        with refuses("plan.batch-not-divisible", 5):
            sw.dataloader(Numbers(), sw.Plan.preset("ddp", 2), world, batch_size=5)
        assert len(sw.dataloader(Numbers(), sw.Plan.preset("ddp", 1, batch_size=4), world)) == 6

    run_ranks(body, 1)


def test_a_resumed_stream_with_other_samples_is_refused():
    (loader,) = loaders(1, Stream(), batch_size=2)
    batches = iter(loader)
    next(batches)
    next(batches)
    state = loader.state_dict()
    (resumed,) = loaders(1, Stream(), batch_size=2)
    resumed.load_state_dict(state)
    assert [batch.tolist() for batch in resumed] == [batch.tolist() for batch in batches]
    changed = Stream()
    changed.__class__ = type("Changed", (Stream,), {"__iter__": lambda _: iter(torch.arange(1, 12))})
    (other,) = loaders(1, changed, batch_size=2)
    other.load_state_dict(state)
    with refuses("data.stream-changed", "Changed"):
        next(iter(other))
