"""The alpha-beta fit finds the numbers that made the points."""

import pytest

from shardwise.bench.fit import fit_alpha_beta
from shardwise.errors import InputError

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
    with pytest.raises(InputError, match="two sizes"):
        fit_alpha_beta([(8, 1.0), (8, 2.0)])
