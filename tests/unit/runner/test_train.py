"""`sw.train` from Python leaves what the command leaves: a run directory, weights, and a report that has both."""

import dataclasses
from pathlib import Path

import pytest
import torch

import shardwise as sw
from jobs import sentences_job, token_job_text
from refusals import refuses
from shardwise.cli.main import main
from shardwise.runner.report import TrainReport, read_result
from shardwise.runs import RunDirectory
from shardwise.testing import run_ranks

JOB = sentences_job("llama-tiny", steps=2)


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def train_here(world, plan, **options):
    """Train in the world; return the report, and what each rank finds in the file it names."""
    if plan != "auto":
        plan = sw.Plan.preset(plan, world.size, batch_size=JOB.batch_size, precision="fp64")
    report = sw.train(JOB, plan, world, show_progress=False, **options)
    return report, report.state_dict()


@pytest.mark.parametrize(("nproc", "plan"), [(2, "ddp"), (2, "zero3"), (2, "tp"), (2, "pp")])
def test_training_in_a_world_leaves_a_run_directory_with_the_trained_model(nproc, plan):
    (report, weights), (other, weights_of_other) = run_ranks(train_here, nproc, plan)
    run = RunDirectory(Path(report.run))
    assert report.run == other.run
    assert run.path.parent == Path("runs")
    assert run.plan.exists()
    assert report.weights == run.weights
    assert weights.keys() == weights_of_other.keys()
    model = report.load_model(JOB)
    assert not model.training
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, weights[name], msg=name)
    trained = run_ranks(train_here, 1, "ddp")[0][1]
    torch.testing.assert_close(weights, trained, rtol=1e-9, atol=1e-11)


def test_run_dir_and_plan_auto_are_accepted_in_a_world():
    report, _ = run_ranks(train_here, 2, "auto", run_dir="mine")[0]
    assert report.run == "mine"
    assert "replicate2" in RunDirectory(Path("mine")).plan.read_text()


def test_path_of_a_job_file_is_accepted_in_a_world():
    Path("job.py").write_text(token_job_text())
    report = run_ranks(lambda world: sw.train("job.py", "ddp", world, show_progress=False), 1)[0]
    assert report.result.steps == 5


def test_training_that_is_refused_leaves_no_run_directory():
    def train(world):
        return sw.train(dataclasses.replace(JOB, batch_size=4), sw.Plan.preset("ddp", 1, batch_size=8), world)

    with refuses("plan.batch-size-mismatch"):
        run_ranks(train, 1)
    assert not Path("runs").exists()


@pytest.mark.usefixtures("forked_parents")
def test_report_of_a_job_file_loads_the_trained_model():
    Path("job.py").write_text(token_job_text())
    report = sw.train("job.py", set=["steps=2"])
    weights = torch.load(report.weights, weights_only=True)
    torch.testing.assert_close(dict(report.load_model().state_dict()), weights)


def test_report_without_weights_and_job_without_file_are_refused():
    with refuses("train.no-weights", "stopped and saved"):
        TrainReport(failure="stopped and saved").load_model()
    report, _ = run_ranks(train_here, 1, "ddp")[0]
    with refuses("train.no-job-file", "report.load_model(job)"):
        report.load_model()


@pytest.mark.usefixtures("forked_parents")
def test_command_that_a_callback_stops_exits_with_0_and_keeps_its_weights():
    stopping = "on_step=lambda context: sw.STOP if context.step == 2 else None, epochs=1"
    Path("job.py").write_text(token_job_text().replace("epochs=1", stopping))
    assert main(["train", "job.py", "--nproc", "2", "--run-dir", "run"]) == 0
    run = RunDirectory(Path("run"))
    report = read_result(run)
    assert (report.result.steps, report.result.is_stopped) == (2, True)
    assert report.weights.exists()
