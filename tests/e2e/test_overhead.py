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
FIGURE = re.compile(rf"FIGURE overhead\.(\w+)\.us (-?\d+\.\d) {UNIT} target <=15 (met|missed)")


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


def test_figures_are_well_formed_last_and_their_verdicts_follow_from_the_values(lines):
    assert [line for line in lines if line.startswith("FIGURE")] == lines[-2:]
    found = [FIGURE.fullmatch(line).groups() for line in lines[-2:]]
    assert [name for name, _, _ in found] == ["shardwise", "shardwise_sampled"]
    for _, value, verdict in found:
        assert verdict == ("met" if float(value) <= 15 else "missed")


def test_table_has_rows_for_shardwise_and_one_for_the_noise(lines):
    rows = [re.match(r"([a-z -]+?) +\d+ +\d+ +-?\d", line) for line in lines]
    assert {row[1] for row in rows if row} == {"hand-written", "shardwise", "shardwise sampled"}
