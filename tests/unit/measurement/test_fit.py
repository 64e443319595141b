"""The alpha-beta fit finds the numbers that made the points."""

import pytest

from refusals import refuses
from shardwise.measurement.comm.verdict import fit_alpha_beta, fit_knee, held_out_error

SIZES = [2**power for power in range(8, 27, 3)]


def test_points_of_a_line_give_the_line_back():
    fit = fit_alpha_beta([(size, 2e-5 + size * 1e-9) for size in SIZES])
    assert fit.alpha_s == pytest.approx(2e-5)
    assert fit.beta_s == pytest.approx(1e-9)
    assert fit.error == pytest.approx(0, abs=1e-9)
    assert fit.seconds(1000) == pytest.approx(2.1e-5)


def test_small_messages_count_as_much_as_large_ones():
    noisy = [(size, (2e-5 + size * 1e-9) * (1.1 if index % 2 else 0.9)) for index, size in enumerate(SIZES)]
    fit = fit_alpha_beta(noisy)
    assert fit.alpha_s == pytest.approx(2e-5, rel=0.15)
    assert fit.beta_s == pytest.approx(1e-9, rel=0.15)
    assert fit.error == pytest.approx(0.1, rel=0.2)


def test_neither_number_is_below_zero():
    assert fit_alpha_beta([(1, 1.0), (2, 3.0), (3, 9.0)]).alpha_s == 0
    assert fit_alpha_beta([(1, 3.0), (2, 2.0), (3, 1.0)]).beta_s == 0


def test_one_size_makes_no_line():
    with refuses("bench.too-few-points"):
        fit_alpha_beta([(8, 1.0), (8, 2.0)])


def bent(size):
    return 2e-4 + min(size, 2**20) * 1e-9 + max(0, size - 2**20) * 4e-9


def test_a_knee_is_found_where_there_is_one():
    fit = fit_knee([(2**power, bent(2**power)) for power in range(10, 27)])
    assert fit.knee_bytes == 2**20
    assert (fit.alpha_s, fit.beta_s, fit.beyond_s) == pytest.approx((2e-4, 1e-9, 4e-9))
    assert fit.bytes_per_s == pytest.approx(0.25e9)
    assert fit.seconds(2**30) == pytest.approx(bent(2**30))


def test_a_straight_line_gets_no_knee_and_few_sizes_neither():
    assert fit_knee([(size, 2e-5 + size * 1e-9) for size in SIZES]).knee_bytes is None
    noisy = [(2**power, (2e-5 + 2**power * 1e-9) * (1.05, 0.97, 1.0)[power % 3]) for power in range(10, 27)]
    assert fit_knee(noisy).knee_bytes is None
    assert fit_knee([(2**power, bent(2**power)) for power in range(18, 25)]).knee_bytes is None


def test_the_held_out_error_is_that_of_sizes_the_fit_never_saw():
    line = [(size, 2e-5 + size * 1e-9) for size in SIZES]
    assert held_out_error(line) == pytest.approx(0, abs=1e-9)
    doubled = [(size, seconds * (2 if index % 2 else 1)) for index, (size, seconds) in enumerate(line)]
    assert held_out_error(doubled) == pytest.approx(0.5)
    assert held_out_error(line[:4]) is None
