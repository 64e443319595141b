"""Chapter 5 of the gallery: the commands of its README run, and what it says of combining strategies holds."""

import importlib
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from shardwise.testing import run_ranks

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[2]
CHAPTER = ROOT / "examples" / "05-advanced"
QUOTE = re.compile(r"<!-- quote: (\S+) (\S+) -->\n```python\n(.*?)```\n<!-- end quote -->", re.DOTALL)


def commands(*parts: str) -> list[str]:
    """Return the commands of the README's bash blocks that have all `parts`, in order."""
    blocks = re.findall(r"^```bash\n(.*?)^```", (CHAPTER / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if all(part in line for part in parts)]


def run(line: str, folder: Path, seconds: float = 90) -> str:
    """Run a command as a reader of the README would, and return what it printed; leave no process behind."""
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(CHAPTER)]),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    line = re.sub(r"(?<= )(\w+\.py)", rf"{CHAPTER}/\1", line)  # from a folder of its own: runs/ is written there
    process = subprocess.Popen(
        ["bash", "-c", line],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(20)
    assert process.returncode == 0, output
    return output


@pytest.fixture
def script(monkeypatch):
    """Import a script of the chapter."""
    monkeypatch.syspath_prepend(CHAPTER)
    return importlib.import_module


def test_quoted_code_is_the_files_own_text():
    quotes = QUOTE.findall((CHAPTER / "README.md").read_text())
    assert quotes
    for path, marker, shown in quotes:
        [block] = re.findall(
            rf"^ *# <{marker}>\n(.*?)^ *# </{marker}>", (ROOT / path).read_text(), re.DOTALL | re.MULTILINE
        )
        assert textwrap.dedent(block) == shown


def page() -> str:
    return (CHAPTER / "README.md").read_text()


@pytest.mark.prove
def test_every_product_has_the_losses_of_every_other(tmp_path):
    lines = commands("launch", "hybrid_parallelism.py") + commands("torchrun", "hybrid_parallelism.py")
    outputs = [run(line, tmp_path) for line in lines]
    assert len(outputs) == 3
    for output in outputs:
        assert float(re.search(r"differ by (\S+)", output)[1]) < 1e-4
    shares = re.findall(r"^(\S.*?)  +(\d+%)", page(), re.MULTILINE)
    assert len(shares) == 9
    assert re.findall(r"^(\S.*?)  +(\d+%)", outputs[0], re.MULTILINE) == shares


@pytest.mark.slow
def test_the_job_of_hybrid_parallelism_trains_and_verifies(tmp_path):
    train, verify = (run(line, tmp_path) for line in commands("--nproc "))
    assert "pp2.shard2" in train
    assert verify.count("passed") >= 3


@pytest.mark.slow
def test_mean_of_means_is_wrong_and_sums_over_the_count_are_right(tmp_path):
    lines = commands("gradient_accumulation.py")
    assert len(lines) == 2
    for line in lines:
        output = run(line, tmp_path)
        printed = [row for row in output.splitlines() if re.match(r"tokens|one step|plain|shardwise, ", row)]
        assert "\n".join(printed) in page()
        assert re.findall(r"([\d.]+)%", output)[1:] == ["0.00"] * 3


@pytest.mark.slow
def test_communication_overlap_prints_every_way_and_gain(tmp_path):
    lines = commands("communication_overlap.py")
    assert len(lines) == 2
    names = re.findall(r"^(\S.*?) {2,}[\d.]+ +-?[\d.]+$", page(), re.MULTILINE)
    assert len(names) == 10
    for line in lines:
        output = run(f"{line} --rounds 3 --blocks 4 --width 64", tmp_path)
        assert re.findall(r"^(\S.*?) {2,}[\d.]+ +-?[\d.]+$", output, re.MULTILINE) == names
        assert len(re.findall(r"ms saved, [+-]\d+%", output)) == 6


def test_every_way_of_communicating_gives_the_same_gradients(script):
    overlap = script("communication_overlap")

    def body(world):
        torch.manual_seed(world.rank)
        x = torch.randn(4, 8)
        models = []

        def make():
            models.append(overlap.network(8, 3))
            return models[-1]

        gradients = []
        for step in overlap.all_ways(world, make, x).values():
            step()
            named = models[len(gradients)].named_parameters()
            gradients.append({name: whole(parameter.grad) for name, parameter in named})
        return gradients

    (alone, *first), (other, *second) = run_ranks(body, 2)
    mean = {name: (gradient + other[name]) / 2 for name, gradient in alone.items()}
    for gradients in first + second:
        torch.testing.assert_close(gradients, mean)


def whole(gradient):
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient.clone()


def test_every_command_of_the_readme_is_run_here():
    scripts = [word for line in commands() for word in line.split() if word.endswith(".py")]
    assert [scripts.count(name) for name in sorted(set(scripts))] == [2, 2, 5]
