"""The code of the guides on callbacks and hyperparameters trains as these pages describe."""

import re
import runpy
from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise.checkpoint.convert.convert import convert
from shardwise.checkpoint.spec import ConvertSpec
from shardwise.cli.main import main
from shardwise.runner.observers import read_result
from shardwise.runs import RunDirectory
from shardwise.runs.state import RunState
from shardwise.testing import run_ranks

GUIDES = Path(__file__).resolve().parents[3] / "docs" / "guides"
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)

pytestmark = pytest.mark.usefixtures("forked_parents")


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def blocks(page):
    """Write the first block of a page as job.py and return the others."""
    job, *others = BLOCK.findall((GUIDES / page).read_text())
    Path("job.py").write_text(job)
    return others


def typed(page):
    """Return the arguments of the first command of a page."""
    command = re.search(r"^\$ shardwise (.*)$", (GUIDES / page).read_text(), re.MULTILINE)
    return command[1].split()


def test_guide_on_callbacks():
    assert blocks("callbacks.md") == []
    assert main([*typed("callbacks.md"), "--run-dir", "run"]) == 0
    run = RunDirectory(Path("run"))
    result = read_result(run).result
    state = RunState(run)
    state.refresh_all()
    evaluated = [row[0] for row in state.training.curves["evaluation/accuracy"].rows()]
    assert evaluated[:3] == [0, 10, 20]
    logged = [row[0] for row in state.training.curves["log/weight_norm"].rows()]
    assert logged == [step for step in evaluated if step % 20 == 0]
    assert result.steps == evaluated[-1]


def test_guide_on_hyperparameters():
    [sweep] = blocks("hyperparameters.md")
    assert main([*typed("hyperparameters.md"), "--run-dir", "run"]) == 0
    assert read_result(RunDirectory(Path("run"))).load_model()[1].out_features == 64
    found = {"__name__": "__main__"}
    exec(sweep, found)
    accuracy, report = found["best"]
    assert report.result.evaluation["accuracy"] == accuracy > 0.1
    assert found["model"][1].out_features == int(report.run.rpartition("-")[2])


def test_guide_on_transformers(tmp_path):
    """The job's export is a folder that from_pretrained loads; the custom loop has the weights of one process."""
    transformers = pytest.importorskip("transformers")
    guide = runpy.run_path(str(GUIDES / "huggingface.py"))

    def body(world):
        job = guide["job"]()
        plan = sw.Plan.preset("fsdp" if world.size > 1 else "one", world.size, batch_size=job.batch_size)
        folder = tmp_path / f"run-{world.size}"
        folder.mkdir(exist_ok=True)
        result = sw.train(job, plan, world, run=RunDirectory(folder), show_progress=False)
        return result.result.evaluation, guide["own_loop"](world)

    (one, wanted), *_ = run_ranks(body, 1)
    (evaluation, weights), *_ = run_ranks(body, 2)
    assert evaluation == pytest.approx(one, rel=1e-4)
    for name, value in wanted.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-6, msg=name)
    convert(ConvertSpec(source=tmp_path / "run-2", target=tmp_path / "folder", to="hf"))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
    trained = torch.load(tmp_path / "run-2" / "weights.pt", weights_only=True)
    assert all(torch.equal(value, trained[name]) for name, value in loaded.state_dict().items())
    assert loaded.config.architectures == ["LlamaForCausalLM"]
