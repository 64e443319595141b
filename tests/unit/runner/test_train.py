"""`sw.train` from Python leaves what the command leaves: a run directory, weights, and a report that has both."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

import shardwise as sw
from jobs import sentences_job, token_job_text
from refusals import refuses
from shardwise.cli.main import main
from shardwise.job import refer
from shardwise.runner.local import open_run, with_inherited_settings, write_run_inputs
from shardwise.runner.observers import TrainReport, read_result
from shardwise.runs import RunDirectory
from shardwise.testing import run_ranks
from shardwise.training.spec import TrainSpec

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


def test_run_directory_of_the_same_job_is_continued_on_request_only():
    for name in ("job.py", "other.py"):
        Path(name).write_text("job = 3")
    reference, plan = refer("job.py", {}), sw.Plan.preset("ddp", 1, batch_size=8)

    def opened(resume, target=reference):
        spec = TrainSpec.of("job.py", run_dir="stopped", resume=resume)
        return open_run(spec.replace(save=spec.save.resolved()), target)

    write_run_inputs(opened(None), reference, plan)
    run = RunDirectory(Path("stopped"))
    assert opened("auto").path == opened("stopped").path == run.path  # stopped before its first checkpoint
    for resume in (None, "never"):
        with refuses("run.directory-not-empty", "--resume auto", "--resume stopped"):
            opened(resume)
    with refuses("run.other-job", f"{reference.path}:job"):
        opened("auto", refer("other.py", {}))
    run.report_json.write_text("{}")
    with refuses("run.directory-not-empty", "--run-dir"):
        opened("auto")
    run.checkpoints.mkdir()
    assert opened("auto").path == run.path


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


def test_dry_run_prints_the_plan_and_what_would_be_submitted_and_starts_nothing(capsys):
    Path("job.py").write_text(token_job_text())
    command = ["train", "job.py", "--nproc", "2", "--nnodes", "2", "--save-every", "3", "--dry-run"]
    assert main([*command, "--master-addr", "a"]) == 0
    shown = capsys.readouterr().out
    assert 'layout = "replicate4"' in shown
    for node in range(2):
        assert f"train --nnodes=2 --node-rank={node} --master-addr=a" in shown
    assert main([*command, "--slurm", "time=5"]) == 0
    script = capsys.readouterr().out
    assert script.startswith("#!/bin/bash\n#SBATCH --job-name=job\n")
    assert "--save-every=3 job.py" in script
    assert "--dry-run" not in shown + script
    assert not Path("runs").exists()


@pytest.mark.usefixtures("forked_parents")
def test_command_that_a_callback_stops_exits_with_0_and_keeps_its_weights(capsys):
    stopping = "on_step=lambda context: sw.STOP if context.step == 2 else None, epochs=1"
    Path("job.py").write_text(token_job_text().replace("epochs=1", stopping))
    assert main(["train", "job.py", "--nproc", "2", "--run-dir", "run", "--max-restarts", "1"]) == 0
    assert "--save-every" in capsys.readouterr().err  # a restart would have no checkpoint
    run = RunDirectory(Path("run"))
    report = read_result(run)
    assert (report.result.steps, report.result.is_stopped) == (2, True)
    assert report.weights.exists()
    written = json.loads(run.report_json.read_text())
    written["result"]["loss"] = None  # as in a resumed run that only repeats an evaluation
    run.report_json.write_text(json.dumps(written))
    assert math.isnan(read_result(run).result.loss)


@pytest.mark.parametrize("resume", ["run", "run/checkpoints", "run/checkpoints/best", "auto"])
def test_a_resumed_run_has_the_overrides_of_the_first_unless_they_are_given_again(resume):
    Path("job.py").write_text(token_job_text())
    reference = refer("job.py", {"steps": "40", "optimizer.lr": "0.5"})
    run = RunDirectory(Path("run"))
    run.path.mkdir()
    write_run_inputs(run, reference, sw.Plan.preset("ddp", 1))
    spec = TrainSpec.of("job.py", resume=resume, run_dir="run" if resume == "auto" else None, set=["steps=50"])
    assert with_inherited_settings(spec).settings == ("optimizer.lr=0.5", "steps=50")
    Path("other.py").write_text(token_job_text())
    for unchanged in (spec.replace(job="other.py"), TrainSpec.of("job.py", resume="never", run_dir="run")):
        assert with_inherited_settings(unchanged) is unchanged


def test_training_resumes_with_the_overrides_of_the_first_run(capfd):
    Path("job.py").write_text(token_job_text())
    assert (
        main(["train", "job.py", "--set", "steps=2", "--set", "batch_size=4", "--save-every=2", "--run-dir=one"]) == 0
    )
    assert main(["train", "job.py", "--set", "steps=3", "--resume=one", "--run-dir=two"]) == 0
    assert "note: --set batch_size=4 applies" in capfd.readouterr().err
    assert json.loads(Path("two/job.json").read_text())["overrides"] == {"batch_size": "4", "steps": "3"}
