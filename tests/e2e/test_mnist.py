"""The seeds' own command on real MNIST, whole: minutes on two cores, so part of `make prove`."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.prove
@pytest.mark.timeout(3000)
def test_three_epochs_of_mnist_on_two_ranks_reach_98_5_percent():
    fetched = subprocess.run(["make", "data"], cwd=ROOT, capture_output=True, text=True, check=False)
    if not (ROOT / "data" / "mnist").is_dir():
        pytest.skip(f"real MNIST could not be fetched: {fetched.stderr.strip()}")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "train_ddp.py"]
    done = subprocess.run(
        [*command, "--epochs", "3", "--batch-size", "128", "--lr", "0.001"],
        cwd=ROOT / "examples" / "01-ddp-basics",
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    accuracy = float(re.search(r"accuracy[^0-9]*([0-9.]+) ?%", done.stdout)[1])
    assert accuracy >= 98.5
