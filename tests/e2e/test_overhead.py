"""The overhead benchmark runs by itself, without its peers, and ends with figures a program can read."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.prove

ROOT = Path(__file__).resolve().parents[2]
PEERS = ("accelerate", "lightning")
UNIT = "microseconds-per-step-over-hand-written"
FIGURE = re.compile(rf"FIGURE overhead\.shardwise\.us (-?\d+\.\d) {UNIT} target <=15 (met|missed)")


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """What `--quick` prints where no peer can be imported."""
    absent = tmp_path_factory.mktemp("absent")
    for peer in PEERS:
        (absent / f"{peer}.py").write_text("raise ImportError")
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "overhead.py", "--quick"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(absent), str(ROOT / "src")])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_absent_peers_are_named_and_left_out(lines):
    assert [line for line in lines if "not installed" in line] == [
        f"{peer} is not installed: left out (pip install -r benchmarks/peers.txt)" for peer in PEERS
    ]
    assert not any(line.startswith(peer) for line in lines[len(PEERS) :] for peer in PEERS)


def test_only_figure_is_well_formed_and_last(lines):
    assert [line for line in lines if line.startswith("FIGURE")] == lines[-1:]
    assert FIGURE.fullmatch(lines[-1])


def test_verdict_follows_from_the_value(lines):
    value, verdict = FIGURE.fullmatch(lines[-1]).groups()
    assert verdict == ("met" if float(value) <= 15 else "missed")


def test_table_has_a_row_for_shardwise_and_one_for_the_noise(lines):
    rows = {line.split()[0] for line in lines if re.match(r"[a-z-]+ +\d+ +\d+ +-?\d", line)}
    assert rows == {"hand-written", "shardwise"}
