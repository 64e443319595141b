"""The code of the guides on callbacks and hyperparameters trains as these pages describe."""

import re
from pathlib import Path

import pytest

from shardwise.cli.main import main
from shardwise.runner.report import read_result
from shardwise.runs import RunDirectory
from shardwise.runs.state import RunState

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
