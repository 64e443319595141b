"""The benchmark of rounds runs by itself, and its bytes are those of one sync in 25 steps."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from env.namespaces import why_not

pytestmark = [
    pytest.mark.prove,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "never"),  # loopback hears others too
]
ROOT = Path(__file__).resolve().parents[2]


def test_rounds_of_25_steps_move_less_than_a_twentieth_of_the_bytes_of_ddp():
    argv = [sys.executable, ROOT / "benchmarks" / "low_communication.py", "--quick"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ratio = re.search(
        r"^FIGURE low_communication\.small\.bytes (\S+) x-ddp target <=0\.05 met$", done.stdout, re.MULTILINE
    )
    assert float(ratio[1]) > 1 / 25  # headers and counts travel too
    assert re.search(
        r"^FIGURE low_communication\.small\.loss \S+ percent-above-ddp target <=2 (met|missed)$",
        done.stdout,
        re.MULTILINE,
    )
    assert re.search(r"^FIGURE low_communication\.small\.200mbit\.speed \S+ x-ddp$", done.stdout, re.MULTILINE)
