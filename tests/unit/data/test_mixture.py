"""Mixtures: proportions as integers, a table of one period, and counts of any prefix."""

from fractions import Fraction

import numpy as np
import pytest

from refusals import refuses
from shardwise.data.mixture import LONGEST_PERIOD, Mixture, make_mixture


@pytest.mark.parametrize(
    ("proportions", "shares"),
    [
        ((1,), (1,)),
        ((2, 1, 1), (2, 1, 1)),
        ((0.7, 0.2, 0.1), (7, 2, 1)),
        ((0.5, 0, 0.5), (1, 0, 1)),
        ((1e6, 1), (LONGEST_PERIOD - 1, 1)),
    ],
)
def test_proportions_become_the_smallest_integers(proportions, shares):
    assert make_mixture({str(index): each for index, each in enumerate(proportions)}).shares == shares


def test_proportions_may_be_numbers_of_numpy():
    proportions = {"web": np.int64(3), "code": np.float32(0.7), "books": Fraction(1, 2)}
    assert make_mixture(proportions) == make_mixture({"web": 3, "code": 0.7, "books": 0.5})


def test_shares_are_rounded_by_less_than_one_row_if_a_period_would_be_too_long():
    proportions = [0.123456789, 0.3333333333, 0.2718281828, 1 / 7, 1e-9]
    found = make_mixture({str(index): each for index, each in enumerate(proportions)})
    assert found.period == LONGEST_PERIOD
    assert found.shares[-1] == 1
    exact = np.array(proportions) / sum(proportions) * LONGEST_PERIOD
    assert np.abs(np.array(found.shares) - exact).max() < 1


def test_every_prefix_is_within_one_row_of_exact():
    generator = np.random.default_rng(0)
    for num_sources in (1, 2, 3, 5, 17):
        for _ in range(20):
            mixture = Mixture(shares=tuple(int(each) for each in generator.integers(1, 60, num_sources)))
            table = mixture.sources(0, 2 * mixture.period)
            counts = np.cumsum(table[:, None] == np.arange(num_sources), axis=0)
            exact = np.arange(1, len(table) + 1)[:, None] * np.array(mixture.shares) / mixture.period
            assert np.abs(counts - exact).max() < 1
            for position in generator.integers(0, len(table), 5):
                before = counts[position - 1] if position else np.zeros(num_sources)
                assert (mixture.counts(int(position)) == before).all()


def test_position_far_ahead_needs_no_history():
    mixture = make_mixture({"web": 0.65, "code": 0.25, "books": 0.1})
    position = 10**15 + 3
    counts = mixture.counts(position)
    assert counts.sum() == position
    assert counts + np.bincount(mixture.sources(position, position + 1), minlength=3) == pytest.approx(
        mixture.counts(position + 1)
    )


def test_invalid_proportions_are_refused():
    with refuses("data.mixture-empty"):
        make_mixture({})
    for value in (-1, float("nan"), float("inf"), "half", True, np.float32(-1), np.float64("nan"), None):
        with refuses("data.proportion-invalid", "web", value):
            make_mixture({"web": value})
    with refuses("data.proportions-zero"):
        make_mixture({"web": 0, "code": 0.0})
