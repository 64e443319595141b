"""Curves of any length in little memory."""

import math
import random

from shardwise.runs.history import Curve


def filled(values, limit=16):
    curve = Curve(limit)
    for step, value in enumerate(values):
        curve.add(step, value)
    return curve


def test_short_curve_is_kept_as_it_is():
    assert filled([3.0, 2.0, 1.0]).rows() == [(0, 3.0, 3.0, 3.0), (1, 2.0, 2.0, 2.0), (2, 1.0, 1.0, 1.0)]


def test_long_curve_has_few_rows_and_covers_every_step():
    curve = filled([1.0] * 10_000)
    assert 8 <= len(curve) <= 16
    assert [row[0] for row in curve.rows()] == [number * curve.width for number in range(len(curve))]
    assert curve.width * len(curve) >= 10_000 > curve.width * (len(curve) - 1)


def test_one_spike_among_many_steps_stays_visible():
    values = [1.0] * 10_000
    values[7_531] = 99.0
    [spike] = [row for row in filled(values).rows() if row[2] > 1.0]
    assert spike[2] == 99.0
    assert spike[0] <= 7_531


def test_rows_are_the_lowest_the_highest_and_the_mean_of_their_steps():
    rng = random.Random(5)
    values = [rng.gauss(0, 1) for _ in range(1_000)]
    curve = filled(values)
    for first, low, high, mean in curve.rows():
        part = values[first : first + curve.width]
        assert math.isclose(low, min(part), rel_tol=1e-5)
        assert math.isclose(high, max(part), rel_tol=1e-5)
        assert math.isclose(mean, sum(part) / len(part), rel_tol=1e-4, abs_tol=1e-6)


def test_steps_that_are_truncated_leave_no_trace_and_may_come_again():
    again = filled([1.0] * 700 + [50.0] * 300)
    again.truncate(700)
    for step in range(700, 1_000):
        again.add(step, 2.0)
    assert again.rows() == filled([1.0] * 700 + [2.0] * 300).rows()


def test_truncation_beyond_the_end_changes_nothing():
    curve = filled([1.0] * 10)
    generation = curve.generation
    curve.truncate(10)
    assert (curve.generation, len(curve)) == (generation, 10)


def test_value_that_is_nan_is_a_gap():
    assert filled([1.0, math.nan, 3.0]).rows()[1] == (1, None, None, None)


def test_steps_far_apart_still_fit():
    curve = Curve(16)
    for step in range(0, 1_000_000, 1_000):
        curve.add(step, 1.0)
    assert len(curve) <= 16


def test_generation_shows_that_earlier_rows_changed():
    curve, seen = Curve(16), None
    for step in range(2_000):
        before, rows = curve.generation, curve.rows()
        curve.add(step, float(step))
        if curve.generation == before:
            assert curve.rows()[: len(rows) - 1] == rows[:-1]
        else:
            seen = step
    assert seen is not None
