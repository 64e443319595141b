"""Chapter 2 of the gallery: the commands of its README run, and what it says of sharding holds."""

import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise.testing import run_ranks

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[2]
CHAPTER = ROOT / "examples" / "02-fsdp"
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


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]


@pytest.mark.prove
def test_fsdp_basics_has_the_same_losses_on_any_mesh(tmp_path):
    lines = commands("fsdp_basics.py")
    assert len(lines) == 3
    one, low, hybrid = (losses(run(f"{line} --steps 10 --report 5", tmp_path)) for line in lines)
    assert one == pytest.approx(hybrid, abs=2e-4)
    assert one == pytest.approx(low, abs=2e-2)
    assert one[-1] < one[0] - 1
    assert (tmp_path / "runs/fsdp_basics.pt").is_file()


@pytest.mark.slow
def test_fsdp_transformer_trains_in_a_loop_of_ones_own_and_as_a_job(tmp_path):
    full, low = (
        losses(run(f"{line} --steps 4", tmp_path)) for line in commands("fsdp_transformer.py", "--plan", "per")
    )
    assert full == pytest.approx(low, abs=2e-2)
    [line] = commands("shardwise train")
    output = run(f"{line} --set steps=4", tmp_path)
    assert "recompute      full" in output
    assert losses(output)[-1] < losses(output)[0]


@pytest.mark.slow
def test_fsdp_checkpoint_goes_on_with_another_number_of_processes(tmp_path):
    save, resume, *others = (run(line, tmp_path) for line in commands("fsdp_checkpoint.py"))
    assert "resumed from runs/fsdp_checkpoint/step-000010 on 1 processes" in resume
    assert [losses(output) for output in others] == [losses(save)] * 2
    assert losses(resume)[-1] < losses(save)[0]


@pytest.mark.parametrize("strategy", ["sharded", "async", "whole"])
def test_a_resumed_training_has_the_losses_of_an_uninterrupted_one(strategy, script, tmp_path):
    checkpoint = script("fsdp_checkpoint")

    def body(world, steps, resumed):
        model = checkpoint.sharded_model(checkpoint.make_mesh(world.device))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
        first = checkpoint.resume(model, optimizer, tmp_path) if resumed else 0
        text = checkpoint.load_text(10_000)
        found = [
            checkpoint.train_step(model, optimizer, checkpoint.global_batch(text, step, 24), accumulate=1)
            for step in range(first, steps)
        ]
        if not resumed:
            writers = torch.distributed.new_group(backend="gloo")
            saving = checkpoint.save(model, optimizer, tmp_path / f"step-{steps:06d}", strategy, writers)
            checkpoint.finish(saving)
        return found

    whole = run_ranks(body, 2, 5, False)[0]
    for path in tmp_path.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    run_ranks(body, 2, 3, False)
    for nproc in (1, 2, 3):
        assert run_ranks(body, nproc, 5, True)[0] == pytest.approx(whole[3:], rel=1e-5)


def test_sharded_weights_are_those_of_a_plain_module(script):
    basics = script("fsdp_basics")

    def body(world):
        model = basics.sharded_model(basics.make_mesh(world.device, replicate=2))
        return sw.full_state_dict(model)

    torch.manual_seed(0)
    torch.testing.assert_close(run_ranks(body, 4)[0], basics.NextByte().state_dict(), rtol=0, atol=0)


def test_fsdp_basics_without_a_launcher_says_what_to_type(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    line = [sys.executable, str(CHAPTER / "fsdp_basics.py")]
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "start it by torchrun --nproc_per_node=2 fsdp_basics.py"


def table(text: str) -> dict[str, list[float]]:
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if re.match(r"\| [A-Z].* \d+\.\d\d \|$", line)]
    return {name: [float(number) for number in numbers] for name, *numbers in rows}


@pytest.mark.slow
def test_the_table_of_strategies_is_what_a_fresh_run_measures(tmp_path):
    [line] = commands("measure_strategies.py")
    measured = table(run(line, tmp_path))
    shown = table((CHAPTER / "sharding_strategies.md").read_text())
    assert measured.keys() == shown.keys()
    assert len(shown) == 5
    for name, numbers in shown.items():
        assert measured[name][:-1] == numbers[:-1]
        assert measured[name][-1] == pytest.approx(numbers[-1], rel=0.02)  # TCP sends some bytes twice


def test_every_command_of_the_readme_is_run_here():
    scripts = {word for line in commands() for word in line.split() if word.endswith(".py")}
    assert scripts == {"fsdp_basics.py", "fsdp_transformer.py", "fsdp_checkpoint.py", "measure_strategies.py"}
