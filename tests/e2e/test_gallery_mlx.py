"""Chapter 6 of the gallery and the page on MLX: their commands run, and every row of the mapping holds."""

import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest

from e2e.gallery import EXAMPLES, ROOT, Chapter, losses
from env.ports import free_port

if importlib.util.find_spec("mlx") is None:
    pytest.skip("MLX is not installed: pip install 'shardwise[mlx]'", allow_module_level=True)

pytestmark = pytest.mark.timeout(300)

CHAPTER = Chapter(EXAMPLES / "06-mlx")
PAGE = ROOT / "docs" / "guides" / "mlx.md"
STARTED = {
    "torchrun --nproc_per_node=2",
    "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT",
    "Multi-GPU training",
    "Scaling",
    "Process model",
}
"""Rows that are about starting processes: run by the tests below, the others by mapping.py."""


def run(line, folder):
    """Run a command of the chapter; MLX's launcher on ports of its own, since it takes the same ones every time."""
    return CHAPTER.run(line.replace("mlx.launch ", f"mlx.launch --starting-port {free_port()} "), folder)


def rows_of_the_page():
    """First cells of the tables in the sections that map torch to MLX."""
    text = PAGE.read_text()
    sections = text[text.index("## The mapping") : text.index("## The training step")]
    cells = re.findall(r"^\| *([^|]+?) *\|", sections, re.MULTILINE)
    return {cell.replace("`", "") for cell in cells if cell.strip()} - {"PyTorch", "---"}


@pytest.mark.prove
def test_every_row_of_the_mapping_is_the_same_in_torch_and_mlx(tmp_path):
    [line] = CHAPTER.commands("mapping.py")
    found = re.findall(r"^(\S+) +(.+)$", run(line, tmp_path), re.MULTILINE)
    assert {verdict for verdict, _ in found} == {"same"}
    assert {title for _, title in found} | STARTED == rows_of_the_page()


def plain(output):
    """Processes, first and last loss of plain_mlx.py, and the last loss of the step that is often shown."""
    processes, *numbers = re.search(r"processes (\d)   first loss (\S+)   last loss (\S+)", output).groups()
    return processes, numbers, re.search(r"not compiled: last loss (\S+)", output)[1]


def test_plain_mlx_has_the_same_losses_on_one_process_and_on_two(tmp_path):
    """Rows "torchrun", "Multi-GPU training", "Scaling", "Process model": one script, processes by its launcher."""
    alone, together = (run(line, tmp_path) for line in CHAPTER.commands("plain_mlx.py"))
    assert plain(alone)[0] == "1"
    assert plain(together)[0] == "2"
    assert plain(alone)[1:] == plain(together)[1:]
    assert plain(alone)[1][1] == plain(alone)[2]
    for output in (alone, together):
        mapped, distance = re.search(
            r"^(vmap over 64 samples: gradients \S+ \S+ \S+) .* (\S+)$", output, re.MULTILINE
        ).groups()
        assert mapped in CHAPTER.readme
        assert float(distance) < 1e-5


def test_the_step_that_is_often_shown_does_not_compile_for_the_reason_that_the_page_gives(tmp_path):
    [complaint] = re.findall(r"^compiled: (.+)$", run("python plain_mlx.py", tmp_path), re.MULTILINE)
    assert f"ValueError: {complaint}" in PAGE.read_text()


def test_the_step_that_is_often_shown_moves_what_is_frozen_and_the_one_that_works_does_not(monkeypatch):
    monkeypatch.syspath_prepend(CHAPTER.folder)
    import mlx.core as mx
    import plain_mlx
    from mlx import optimizers

    def moved(train):
        model = plain_mlx.network()
        model.layers[0].freeze()
        before = model.layers[0].weight
        train(model, *plain_mlx.data(), optimizers.SGD(0.1))
        return not mx.array_equal(model.layers[0].weight, before).item()

    def works(model, x, y, optimizer):
        step, _ = plain_mlx.make_step(model, optimizer, mx.distributed.init())
        return step(x, y)

    assert moved(plain_mlx.shown_step)
    assert not moved(works)


def test_a_hostfile_and_a_rank_are_all_that_mlx_needs(tmp_path):
    """Row "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT"."""
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{free_port()}"] for _ in range(2)]))
    code = "import mlx.core as mx; g = mx.distributed.init(strict=True); print(g.rank(), g.size())"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env=os.environ | {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    assert [rank.communicate(timeout=60)[0].split() for rank in ranks] == [["0", "2"], ["1", "2"]]


@pytest.mark.prove
@pytest.mark.parametrize("processes", [1, 2])
def test_the_digits_reach_the_accuracy_of_the_chapter(tmp_path, processes):
    line = CHAPTER.commands("train digits.py")[processes - 1]
    assert ("--nproc 2" in line) == (processes == 2)
    assert float(re.search(r"test accuracy +([\d.]+)%", run(line, tmp_path))[1]) >= 97.5


@pytest.mark.prove
def test_one_and_two_processes_end_at_the_same_loss(tmp_path):
    for name in ("digits.py", "text.py"):
        alone, together = (
            re.search(r"test loss +(\S+)", run(line, tmp_path))[1]
            for line in CHAPTER.commands(f"train {name}")
            if "--run-dir" not in line
        )
        assert float(alone) == pytest.approx(float(together), abs=2e-4), name


@pytest.mark.prove
@pytest.mark.timeout(900)
def test_a_training_resumes_in_torch_and_its_weights_are_loaded_by_mlx(tmp_path):
    *_, convert = lines = [*CHAPTER.commands("--run-dir"), *CHAPTER.commands("checkpoint convert")]
    assert len(lines) == 3
    assert "--to mlx" in convert
    outputs = [run(line, tmp_path) for line in lines]
    assert losses(outputs[1])[-1] < losses(outputs[0])[0]
    from shardwise.engines.mlx.models import decoder

    model = decoder("llama-tiny", vocab_size=256, context=128)
    model.load_weights(str(tmp_path / "runs" / "model.safetensors"))


@pytest.mark.prove
def test_two_processes_equal_one_step_by_step(tmp_path):
    [line] = CHAPTER.commands("shardwise verify")
    assert "passed" in run(line, tmp_path)


def test_the_text_job_differs_from_torchs_in_engine_and_model_alone():
    def jobs(path):
        lines = path.read_text().partition("sw.Job(")[2].splitlines()
        return [line.partition("#")[0].strip() for line in lines]

    ours, torchs = jobs(CHAPTER.folder / "text.py"), jobs(CHAPTER.folder / "text_torch.py")
    assert ours.pop(1) == 'engine="mlx",'
    assert [pair for pair in zip(ours, torchs, strict=True) if pair[0] != pair[1]] == [(ours[1], torchs[1])]
    assert ours[1].replace("sw.models.mlx.", "sw.models.") == torchs[1]


def test_every_command_of_the_readme_is_run_here():
    lines = CHAPTER.commands()
    scripts = [argument for line in lines for argument in line.split() if argument.endswith(".py")]
    assert {name: scripts.count(name) for name in scripts} == {
        "digits.py": 2,
        "text.py": 4,
        "text_torch.py": 1,
        "plain_mlx.py": 2,
        "mapping.py": 1,
    }
    assert len(lines) == 11
