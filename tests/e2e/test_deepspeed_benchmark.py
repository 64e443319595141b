"""The benchmark of DeepSpeed has the library's name, and still leaves it to whoever asks for it."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

pytestmark = [
    pytest.mark.prove,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="pip install 'shardwise[deepspeed]'"),
]


def python(*argv):
    done = subprocess.run([sys.executable, *argv], cwd=BENCHMARKS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_other_benchmarks_import_the_library():
    assert "True" in python("-c", "import deepspeed, figures; print(callable(deepspeed.initialize))")


@pytest.mark.timeout(600)
def test_it_prints_a_figure_for_each_stage():
    figures = re.findall(r"^FIGURE (\S+) ", python("deepspeed.py", "--quick"), re.MULTILINE)
    assert [name for name in figures if name.endswith("overhead")] == [
        "deepspeed.zero2.overhead",
        "deepspeed.zero3.overhead",
    ]
    assert sum("native" in name for name in figures) == 4
