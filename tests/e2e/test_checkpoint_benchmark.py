"""The checkpoint benchmark runs by itself, reports each save when it is done, and keeps to its time."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def test_saves_beyond_the_budget_are_left_out_and_the_figures_are_there_all_the_same(tmp_path):
    arguments = ["--quick", "--size-gib", "0.02", "--budget-s", "0"]
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "checkpoint.py", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"async (\w+) +save (\d): stall", done.stdout) == [
        ("shardwise", "1"),
        ("dcp", "1"),
        ("shardwise", "2"),
    ]
    assert "async dcp        save 2 left out" in done.stdout
    figures = re.findall(r"^FIGURE (\S+) \S+ \S+ target \S+ (?:met|missed)$", done.stdout, re.MULTILINE)
    assert figures == ["checkpoint.sync.speed", "checkpoint.load.time", "checkpoint.async.lost"]
    assert list(tmp_path.iterdir()) == []
