import numpy as np
import pytest

from refusals import refuses
from shardwise.data.cursor import Cursor, sample_ids


def order(length, *, seed=0, epoch=0):
    return sample_ids(np.arange(length), seed=seed, epoch=epoch, length=length)


@pytest.mark.parametrize("length", [1, 2, 3, 5, 17, 64, 1437, 65_537])
def test_an_epoch_holds_every_sample_once(length):
    assert sorted(order(length, seed=3, epoch=2)) == list(range(length))


def test_any_slice_is_known_without_the_rest():
    whole = order(1000, seed=7)
    assert np.array_equal(sample_ids(np.arange(990, 1000), seed=7, epoch=0, length=1000), whole[990:])


def test_order_changes_with_seed_and_epoch():
    orders = [order(200, seed=seed, epoch=epoch) for seed in range(4) for epoch in range(4)]
    matches = [np.mean(a == b) for i, a in enumerate(orders) for b in orders[:i]]
    assert max(matches) < 0.05


def test_order_is_shuffled_well():
    """Positions are uniform and neighbours independent: chi-square and correlation within 5 sigma."""
    length, epochs = 64, 500
    first = np.array([order(length, epoch=epoch)[:2] for epoch in range(epochs)])
    counts = np.bincount(first[:, 0], minlength=length)
    chi_square = ((counts - epochs / length) ** 2 / (epochs / length)).sum()
    assert abs(chi_square - (length - 1)) < 5 * np.sqrt(2 * (length - 1))
    assert abs(np.corrcoef(first[:, 0], first[:, 1])[0, 1]) < 5 / np.sqrt(epochs)


def test_a_trillion_samples_cost_no_memory():
    ids = sample_ids(np.arange(10**12 - 5, 10**12), seed=1, epoch=0, length=10**12)
    assert len(set(ids.tolist())) == 5
    assert ids.min() >= 0
    assert ids.max() < 10**12


def test_place_outside_the_epoch_is_refused():
    with refuses("data.position-outside-epoch", 10):
        sample_ids(np.array([10]), seed=0, epoch=0, length=10)


def test_cursor_enters_the_next_epoch_with_its_last_sample():
    assert Cursor(seed=1, index=90).advance(5, 100) == Cursor(seed=1, index=95)
    assert Cursor(seed=1, index=95).advance(5, 100) == Cursor(seed=1, epoch=1)
