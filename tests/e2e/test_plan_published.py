import re
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.planner.cost.compute import Assumptions
from shardwise.planner.cost.time import RUNS

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "plan_published.py"
TARGETS = ("mean", "mean_of_groups", "covered", "within", "order", "blind_mean", "blind_covered")


@pytest.fixture(scope="module")
def shown():
    """The output of the benchmark."""
    return subprocess.run([sys.executable, SCRIPT, "--quick"], capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def figures(shown):
    """Name -> value of the benchmark's figures."""
    found = re.findall(r"^FIGURE plan\.published\.(\w+) (\S+)", shown, re.MULTILINE)
    return {name: float(value) for name, value in found}


def test_groups_of_published_runs_are_predicted_without_them_within_the_targets(shown, figures):
    reached = re.findall(r"^FIGURE plan\.published\.(\w+) .* met$", shown, re.MULTILINE)
    assert reached == list(TARGETS)
    assert "missed" not in shown
    assert figures.keys() > set(TARGETS)


def test_the_planner_uses_the_fit_and_the_interval_of_all_groups(figures):
    assert Assumptions().sustained == pytest.approx(figures["sustained"], abs=0.01)
    assert pytest.approx((figures["fastest"], figures["slowest"]), abs=0.01) == RUNS
