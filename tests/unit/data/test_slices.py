import pytest

from refusals import refuses
from shardwise.data.cursor import Slices


@pytest.mark.parametrize("dp_size", [1, 2, 3, 4])
@pytest.mark.parametrize("accumulation", [1, 2, 5])
@pytest.mark.parametrize("length", [1, 119, 120, 121, 257])
def test_data_parallel_ranks_and_micro_batches_cover_every_sample_index_once(dp_size, accumulation, length):
    parts = [
        Slices(batch_size=120, accumulation=accumulation, dp_rank=dp_rank, dp_size=dp_size, length=length)
        for dp_rank in range(dp_size)
    ]
    for step in range(parts[0].steps_per_epoch):
        spans = [span for part in parts for span in part.spans(step)]
        places = [place for start, stop in spans for place in range(start, stop)]
        assert places == list(range(step * 120, step * 120 + parts[0].rows_of_step(step)))
        assert max(stop - start for start, stop in spans) <= parts[0].micro_batch


def test_short_step_is_spread_evenly():
    sizes = [
        stop - start
        for dp_rank in range(4)
        for start, stop in Slices(batch_size=8, accumulation=1, dp_rank=dp_rank, dp_size=4, length=6).spans(0)
    ]
    assert sorted(sizes) == [1, 1, 2, 2]


def test_empty_dataset_is_refused():
    with refuses("data.no-samples"):
        Slices(batch_size=1, accumulation=1, dp_rank=0, dp_size=1, length=0)
